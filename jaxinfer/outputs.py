"""From the events of a request to its RequestOutput."""

from __future__ import annotations

from jaxinfer.core import (
    CompletionOutput,
    FinishReason,
    Logprob,
    Request,
    RequestMetrics,
    RequestOutput,
    TokenEvent,
)


class Continuation:
    """One continuation, put together from its events."""

    def __init__(self, index: int):
        self.index = index
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Logprob]] | None = None
        self.finish_reason: FinishReason | None = None
        self.last: TokenEvent | None = None

    def add(self, event: TokenEvent) -> None:
        """Take the next event; they come in order."""
        self.texts.append(event.text)
        self.token_ids.extend(event.token_ids)
        if event.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs.extend(event.logprobs)
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
    )


def _joined(metrics: list[RequestMetrics]) -> RequestMetrics:
    """Of n continuations: the first token of any, the end of the last, the mean time per token."""
    tpot = [m.tpot_s for m in metrics if m.tpot_s is not None]
    return RequestMetrics(
        queue_s=min((m.queue_s for m in metrics if m.queue_s is not None), default=None),
        ttft_s=min((m.ttft_s for m in metrics if m.ttft_s is not None), default=None),
        tpot_s=sum(tpot) / len(tpot) if tpot else None,
        total_s=max((m.total_s for m in metrics if m.total_s is not None), default=None),
        cached_tokens=sum(m.cached_tokens for m in metrics),
        preemptions=sum(m.preemptions for m in metrics),
    )
