"""Counts and small statistics of an engine since it started. All but `failed_in_a_row` only ever grow."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jaxinfer.core import FinishReason, RequestMetrics, Sequence


class Spread:
    """Count, mean, smallest and largest of what was added; constant memory."""

    __slots__ = ("count", "high", "low", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.low = 0.0
        self.high = 0.0

    def add(self, value: float) -> None:
        self.low = value if self.count == 0 else min(self.low, value)
        self.high = max(self.high, value)
        self.total += value
        self.count += 1

    def as_dict(self) -> dict[str, float]:
        mean = self.total / self.count if self.count else 0.0
        return {"count": self.count, "total": self.total, "mean": mean, "min": self.low, "max": self.high}


def sequence_metrics(sequence: Sequence, now: float) -> RequestMetrics:
    """The times of a sequence that ends now. Preemption resets none of its stamps."""
    arrived, first, last = sequence.arrived_at, sequence.first_token_at, sequence.last_token_at
    started = sequence.first_scheduled_at
    gaps = sequence.num_output - 1
    return RequestMetrics(
        queue_s=None if started is None else started - arrived,
        ttft_s=None if first is None else first - arrived,
        tpot_s=None if first is None or last is None or gaps < 1 else (last - first) / gaps,
        total_s=now - arrived,
        cached_tokens=sequence.cached_tokens,
        preemptions=sequence.preemptions,
    )


@dataclass(slots=True)
class Counters:
    """What `Engine.stats` reports besides the gauges.

    `engine_s` is Python of the engine (deciding, recording, detokenising), `dispatch_s` Python of the
    runner up to the start of the step, `wait_s` the wait for what the step sampled. `failed_in_a_row` counts
    the failed steps since the last good one.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    computed_tokens: int = 0
    steps: int = 0
    failed_steps: int = 0
    failed_in_a_row: int = 0
    invariant_failures: int = 0
    engine_s: float = 0.0
    dispatch_s: float = 0.0
    wait_s: float = 0.0
    finished: dict[FinishReason, int] = field(
        default_factory=lambda: {"stop": 0, "length": 0, "abort": 0, "error": 0}
    )
    queue_s: Spread = field(default_factory=Spread)
    ttft_s: Spread = field(default_factory=Spread)
    tpot_s: Spread = field(default_factory=Spread)

    def ended(self, sequence: Sequence, reason: FinishReason, metrics: RequestMetrics) -> None:
        """Count the end of one sequence. A prompt counts once, as its first continuation found it."""
        self.finished[reason] += 1
        self.cached_tokens += 0 if sequence.index else metrics.cached_tokens
        for name in ("queue_s", "ttft_s", "tpot_s"):
            if (value := getattr(metrics, name)) is not None:
                getattr(self, name).add(value)

    def as_dict(self) -> dict[str, Any]:
        host, whole = self.engine_s + self.dispatch_s, self.engine_s + self.dispatch_s + self.wait_s
        return {
            "requests": self.requests,
            "finished": dict(self.finished),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "generated_tokens": self.generated_tokens,
            "computed_tokens": self.computed_tokens,
            "steps": self.steps,
            "failed_steps": self.failed_steps,
            "failed_in_a_row": self.failed_in_a_row,
            "invariant_failures": self.invariant_failures,
            "engine_s": self.engine_s,
            "dispatch_s": self.dispatch_s,
            "wait_s": self.wait_s,
            "host_share": host / whole if whole else 0.0,
            "queue_s": self.queue_s.as_dict(),
            "ttft_s": self.ttft_s.as_dict(),
            "tpot_s": self.tpot_s.as_dict(),
        }
