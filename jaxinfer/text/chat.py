"""Chat messages to prompt ids, through the model's own jinja template."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from jaxinfer.text.chat_messages import ContentGuard, Segment, checked_copy, normalize_messages
from jaxinfer.text.chat_sandbox import ChatSandbox
from jaxinfer.text.errors import ChatTemplateError
from jaxinfer.text.sources import FolderSource, GGUFSource, read_json
from jaxinfer.text.tokenizer import SpecialTexts, Tokenizer

_RESERVED = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token")
_NOTHING_SPECIAL = SpecialTexts({})


class ChatTemplate:
    """A model's chat template.

    The ids are those of transformers' apply_chat_template, with two differences: special-token text written
    by the caller (in content, names, tools, ...) stays plain text, and a tokenizer that starts every text
    with BOS starts a chat with exactly one, whether or not the template writes it. (Added tokens that are not
    special, such as <think> in some models, are ordinary vocabulary and are recognised in content as well.)
    """

    def __init__(
        self, source: str | Mapping[str, str] | None, bos_token: str = "", eos_token: str = ""
    ) -> None:
        """source: jinja text; or texts by name, of which "tool_use" is taken when there are tools and else
        "default"; or None for a model that has no template, whose `render` raises.
        """
        sources = {"default": source} if isinstance(source, str) else dict(source or {})
        self._sources: dict[str, str] = sources
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._sandbox = ChatSandbox()
        self._compiled: dict[str, jinja2.Template] = {}
        self._lock = threading.Lock()

    @property
    def given(self) -> bool:
        """False for a model that has no template."""
        return bool(self._sources)

    @classmethod
    def from_source(cls, source: FolderSource | GGUFSource, tokenizer: Tokenizer) -> ChatTemplate:
        """The template that belongs to a checkpoint's `tokenizer_source()`.

        In a folder chat_template.jinja goes before the chat_template of tokenizer_config.json, and that
        before chat_template.json, which transformers has for processors. Raises ChatTemplateError naming the
        file for one that is no text.
        """
        return cls(find_template(source), tokenizer.bos_token, tokenizer.eos_token)

    @property
    def available(self) -> bool:
        """Whether the model has a template."""
        return bool(self._sources)

    @property
    def source(self) -> str | None:
        """The text of the template that a chat without tools is written by; None without one."""
        return self._sources.get("default")

    @property
    def takes_tools(self) -> bool:
        """Whether the model's template does anything with tools."""
        return "tool_use" in self._sources or bool(re.search(r"\btools\b", self._sources.get("default", "")))

    @property
    def tags_calls(self) -> bool:
        """Whether the template has calls written as Hermes and Qwen do: `<tool_call>{...}</tool_call>`."""
        return "<tool_call>" in self._sources.get("tool_use", self._sources.get("default", ""))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tokenizer: Tokenizer,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Prompt ids for `messages`.

        add_generation_prompt: end with the opening of the assistant's answer. continue_final_message: end
        right after the last message's content, without closing it. variables: further names for the template.
        Raises ChatTemplateError when both flags are true, when the model has no template, and for messages
        that cannot be used (see `normalize_messages`) or that the template refuses.
        """
        rendered, guard = self._render(
            messages, tokenizer.special_texts, add_generation_prompt, continue_final_message, tools, variables
        )
        if guard.holds_placeholder(rendered):
            ids = _encode_segments(guard.split(rendered), tokenizer)
        else:
            ids = tokenizer.encode(rendered, add_special_tokens=False)
        if tokenizer.adds_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
            ids.insert(0, tokenizer.bos_id)
        return ids

    def render_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt as text, to look at.

        Encoding it could turn content into control tokens: `render` gives the ids.
        """
        rendered, guard = self._render(
            messages, _NOTHING_SPECIAL, add_generation_prompt, continue_final_message, tools, variables
        )
        return guard.restore(rendered)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        special: SpecialTexts,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: dict[str, Any],
    ) -> tuple[str, ContentGuard]:
        if add_generation_prompt and continue_final_message:
            raise ChatTemplateError(
                "add_generation_prompt and continue_final_message exclude each other; set one to false"
            )
        if clash := [name for name in variables if name in _RESERVED]:
            raise ChatTemplateError(
                f"template variable {clash[0]!r} is set by the server and cannot be given"
            )
        name, template = self._choose(bool(tools))
        chat = checked_copy(_normalized(messages), "messages")
        tool_list = checked_copy(list(tools), "tools") if tools else None
        extra = checked_copy(variables, "template variables")
        guard = ContentGuard(special, [chat, tool_list, extra, self._sources[name]])
        chat = guard.protect(chat)
        # As in transformers: a mark behind the last content shows where to cut, and the space behind the mark
        # shows whether the template trims its contents.
        tag = f"{guard.mark}end{guard.mark} "
        if continue_final_message:
            chat[-1]["content"] += tag
        rendered = self._sandbox.run(
            template,
            {
                "messages": chat,
                "tools": guard.protect(tool_list),
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
                **self._tokens,
                **guard.protect(extra),
            },
        )
        rendered = guard.unescape(rendered)
        if continue_final_message:
            rendered = _cut_at(rendered, tag)
        return rendered, guard

    def _choose(self, has_tools: bool) -> tuple[str, jinja2.Template]:
        if not self._sources:
            raise ChatTemplateError(
                "this model has no chat template; send a plain prompt (completions) instead of messages"
            )
        name = "tool_use" if has_tools and "tool_use" in self._sources else "default"
        if name not in self._sources:
            raise ChatTemplateError(
                f"no chat template named 'default'; the model has {sorted(self._sources)}"
            )
        with self._lock:
            if name not in self._compiled:
                self._compiled[name] = self._sandbox.prepare(self._sources[name])
            return name, self._compiled[name]


