"""What comes out of the engine: events, and the answers put together from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """`logprob` natural, of the raw float32 distribution; `rank` 1 is the most likely token."""

    logprob: float
    rank: int
    text: str = ""

    @property
    def decoded_token(self) -> str:
        """vLLM's name for `text`."""
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Seconds are wall clock from the request's arrival. `tpot_s` is None below two output tokens.

    The rest has the names of vLLM's RequestStateStats: `arrival_time` is in seconds since 1970, what ends in
    `_ts` on the engine's own clock, which never goes back: when it was queued, first scheduled, and had its
    first and last token; None for what never happened.
    """

    queue_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    total_s: float | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    num_generation_tokens: int = 0
    arrival_time: float | None = None
    queued_ts: float | None = None
    scheduled_ts: float | None = None
    first_token_ts: float | None = None
    last_token_ts: float | None = None

    @property
    def first_token_latency(self) -> float | None:
        """vLLM's name for `ttft_s`."""
        return self.ttft_s

    @property
    def num_preemptions(self) -> int:
        """vLLM's name for `preemptions`."""
        return self.preemptions


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """News of one sequence: the text that became safe to show, the tokens behind it, or its end.

    Text can lag behind tokens (a half character, or what may become a stop string is held back), so
    `text` may be empty while `token_ids` is not, and the last event may carry text alone. The first event
    with a token also brings `prompt_logprobs`, where they were asked for.
    """

    request_id: str
    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    metrics: RequestMetrics | None = None
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, Logprob], ...] | None
    cumulative_logprob: float | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    error: str | None = None

    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    metrics: RequestMetrics
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None

    @property
    def finished(self) -> bool:
        """Whether all of its continuations have ended."""
        return all(output.finished() for output in self.outputs)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that the prefix cache had."""
        return self.metrics.cached_tokens
