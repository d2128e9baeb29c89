"""The answers: OpenAI's shapes of completions, chats, chunks, usage and logprobs, and vLLM's additions.

A `Choice` gathers what one sequence said; an `Answer` is one HTTP answer, whole or as a stream of chunks.
`CompletionAnswer` and `ChatAnswer` differ only in shape. Nothing here knows of sockets or threads.
"""

from __future__ import annotations

import codecs
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxinfer.core import Logprob, Request, TokenEvent
from jaxinfer.llm.beams import BeamSearchParams
from jaxinfer.server.calls import Call, CallParser
from jaxinfer.server.timings import timings
from jaxinfer.server.tools import ToolUse
from jaxinfer.server.wire import ApiError, Parts, joined

SHORT = 64
"""Tokens whose log-probabilities are told in a plain list."""

TokenBytes = Callable[[int, str], bytes]
"""The exact bytes of a token, from its id and its text: part of a character has no text of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a body asks of its answer's shape."""

    include_usage: bool = False
    usage_so_far: bool = False
    """In every chunk of a stream."""
    token_ids: bool = False
    """Ids of the prompt and of the answer, beside the text."""
    names_as_ids: bool = False
    """Tokens of logprobs as `token_id:7`, which no two tokens share."""
    echo: bool = False
    """A completion's text and logprobs start with those of its prompt."""
    prompt_only: bool = False
    """With echo: max_tokens was 0. The engine makes one token, which is not told."""
    logprobs: int | None = None
    told_ids: bool = False
    """logprobs tell of ids that the request names, not of the likeliest."""
    prompt_logprobs: int | None = None
    tools: ToolUse | None = None
    beams: BeamSearchParams | None = None


