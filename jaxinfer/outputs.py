"""From the events of a request to its RequestOutput, and from that of a scored text to its Score."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxinfer.core import (
    CompletionOutput,
    FinishReason,
    JaxInferError,
    Logprob,
    Request,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
    TokenEvent,
)

SCORING = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
"""How a text is run to be scored: for its own tokens' logprobs. A request generates one token at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How likely a model finds a text. Logprobs are natural, of the raw float32 distribution.

    `logprobs[i]` is that of `token_ids[i]` after those before it; None for the first, which follows nothing.
    `nll` is the sum of -logprob, `perplexity` exp(nll / number of scored tokens), infinity where that
    is past a float's range.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    nll: float
    perplexity: float


def score_of(output: RequestOutput) -> Score:
    """The score of a text that ran with SCORING. Raises JaxInferError when its run failed."""
    if output.prompt_logprobs is None:
        ended = output.outputs[0]
        raise JaxInferError(
            f"the text was not scored: {ended.error or f'it ended with {ended.finish_reason}'}"
        )
    logprobs = tuple(
        None if known is None else known[token].logprob
        for token, known in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    )
    scored = [value for value in logprobs if value is not None]
    nll = -math.fsum(scored)
    try:
        perplexity = math.exp(nll / len(scored))
    except OverflowError:
        perplexity = math.inf
    return Score(token_ids=output.prompt_token_ids, logprobs=logprobs, nll=nll, perplexity=perplexity)


class Continuation:
    """One continuation, put together from its events."""

    def __init__(self, index: int):
        self.index = index
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Logprob]] | None = None
        self.prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None
        self.finish_reason: FinishReason | None = None
        self.last: TokenEvent | None = None

    def add(self, event: TokenEvent) -> None:
        """Take the next event; they come in order."""
        self.texts.append(event.text)
        self.token_ids.extend(event.token_ids)
        if event.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs.extend(event.logprobs)
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
        if event.finish_reason is not None:
            self.finish_reason, self.last = event.finish_reason, event

    def output(self) -> CompletionOutput:
        """What it has become; `finish_reason` is None while it goes on."""
        logprobs = None if self.logprobs is None else tuple(self.logprobs)
        return CompletionOutput(
            index=self.index,
            text="".join(self.texts),
            token_ids=tuple(self.token_ids),
            logprobs=logprobs,
            cumulative_logprob=None
            if logprobs is None
            else sum(p[i].logprob for p, i in zip(logprobs, self.token_ids, strict=True)),
            finish_reason=self.finish_reason,
            stop_reason=self.last.stop_reason if self.last else None,
            error=self.last.error if self.last else None,
        )


def request_output(request: Request, answers: list[Continuation]) -> RequestOutput:
    """The result of a request from its n continuations, in the order of their indices."""
    metrics = [a.last.metrics for a in answers if a.last is not None and a.last.metrics is not None]
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=request.prompt_token_ids,
        outputs=tuple(answer.output() for answer in answers),
        metrics=metrics[0] if len(metrics) == 1 else _joined(metrics),
        prompt_logprobs=answers[0].prompt_logprobs,
    )


def _joined(metrics: list[RequestMetrics]) -> RequestMetrics:
    """Of n continuations: the first token of any, the end of the last, the mean time per token. The prompt is
    computed once, for the first one, so what that found in the prefix cache is what the request found."""

    def known(name: str) -> list[float]:
        return [value for m in metrics if (value := getattr(m, name)) is not None]

    def least(name: str) -> float | None:
        return min(known(name), default=None)

    tpot = known("tpot_s")
    return RequestMetrics(
        queue_s=least("queue_s"),
        ttft_s=least("ttft_s"),
        tpot_s=sum(tpot) / len(tpot) if tpot else None,
        total_s=max(known("total_s"), default=None),
        cached_tokens=metrics[0].cached_tokens if metrics else 0,
        preemptions=sum(m.preemptions for m in metrics),
        num_generation_tokens=sum(m.num_generation_tokens for m in metrics),
        arrival_time=least("arrival_time"),
        queued_ts=least("queued_ts"),
        scheduled_ts=least("scheduled_ts"),
        first_token_ts=least("first_token_ts"),
        last_token_ts=max(known("last_token_ts"), default=None),
    )
