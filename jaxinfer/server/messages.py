"""The messages of a conversation, as bodies bring them and as chat templates take them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import InitErrorDetails, PydanticCustomError

from jaxinfer.core import RequestError
from jaxinfer.server.structures import Strict, refuse_constant
from jaxinfer.server.tools import Tool

_NOT_FOR_TEMPLATES = frozenset({
    "messages", "sampling_params", "tokenizer", "tools", "add_generation_prompt", "continue_final_message",
    "priority", "cache_salt", "timeout_s", "bos_token", "eos_token", "self",
})  # fmt: skip
"""Names that have a parameter of their own, or that are the server's."""


PIECE = 256
"""Entries of a list that are checked in one go."""


def in_pieces(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """A validator of lists, around the one of all of it: pydantic keeps the GIL from the first entry to the
    last, and other threads wait."""
    if not isinstance(value, list) or len(value) <= PIECE:
        return check(value)
    checked: list[Any] = []
    for start in range(0, len(value), PIECE):
        try:
            checked += check(value[start : start + PIECE])
        except ValidationError as error:
            found = error.errors(include_url=False, include_context=False, include_input=False)
            raise ValidationError.from_exception_data(error.title, [
                InitErrorDetails(
                    type=PydanticCustomError(one["type"], one["msg"]),  # pyright: ignore[reportArgumentType]
                    loc=(start + int(one["loc"][0]), *one["loc"][1:]),
                    input=None,
                )
                for one in found
            ]) from None  # fmt: skip
    return checked


class ContentPart(Strict):
    """One part of a message; only text is understood."""

    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    """What an earlier answer called: `arguments` is the text of a JSON object."""

    name: str
    arguments: str
    parsed_arguments: Any = None  # of OpenAI's SDK, which read it out of `arguments`


class ToolCall(Strict):
    """A call that an earlier answer made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # of a stream's delta; the order of the list says the same


class Message(Strict):
    """One turn of a conversation. `developer` is OpenAI's newer word for `system`; roles that OpenAI does not
    have (Llama's `ipython`) are for the model's template to write, or to refuse."""

    role: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_.-]{0,63}$")]
    content: str | Annotated[list[ContentPart], WrapValidator(in_pieces)] | None = None
    name: str | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None  # of OpenAI's answers: empty
    refusal: None = None
    audio: None = None
    tool_calls: Annotated[list[ToolCall], WrapValidator(in_pieces)] | None = None
    tool_call_id: str | None = None
    function_call: None = None
    parsed: Any = None  # of OpenAI's SDK, which read it out of `content`

    def check(self, where: str) -> None:
        """Raise RequestError for fields that do not belong together."""
        if self.tool_calls and self.role != "assistant":
            raise RequestError(f"{where}: only an assistant's message has tool_calls", f"{where}.tool_calls")
        if self.tool_call_id is not None and self.role != "tool":
            raise RequestError(
                f"{where}: only a message of role tool has a tool_call_id", f"{where}.tool_call_id"
            )
        if self.content is None and not self.tool_calls:
            raise RequestError(f"{where}.content is missing", f"{where}.content")
        for i, call in enumerate(self.tool_calls or ()):
            if not isinstance(_object_or_none(call.function.arguments), dict):
                place = f"{where}.tool_calls[{i}].function.arguments"
                raise RequestError(f"{place} must be the text of a JSON object", place)

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates know it."""
        content: Any = self.content
        if isinstance(content, list):
            content = [{"type": part.type, "text": part.text} for part in content]
        message = {"role": "system" if self.role == "developer" else self.role, "content": content}
        for name in ("name", "tool_call_id"):
            if getattr(self, name) is not None:
                message[name] = getattr(self, name)
        if self.tool_calls:
            message["tool_calls"] = [_call_for_template(call) for call in self.tool_calls]
        return message


Messages = Annotated[list[Message], WrapValidator(in_pieces)]


def _call_for_template(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": _object_or_none(call.function.arguments)}
    known = {"type": call.type, "function": function}
    return known if call.id is None else {"id": call.id, **known}


def _object_or_none(text: str) -> Any:
    """A call without arguments may have been written as no text at all."""
    try:
        return json.loads(text or "{}", parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return None


class Conversation(Strict):
    """What the chat template gets besides messages, and where the answer starts."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], WrapValidator(in_pieces)] | None = None

    def template_input(
        self, messages: list[Message] | None, *, with_tools: bool = True
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Messages and options as the chat template takes them; raises RequestError."""
        if not messages:
            raise RequestError("messages is empty; it must hold at least one message", "messages")
        for i, message in enumerate(messages):
            message.check(f"messages[{i}]")
        go_on = bool(self.continue_final_message)
        if go_on and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt cannot both be true",
                "continue_final_message",
            )
        if go_on and (messages[-1].role != "assistant" or messages[-1].content is None):
            raise RequestError(
                "continue_final_message needs a last message of role assistant, with content",
                "continue_final_message",
            )
        for name in self.chat_template_kwargs or ():
            if name in _NOT_FOR_TEMPLATES:
                raise RequestError(
                    f"chat_template_kwargs: {name!r} is set by the server or by a parameter of its own",
                    f"chat_template_kwargs.{name}",
                )
        generation_prompt = not go_on if self.add_generation_prompt is None else self.add_generation_prompt
        options: dict[str, Any] = {
            "add_generation_prompt": generation_prompt,
            "continue_final_message": go_on,
        }
        if self.chat_template_kwargs:
            options["chat_template_kwargs"] = self.chat_template_kwargs
        if self.tools and with_tools:
            options["tools"] = [tool.model_dump(exclude_none=True) for tool in self.tools]
        return [message.for_template() for message in messages], options
