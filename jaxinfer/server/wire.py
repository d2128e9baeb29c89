"""The answers on the wire: OpenAI's shapes of completions, chats, chunks, usage, logprobs and errors.

A `Choice` gathers what one sequence said; an `Answer` is one HTTP answer, whole or as a stream of chunks.
`CompletionAnswer` and `ChatAnswer` differ only in shape. Nothing here knows of sockets or threads.
"""

from __future__ import annotations

import codecs
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxinfer.core import EngineDeadError, JaxInferError, Logprob, Request, RequestError, TokenEvent
from jaxinfer.server.worker import OverloadedError

TokenBytes = Callable[[int, str], bytes]
"""The exact bytes of a token, from its id and its text: part of a character has no text of its own."""


def encode(value: Any) -> bytes:
    """Strict JSON. Escaped to ASCII: clients that split a stream into lines take U+2028 for a line end."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")


def frame(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"


# -------------------------------------------------------------------------------------------- errors


class ApiError(Exception):
    """An error as the client sees it: a status and OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """`{"error": {...}}`."""
        kind = _ERROR_TYPES.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


_ERROR_TYPES = {
    401: "authentication_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


def api_error(error: Exception) -> ApiError:
    """The one mapping from our errors to the wire; what is not ours says nothing of its inside."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, OverloadedError):
        retry = {"Retry-After": str(error.retry_after_s)}
        return ApiError(429, str(error), code="overloaded", headers=retry)
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error), code="engine_stopped", headers={"Retry-After": "10"})
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.param, code="invalid_value")
    if isinstance(error, JaxInferError):
        return ApiError(400, str(error))
    return ApiError(500, "internal error; the server's log says more", code="internal_error")


# ------------------------------------------------------------------------------------------- choices


@dataclass(slots=True)
class Choice:
    """What one sequence has said so far."""

    index: int
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    num_tokens: int = 0
    finish_reason: str | None = None
    announced: bool = False
    text_offset: int = 0
    _characters: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    def offset_of(self, data: bytes) -> int:
        """Where in the text the next token starts, in whole characters; its bytes move the place on."""
        before = self.text_offset
        self.text_offset += len(self._characters.decode(data))
        return before


class Answer(ABC):
    """One HTTP answer: `n` choices of each request, in the order of the requests.

    The choice of the k-th sequence of prompt p has the index p * n + k: 3 prompts, n = 2 -> prompt 1 has
    the choices 2 and 3.
    """

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(
        self, requests: Sequence[Request], model: str, *, token_bytes: TokenBytes, include_usage: bool = False
    ):
        n = requests[0].sampling.n
        self.requests = requests
        self.choices = [Choice(index) for index in range(len(requests) * n)]
        self.token_bytes = token_bytes
        self.include_usage = include_usage
        self.with_logprobs = requests[0].sampling.logprobs is not None
        self._first = {request.request_id: p * n for p, request in enumerate(requests)}
        self._cached = dict.fromkeys(self._first, 0)
        self._prompt_logprobs: dict[int, Sequence[dict[int, Logprob] | None]] = {}  # by first choice
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def take(self, event: TokenEvent) -> None:
        """Record an event of an answer that is not streamed. Raises ApiError for a sequence that failed."""
        choice = self._note(event)
        choice.text.append(event.text)
        choice.token_ids += event.token_ids
        choice.logprobs += event.logprobs or ()

    def _note(self, event: TokenEvent) -> Choice:
        """Count an event, whether its text is kept or sent at once, and find its choice."""
        if event.finish_reason in ("error", "abort"):
            raise ApiError(
                500, event.error or "the request was aborted", code=f"generation_{event.finish_reason}"
            )
        if event.metrics is not None and event.index == 0:
            self._cached[event.request_id] = event.metrics.cached_tokens
        first = self._first[event.request_id]
        if event.prompt_logprobs is not None:
            self._prompt_logprobs[first] = event.prompt_logprobs
        choice = self.choices[first + event.index]
        choice.num_tokens += len(event.token_ids)
        choice.finish_reason = event.finish_reason
        return choice

    def whole(self) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        return {
            **self._head,
            "object": self.whole_object,
            "choices": [self._whole_choice(choice) for choice in self.choices],
            "usage": self.usage(),
        }

    def chunks(self, event: TokenEvent) -> Iterator[dict[str, Any]]:
        """The chunks that tell the client of an event; none while its text is held back.

        Raises ApiError for a sequence that failed.
        """
        choice = self._note(event)
        for piece in self._pieces(choice, event):
            yield self._chunk([{"index": choice.index, **piece}])

    def last_chunk(self) -> dict[str, Any]:
        """The chunk that ends a stream with `include_usage`: no choices, the usage of all of them."""
        return {**self._chunk([]), "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Tokens of all prompts, each counted once, and of all choices."""
        prompt = sum(len(request.prompt_token_ids) for request in self.requests)
        completion = sum(choice.num_tokens for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "object": self.chunk_object, "choices": choices}
        return {**chunk, "usage": None} if self.include_usage else chunk

    @abstractmethod
    def _whole_choice(self, choice: Choice) -> dict[str, Any]: ...

    @abstractmethod
    def _pieces(self, choice: Choice, event: TokenEvent) -> Iterator[dict[str, Any]]: ...


class CompletionAnswer(Answer):
    """The shapes of /v1/completions."""

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": "".join(choice.text),
            "logprobs": self._logprobs(choice, choice.token_ids, choice.logprobs),
            "finish_reason": choice.finish_reason,
            **self._of_prompt(choice),
        }

    def _of_prompt(self, choice: Choice) -> dict[str, Any]:
        """vLLM's extra, where it was asked for: with every choice, how likely its prompt's tokens were."""
        sampling = self.requests[0].sampling
        if sampling.prompt_logprobs is None:
            return {}
        known = self._prompt_logprobs[choice.index - choice.index % sampling.n]
        return {"prompt_logprobs": [entries and _vllm_entries(entries) for entries in known]}

    def _pieces(self, choice: Choice, event: TokenEvent) -> Iterator[dict[str, Any]]:
        logprobs = self._logprobs(choice, event.token_ids, event.logprobs or ())
        if event.text or event.finish_reason or (logprobs and event.token_ids):
            yield {"text": event.text, "logprobs": logprobs, "finish_reason": event.finish_reason}

    def _logprobs(
        self, choice: Choice, token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]]
    ) -> dict[str, Any] | None:
        """The four parallel lists. `text_offset` counts characters of the choice's text."""
        if not self.with_logprobs:
            return None
        tokens, offsets = [], []
        for token_id, known in zip(token_ids, logprobs, strict=True):
            chosen = known[token_id]
            data = self.token_bytes(token_id, chosen.text)
            tokens.append(_token_name(chosen.text, data))
            offsets.append(choice.offset_of(data))
        return {
            "tokens": tokens,
            "token_logprobs": [known[i].logprob for i, known in zip(token_ids, logprobs, strict=True)],
            "top_logprobs": [self._top(known) for known in logprobs],
            "text_offset": offsets,
        }

    def _top(self, known: dict[int, Logprob]) -> dict[str, float]:
        """Every known token, the chosen one included. This shape is keyed by text, and texts may be equal:
        the likelier token keeps the name, the others are named by id, so that none is lost."""
        top: dict[str, float] = {}
        for token_id, entry in sorted(known.items(), key=lambda item: item[1].rank):
            name = _token_name(entry.text, self.token_bytes(token_id, entry.text))
            top[name if name not in top else f"token_id:{token_id}"] = entry.logprob
        return top


