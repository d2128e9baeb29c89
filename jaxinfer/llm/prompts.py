"""From what callers hand over as a prompt or a conversation to token ids."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from jaxinfer.arguments import Message, Prompt, as_int, check_text, check_texts
from jaxinfer.core import RequestError

TRUNCATION_SIDES = ("left", "right")


@dataclass(frozen=True, slots=True)
class Cut:
    """How a prompt that is too long is made shorter: to `tokens`, taken away on one `side`.

    `tokens` -1 is as many as leave room for the request's max_tokens (one token, where it names none).
    """

    tokens: int | None = None
    side: str = "left"

    def __post_init__(self) -> None:
        tokens = self.tokens
        if tokens is not None and (type(tokens) is not int or (tokens < 1 and tokens != -1)):
            raise RequestError(
                "truncate_prompt_tokens must be a number of tokens from 1 on, or -1 for as many as fit, got "
                f"{tokens!r}",
                "truncate_prompt_tokens",
            )
        if self.side not in TRUNCATION_SIDES:
            raise RequestError(f"truncation_side must be left or right, got {self.side!r}", "truncation_side")

    def cut(self, ids: list[int], room: int) -> list[int]:
        """The ids that are left. `room`: what the model's limit leaves for the prompt."""
        if self.tokens is None:
            return ids
        most = max(1, room) if self.tokens == -1 else self.tokens
        if len(ids) <= most:
            return ids
        return ids[:most] if self.side == "right" else ids[-most:]


class Prompts:
    """The prompts of one model; any number of threads may use it at once."""

    def __init__(self, tokenizer: Any, chat_template: Any):
        """tokenizer, chat_template: as `LLM.from_parts` takes them; None for a model that has none."""
        self._tokenizer = tokenizer
        self._template = chat_template

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See `LLM.encode`."""
        if self._tokenizer is None:
            raise RequestError("this model has no tokenizer; give token ids instead of text", "prompt")
        check_text(text, "prompt")
        if type(add_special_tokens) is not bool:
            raise RequestError(
                f"add_special_tokens must be true or false, got {add_special_tokens!r}", "add_special_tokens"
            )
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def read(self, prompt: Prompt, *, add_special_tokens: bool = True) -> tuple[list[int], str | None]:
        """The ids of a prompt, and its text where it has one.

        A mapping is a prompt as vLLM writes it: `prompt` (a text), `prompt_token_ids`, or both, of which the
        ids run.
        """
        if isinstance(prompt, Mapping):
            unknown = [str(name) for name in prompt if name not in ("prompt", "prompt_token_ids")]
            if unknown:
                raise RequestError(
                    f"a prompt given as a mapping has prompt or prompt_token_ids; {unknown[0][:80]!r} is not "
                    "served",
                    unknown[0][:80],
                )
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if text is not None:
                check_text(text, "prompt")
            if ids is not None:
                return self.read(ids)[0], text
            if text is None:
                raise RequestError("a prompt given as a mapping needs prompt or prompt_token_ids", "prompt")
            prompt = text
        if isinstance(prompt, str):
            return self.encode(prompt, add_special_tokens=add_special_tokens), prompt
        if isinstance(prompt, bytes) or not hasattr(prompt, "__iter__"):
            raise RequestError(f"a prompt must be a string or a list of token ids, got {prompt!r}", "prompt")
        return [as_int(i) for i in prompt], None

    def chat(
        self,
        messages: Seq[Message],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Seq[Mapping[str, Any]] | None = None,
        add_special_tokens: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **template_options: Any,
    ) -> list[int]:
        """See `LLM.encode_chat`."""
        from jaxinfer.text import ChatTemplate, ChatTemplateError, TokenizerError

        template, tokenizer = self._template, self._tokenizer
        if chat_template is not None and tokenizer is not None:
            check_text(chat_template, "chat_template")
            template = ChatTemplate(chat_template, tokenizer.bos_token, tokenizer.eos_token)
        if template is None or tokenizer is None:
            raise RequestError(
                "this model has no chat template; use generate with a plain prompt", "messages"
            )
        if add_special_tokens and tokenizer.encode(""):
            raise RequestError(
                "add_special_tokens: a chat has the special tokens that its template writes, and no others",
                "add_special_tokens",
            )
        for name in _MEDIA & template_options.keys():
            if template_options.pop(name) is not None:
                raise RequestError(f"{name} is not supported", name)
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "add_generation_prompt and continue_final_message exclude each other",
                "continue_final_message",
            )
        for name in _OWN & (chat_template_kwargs or {}).keys():
            raise RequestError(f"chat_template_kwargs: {name} is set by a parameter of its own", name)
        check_texts(messages, "messages")
        check_texts(tools, "tools")
        try:
            return list(
                template.render(
                    messages,
                    tokenizer,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    tools=tools,
                    **{**(chat_template_kwargs or {}), **template_options},
                )
            )
        except (ChatTemplateError, TokenizerError) as error:
            raise RequestError(str(error), "messages") from error


_OWN = {"messages", "tokenizer", "add_generation_prompt", "continue_final_message", "tools"}
_MEDIA = {"chat_template_content_format", "lora_request", "mm_processor_kwargs", "tokenization_kwargs"}
"""Keywords of vLLM's `chat` that are no variables of a template, and are not served."""
