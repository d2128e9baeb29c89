"""Finding calls of functions in the text of an answer, as it comes.

Two forms of a call are read, those that models are trained on:

    <tool_call>{"name": "f", "arguments": {...}}</tool_call>    Hermes and Qwen: any number, amid text
    {"name": "f", "parameters": {...}}                          Llama 3: the whole answer, several split by ;

Only what names one of the functions given is a call; everything else is text. A call is told when it is
complete, so that a stream says what the whole answer says.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jaxinfer.server.structures import refuse_constant
from jaxinfer.server.tools import CLOSING, OPENING, ToolUse

_CALL_KEYS = ("name", "arguments", "parameters", "type", "id")
_SEPARATORS = "; \t\r\n"


@dataclass(frozen=True, slots=True)
class Call:
    """One call: a function's name and its arguments as JSON text."""

    id: str
    name: str
    arguments: str

    def as_openai(self) -> dict[str, Any]:
        """The entry of a message's `tool_calls`."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class CallParser:
    """Splits the text of one answer, as it comes, into text to show and calls.

    Every character is looked at a fixed number of times, however long an answer or a call is: what is held
    is a list of pieces, and tags are looked for in the newest piece and the few characters before it.
    """

    def __init__(self, use: ToolUse):
        self._use = use
        self._start: _Start | None = _Start() if use.bare else None  # None once it is known how it starts
        self._first: list[str] = []  # an answer of which that is not known, or that is held to its end
        self._space: list[str] = []  # white space that may lie beside a call
        self._partial = ""  # the end of the text, which may be the beginning of an opening tag
        self._inside: _Inside | None = None  # a call whose tag has opened
        self.called = False

    def push(self, text: str) -> Iterator[str | Call]:
        """The next piece of the answer; yields what is known now."""
        if self._start is None:
            yield from self._scan(text)
            return
        self._first.append(text)
        if self._start.read(text) is False:
            yield from self._scan_first()

    def finish(self) -> Iterator[str | Call]:
        """The answer has ended; yields what was held back."""
        if self._start is not None:
            whole = "".join(self._first)
            calls = self._bare_calls(whole)
            for call in calls:
                yield from self._tell(call)
            if calls:
                return
            yield from self._scan_first()
        space, inside = "".join(self._space), self._inside
        call = None if inside is None else self._call(inside.text, bare=False)
        if call is not None:  # the closing tag was not written, or is a control token
            yield from self._tell(call)
            return
        rest = space + (self._partial if inside is None else OPENING + inside.text)
        if rest and (rest.strip() or not self.called):
            yield rest

    def _scan_first(self) -> Iterator[str | Call]:
        """The answer is none in Llama 3's form: what was held of it is text, with tags maybe."""
        text, self._start, self._first = "".join(self._first), None, []
        yield from self._scan(text)

    def _scan(self, text: str) -> Iterator[str | Call]:
        """Tell what is certain of a new piece: what lies before a tag, and the calls that are closed."""
        while text:
            if self._inside is not None:
                closed = self._inside.push(text)
                if closed is None:
                    return
                body, text = closed
                self._inside = None
                call = self._call(body, bare=False)
                if call is None:
                    yield from self._show(OPENING + body + CLOSING)
                else:
                    self._space = []
                    yield from self._tell(call)
                continue
            text, self._partial = self._partial + text, ""
            before, tag, text = text.partition(OPENING)
            if tag:
                self._inside = _Inside()
            else:
                size = len(before) - _beginning_of_call(before)
                before, self._partial = before[:size], before[size:]
            yield from self._show(before)

    def _show(self, text: str) -> Iterator[str]:
        """Text, but for the white space at its end: that is held until it is known whether a call follows."""
        body = text.rstrip()
        if body:
            yield "".join(self._space) + body
            self._space = []
        if len(body) < len(text):
            self._space.append(text[len(body) :])

    def _tell(self, call: Call) -> Iterator[Call]:
        if self._use.parallel or not self.called:
            yield call
        self.called = True

    def _bare_calls(self, text: str) -> list[Call]:
        """The calls that the whole text is; none where it is anything else."""
        calls, at = [], 0
        while at < len(text):
            if text[at] in _SEPARATORS:
                at += 1
                continue
            try:
                _, end = json.JSONDecoder(parse_constant=refuse_constant).raw_decode(text, at)
            except (ValueError, RecursionError):
                return []
            call = self._call(text[at:end], bare=True)
            if call is None:
                return []
            calls.append(call)
            at = end
        return calls

    def _call(self, text: str, *, bare: bool) -> Call | None:
        try:
            value = json.loads(text, parse_constant=refuse_constant)
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, dict) or not set(value) <= set(_CALL_KEYS):
            return None
        given = [value[key] for key in ("arguments", "parameters") if key in value]
        name, arguments = value.get("name"), given[0] if given else {}
        if not isinstance(name, str) or name not in self._use.functions or len(given) > 1:
            return None
        if not isinstance(arguments, dict) or (bare and not given):
            return None
        return Call(f"call_{uuid.uuid4().hex}", name, _as_json(arguments))


def _as_json(value: Any) -> str:
    """JSON text, characters as they are unless one of them is half of a pair."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


class _Start:
    """Reads how an answer starts: as a call in Llama 3's form (`{"name"`), or as anything else."""

    def __init__(self) -> None:
        self._expected = "{"
        self._key: str | None = None
        self._verdict: bool | None = None

    def read(self, text: str) -> bool | None:
        """The next piece. Gives whether the answer may be a call; None: that is not known yet."""
        for character in text:
            if self._verdict is not None:
                break
            if self._key is not None:
                self._read_key(character)
            elif not character.isspace():
                if character != self._expected:
                    self._verdict = False
                elif character == "{":
                    self._expected = '"'
                else:
                    self._key = ""
        return self._verdict

    def _read_key(self, character: str) -> None:
        assert self._key is not None, "a key has begun"
        if character == '"':
            self._verdict = self._key in _CALL_KEYS
            return
        self._key += character
        if not any(known.startswith(self._key) for known in _CALL_KEYS):
            self._verdict = False


class _Inside:
    """The text of a call whose tag has opened."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._end = ""  # of the text so far, as much as may be the beginning of the closing tag

    def push(self, text: str) -> tuple[str, str] | None:
        """The next piece. Gives what lies before the closing tag and what lies after it, once it is there."""
        window = self._end + text
        at = window.find(CLOSING)
        self._pieces.append(text)
        if at < 0:
            self._end = window[1 - len(CLOSING) :]
            return None
        whole = self.text
        size = len(whole) - (len(window) - at)
        return whole[:size], whole[size + len(CLOSING) :]

    @property
    def text(self) -> str:
        return "".join(self._pieces)


def _beginning_of_call(text: str) -> int:
    """How many characters at the end of a text may be the beginning of an opening tag."""
    most = min(len(text), len(OPENING) - 1)
    return next((n for n in range(most, 0, -1) if OPENING.startswith(text[-n:])), 0)
