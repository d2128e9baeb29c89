"""Functions that a model may call: what a body says of them, and finding the calls in the text of an answer.

Two forms of a call are read, those that models are trained on:

    <tool_call>{"name": "f", "arguments": {...}}</tool_call>    Hermes and Qwen: any number, amid text
    {"name": "f", "parameters": {...}}                          Llama 3: the whole answer, several split by ;

Only what names one of the functions given is a call; everything else is text. A call is told when it is
complete, so that a stream says what the whole answer says.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from jaxinfer.core import RequestError
from jaxinfer.server.structures import Strict, refuse_constant

MAX_TOOLS = 128
"""Functions of one request (OpenAI's own limit)."""

OPENING, CLOSING = "<tool_call>", "</tool_call>"
_CALL_KEYS = ("name", "arguments", "parameters", "type", "id")
_SEPARATORS = "; \t\r\n"


# ------------------------------------------------------------------------------------------- bodies


class Function(Strict):
    """A function, and the schema of the object that it takes."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """One entry of `tools`."""

    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    """The name of one of `tools`."""

    name: str


class NamedTool(Strict):
    """The `tool_choice` that is one function."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a body says about calls. `forced`: the functions of which the answer must call one."""

    functions: Mapping[str, dict[str, Any] | None]
    forced: tuple[str, ...] = ()
    named: bool = False
    parallel: bool = True

    def grammar(self) -> str | None:
        """The Lark grammar of an answer that must be a call; None where it need not be one.

        What is the same in every call is written as it is: a model that has never seen the functions would
        wander about in the white space that JSON allows.
        """
        if not self.forced:
            return None
        lines = ["start: " + " | ".join(f"call_{i}" for i in range(len(self.forced)))]
        for i, name in enumerate(self.forced):
            opening = json.dumps(f'{{"name": "{name}", "arguments": ')
            lines.append(f'call_{i}: {opening} arguments_{i} "}}"')
            schema = self.functions[name] or {"type": "object"}
            lines.append(f"arguments_{i}: %json {json.dumps(schema)}")
        return "\n".join(lines)

    def finish_reason(self, reason: str | None, called: bool) -> str | None:
        """OpenAI's: an answer that stops with calls ends with "tool_calls", but "stop" if one was named."""
        return "tool_calls" if called and reason == "stop" and not self.named else reason


def tool_use(
    tools: list[Tool] | None, choice: ToolChoice | None, parallel: bool | None, *, takes_tools: bool
) -> ToolUse | None:
    """What the body's three parameters come to; None where no call can be made. Raises RequestError.

    `takes_tools`: whether the model's chat template has a place for functions. Without one a model can
    still be made to call, by name or with "required", for then a grammar writes the call.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise RequestError("tool_choice asks for a call, and tools has no functions", "tool_choice")
        return None
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools has {len(tools)} functions; at most {MAX_TOOLS} are served", "tools")
    functions: dict[str, dict[str, Any] | None] = {}
    for i, tool in enumerate(tools):
        if tool.function.name in functions:
            raise RequestError(f"tools has two functions of the name {tool.function.name!r}", f"tools[{i}]")
        functions[tool.function.name] = tool.function.parameters
    if choice == "none":
        return None
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if name not in functions:
            raise RequestError(f"tool_choice: tools has no function {name!r}", "tool_choice.function.name")
        return ToolUse(functions, (name,), named=True)
    if choice == "required":
        return ToolUse(functions, tuple(functions))
    if not takes_tools:
        raise RequestError(
            "this model's chat template has no place for tools, so it would never see them; leave them out, "
            'or send tool_choice "required" or the name of a function',
            "tools",
        )
    for i, tool in enumerate(tools):
        if tool.function.strict:
            raise RequestError(
                'strict needs a tool_choice of "required" or one function: in an answer that may be text '
                "nothing holds the arguments to their schema",
                f"tools[{i}].function.strict",
            )
    return ToolUse(functions, parallel=parallel is not False)


# ------------------------------------------------------------------------------------------ answers


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
    """Splits the text of one answer, as it comes, into text to show and calls."""

    def __init__(self, use: ToolUse):
        self._use = use
        self._held = ""  # may become a call or the white space beside one
        self._started = False  # some text was told: an answer in Llama 3's form is a call from its start
        self.called = False

    def push(self, text: str) -> Iterator[str | Call]:
        """The next piece of the answer; yields what is known now."""
        self._held += text
        if self._started or self.called or not _may_be_bare(self._held):
            yield from self._scan()

    def finish(self) -> Iterator[str | Call]:
        """The answer has ended; yields what was held back."""
        if not self._started and not self.called:
            calls = self._bare_calls(self._held)
            for call in calls:
                yield from self._tell(call)
            if calls:
                self._held = ""
            yield from self._scan()
        start = self._held.find(OPENING)
        call = None if start < 0 else self._call(self._held[start + len(OPENING) :], bare=False)
        if call is not None:  # the closing tag was not written, or is a control token
            yield from self._tell(call)
        elif self._held.strip() or not self.called:
            yield from self._show(self._held)
        self._held = ""

    def _scan(self) -> Iterator[str | Call]:
        """Tell what is certain of the text held: what lies before a tag, and the calls that are closed."""
        while True:
            start = self._held.find(OPENING)
            if start < 0:
                shown = len(self._held) - _beginning_of_call(self._held)
                yield from self._show(self._held[:shown].rstrip())
                return
            yield from self._show(self._held[:start].rstrip())
            start = self._held.find(OPENING)  # only white space is left before it
            end = self._held.find(CLOSING, start)
            if end < 0:
                return
            call = self._call(self._held[start + len(OPENING) : end], bare=False)
            whole = self._held[: end + len(CLOSING)]
            if call is None:
                yield from self._show(whole)
            else:
                self._held = self._held[len(whole) :]
                yield from self._tell(call)

    def _show(self, text: str) -> Iterator[str]:
        """Text that starts what is held."""
        if text:
            self._started = True
            self._held = self._held[len(text) :]
            yield text

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


def _may_be_bare(text: str) -> bool:
    """Whether an answer that begins so may yet be a call in Llama 3's form."""
    start = text.lstrip()
    if not start.startswith("{"):
        return not start
    key = start[1:].lstrip()
    if not key.startswith('"'):
        return not key
    name, closed, _ = key[1:].partition('"')
    return name in _CALL_KEYS if closed else any(known.startswith(name) for known in _CALL_KEYS)


def _beginning_of_call(text: str) -> int:
    """How many characters at the end of a text may be the beginning of an opening tag."""
    most = min(len(text), len(OPENING) - 1)
    return next((n for n in range(most, 0, -1) if OPENING.startswith(text[-n:])), 0)
