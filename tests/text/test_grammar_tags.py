"""vLLM's structured_outputs: structural tags, GBNF grammars, and what refines JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from grammar_walks import allowed_ids, walk

from jaxinfer.core import RequestError, SamplingParams, StructuredOutputsParams
from jaxinfer.text import ByteTokenizer
from jaxinfer.text.grammar import GrammarCompiler

TOKENIZER = ByteTokenizer()
COMPILER = GrammarCompiler(TOKENIZER, 259)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "additionalProperties": False}
COUNT = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
STRUCTURES = {
    "type": "structural_tag",
    "triggers": ["<f="],
    "structures": [
        {"begin": "<f=city>", "schema": CITY, "end": "</f>"},
        {"begin": "<f=count>", "schema": COUNT, "end": "</f>"},
    ],
}


def followed(text: str, **asked: Any) -> int | None:
    """Where `text` leaves the structure; None if it is a whole output of it."""
    matcher = COMPILER.matcher(SamplingParams(structured_outputs=asked))
    assert matcher is not None
    for place, byte in enumerate(text.encode()):
        if byte not in allowed_ids(matcher.mask(), 259):
            return place
        matcher.accept(byte)
    return None if TOKENIZER.eos_ids & set(allowed_ids(matcher.mask(), 259)) else len(text)


def formatted(content: dict[str, Any], **options: bool) -> dict[str, Any]:
    tag = {"begin": "<a>", "content": content, "end": "</a>"}
    return {
        "type": "structural_tag",
        "format": {"type": "triggered_tags", "triggers": ["<a"], "tags": [tag], **options},
    }


@pytest.mark.parametrize("spelled", [STRUCTURES, json.dumps(STRUCTURES)])
def test_text_is_free_up_to_a_trigger_and_then_follows_its_tag(spelled: Any) -> None:
    for text, place in [
        ("", None),
        ("free text, < and <f too\n", None),
        ('see <f=city>{"city": "Ulm"}</f> and <f=count>{"n":7}</f>.', None),
        ("see <f=x", 7),
        ('<f=count>{"city"', 11),
        ('<f=city>{"city": "Ulm"}</f', 26),
        ('<f=city>{"city": "Ulm"} ', 23),
    ]:
        assert followed(text, structural_tag=spelled) == place, text


def test_tags_in_the_newer_format() -> None:
    digits = {"type": "regex", "pattern": "[0-9]+"}
    once = {"stop_after_first": True}
    for content, options, text, place in [
        (digits, {}, "x <a>12</a> y <a>3</a>", None),
        (digits, {}, "x <a>1z", 6),
        (digits, {"at_least_one": True}, "x", 1),
        (digits, once, "x", None),
        (digits, {**once, "at_least_one": True}, "x<a>1</a>", None),
        (digits, {**once, "at_least_one": True}, "x<a>1</a>y", 9),
        ({"type": "any_text"}, {}, "<a>what </ you <a like</a> and <a>", 34),
        ({"type": "json_schema", "json_schema": COUNT}, {}, '<a>{"n": 1}</a>', None),
    ]:
        assert followed(text, structural_tag=formatted(content, **options)) == place, (content, options, text)


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ({}, "needs type"),
        ("{", "not valid JSON"),
        ({"type": "tag"}, "type must be"),
        ({"type": "structural_tag"}, "needs structures and triggers"),
        ({**STRUCTURES, "triggers": []}, "triggers must be a list"),
        ({**STRUCTURES, "triggers": ["<g"]}, "begins with none of the triggers"),
        ({**STRUCTURES, "triggers": ["<f", "<f="]}, "is within"),
        ({**STRUCTURES, "structures": [{"begin": "<f=", "schema": {"if": {}}, "end": ""}]}, "'if'"),
        ({**STRUCTURES, "structures": [{"begin": "<f=", "schema": {}}]}, "needs end"),
        ({**STRUCTURES, "more": 1}, "unknown member 'more'"),
        (formatted({"type": "grammar"}), "must be one of json_schema, regex, any_text"),
        (formatted({"type": "regex", "json_schema": {}}), "takes no json_schema"),
        (formatted({"type": "regex"}), "needs pattern"),
        (formatted({"type": "regex", "pattern": "["}), "structured_outputs.structural_tag"),
        (formatted({"type": "any_text"}, at_least_one=1), "must be true or false"),  # type: ignore[arg-type]
    ],
)
def test_a_structural_tag_that_cannot_be_served_is_refused(tag: Any, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        COMPILER.check(SamplingParams(structured_outputs={"structural_tag": tag}))
    assert message in str(caught.value)
    assert str(caught.value.param).startswith("structured_outputs.structural_tag")


def test_a_gbnf_grammar_is_a_grammar() -> None:
    grammar = """
        root ::= "SELECT " column (" FROM " table)?   # what llama.cpp and xgrammar read
        column ::= [a-c]+
        table ::= "t1" | "t2"
    """
    for seed in range(5):
        matcher = COMPILER.matcher(SamplingParams(grammar=grammar))
        assert matcher is not None
        text = TOKENIZER.decode(walk(matcher, TOKENIZER, seed))
        assert followed(text, grammar=grammar) is None
        assert text.startswith("SELECT ")
    assert followed("SELECT abc FROM t3", grammar=grammar) == 17


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= nowhere\nother ::= "a"',
        "root ::= (",
        "root ::= " + "(" * 5000,
        'root ::= "' + "a" * 20000 + '"',
    ],
)
def test_a_gbnf_grammar_that_cannot_be_read_is_refused(grammar: str) -> None:
    with pytest.raises(RequestError) as caught:
        COMPILER.check(SamplingParams(structured_outputs=StructuredOutputsParams(grammar=grammar)))
    assert caught.value.param == "structured_outputs.grammar"


def test_json_can_be_refined() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}, "of": {"type": "object"}}}
    compact = {"json": schema, "disable_any_whitespace": True}
    assert followed('{"n": 1, "more": [1, 2]}', **compact) is None
    assert followed('{"n":1', **compact) == 5
    assert followed('{ "n"', **compact) == 1
    closed = {"json": schema, "disable_additional_properties": True}
    assert followed('{"n": 1, "of": {}}', **closed) is None
    assert followed('{"n": 1, "m', **closed) == 10
    assert followed('{"of": {"x', **closed) == 8
    spaced = {"json_object": True, "whitespace_pattern": "[ ]{2}"}
    assert followed('{  "a"  :  1  }', **spaced) is None
    assert followed('{ "a"', **spaced) == 2
    assert followed("[", json_object=True) == 0
    for pattern in (r"\s*", r"[\s]{0,3}", r"[\n\t ]*"):
        assert followed('{\n\t"a": 1}', json_object=True, whitespace_pattern=pattern) is None
        assert followed("{\u00a0", json_object=True, whitespace_pattern=pattern) == 1, pattern


def test_a_pattern_of_one_name_does_not_open_a_place_for_another() -> None:
    """llguidance allows the comma, and then no name at all: the output broke off with an error."""
    schema = {
        "type": "object",
        "properties": {"score": {"type": "integer", "multipleOf": 5}, "tag": {"enum": ["a"]}},
        "required": ["score", "tag"],
        "additionalProperties": False,
        "patternProperties": {"^score$": {"maximum": 20, "type": "integer"}},
    }
    asked = {"json": schema}
    assert followed('{"score": 15, "tag": "a"}', **asked) is None
    assert followed('{"score": 15, "tag": "a",', **asked) == 24
    assert followed('{"score": 25', **asked) == 11  # the pattern speaks of it, too
    assert followed('{"score": 12', **asked) == 11
    open_to_others = {**schema, "patternProperties": {"^score$": {"maximum": 20}, "^x": {"type": "null"}}}
    assert followed('{"score": 15, "tag": "a", "xy": null}', json=open_to_others) is None
    again = {"again": {"$ref": "#/properties/score"}}  # where places matter, none moves
    referring = {**schema, "properties": {**schema["properties"], **again}}
    assert followed('{"score": 15, "tag": "a", "again": 25}', json=referring) is None


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({}, "structured_outputs"),
        ({"json": {}, "regex": "a"}, "structured_outputs"),
        ({"xml": "a"}, "structured_outputs"),
        ({"json_object": False}, "structured_outputs.json_object"),
        ({"json": 5}, "structured_outputs.json"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"structural_tag": 5}, "structured_outputs.structural_tag"),
        ({"regex": "a", "disable_any_whitespace": True}, "structured_outputs.disable_any_whitespace"),
        ({"regex": "a", "whitespace_pattern": " "}, "structured_outputs.whitespace_pattern"),
        ({"json": {}, "disable_any_whitespace": "no"}, "structured_outputs.disable_any_whitespace"),
        (
            {"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "},
            "structured_outputs.whitespace_pattern",
        ),
        ({"json": {}, "whitespace_pattern": 5}, "structured_outputs.whitespace_pattern"),
    ],
)  # fmt: skip
def test_what_has_no_meaning_is_refused_where_it_is_made(asked: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(structured_outputs=asked)
    assert caught.value.param == param


def test_white_space_is_white_space() -> None:
    with pytest.raises(RequestError, match="white space"):
        COMPILER.check(SamplingParams(structured_outputs={"json": {}, "whitespace_pattern": "[a ]*"}))


def test_one_structure_a_request() -> None:
    with pytest.raises(RequestError, match="exclude each other"):
        SamplingParams(regex="a", structured_outputs=StructuredOutputsParams(regex="a"))
    with pytest.raises(RequestError, match="allowed_token_ids"):
        SamplingParams(allowed_token_ids=[1], structured_outputs={"regex": "a"})
    with pytest.raises(RequestError, match="mapping"):
        SamplingParams(structured_outputs="a")  # type: ignore[arg-type]
