"""Grammars in Lark's syntax, as llguidance takes it: what a caller may not write, and what the rest becomes.

Regular expressions and choices are small grammars too, so everything reaches llguidance as this one language.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from jaxinfer.core import RequestError
from jaxinfer.text.grammar_schema import checked_schema, parsed_json

MAX_REGEX_BYTES = 16 * 1024
MAX_GRAMMAR_BYTES = 64 * 1024
MAX_PARTS = 1000
"""Definitions and brackets of a grammar together: its compiler is recursive in native code, where too deep a
chain of rules ends the process (2000 still pass on a stack of 8 MB)."""

OPTIONS = '\n%llguidance {"no_forcing": true}\n'
"""The model chooses how text is cut into tokens, also where only one text is possible."""

_ALLOWED_OPTIONS = {"no_forcing", "allow_initial_skip", "ignore_once"}
_DIRECTIVES = {"%import", "%ignore", "%json", "%regex", "%llguidance"}
# Attributes of rules that would be ignored, or that end the output in another way than its end.
_REFUSED_ATTRIBUTES = {"stop", "stop_capture", "temperature", "max_tokens"}
_TOKEN = re.compile(
    r"""(?P<comment>(?:\#|//)[^\n]*)
      | (?P<string>"(?:\\.|[^"\\\n])*")
      | (?P<regex>/(?:\\.|[^/\\])+/)
      | (?P<directive>%[A-Za-z]+)
      | (?P<special><[^<>\s]+>)
      | (?P<attribute>[A-Za-z_][A-Za-z0-9_]*)(?=\s*=)
      | (?P<part>[(\[{:])
      | (?P<other>[A-Za-z_][A-Za-z0-9_\-]*|.)""",
    re.VERBOSE | re.DOTALL,
)


def regex_grammar(pattern: str) -> str:
    """A grammar whose texts match the whole of `pattern` (Rust's syntax, without look-around)."""
    from llguidance import regex_to_lark

    _check_size(pattern, MAX_REGEX_BYTES, "regex")
    # An empty /.../ would be a comment.
    return f"start: /{regex_to_lark(pattern, '') or '(?:)'}/" + OPTIONS


def choice_grammar(choices: Sequence[str]) -> str:
    """A grammar of exactly these texts."""
    _check_size("".join(choices), MAX_GRAMMAR_BYTES, "choice")
    return "start: CHOICE\nCHOICE: " + " | ".join(map(_literal, dict.fromkeys(choices))) + OPTIONS


def schema_grammar(schema: Any) -> str:
    """A grammar of the JSON values that a schema allows."""
    return f"start: %json {checked_schema(schema, 'json_schema')}" + OPTIONS


def checked_grammar(text: str) -> str:
    """The caller's grammar with its inline schemas checked.

    Raises RequestError for special tokens (they are not text), for attributes and directives that are not
    served, and for sizes. Syntax is llguidance's business.
    """
    _check_size(text, MAX_GRAMMAR_BYTES, "grammar")
    if not text.strip():
        raise RequestError("grammar is empty; it must define the rule start", "grammar")
    pieces: list[str] = []
    parts = position = 0
    while position < len(text):
        found = _TOKEN.match(text, position)
        assert found is not None, f"the pattern of a token fits any character, not {text[position]!r}"
        kind, token, position = found.lastgroup, found.group(), found.end()
        parts += kind == "part"
        if kind == "special":
            _refuse(f"special tokens such as {token!r:.60} are not text and cannot be generated")
        elif kind == "attribute" and token in _REFUSED_ATTRIBUTES:
            _refuse(f"the attribute {token!r} of rules is not supported; use the request's own fields")
        elif kind == "directive":
            if token not in _DIRECTIVES:
                _refuse(f"{token!r:.60} is not supported; supported: {', '.join(sorted(_DIRECTIVES))}")
            if token in ("%json", "%regex", "%llguidance"):
                value, position = _json_value(text, position)
                token = f"{token} {_checked_value(token, value)}"
                parts += value.count("{")
        pieces.append(token)
    if parts > MAX_PARTS:
        _refuse(f"has {parts} definitions and brackets; at most {MAX_PARTS} are served")
    return "".join(pieces) + OPTIONS


def _checked_value(directive: str, value: str) -> str:
    if directive == "%json":
        return checked_schema(value, "grammar")
    options = parsed_json(value, "grammar")
    if directive == "%llguidance" and (unknown := sorted(set(options) - _ALLOWED_OPTIONS)):
        _refuse(f"%llguidance {unknown[0]!r:.60} is not supported")
    return value


def _json_value(text: str, position: int) -> tuple[str, int]:
    """The JSON object that starts at or after `position`, and where it ends."""
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    try:
        value, end = json.JSONDecoder().raw_decode(text, position)
    except (ValueError, RecursionError) as error:
        _refuse(f"holds JSON that is not valid: {error}")
    if not isinstance(value, dict):
        _refuse("holds JSON that is not an object")
    return text[position:end], end


def _literal(text: str) -> str:
    """Text as a Lark string: JSON's escapes, and DEL, which Lark's strings may not hold."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _check_size(text: str, limit: int, param: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise RequestError(f"{param} holds a lone surrogate, which is not text", param) from None
    if size > limit:
        raise RequestError(f"{param} has {size} bytes; at most {limit} are served", param)


def _refuse(message: str) -> NoReturn:
    raise RequestError(f"grammar: {message}", "grammar")
