"""JSON schemas: whatever the mask lets through is an instance, as `jsonschema` judges it."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from grammar_walks import walk
from small_tokenizers import small_source

from jaxinfer.core import RequestError, SamplingParams
from jaxinfer.text import Tokenizer
from jaxinfer.text.grammar import GrammarCompiler


def record(required: list[str] | None = None, /, **properties: Any) -> dict[str, Any]:
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": record(
            ["value"],
            value={"type": "integer"},
            left={"$ref": "#/$defs/node"},
            right={"$ref": "#/$defs/node"},
        )
    },
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "anything": {},
    "object": {"type": "object"},
    "record": record(name={"type": "string"}, age={"type": "integer"}),
    "optional": record(["b"], a={"type": "null"}, b={"type": "boolean"}, c={"type": "integer"}),
    "all optional": record([], a={"type": "integer"}, b={"type": "integer"}),
    "nested": record(outer=record(inner=record(x={"type": "number"}))),
    "array": {"type": "array", "items": {"type": "integer"}},
    "array of 2 to 4": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "array of none": {"type": "array", "maxItems": 0},
    "tuple": {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}], "items": False,
              "minItems": 2},
    "tuple and more": {"type": "array", "prefixItems": [{"const": 1}], "items": {"type": "null"},
                       "minItems": 1},
    "enum": {"enum": ["red", "green", 3, None, True, {"a": [1, 2]}]},
    "unicode enum": {"enum": ["süß", "日本", "😀", 'quote"\\', "tab\t", "\x7f"]},
    "const": {"const": {"kind": "x", "n": -1.5}},
    "anyOf": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "string"}, "maxItems": 2}]},
    "oneOf": {"oneOf": [record(kind={"const": "a"}, x={"type": "integer"}), record(kind={"const": "b"})]},
    "allOf": {"allOf": [record([], a={"type": "integer"}), {"type": "object", "required": ["a"]}]},
    "ref": {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 3,
            "$defs": {"n": {"type": "integer"}}},
    "definitions": {"$ref": "#/definitions/n", "definitions": {"n": {"type": "boolean"}}},
    "recursion": TREE,
    "recursion to the root": record([], next={"$ref": "#"}),
    "bounded number": {"type": "number", "minimum": -2.5, "maximum": 10},
    "open number": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "bounded integer": {"type": "integer", "minimum": 17, "maximum": 1234},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0},
    "pattern": {"type": "string", "pattern": r"^[A-Z]{2}-\d{3}$"},
    "pattern within": {"type": "string", "pattern": "^[x-z]*ab+c"},
    "date": {"type": "string", "format": "date"},
    "date-time": {"type": "string", "format": "date-time"},
    "time": {"type": "string", "format": "time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "ipv6": {"type": "string", "format": "ipv6"},
    "email": {"type": "string", "format": "email"},
    "string length": {"type": "string", "minLength": 2, "maxLength": 5},
    "empty string": {"type": "string", "maxLength": 0},
    "map": {"type": "object", "additionalProperties": {"type": "integer"}},
    "named and further": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
                          "additionalProperties": {"type": "string"}},
    "patternProperties": {"type": "object", "patternProperties": {"^x_": {"type": "integer"}},
                          "additionalProperties": False},
    "at least one": {"type": "object", "minProperties": 1, "additionalProperties": {"type": "null"}},
    "types": {"type": ["string", "null"]},
    "nullable": record(a={"anyOf": [{"type": "string"}, {"type": "null"}]}),
    "unicode name": {"type": "object", "properties": {"größe \"1\"": {"type": "integer"}},
                     "required": ["größe \"1\""]},
    "annotated": {"$schema": "http://json-schema.org/draft-07/schema#", "$id": "https://a.b/c", "title": "T",
                  "description": "d", "default": 1, "examples": [1], "type": "integer"},
    "array of records": {"type": "array", "minItems": 1, "maxItems": 3,
                         "items": record(id={"type": "integer"}, tags={"type": "array",
                                         "items": {"enum": ["a", "b"]}, "maxItems": 2})},
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(small_source())


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.vocab_size)


def accepts(compiler: GrammarCompiler, tokenizer: Tokenizer, sampling: SamplingParams, text: str) -> bool:
    """Whether a text is one that the structure lets through and may end at."""
    matcher = compiler.matcher(sampling)
    assert matcher is not None
    try:
        for token in [*tokenizer.encode(text, add_special_tokens=False, parse_special=False),
                      min(tokenizer.eos_ids)]:  # fmt: skip
            matcher.accept(token)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_walk_is_an_instance(compiler: GrammarCompiler, tokenizer: Tokenizer, name: str) -> None:
    schema = SCHEMAS[name]
    validator = jsonschema.Draft202012Validator(
        {key: value for key, value in schema.items() if key not in ("$schema", "$id")},
        format_checker=jsonschema.FormatChecker(["date", "ipv4", "ipv6", "email", "uuid"]),
    )
    texts = set()
    for seed in range(12):
        matcher = compiler.matcher(SamplingParams(json_schema=schema if seed % 2 else json.dumps(schema)))
        assert matcher is not None
        text = tokenizer.decode(walk(matcher, tokenizer, seed))
        texts.add(text)
        # Random bytes make dates such as 29 February of a common year, which the format's pattern allows.
        if "date" not in name or not any(part in text for part in ("-02-29", "0000-")):
            validator.validate(json.loads(text))
    assert len(texts) > 1 or name in ("array of none", "const", "empty string")


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("record", '{"name": "a", "age": 3}', '{"name": "a"}'),
        ("record", '{\n    "name": "a",\n    "age": 3\n}', '{"name": "a"' + " " * 40 + ', "age": 3}'),
        ("object", '{"a": {"b": [1, null]}}', "[1]"),
        ("anything", "[1, \"a\", {}]", "[1,]"),
        ("bounded integer", "1234", "1235"),
        ("string length", '"日本語"', '"a"'),
        ("tuple", '["a", 1]', '["a", 1, 2]'),
        ("recursion", '{"value": 1, "left": {"value": 2}}', '{"value": 1, "left": {}}'),
        ("unicode enum", '"😀"', '"😁"'),
    ],
)  # fmt: skip
def test_what_a_person_would_write(
    compiler: GrammarCompiler, tokenizer: Tokenizer, name: str, good: str, bad: str
) -> None:
    sampling = SamplingParams(json_schema=SCHEMAS[name])
    assert accepts(compiler, tokenizer, sampling, good)
    assert not accepts(compiler, tokenizer, sampling, bad)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "object", "foo": 1}, "'foo'"),
        ({"type": "integer", "minimun": 1}, "'minimun'"),
        ({"properties": {"a": {"nullable": True}}}, "#/properties/a"),
        ({"x-guidance": {"lenient": True}}, "'x-guidance'"),
        ({"not": {}}, "'not'"),
        ({"type": "array", "uniqueItems": True}, "'uniqueItems'"),
        ({"if": {}, "then": {}}, "'if'"),
        ({"type": "string", "format": "color"}, "'color'"),
        ({"type": "integer", "format": "int32"}, "'int32'"),
        ({"type": "int"}, "int"),
        ({"items": [{}]}, "prefixItems"),
        ({"minimum": 1, "exclusiveMinimum": True}, "draft 4"),
        ({"$schema": "http://json-schema.org/draft-04/schema#"}, "draft-04"),
        ({"const": 2**60}, "exact"),
        ({"$ref": "https://example.com/a.json"}, "not the place"),
        ({"$ref": "#/$defs/missing"}, "missing"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "no text"),
        ({"type": "string", "pattern": "(?=a)"}, "look"),
        ({"type": "string", "pattern": "("}, "regex"),
        ({"minProperties": 3}, "minProperties"),
        ({"anyOf": []}, "anyOf"),
        ({"properties": 3}, "properties"),
        ({"minimum": 2, "maximum": 1, "type": "integer"}, "json_schema"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ('{"type": "object"', "not valid JSON"),
        ('{"a": NaN}', "NaN"),
        ('{"type": "object", "type": "array"}', "twice"),
        ("[]", "object"),
        ('{"title": "\ud800"}', "surrogate"),
        ({"default": object()}, "JSON"),
    ],
)
def test_refused_by_name(compiler: GrammarCompiler, schema: Any, said: str) -> None:
    with pytest.raises(RequestError, match="json_schema") as raised:
        compiler.check(SamplingParams(json_schema=schema))
    assert raised.value.param == "json_schema"
    assert said in str(raised.value)