def _normalized(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    try:
        return normalize_messages(messages)
    except RecursionError as error:
        raise ChatTemplateError("messages: nested too deeply") from error


def _cut_at(rendered: str, tag: str) -> str:
    mark = tag.rstrip()
    # The last one: an earlier message may hold the same content, but only the final one has the mark.
    position = rendered.rfind(mark)
    if position < 0:
        raise ChatTemplateError("continue_final_message: the chat template does not print the last message")
    kept = rendered[:position].replace(tag, "").replace(mark, "")
    return kept if rendered.startswith(tag, position) else kept.rstrip()


def _encode_segments(segments: list[Segment], tokenizer: Tokenizer) -> list[int]:
    """Ids of a prompt cut at the template's control tokens, everything between them as plain text."""
    ids: list[int] = []
    for index, segment in enumerate(segments):
        if segment.token_id is not None:
            ids.append(segment.token_id)
            continue
        text = segment.text
        before = segments[index - 1].token_id if index else None
        after = segments[index + 1].token_id if index + 1 < len(segments) else None
        # Some control tokens swallow the white space beside them.
        if before is not None and tokenizer.added_tokens[before].rstrip:
            text = text.lstrip()
        if after is not None and tokenizer.added_tokens[after].lstrip:
            text = text.rstrip()
        ids += tokenizer.encode_segment(text, continued=index > 0)
    return ids


def find_template(source: FolderSource | GGUFSource) -> str | dict[str, str] | None:
    """The template text (or texts by name) of a tokenizer source; None when it has none.

    Raises ChatTemplateError, naming the file, when it cannot be read or has the wrong type.
    """
    template, config = source.chat_template, getattr(source, "tokenizer_config", None)
    if isinstance(template, str):
        return template
    if isinstance(template, Path) and template.suffix != ".json":
        try:
            return template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ChatTemplateError(f"{template}: cannot be read ({error})") from error
    stated = _template_of(config)
    return _template_of(template) if stated is None else stated


def _template_of(path: Path | None) -> str | dict[str, str] | None:
    """The `chat_template` of a JSON file: text, or a list of texts with names."""
    value = read_json(path).get("chat_template")
    if value is None or isinstance(value, str):
        return value
    named: dict[str, str] = {}
    for item in value if isinstance(value, list) else [None]:
        name, text = (item.get("name"), item.get("template")) if isinstance(item, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(text, str):
            raise ChatTemplateError(
                f"{path}: chat_template must be text, or a list of objects with name and template; "
                f"got {value!r:.80}"
            )
        named[name] = text
    return named or None
