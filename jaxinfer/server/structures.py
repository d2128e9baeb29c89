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
    """A named schema. Every answer follows it; with `strict` true, an object has no properties but those that
    the schema names, where it does not say otherwise (OpenAI wants it to say so)."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """Text of any kind, some JSON object, JSON that a schema allows, or (vLLM's) text with structural tags,
    which either `structures` and `triggers` or a `format` describe."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None

    def sampling(self) -> dict[str, Any]:
        """The fields of SamplingParams that ask for it. Raises RequestError."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            verb = "needs" if self.json_schema is None else "takes no"
            raise RequestError(
                f"response_format {self.type} {verb} json_schema", "response_format.json_schema"
            )
        tag = {name: getattr(self, name) for name in ("structures", "triggers", "format")}
        tag = {name: value for name, value in tag.items() if value is not None}
        if self.type == "structural_tag":
            return {"structured_outputs": {"structural_tag": {"type": self.type, **tag}}}
        for name in tag:
            raise RequestError(f"response_format {self.type} takes no {name}", f"response_format.{name}")
        if self.json_schema is not None and self.json_schema.strict:
            asked = {"json": self.json_schema.schema_, "disable_additional_properties": True}
            return {"structured_outputs": asked}
        if self.json_schema is not None:
            return {"json_schema": self.json_schema.schema_}
        return {"json_schema": {"type": "object"}} if self.type == "json_object" else {}


class StructuredOutputs(Strict):
    """As `core.StructuredOutputsParams`, which checks it."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None

    def sampling(self) -> dict[str, Any]:
        """As `ResponseFormat.sampling`."""
        return {"structured_outputs": self.model_dump(by_alias=True, exclude_none=True)}
