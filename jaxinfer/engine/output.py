"""From sampled tokens to what the caller sees: text, logprobs, the reason of the end."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import Protocol

from jaxinfer.core import (
    FinishReason,
    Logprob,
    RequestMetrics,
    Sampled,
    SamplingParams,
    Sequence,
    TokenEvent,
)
from jaxinfer.engine.drawing import Drawing, Matcher

LOGPROB_FLOOR = -9999.0
"""Stands for a logprob of minus infinity, which JSON cannot carry (OpenAI's convention)."""


class TextStream(Protocol):
    """The text of a growing list of tokens, cut at the first stop string."""

    @property
    def stopped(self) -> bool: ...

    @property
    def matched(self) -> str | None: ...

    def push(self, token_id: int) -> str:
        """Take the next token; returns the text that is safe to show now."""
        ...

    def finish(self) -> str:
        """No more tokens follow; returns the text held back so far. A match may be decided only here."""
        ...


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer."""

    def token_text(self, token_id: int) -> str: ...

    def matcher(self, sampling: SamplingParams) -> Matcher | None:
        """Follows the structure that `sampling` asks for; None without one. Raises RequestError."""
        ...

    def spellings(self, words: Seq[str]) -> list[tuple[int, ...]]:
        """The token ids that write each word, at the start of a text and after a space."""
        ...

    def stream(
        self,
        stop: Seq[str] = ...,
        include_stop: bool = ...,
        skip_special_tokens: bool = ...,
        min_tokens: int = ...,
    ) -> TextStream: ...


class SequenceOutput:
    """The output side of one sequence; makes its events. Without a tokenizer all text is empty."""

    __slots__ = (
        "_scores", "_stream", "_tokenizer", "drawing", "num_told", "sequence", "stop_reason", "token_at",
    )  # fmt: skip

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer | None, drawing: Drawing):
        sampling = sequence.request.sampling
        self.sequence = sequence
        self.drawing = drawing
        self._scores: list[dict[int, Logprob] | None] | None = None
        if sampling.prompt_logprobs is not None and sequence.index == 0:
            self._scores = [None for _ in range(sequence.num_prompt)]
        self.stop_reason: str | int | None = None
        self.num_told = 0  # tokens that are in an event
        self.token_at: float | None = None  # when the last one of them was sampled
        self._tokenizer = tokenizer
        self._stream = None
        if tokenizer is not None:
            self._stream = tokenizer.stream(
                stop=tuple(sampling.stop),
                include_stop=sampling.include_stop_str_in_output,
                skip_special_tokens=sampling.skip_special_tokens,
                min_tokens=sampling.min_tokens,
            )

    @property
    def stopped(self) -> bool:
        """True when a stop string was found."""
        return self._stream is not None and self._stream.stopped

    def push(self, sampled: Sampled, ended_by_id: bool, stop_token_id: int | None) -> str:
        """Take a token; returns the text that became safe to show.

        A token that ended the sequence by its id shows its text only where asked: a stop token with
        include_stop_str_in_output, EOS with that or with skip_special_tokens off.
        """
        stream, sampling = self._stream, self.sequence.request.sampling
        self.stop_reason = stop_token_id
        if stream is None:
            return ""
        if ended_by_id and not sampling.include_stop_str_in_output:
            is_eos = stop_token_id is None
            if not (is_eos and not sampling.skip_special_tokens):
                return ""
        text = stream.push(sampled.token_id)
        if stream.stopped and not ended_by_id:
            self.stop_reason = stream.matched
        return text

    def finish(self) -> str:
        """The sequence has ended; returns the text held back so far."""
        stream = self._stream
        if stream is None or stream.stopped:
            return ""
        text = stream.finish()
        if stream.stopped and self.stop_reason is None:
            self.stop_reason = stream.matched
        return text

    def score(self, start: int, scores: tuple[Sampled, ...]) -> None:
        """Keep how likely the prompt tokens from position `start` on were; again, after a preemption."""
        count = self.sequence.request.sampling.prompt_logprobs
        if self._scores is not None and count is not None:
            for position, scored in enumerate(scores, start):
                self._scores[position] = self._entries(scored, count)

    def logprobs(self, sampled: Sampled) -> tuple[dict[int, Logprob], ...] | None:
        """The chosen token first, then the k most likely ones, or those of the ids asked for; None when
        nothing is."""
        sampling = self.sequence.request.sampling
        if sampling.logprob_token_ids is not None:
            return (self._entries(sampled, 0),)
        return None if sampling.logprobs is None else (self._entries(sampled, sampling.logprobs),)

    def _entries(self, sampled: Sampled, count: int) -> dict[int, Logprob]:
        entries = {sampled.token_id: self._logprob(sampled.token_id, sampled.logprob, sampled.rank)}
        for rank, (token, logprob) in enumerate(sampled.top[:count], 1):
            if token not in entries:
                entries[token] = self._logprob(token, logprob, rank)
        for token, logprob, rank in sampled.told:
            if token not in entries:
                entries[token] = self._logprob(token, logprob, rank)
        return entries

    def _logprob(self, token: int, logprob: float, rank: int) -> Logprob:
        value = max(logprob, LOGPROB_FLOOR) if math.isfinite(logprob) else LOGPROB_FLOOR
        return Logprob(value, rank, "" if self._tokenizer is None else self._tokenizer.token_text(token))

    def event(
        self,
        text: str,
        sampled: Sampled | None,
        reason: FinishReason | None,
        error: str | None = None,
        metrics: RequestMetrics | None = None,
    ) -> TokenEvent:
        request = self.sequence.request
        event = TokenEvent(
            request_id=request.request_id,
            index=self.sequence.index,
            text=text,
            token_ids=() if sampled is None else (sampled.token_id,),
            logprobs=None if sampled is None else self.logprobs(sampled),
            finish_reason=reason,
            stop_reason=self.stop_reason if reason == "stop" else None,
            error=error,
            metrics=metrics,
            prompt_logprobs=self._prompt_logprobs(sampled),
        )
        self.num_told += len(event.token_ids)
        return event

    def _prompt_logprobs(self, sampled: Sampled | None) -> tuple[dict[int, Logprob] | None, ...] | None:
        """With the first token, when they are all there; told once."""
        if sampled is None or self.num_told or self._scores is None:
            return None
        return tuple(self._scores)