@dataclass(slots=True)
class Choice:
    """What one sequence has said so far."""

    index: int
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    num_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    announced: bool = False
    text_offset: int = 0
    calls: CallParser | None = None
    num_calls: int = 0
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
        self,
        requests: Sequence[Request],
        model: str,
        *,
        token_bytes: TokenBytes,
        wanted: Wanted,
        prompt_texts: Sequence[str] = (),
    ):
        """`prompt_texts`: with `wanted.echo`, the text of each request's prompt."""
        self.n = requests[0].sampling.n
        self.requests = requests
        self.choices = [Choice(index) for index in range(len(requests) * self.n)]
        self.token_bytes = token_bytes
        self.wanted = wanted
        self.prompt_texts = prompt_texts
        self.with_logprobs = wanted.logprobs is not None
        self._first = {request.request_id: p * self.n for p, request in enumerate(requests)}
        self._cached = dict.fromkeys(self._first, 0)
        self._prompt_logprobs: dict[int, Sequence[dict[int, Logprob] | None]] = {}  # by first choice
        self._timings: dict[str, float] | None = None  # of the only choice: n of them have no one time
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
            self._timings = timings(event.metrics) if len(self.choices) == 1 else None
        first = self._first[event.request_id]
        if event.prompt_logprobs is not None:
            self._prompt_logprobs[first] = event.prompt_logprobs
        choice = self.choices[first + event.index]
        choice.num_tokens += 0 if self.wanted.prompt_only else len(event.token_ids)
        choice.finish_reason, choice.stop_reason = event.finish_reason, event.stop_reason
        return choice

    def size(self) -> int:
        """Tokens and log-probabilities that `whole` tells of."""
        said = sum(len(choice.token_ids) + _entries(choice.logprobs) for choice in self.choices)
        return said + self.n * sum(map(_entries, self._prompt_logprobs.values()))

    def whole(self) -> dict[str, Any]:
        """The body of an answer that is not streamed; long lists of it are `Parts`."""
        return {
            **self._head,
            "object": self.whole_object,
            "choices": [self._whole_choice(choice) for choice in self.choices],
            "usage": self.usage(),
            "metrics": self._timings,
        }

    def chunks(self, event: TokenEvent) -> Iterator[dict[str, Any]]:
        """The chunks that tell the client of an event; none while its text is held back.

        Raises ApiError for a sequence that failed.
        """
        choice = self._note(event)
        ids = list(event.token_ids)
        for piece in self._pieces(choice, event):
            opens = self._opens(piece)
            if self.wanted.token_ids:
                piece["token_ids"], ids = ([], ids) if opens else (ids, [])
            if piece["finish_reason"]:
                piece["stop_reason"] = choice.stop_reason
            untold = len(event.token_ids) if opens and not self.wanted.prompt_only else 0
            yield self._chunk([{"index": choice.index, **piece}], untold)

    def _opens(self, piece: dict[str, Any]) -> bool:
        """Whether a piece comes before what the sequence said."""
        return False

    def last_chunk(self) -> dict[str, Any]:
        """The chunk that ends a stream with `include_usage`: no choices, the usage of all of them."""
        return {**self._chunk([]), "usage": self.usage(), "metrics": self._timings}

    def usage(self, untold: int = 0) -> dict[str, Any]:
        """Tokens of all prompts, each counted once, and of all choices but `untold` ones."""
        prompt = sum(len(request.prompt_token_ids) for request in self.requests)
        completion = sum(choice.num_tokens for choice in self.choices) - untold
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }

    def _chunk(self, choices: list[dict[str, Any]], untold: int = 0) -> dict[str, Any]:
        chunk = {**self._head, "object": self.chunk_object, "choices": choices}
        if not self.wanted.include_usage:
            return chunk
        return {**chunk, "usage": self.usage(untold) if self.wanted.usage_so_far else None}

    def _request_of(self, choice: Choice) -> Request:
        return self.requests[choice.index // self.n]

    def _of_prompt(self, choice: Choice) -> list[dict[str, Any] | None] | Parts:
        """vLLM's extra: how likely the tokens of a choice's prompt were, as it spells that."""
        ids, known = self._request_of(choice).prompt_token_ids, self._prompt_known(choice)
        most = self.wanted.prompt_logprobs or 0
        return _listed(
            lambda token_id, entries: entries and _vllm_entries(_likeliest(entries, token_id, most)),
            ids,
            known,
        )

    def _prompt_known(self, choice: Choice) -> Sequence[dict[int, Logprob] | None]:
        return self._prompt_logprobs[choice.index - choice.index % self.n]

    def _name(self, token_id: int, text: str, data: bytes) -> str:
        """A token's text, or OpenAI's spelling of a part of a character: `bytes:\\xf0\\x9f`."""
        if self.wanted.names_as_ids:
            return f"token_id:{token_id}"
        if data and text.encode("utf-8", "replace") != data:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        return text

    @abstractmethod
    def _whole_choice(self, choice: Choice) -> dict[str, Any]: ...

    @abstractmethod
    def _pieces(self, choice: Choice, event: TokenEvent) -> Iterator[dict[str, Any]]: ...


class CompletionAnswer(Answer):
    """The shapes of /v1/completions."""

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        echoed, logprobs = self._echo(choice)
        token_ids = choice.token_ids
        if self.wanted.prompt_only:
            token_ids = []
        else:
            echoed += "".join(choice.text)
            logprobs = _joined(logprobs, self._logprobs(choice, choice.token_ids, choice.logprobs))
        whole: dict[str, Any] = {
            "index": choice.index,
            "text": echoed,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **dict.fromkeys(("prompt_logprobs", "prompt_token_ids", "token_ids")),  # where not asked for
        }
        if self.wanted.prompt_logprobs is not None:
            whole["prompt_logprobs"] = self._of_prompt(choice)
        if self.wanted.token_ids:
            whole["prompt_token_ids"] = list(self._request_of(choice).prompt_token_ids)
            whole["token_ids"] = list(token_ids)
        return whole

    def _pieces(self, choice: Choice, event: TokenEvent) -> Iterator[dict[str, Any]]:
        if not choice.announced and (self.wanted.echo or self.wanted.token_ids):
            text, logprobs = self._echo(choice)
            opening: dict[str, Any] = {"text": text, "logprobs": logprobs, "finish_reason": None}
            if self.wanted.token_ids:
                opening["prompt_token_ids"] = list(self._request_of(choice).prompt_token_ids)
            yield opening
        choice.announced = True
        if self.wanted.prompt_only:
            if event.finish_reason:
                yield {"text": "", "logprobs": None, "finish_reason": event.finish_reason}
            return
        logprobs = self._logprobs(choice, event.token_ids, event.logprobs or ())
        told = event.token_ids and (logprobs or self.wanted.token_ids)
        if event.text or event.finish_reason or told:
            yield {"text": event.text, "logprobs": logprobs, "finish_reason": event.finish_reason}

    def _opens(self, piece: dict[str, Any]) -> bool:
        return "prompt_token_ids" in piece or self.wanted.prompt_only

    def _echo(self, choice: Choice) -> tuple[str, dict[str, Any] | None]:
        """The prompt's text and logprobs as the answer starts with them; "" and None without `echo`."""
        if not self.wanted.echo:
            return "", None
        text = self.prompt_texts[choice.index // self.n]
        choice.text_offset = len(text)
        if not self.with_logprobs:
            return text, None
        ids, most = self._request_of(choice).prompt_token_ids, self.wanted.logprobs or 0
        data = [self.token_bytes(i, "") for i in ids]
        names = [
            self._name(i, piece.decode("utf-8", "replace"), piece) for i, piece in zip(ids, data, strict=True)
        ]
        known = self._prompt_known(choice)
        return text, {
            "tokens": names,
            "token_logprobs": [e and e[i].logprob for i, e in zip(ids, known, strict=True)],
            "top_logprobs": _listed(lambda i, e: e and self._top(i, _likeliest(e, i, most)), ids, known),
            "text_offset": _offsets(text, data),
        }

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
            tokens.append(self._name(token_id, chosen.text, data))
            offsets.append(choice.offset_of(data))
        return {
            "tokens": tokens,
            "token_logprobs": [known[i].logprob for i, known in zip(token_ids, logprobs, strict=True)],
            "top_logprobs": _listed(self._top, token_ids, logprobs),
            "text_offset": offsets,
        }

    def _top(self, chosen: int, known: dict[int, Logprob]) -> dict[str, float]:
        """Every known token, the chosen one first (as vLLM has it). This shape is keyed by text, and texts
        may be equal: the likelier token keeps the name, the others are named by id, so that none is lost."""
        names: dict[str, int] = {}
        for token_id, entry in sorted(known.items(), key=lambda item: item[1].rank):
            name = self._name(token_id, entry.text, self.token_bytes(token_id, entry.text))
            names[name if name not in names else f"token_id:{token_id}"] = token_id
        ordered = sorted(names.items(), key=lambda item: item[1] != chosen)
        return {name: known[token_id].logprob for name, token_id in ordered}


class ChatAnswer(Answer):
    """The shapes of /v1/chat/completions."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def whole(self) -> dict[str, Any]:
        whole = super().whole() | dict.fromkeys(("prompt_logprobs", "prompt_token_ids"))
        if self.wanted.prompt_logprobs is not None:
            whole["prompt_logprobs"] = self._of_prompt(self.choices[0])
        if self.wanted.token_ids:
            whole["prompt_token_ids"] = list(self.requests[0].prompt_token_ids)
        return whole

    def chunks(self, event: TokenEvent) -> Iterator[dict[str, Any]]:
        opens = self.wanted.token_ids and not self.choices[event.index].announced
        for chunk in super().chunks(event):
            yield {**chunk, "prompt_token_ids": list(self.requests[0].prompt_token_ids)} if opens else chunk
            opens = False

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        said = self._echo(choice) + "".join(choice.text)
        message: dict[str, Any] = {"role": "assistant", "content": said, "refusal": None}
        reason = choice.finish_reason
        if self.wanted.tools is not None:
            parser = CallParser(self.wanted.tools)
            said = [*parser.push("".join(choice.text)), *parser.finish()]
            calls = [item.as_openai() for item in said if isinstance(item, Call)]
            message["content"] = self._echo(choice) + "".join(item for item in said if isinstance(item, str))
            if calls:
                message["content"] = message["content"] or None
                message["tool_calls"] = calls
            reason = self.wanted.tools.finish_reason(reason, bool(calls))
        whole: dict[str, Any] = {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice.token_ids, choice.logprobs),
            "finish_reason": reason,
            "stop_reason": choice.stop_reason,
            "token_ids": choice.token_ids if self.wanted.token_ids else None,
        }
        return whole

    def _pieces(self, choice: Choice, event: TokenEvent) -> Iterator[dict[str, Any]]:
        if not choice.announced:
            choice.announced = True
            delta = {"role": "assistant", "content": self._echo(choice)}
            yield {"delta": delta, "logprobs": None, "finish_reason": None}
        text, calls = self._split(choice, event)
        logprobs = self._logprobs(event.token_ids, event.logprobs or ())
        told = event.token_ids and (logprobs or self.wanted.token_ids)
        reason = event.finish_reason
        if reason and not calls and not choice.num_calls and (text or told):
            yield {"delta": {"content": text}, "logprobs": logprobs, "finish_reason": reason}
            return
        if text or told:
            yield {"delta": {"content": text}, "logprobs": logprobs, "finish_reason": None}
        for call in calls:
            delta = {"tool_calls": [{"index": choice.num_calls, **call.as_openai()}]}
            choice.num_calls += 1
            yield {"delta": delta, "logprobs": None, "finish_reason": None}
        if reason:
            if self.wanted.tools is not None:
                reason = self.wanted.tools.finish_reason(reason, choice.num_calls > 0)
            yield {"delta": {}, "logprobs": None, "finish_reason": reason}

    def _opens(self, piece: dict[str, Any]) -> bool:
        return "role" in piece["delta"]

    def _echo(self, choice: Choice) -> str:
        return self.prompt_texts[choice.index // self.n] if self.wanted.echo else ""

    def _split(self, choice: Choice, event: TokenEvent) -> tuple[str, list[Call]]:
        """What an event adds to the content, and the calls that it completes."""
        if self.wanted.tools is None:
            return event.text, []
        if choice.calls is None:
            choice.calls = CallParser(self.wanted.tools)
        said = list(choice.calls.push(event.text))
        if event.finish_reason:
            said += choice.calls.finish()
        text = "".join(item for item in said if isinstance(item, str))
        return text, [item for item in said if isinstance(item, Call)]

    def _logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]]
    ) -> dict[Literal["content", "refusal"], Any] | None:
        if not self.with_logprobs:
            return None

        def told(token_id: int, known: dict[int, Logprob]) -> dict[str, Any]:
            return {**self._entry(token_id, known[token_id]), "top_logprobs": self._top(token_id, known)}

        return {"content": _listed(told, token_ids, logprobs), "refusal": None}

    def _top(self, chosen: int, known: dict[int, Logprob]) -> list[dict[str, Any]]:
        """The k likeliest. `known` is those, and the chosen token once more when it is not one of them. Where
        the request names ids, all of them and the chosen one (vLLM's rule)."""
        asked = len(known) if self.wanted.told_ids else self.wanted.logprobs or 0
        likeliest = [item for item in known.items() if len(known) <= asked or item[0] != chosen]
        return [self._entry(i, entry) for i, entry in sorted(likeliest, key=lambda item: item[1].rank)]

    def _entry(self, token_id: int, entry: Logprob) -> dict[str, Any]:
        data = self.token_bytes(token_id, entry.text)
        name = f"token_id:{token_id}" if self.wanted.names_as_ids else entry.text
        return {"token": name, "logprob": entry.logprob, "bytes": list(data)}


def news_size(events: Iterable[TokenEvent]) -> int:
    """Tokens and log-probabilities that the chunks of these events tell of."""
    return sum(len(e.token_ids) + _entries(e.logprobs) + _entries(e.prompt_logprobs) for e in events)


def _entries(known: Iterable[dict[int, Logprob] | None] | None) -> int:
    return sum(len(entries) for entries in known or () if entries)


def _listed(
    tell: Callable[[int, Any], Any], token_ids: Sequence[int], known: Sequence[Any]
) -> list[Any] | Parts:
    """`tell` of each token and what is known of it, in a list, which is made later if it is long."""
    assert len(token_ids) == len(known), f"{len(token_ids)} tokens, and log-probabilities of {len(known)}"

    def make(start: int, end: int) -> list[Any]:
        return [tell(i, entries) for i, entries in zip(token_ids[start:end], known[start:end], strict=True)]

    size = len(known)
    return make(0, size) if size <= SHORT else Parts(size, make)


def _joined(first: dict[str, Any] | None, then: dict[str, Any] | None) -> dict[str, Any] | None:
    """The logprobs of a prompt and of what follows it."""
    if first is None or then is None:
        return then
    return {name: joined(values, then[name]) for name, values in first.items()}


def _likeliest(known: dict[int, Logprob], token_id: int, most: int) -> dict[int, Logprob]:
    """The `most` likeliest and the token's own: echo and prompt_logprobs may want different numbers."""
    return {i: entry for i, entry in known.items() if entry.rank <= most or i == token_id}


def _offsets(text: str, pieces: Sequence[bytes]) -> list[int]:
    """Where each token of a prompt starts in its text, in whole characters.

    A token that is not in the text (BOS, say) takes no room in it; the white space that a tokenizer puts
    before a word at the start is not in it either.
    """
    raw, at, characters, offsets = text.encode("utf-8", "replace"), 0, 0, []
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for piece in pieces:
        offsets.append(characters)
        if not raw.startswith(piece, at):
            piece = piece[1:] if piece[:1] == b" " and raw.startswith(piece[1:], at) else b""
        characters += len(decoder.decode(piece))
        at += len(piece)
    return offsets


def _vllm_entries(known: dict[int, Logprob]) -> dict[str, Any]:
    return {
        str(token_id): {"logprob": entry.logprob, "rank": entry.rank, "decoded_token": entry.text}
        for token_id, entry in known.items()
    }
