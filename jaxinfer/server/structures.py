"""How a body asks for an answer of some form: OpenAI's `response_format` and vLLM's `structured_outputs`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from jaxinfer.core import RequestError


def refuse_constant(name: str) -> Any:
    """json's `parse_constant`: NaN and Infinity, which Python reads, are not JSON."""
    raise ValueError(f"{name} is not a JSON number")


class Strict(BaseModel):
    """JSON types are taken as they are ("5" is no number, true is no 1) and unknown keys are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class JsonSchema(Strict):
    """A named schema. `strict` false only permits what `strict` true demands, so it makes no difference here:
    every answer follows its schema."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """Text of any kind, some JSON object, or JSON that a schema allows."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def sampling(self) -> dict[str, Any]:
        """The fields of SamplingParams that ask for it. Raises RequestError."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            verb = "needs" if self.json_schema is None else "takes no"
            raise RequestError(
                f"response_format {self.type} {verb} json_schema", "response_format.json_schema"
            )
        if self.json_schema is not None:
            return {"json_schema": self.json_schema.schema_}
        return {"json_schema": {"type": "object"}} if self.type == "json_object" else {}


class StructuredOutputs(Strict):
    """One of: a JSON schema (as an object or as text), a pattern, a list of texts, a Lark grammar."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    def sampling(self) -> dict[str, Any]:
        """As `ResponseFormat.sampling`."""
        asked = {
            "json_schema": self.json_,
            "regex": self.regex,
            "choice": self.choice,
            "grammar": self.grammar,
        }
        given = {name: value for name, value in asked.items() if value is not None}
        if len(given) != 1:
            raise RequestError(
                "structured_outputs must have one of json, regex, choice and grammar", "structured_outputs"
            )
        return given
