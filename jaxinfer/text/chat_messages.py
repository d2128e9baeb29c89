"""Chat messages as templates expect them, and the guard that keeps content from becoming control tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxinfer.text.errors import ChatTemplateError, require_unicode
from jaxinfer.text.tokenizer import SpecialTexts

# The private-use area of Unicode: characters without a meaning, one of which the guard borrows per request.
_PRIVATE_USE = range(0xE000, 0xF900)


def normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A deep copy of `messages` in the shape that text-only templates understand.

    Content given as a list of text parts becomes their texts joined by newlines; null content (and, beside
    tool calls, missing content) becomes ""; the arguments of a tool call given as JSON text become an object.
    Raises ChatTemplateError naming the message for anything else: no role, an image part, not a list.
    """
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
        raise ChatTemplateError(f"messages: got {_shown(messages)}, expected a non-empty list of messages")
    return [_normalize_message(index, message) for index, message in enumerate(messages)]


def _normalize_message(index: int, message: Any) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise ChatTemplateError(f"{where}: got {_shown(message)}, expected an object with role and content")
    if not isinstance(message.get("role"), str) or not message["role"]:
        role = _shown(message.get("role"))
        raise ChatTemplateError(f"{where}: role: got {role}, expected a name such as 'user'")
    if "content" not in message and not message.get("tool_calls"):
        raise ChatTemplateError(f"{where}: no content")
    result = _copy(message, where)
    result["content"] = _content(message.get("content"), where)
    for call in result.get("tool_calls") or []:
        function = call.get("function", call) if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            function["arguments"] = _parsed_arguments(function["arguments"])
    return result


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise ChatTemplateError(f"{where}: content: got {_shown(content)}, expected text or text parts")
    texts: list[str] = []
    for number, part in enumerate(content):
        if isinstance(part, Mapping) and part.get("type", "text") == "text":
            part = part.get("text")
        if not isinstance(part, str):
            kind = part.get("type") if isinstance(part, Mapping) else _shown(part)
            raise ChatTemplateError(f"{where}: content part {number}: got {kind!r}, expected a text part")
        texts.append(part)
    return "\n".join(texts)


def _parsed_arguments(arguments: str) -> Any:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _copy(value: Any, where: str) -> Any:
    """A copy made of dicts, lists and plain values; checks every text for lone surrogates."""
    if isinstance(value, str):
        require_unicode(value, where, ChatTemplateError)
        return value
    if isinstance(value, Mapping):
        return {_copy(key, where): _copy(item, where) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copy(item, where) for item in value]
    return value


def checked_copy(value: Any, where: str) -> Any:
    """A deep copy of JSON-like data.

    Raises ChatTemplateError, naming `where`, for lone surrogates and for data nested too deeply.
    """
    try:
        return _copy(value, where)
    except RecursionError as error:
        raise ChatTemplateError(f"{where}: nested too deeply") from error


@dataclass(frozen=True)
class Segment:
    """A piece of a rendered prompt: a control token of the template (`token_id` set), or text."""

    text: str
    token_id: int | None


class ContentGuard:
    """Marks, in everything the caller wrote, what could become a control token in the prompt.

    Before rendering, each special-token text inside a caller's string is replaced by a placeholder, and so is
    the beginning of one at the end of a string, or the end of one at its start, which could otherwise be
    completed by the text beside it. After rendering, a special-token text can only be the template's own.
    """

    def __init__(self, special: SpecialTexts, inputs: Any) -> None:
        """inputs: everything whose characters may appear in the prompt (messages, template, ...)."""
        self._special = special
        texts = "".join(_texts(inputs))
        # A template may write JSON with everything beyond ASCII escaped, the mark included.
        free = (code for code in _PRIVATE_USE if chr(code) not in texts and f"\\u{code:04x}" not in texts)
        self.mark = next((chr(code) for code in free), "")
        if not self.mark:
            raise ChatTemplateError("messages use every character of the private-use area of Unicode")
        self._hidden: list[str] = []
        self._placeholder = re.compile(f"{self.mark}(\\d+){self.mark}")

    def protect(self, value: Any) -> Any:
        """`value` with placeholders in all its texts, keys of objects included."""
        if isinstance(value, str):
            return self._protect_text(value)
        if isinstance(value, dict):
            return {self._protect_key(key): self.protect(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.protect(item) for item in value]
        return value

    def unescape(self, rendered: str) -> str:
        """The text with marks that a template escaped (as JSON does) put back."""
        return rendered.replace(f"\\u{ord(self.mark):04x}", self.mark) if self._hidden else rendered

    def holds_placeholder(self, rendered: str) -> bool:
        """Whether anything the caller wrote had to be hidden in this prompt."""
        return self.mark in rendered

    def restore(self, rendered: str) -> str:
        """The text with what the placeholders stand for."""
        return self._placeholder.sub(lambda match: self._hidden[int(match[1])], rendered)

    def split(self, rendered: str) -> list[Segment]:
        """The template's control tokens and the texts between them, placeholders restored, in order."""
        segments: list[Segment] = []
        position = 0
        for match in self._special.pattern.finditer(rendered):
            segments.append(Segment(self.restore(rendered[position : match.start()]), None))
            segments.append(Segment(match[0], self._special.ids[match[0]]))
            position = match.end()
        segments.append(Segment(self.restore(rendered[position:]), None))
        return [segment for segment in segments if segment.text]

    def _protect_key(self, key: Any) -> Any:
        return self._special.pattern.sub(self._hide_match, key) if isinstance(key, str) else key

    def _protect_text(self, text: str) -> str:
        text = self._special.pattern.sub(self._hide_match, text)
        # Templates often trim content, so the ends that matter are those of the trimmed text.
        end = len(text.rstrip())
        for size in range(min(self._special.longest - 1, end), 0, -1):
            if text[end - size : end] in self._special.prefixes:
                text = text[: end - size] + self._hide(text[end - size : end]) + text[end:]
                break
        start = len(text) - len(text.lstrip())
        for size in range(min(self._special.longest - 1, len(text) - start), 0, -1):
            if text[start : start + size] in self._special.suffixes:
                text = text[:start] + self._hide(text[start : start + size]) + text[start + size :]
                break
        return text

    def _hide_match(self, match: re.Match[str]) -> str:
        return self._hide(match[0])

    def _hide(self, text: str) -> str:
        self._hidden.append(text)
        return f"{self.mark}{len(self._hidden) - 1}{self.mark}"


def _texts(value: Any) -> Iterator[str]:
    """Every text in JSON-like data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{type(value).__name__} {text[:50]}..."
