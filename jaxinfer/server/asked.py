"""What a body asks for: read, checked against the model and bounded. All of it may run on any thread; of a
large body it must not run on the event loop."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from jaxinfer.core import Request, RequestError
from jaxinfer.server.answers import Answer, ChatAnswer, CompletionAnswer, Wanted
from jaxinfer.server.batch import BatchChatAnswer
from jaxinfer.server.bounds import check_counts, check_texts, texts_of
from jaxinfer.server.schema import (
    BatchChatBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    has_messages,
    parse_body,
)
from jaxinfer.server.tools import OPENING, CallForm
from jaxinfer.server.wire import ApiError
from jaxinfer.server.worker import EngineWorker

if TYPE_CHECKING:
    from jaxinfer.llm import LLM
    from jaxinfer.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Asked:
    """An answer that a body asks for: of which `kind`, with what `wanted`, to the requests that `prepare`
    makes (which tokenises, and lets go of the GIL while it does)."""

    body: CompletionBody | ChatBody | BatchChatBody
    prepare: Callable[[], Sequence[Request]]
    kind: type[Answer]
    wanted: Wanted


class Bodies:
    """The bodies of one application. Each method takes one as it came, and raises RequestError or ApiError
    for what is wrong with it, OverloadedError where there is no room for it."""

    def __init__(self, llm: LLM, worker: EngineWorker, names: Sequence[str]):
        self.llm, self.worker, self.names = llm, worker, tuple(names)
        self._call_form = _call_form(llm)

    def completion(self, raw: bytes) -> Asked:
        """The body of /v1/completions."""
        body = self._parsed(raw, CompletionBody)
        sampling = body.sampling()
        prompts = body.prompts()
        self.worker.check_room(len(prompts) * sampling.get("n", 1))  # before any time goes into tokenising
        for prompt in prompts:
            check_texts([prompt], self.llm.limits, "prompt")

        def prepare() -> list[Request]:
            return [self.llm.prepare(prompt, sampling, **body.options()) for prompt in prompts]

        return Asked(body, prepare, CompletionAnswer, replace(body.wanted(), beams=body.beams(sampling)))

    def chat(self, raw: bytes) -> Asked:
        """The body of /v1/chat/completions."""
        body = self._parsed(raw, ChatBody)
        tools = body.tool_use(form=self._call_form)
        sampling = body.sampling(tools)
        shown = self._call_form is not None and tools is not None
        messages, options = body.template_input(body.messages, with_tools=shown)
        self.worker.check_room(sampling.get("n", 1))
        self._check_chat(messages, options)

        def prepare() -> list[Request]:
            return [self.llm.prepare_chat(messages, sampling, **body.options(), **options)]

        return Asked(body, prepare, ChatAnswer, replace(body.wanted(tools), beams=body.beams(sampling)))

    def chat_batch(self, raw: bytes) -> Asked:
        """The body of /v1/chat/completions/batch."""
        body = self._parsed(raw, BatchChatBody)
        body.check_batch()
        sampling = body.sampling()
        self.worker.check_room(len(body.messages))
        given = [body.template_input(conversation) for conversation in body.messages]
        for messages, _ in given:
            check_texts(texts_of(messages), self.llm.limits, "messages")

        def prepare() -> list[Request]:
            return [self.llm.prepare_chat(m, sampling, **body.options(), **options) for m, options in given]

        return Asked(body, prepare, BatchChatAnswer, body.wanted(None))

    def invocation(self, raw: bytes) -> Asked:
        """What SageMaker calls, as vLLM serves it: a chat where there are messages, and else a completion."""
        return self.chat(raw) if has_messages(raw) else self.completion(raw)

    def tokenize(self, raw: bytes) -> Callable[[], tuple[Sequence[int], list[str] | None]]:
        """The body of /tokenize: what gives its token ids, and their spellings if they are wanted."""
        body = self._parsed(raw, TokenizeBody)
        check_texts([body.prompt], self.llm.limits, "prompt")

        def tokens() -> tuple[Sequence[int], list[str] | None]:
            ids = self._token_ids(body)
            return ids, self.tokenizer().convert_ids_to_tokens(ids) if body.return_token_strs else None

        return tokens

    def detokenize(self, raw: bytes) -> Callable[[], str]:
        """The body of /detokenize: what gives its text."""
        body = self._parsed(raw, DetokenizeBody)
        size = self.llm.limits.vocab_size
        for i, token_id in enumerate(body.tokens):
            if not 0 <= token_id < size:
                raise RequestError(f"tokens[{i}] is {token_id}; token ids go from 0 to {size - 1}", "tokens")
        return partial(self.tokenizer().decode, body.tokens, skip_special_tokens=False)

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 for the name of another model."""
        if name is not None and name not in self.names:
            raise ApiError(
                404,
                f"the model {name!r} does not exist; this server has {', '.join(map(repr, self.names))}",
                param="model",
                code="model_not_found",
            )

    def tokenizer(self) -> Tokenizer:
        """The model's. Raises RequestError where it has none."""
        if self.llm.tokenizer is None:
            raise RequestError("this model has no tokenizer; it is served by token ids", "prompt")
        return self.llm.tokenizer

    # ----------------------------------------------------------------------------------------- parts

    def _parsed[Body: BaseModel](self, raw: bytes, model: type[Body]) -> Body:
        body = parse_body(raw, model, lambda value: check_counts(value, self.llm.limits))
        self.check_model(getattr(body, "model", None))
        return body

    def _check_chat(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> None:
        check_texts(texts_of(messages), self.llm.limits, "messages")
        check_texts([json.dumps(options.get("tools"))], self.llm.limits, "tools")

    def _token_ids(self, body: TokenizeBody) -> Sequence[int]:
        """What a generating endpoint would run of this prompt, were it short enough."""
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("give either prompt or messages", "prompt")
        if body.prompt is not None:
            for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools"):
                if getattr(body, name) is not None:
                    raise RequestError(f"{name} belongs to messages; leave it out beside prompt", name)
            self.tokenizer()
            return self.llm.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
        if body.tools and self._call_form is None:
            raise RequestError("this model's chat template has no place for tools", "tools")
        messages, options = body.template_input(body.messages)
        self._check_chat(messages, options)
        return self.llm.encode_chat(messages, add_special_tokens=bool(body.add_special_tokens), **options)


def _call_form(llm: LLM) -> CallForm | None:
    template, tokenizer = llm.chat_template, llm.tokenizer
    if template is None or not template.takes_tools:
        return None
    return CallForm(template.tags_calls, tokenizer is not None and OPENING in tokenizer.special_texts.ids)