class ChatAnswer(Answer):
    """The shapes of /v1/chat/completions."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
            "logprobs": self._logprobs(choice.token_ids, choice.logprobs),
            "finish_reason": choice.finish_reason,
        }

    def _pieces(self, choice: Choice, event: TokenEvent) -> Iterator[dict[str, Any]]:
        if not choice.announced:
            choice.announced = True
            yield {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        logprobs = self._logprobs(event.token_ids, event.logprobs or ())
        if event.text or (logprobs and event.token_ids):
            yield {"delta": {"content": event.text}, "logprobs": logprobs, "finish_reason": None}
        if event.finish_reason:
            yield {"delta": {}, "logprobs": None, "finish_reason": event.finish_reason}

    def _logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]]
    ) -> dict[Literal["content", "refusal"], Any] | None:
        if not self.with_logprobs:
            return None
        content = [
            {**self._entry(token_id, known[token_id]), "top_logprobs": self._top(token_id, known)}
            for token_id, known in zip(token_ids, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _top(self, chosen: int, known: dict[int, Logprob]) -> list[dict[str, Any]]:
        """The k likeliest. `known` is those, and the chosen token once more when it is not one of them."""
        asked = self.requests[0].sampling.logprobs or 0
        likeliest = [item for item in known.items() if len(known) <= asked or item[0] != chosen]
        return [self._entry(i, entry) for i, entry in sorted(likeliest, key=lambda item: item[1].rank)]

    def _entry(self, token_id: int, entry: Logprob) -> dict[str, Any]:
        data = self.token_bytes(token_id, entry.text)
        return {"token": entry.text, "logprob": entry.logprob, "bytes": list(data)}


def _vllm_entries(known: dict[int, Logprob]) -> dict[str, Any]:
    return {
        str(token_id): {"logprob": entry.logprob, "rank": entry.rank, "decoded_token": entry.text}
        for token_id, entry in known.items()
    }


def _token_name(text: str, data: bytes) -> str:
    """A token's text, or OpenAI's spelling of a part of a character: `bytes:\\xf0\\x9f`."""
    if data and text.encode("utf-8", "replace") != data:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
    return text
