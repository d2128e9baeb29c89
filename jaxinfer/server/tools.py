"""Functions that a model may call: what a body says of them, and the grammar of an answer that must call.

`calls` finds the calls in the text of an answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from jaxinfer.core import RequestError
from jaxinfer.server.structures import Strict

MAX_TOOLS = 128
"""Functions of one request (OpenAI's own limit)."""

OPENING, CLOSING = "<tool_call>", "</tool_call>"


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


_TAGGED = (
    f'opened[lazy]: TEXT "{OPENING}"',
    f'inside: /[ \\n]?/ call /[ \\n]?/ "{CLOSING}"',
    r"TEXT: /(.|\n)*/",
)
_FIRST = (
    f'first_opened[lazy]: FIRST_TEXT "{OPENING}"',
    r"FIRST_TEXT: /([ \t\r\n]*[^{ \t\r\n](.|\n)*)?/",
)
"""Of an answer that is no call as a whole: it does not start with a brace."""

ToolChoice = Literal["none", "auto", "required"] | NamedTool


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a model that is told of functions writes its calls. `tagged`: as Hermes and Qwen do; else the whole
    answer is a call, as Llama 3 has it. `control`: the tags are control tokens, which are no text."""

    tagged: bool
    control: bool = False


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a body says about calls.

    `forced`: the functions of which the answer must call one. `strict`: those whose arguments follow their
    schema in any answer. `bare`: whether an answer that is nothing but a call, without tags, is one.
    """

    functions: Mapping[str, dict[str, Any] | None]
    forced: tuple[str, ...] = ()
    named: bool = False
    parallel: bool = True
    strict: frozenset[str] = frozenset()
    bare: bool = True

    def grammar(self) -> str | None:
        """The Lark grammar of an answer that must be a call, or whose calls must follow their schemas; None
        where anything may be said.

        What is the same in every call is written as it is: a model that has never seen the functions would
        wander about in the white space that JSON allows.
        """
        if self.forced:
            bound = dict.fromkeys(self.forced, True)
            return "\n".join(["start: call", *self._calls("call", "arguments", bound)])
        if not self.strict:
            return None
        bound = {name: name in self.strict for name in self.functions}
        # A lazy lexeme ends at the first tag, and goes before the text that could hold it.
        lines = ["start: (opened inside)* TEXT", *_TAGGED, *self._calls("call", "arguments", bound)]
        if self.bare:
            lines[0] = (
                'start: whole (";" /[ \\n]?/ whole)* | FIRST_TEXT | first_opened inside (opened inside)* TEXT'
            )
            lines += [*_FIRST, *self._calls("whole", "parameters", bound)]
        return "\n".join(lines)

    def _calls(self, rule: str, key: str, bound: Mapping[str, bool]) -> list[str]:
        """The rules of a call of one of some functions, its arguments bound to their schema or any object."""
        lines = [f"{rule}: " + " | ".join(f"{rule}_{i}" for i in range(len(bound)))]
        for i, (name, follows) in enumerate(bound.items()):
            opening = json.dumps(f'{{"name": "{name}", "{key}": ')
            lines.append(f'{rule}_{i}: {opening} {key}_{i} "}}"')
            schema = (self.functions[name] if follows else None) or {"type": "object"}
            lines.append(f"{key}_{i}: %json {json.dumps(schema)}")
        return lines

    def finish_reason(self, reason: str | None, called: bool) -> str | None:
        """OpenAI's: an answer that stops with calls ends with "tool_calls", but "stop" if one was named."""
        return "tool_calls" if called and reason == "stop" and not self.named else reason


def tool_use(
    tools: list[Tool] | None, choice: ToolChoice | None, parallel: bool | None, *, form: CallForm | None
) -> ToolUse | None:
    """What the body's three parameters come to; None where no call can be made. Raises RequestError.

    `form`: how the model writes calls; None where its chat template has no place for functions. Even then it
    can be made to call, by name or with "required", for then a grammar writes the call.
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
    if form is None:
        raise RequestError(
            "this model's chat template has no place for tools, so it would never see them; leave them out, "
            'or send tool_choice "required" or the name of a function',
            "tools",
        )
    strict = frozenset(tool.function.name for tool in tools if tool.function.strict)
    if strict and form.control:
        first = next(i for i, tool in enumerate(tools) if tool.function.strict)
        raise RequestError(
            f'strict needs a tool_choice of "required" or one function here: this model writes {OPENING} as '
            "a control token, after which nothing holds the arguments to their schema",
            f"tools[{first}].function.strict",
        )
    return ToolUse(
        functions, parallel=parallel is not False, strict=strict, bare=not (strict and form.tagged)
    )
