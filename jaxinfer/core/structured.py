"""The forms that an output can be bound to, and the two ways of asking for one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jaxinfer.core.errors import RequestError, shown

MAX_CHOICES = 4096
"""Most texts of one `choice`."""

StructureKind = Literal["json_schema", "regex", "choice", "grammar", "structural_tag"]

STRUCTURES: tuple[StructureKind, ...] = ("json_schema", "regex", "choice", "grammar")
"""The fields of SamplingParams that state a structure by themselves."""

_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """A form of the output. `value` is what `kind` takes; `param` is what the caller called it.

    For JSON: `compact` allows no white space but one space after each comma and colon, `whitespace` is a
    pattern of what may stand between the parts instead of the usual, and `closed` allows no property that the
    schema does not name.
    """

    kind: StructureKind
    value: Any
    param: str
    compact: bool = False
    whitespace: str | None = None
    closed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """vLLM's way of asking for a structure: exactly one of the first six fields.

    `json` is a schema (a mapping or its text), `regex` a pattern of the whole output, `choice` a list of
    texts, `grammar` a Lark or a GBNF grammar (that of llama.cpp and xgrammar, with a rule `root ::= ...`),
    `json_object` True any JSON object, `structural_tag` free text in which each trigger opens a tag of a
    given content (a mapping or its text; see text/grammar_tags.py). The last three fields refine `json` and
    `json_object`: they are `Structure`'s compact, closed and whitespace.

    Raises RequestError (a ValueError) naming the field.
    """

    json: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Mapping[str, Any] | str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        stated = [name for name in _KINDS if getattr(self, name) is not None]
        if len(stated) != 1:
            found = "none of them" if not stated else " and ".join(stated)
            raise RequestError(
                f"structured_outputs must have one of {', '.join(_KINDS)}; got {found}", "structured_outputs"
            )
        if self.json_object is not None and self.json_object is not True:
            raise RequestError(
                f"structured_outputs.json_object must be true, or left out, got {self.json_object!r:.80}",
                "structured_outputs.json_object",
            )
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(
                    f"structured_outputs.{name} must be true or false, got {getattr(self, name)!r:.80}",
                    f"structured_outputs.{name}",
                )
        pattern = self.whitespace_pattern
        if pattern is not None and not isinstance(pattern, str):
            raise RequestError(
                f"structured_outputs.whitespace_pattern must be a pattern, got {pattern!r:.80}",
                "structured_outputs.whitespace_pattern",
            )
        if pattern is not None and self.disable_any_whitespace:
            raise RequestError(
                "structured_outputs: whitespace_pattern and disable_any_whitespace exclude each other",
                "structured_outputs.whitespace_pattern",
            )
        for name in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
            if getattr(self, name) and stated[0] not in ("json", "json_object"):
                raise RequestError(
                    f"structured_outputs.{name} refines json; it has no meaning for {stated[0]}",
                    f"structured_outputs.{name}",
                )
        if self.json_object and self.disable_additional_properties:
            raise RequestError(
                "structured_outputs: json_object names no properties, so disable_additional_properties would "
                "leave {} alone",
                "structured_outputs.disable_additional_properties",
            )
        if self.json_object is None:
            name = stated[0]
            value = checked_structure(_KINDS[name], getattr(self, name), f"structured_outputs.{name}")
            object.__setattr__(self, name, value)

    @property
    def structure(self) -> Structure:
        """What it asks for."""
        name = next(name for name in _KINDS if getattr(self, name) is not None)
        return Structure(
            kind=_KINDS[name],
            value=_ANY_OBJECT if name == "json_object" else getattr(self, name),
            param=f"structured_outputs.{name}",
            compact=self.disable_any_whitespace,
            whitespace=self.whitespace_pattern,
            closed=self.disable_additional_properties,
        )


_KINDS: dict[str, StructureKind] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "json_object": "json_schema",
    "structural_tag": "structural_tag",
}


def checked_structure(kind: StructureKind, value: Any, param: str) -> Any:
    """The value of a structure, of its own type; whether it compiles the tokenizer says.

    Raises RequestError.
    """
    if kind == "choice":
        if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) and v for v in value):
            raise RequestError(f"{param} must be a list of strings, got {shown(value)}", param)
        if not value or len(value) > MAX_CHOICES:
            raise RequestError(f"{param} must have 1 to {MAX_CHOICES} strings, got {len(value)}", param)
        return tuple(value)
    allowed = (str,) if kind in ("regex", "grammar") else (Mapping, str)
    if not isinstance(value, allowed):
        raise RequestError(f"{param} has the wrong type: got {shown(value)}", param)
    return value


def as_structured_outputs(value: Any) -> StructuredOutputsParams:
    """StructuredOutputsParams as they are, or from a mapping of their fields. Raises RequestError."""
    if isinstance(value, StructuredOutputsParams):
        return value
    if not isinstance(value, Mapping):
        raise RequestError(
            "structured_outputs must be StructuredOutputsParams or a mapping of their fields, got "
            f"{shown(value)}",
            "structured_outputs",
        )
    known = StructuredOutputsParams.__slots__
    for name in value:
        if name not in known:
            raise RequestError(
                f"structured_outputs: unknown field {shown(name)}; known: {', '.join(known)}",
                "structured_outputs",
            )
    return StructuredOutputsParams(**value)
