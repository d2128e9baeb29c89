"""JSON schemas, checked before llguidance sees them.

llguidance ignores a keyword that it has never heard of, and its compiler is recursive in native code, where
too deep a schema ends the process. So every keyword is known here or refused by name, and sizes are bounded.
What the keywords mean is draft 2020-12. Objects keep the order of `properties`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from jaxinfer.core import RequestError

MAX_BYTES = 64 * 1024
MAX_DEPTH = 64
"""Schemas within schemas, without references."""
MAX_REFERENCE_DEPTH = 400
"""Heights of all targets of $ref together: the longest way that a chain of references can go."""
MAX_PROPERTIES = 1000
"""Names of properties and definitions in the whole schema; the compiler takes 0.2 s for so many."""

DRAFTS = ("draft/2020-12/schema", "draft/2019-09/schema", "draft-07/schema", "draft-06/schema")
FORMATS = (
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
)  # fmt: skip
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,16}"
"""White space between the parts of a JSON value: room for a line break and indentation, but no endless run of
it, which is where small models get lost."""

_ANNOTATIONS = {
    "$schema", "$id", "$anchor", "$comment", "title", "description", "default", "examples", "deprecated",
    "readOnly", "writeOnly", "contentMediaType", "contentEncoding",
}  # fmt: skip
_ONE = {"items", "additionalProperties"}  # keywords whose value is a schema,
_LISTS = {"prefixItems", "anyOf", "oneOf", "allOf"}  # a list of schemas,
_MAPS = {"properties", "patternProperties", "$defs", "definitions"}  # schemas by name
_VALUES = {
    "type", "const", "enum", "required", "minItems", "maxItems", "minProperties", "maxProperties",
    "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "multipleOf", "$ref",
}  # fmt: skip
KEYWORDS = _ANNOTATIONS | _ONE | _LISTS | _MAPS | _VALUES


def checked_schema(
    schema: Mapping[str, Any] | str,
    param: str,
    *,
    compact: bool = False,
    whitespace: str | None = None,
    closed: bool = False,
) -> str:
    """The schema as JSON text for llguidance's `%json`. The options are those of `core.Structure`.

    Raises RequestError naming `param` and the place.
    """
    if isinstance(schema, str):
        _check_size(schema, param)
        schema = parsed_json(schema, param)
    if not isinstance(schema, Mapping):
        raise RequestError(f"{param} must be a JSON object, got {type(schema).__name__}", param)
    try:
        # Also a copy that nobody changes, with every key a string.
        text = json.dumps(schema, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{param} cannot be written as JSON: {error}", param) from None
    _check_size(text, param)
    copy = parsed_json(text, param)
    check = _SchemaCheck(param)
    check.visit(copy, "#", 0)
    check.references(copy)
    copy.pop("$schema", None)  # checked; an older draft would change what llguidance reads
    for inner in _within(copy):
        if closed:
            _close(inner)
        if not check.refers_to_properties:  # whose places change
            _settle_patterns(inner)
    options: dict[str, Any] = {"whitespace_pattern": whitespace or WHITESPACE}
    if compact:
        options = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    copy["x-guidance"] = {**options, "lenient": False}
    return json.dumps(copy)


def _close(schema: dict[str, Any]) -> None:
    """Let an object have no properties but those that it names, where it does not say otherwise."""
    if schema.get("type") == "object" or "properties" in schema:
        schema.setdefault("additionalProperties", False)


def _settle_patterns(schema: dict[str, Any]) -> None:
    """A pattern that fits the name of one property alone says more of that property, and of no other: left as
    it is, the grammar would open a place for a name that there is not, and an output could not go on."""
    patterns, properties = schema.get("patternProperties"), schema.get("properties")
    if not isinstance(patterns, dict) or not isinstance(properties, dict):
        return
    for pattern in list(patterns):
        found = _ONE_NAME.fullmatch(pattern)
        if found is not None and found[1] in properties:
            properties[found[1]] = {"allOf": [properties[found[1]], patterns.pop(pattern)]}
    if not patterns:
        del schema["patternProperties"]


_ONE_NAME = re.compile(r"\^([A-Za-z0-9_ -]+)\$")


def _within(schema: Any) -> Iterator[dict[str, Any]]:
    """A checked schema and all that it holds; those that are true or false are left out."""
    if not isinstance(schema, dict):
        return
    yield schema
    for keyword, value in list(schema.items()):
        inner: list[Any] = []
        if keyword in _ONE:
            inner = [value]
        elif keyword in _LISTS:
            inner = value
        elif keyword in _MAPS:
            inner = list(value.values())
        for one in inner:
            yield from _within(one)


def parsed_json(text: str, param: str) -> Any:
    """JSON strictly: no NaN, no name twice in an object, bounded nesting."""

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse, object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{param} is not valid JSON: {error}", param) from None


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("an object has a name twice")
    return result


def _check_size(text: str, param: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise RequestError(f"{param} holds a lone surrogate, which is not text", param) from None
    if size > MAX_BYTES:
        raise RequestError(f"{param} has {size} bytes; at most {MAX_BYTES} are served", param)


class _SchemaCheck:
    """One walk through a schema: keywords, numbers, sizes, and where its references go."""

    def __init__(self, param: str) -> None:
        self._param = param
        self._properties = 0
        self._heights: dict[str, int] = {}  # of the schema at each place
        self._targets: dict[str, str] = {}  # $ref -> a place that has it

    def visit(self, schema: Any, place: str, depth: int) -> int:
        """Check the schema at `place`; returns its height, 1 for one that holds no other."""
        if depth > MAX_DEPTH:
            self._refuse(f"is nested more than {MAX_DEPTH} schemas deep", place)
        if isinstance(schema, bool):
            self._heights[place] = 1
            return 1
        if not isinstance(schema, dict):
            self._refuse(f"must be a schema (an object, true or false), got {schema!r:.60}", place)
        height = 0
        for keyword, value in schema.items():
            for inner, at in self._inside(keyword, value, f"{place}/{keyword}"):
                height = max(height, self.visit(inner, at, depth + 1))
            if keyword not in _ANNOTATIONS | _ONE | _LISTS | _MAPS:
                self._numbers(value, f"{place}/{keyword}")
            self._one(keyword, value, place)
        self._distinct_names(schema, place)
        self._heights[place] = height + 1
        return height + 1

    def references(self, root: dict[str, Any]) -> None:
        """Every $ref leads to a schema, and their chain is not too deep for a stack."""
        total = 0
        for target, place in self._targets.items():
            height = self._heights.get("#" if target == "#/" else target)
            if height is None:
                self._refuse(f"{target!r:.80} is not the place of a schema in this document", f"{place}/$ref")
            total += height
        if total > MAX_REFERENCE_DEPTH:
            self._refuse(
                f"has references {total} schemas deep together; at most {MAX_REFERENCE_DEPTH} are served", "#"
            )

    @property
    def refers_to_properties(self) -> bool:
        """True when a reference leads to or through a property."""
        return any("roperties/" in target for target in self._targets)

    def _inside(self, keyword: str, value: Any, place: str) -> list[tuple[Any, str]]:
        """The schemas that a keyword's value holds, each with its place."""
        if keyword in _ONE:
            if keyword == "items" and isinstance(value, list):
                self._refuse("is a list, as before draft 2020-12; write prefixItems", place)
            return [(value, place)]
        if keyword in _LISTS:
            if not isinstance(value, list) or not value:
                self._refuse(f"must be a list of schemas, got {value!r:.60}", place)
            return [(item, f"{place}/{index}") for index, item in enumerate(value)]
        if keyword in _MAPS:
            if not isinstance(value, dict):
                self._refuse(f"must be an object of schemas, got {value!r:.60}", place)
            self._properties += len(value)
            if self._properties > MAX_PROPERTIES:
                self._refuse(f"has more than {MAX_PROPERTIES} names of properties and definitions", "#")
            return [(item, f"{place}/{name}") for name, item in value.items()]
        return []

    def _one(self, keyword: str, value: Any, place: str) -> None:
        at = f"{place}/{keyword}"
        if keyword not in KEYWORDS:
            allowed = ", ".join(sorted(KEYWORDS - _ANNOTATIONS))
            self._refuse(f"the keyword {keyword!r:.60} is not supported; supported: {allowed}", place)
        if keyword == "$schema" and not str(value).rstrip("#").endswith(DRAFTS):
            self._refuse(f"{value!r:.80} is not supported; supported: drafts 6, 7, 2019-09 and 2020-12", at)
        if keyword == "$id" and place != "#":
            self._refuse("is supported at the root alone", at)
        if keyword == "format" and value not in FORMATS:
            self._refuse(f"{value!r:.60} is not supported; supported: {', '.join(FORMATS)}", at)
        if keyword in ("exclusiveMinimum", "exclusiveMaximum") and isinstance(value, bool):
            self._refuse("must be a number (true and false are draft 4)", at)
        if keyword == "$ref":
            if not isinstance(value, str):
                self._refuse(f"must be a string, got {value!r:.60}", at)
            self._targets.setdefault(value, place)

    def _distinct_names(self, schema: dict[str, Any], place: str) -> None:
        """minProperties counts distinct names; of the names that are not listed the grammar cannot tell."""
        least, required = schema.get("minProperties", 0), schema.get("required", [])
        if isinstance(least, int) and isinstance(required, list) and least > len(set(map(str, required))) + 1:
            self._refuse(
                f"{least} is more than one over the required names; further names may repeat each other",
                f"{place}/minProperties",
            )

    def _numbers(self, value: Any, place: str) -> None:
        """Integers that a double cannot hold would be changed silently."""
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, list):
            for item in value:
                self._numbers(item, place)
        elif (isinstance(value, float) and not math.isfinite(value)) or (
            isinstance(value, int) and abs(value) > 2**53
        ):
            self._refuse(f"{value!r:.60} is beyond the numbers that are exact (±2**53)", place)

    def _refuse(self, message: str, place: str) -> NoReturn:
        raise RequestError(
            f"{self._param}: {place if len(place) < 200 else place[:197] + '...'} {message}", self._param
        )
