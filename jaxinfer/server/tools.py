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


ToolChoice = Literal["none", "auto", "required"] | NamedTool


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a body says about calls. `forced`: the functions of which the answer must call one."""

    functions: Mapping[str, dict[str, Any] | None]
    forced: tuple[str, ...] = ()
    named: bool = False
    parallel: bool = True
    bare: bool = True

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
