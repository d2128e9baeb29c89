"""Grammars in Lark's syntax, as llguidance takes it: what a caller may not write, and what the rest becomes.

Regular expressions and choices are small grammars too, so everything reaches llguidance as this one language.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import NoReturn

from jaxinfer.core import RequestError, Structure
from jaxinfer.text.grammar_schema import checked_schema, parsed_json

MAX_REGEX_BYTES = 16 * 1024
MAX_GRAMMAR_BYTES = 64 * 1024
MAX_GBNF_BYTES = 16 * 1024
"""It is read in Python, in some 0.2 s for so much."""
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


_GBNF_RULE = re.compile(r"^[ \t]*[A-Za-z_][A-Za-z0-9_-]*[ \t]*::=", re.MULTILINE)
"""How a rule of a GBNF grammar begins, and nothing in Lark."""


def grammar_of(structure: Structure) -> str:
    """The Lark grammar of a structure, checked as far as that goes without llguidance.

    Raises RequestError.
    """
    value, param = structure.value, structure.param
    if structure.kind == "json_schema":
        options = {"compact": structure.compact, "closed": structure.closed}
        schema = checked_schema(value, param, whitespace=_whitespace(structure), **options)
        return f"start: %json {schema}" + OPTIONS
    if structure.kind == "regex":
        return f"start: {regex_term(value, param)}" + OPTIONS
    if structure.kind == "choice":
        return choice_grammar(value, param)
    if structure.kind == "grammar":
        return checked_grammar(value, param)
    from jaxinfer.text.grammar_tags import tags_grammar

    return tags_grammar(value, param)


def regex_term(pattern: str, param: str) -> str:
    """A term that matches the whole of `pattern` (Rust's syntax, without look-around)."""
    from llguidance import regex_to_lark

    _check_size(pattern, MAX_REGEX_BYTES, param)
    # An empty /.../ would be a comment.
    return f"/{regex_to_lark(pattern, '') or '(?:)'}/"


def choice_grammar(choices: Sequence[str], param: str) -> str:
    """A grammar of exactly these texts."""
    _check_size("".join(choices), MAX_GRAMMAR_BYTES, param)
    return "start: CHOICE\nCHOICE: " + " | ".join(map(literal, dict.fromkeys(choices))) + OPTIONS


def _whitespace(structure: Structure) -> str | None:
    """The pattern of white space between the parts of a JSON value, which must be what JSON allows there."""
    pattern = structure.whitespace
    if pattern is not None and not _WHITESPACE_PATTERN.fullmatch(pattern):
        param = "structured_outputs.whitespace_pattern"
        raise RequestError(
            f"{param} must be a class of white space such as [ ], [\\n\\t ] or \\s, repeated or not (*, "
            f"+, ?, {{m,n}}), got {pattern!r:.80}",
            param,
        )
    if pattern is None:
        return None
    # A \s of the compiler's would also be white space that is none in JSON.
    return pattern.replace(r"\s", r" \n\r\t" if pattern.startswith("[") else r"[ \n\r\t]")


_WHITESPACE_PATTERN = re.compile(
    r"""([ ] | \\[snrt] | \[([ \n\r\t]|\\[snrt])+\])  # a class of characters
        ([*+?] | \{[0-9]{1,3}(,[0-9]{0,3})?\})?       # and how often""",
    re.VERBOSE,
)


def lark_of_gbnf(text: str, param: str) -> str:
    """A GBNF grammar (`root ::= ...`) as a Lark grammar. Raises RequestError where it cannot be read."""
    from llguidance.gbnf_to_lark import any_to_lark

    _check_size(text, MAX_GBNF_BYTES, param)
    _check_parts(text.count("::=") + sum(map(text.count, "([{")), param)
    try:
        return any_to_lark(text)
    except RecursionError:
        raise RequestError(f"{param} is nested too deeply", param) from None
    except Exception as error:  # it raises GbnfToLarkError, and for some mistakes Exception itself
        raise RequestError(f"{param}: {str(error).splitlines()[0][:200]}", param) from None


def checked_grammar(text: str, param: str = "grammar") -> str:
    """The caller's grammar, Lark or GBNF, with its inline schemas checked.

    Raises RequestError for special tokens (they are not text), for attributes and directives that are not
    served, and for sizes. Syntax is llguidance's business.
    """
    _check_size(text, MAX_GRAMMAR_BYTES, param)
    if not text.strip():
        raise RequestError(f"{param} is empty; it must define the rule start", param)
    if _GBNF_RULE.search(text):
        text = lark_of_gbnf(text, param)
    pieces: list[str] = []
    parts = position = 0
    while position < len(text):
        found = _TOKEN.match(text, position)
        assert found is not None, f"the pattern of a token fits any character, not {text[position]!r}"
        kind, token, position = found.lastgroup, found.group(), found.end()
        parts += kind == "part"
        if kind == "special":
            _refuse(param, f"special tokens such as {token!r:.60} are not text and cannot be generated")
        elif kind == "attribute" and token in _REFUSED_ATTRIBUTES:
            _refuse(param, f"the attribute {token!r} of rules is not supported; use the request's own fields")
        elif kind == "directive":
            if token not in _DIRECTIVES:
                _refuse(param, f"{token!r:.60} is not supported; supported: {', '.join(sorted(_DIRECTIVES))}")
            if token in ("%json", "%regex", "%llguidance"):
                value, position = _json_value(text, position, param)
                token = f"{token} {_checked_value(token, value, param)}"
                parts += value.count("{")
        pieces.append(token)
    _check_parts(parts, param)
    return "".join(pieces) + OPTIONS


def _checked_value(directive: str, value: str, param: str) -> str:
    if directive == "%json":
        return checked_schema(value, param)
    options = parsed_json(value, param)
    if directive == "%llguidance" and (unknown := sorted(set(options) - _ALLOWED_OPTIONS)):
        _refuse(param, f"%llguidance {unknown[0]!r:.60} is not supported")
    return value


def _json_value(text: str, position: int, param: str) -> tuple[str, int]:
    """The JSON object that starts at or after `position`, and where it ends."""
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    try:
        value, end = json.JSONDecoder().raw_decode(text, position)
    except (ValueError, RecursionError) as error:
        _refuse(param, f"holds JSON that is not valid: {error}")
    if not isinstance(value, dict):
        _refuse(param, "holds JSON that is not an object")
    return text[position:end], end


def literal(text: str) -> str:
    """Text as a Lark string: JSON's escapes, and DEL, which Lark's strings may not hold."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _check_size(text: str, limit: int, param: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise RequestError(f"{param} holds a lone surrogate, which is not text", param) from None
    if size > limit:
        raise RequestError(f"{param} has {size} bytes; at most {limit} are served", param)


def _check_parts(parts: int, param: str) -> None:
    if parts > MAX_PARTS:
        _refuse(param, f"has {parts} definitions and brackets; at most {MAX_PARTS} are served")


def _refuse(param: str, message: str) -> NoReturn:
    raise RequestError(f"{param}: {message}", param)
