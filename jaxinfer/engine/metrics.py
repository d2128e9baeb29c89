"""Counts and small statistics of an engine since it started. All but `failed_in_a_row` only ever grow.

The engine's thread adds; any thread may read at any time, without a lock and without waiting for a step. What
is read together may then be of two moments a few microseconds apart; no single number is ever torn.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate
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


# Bounds in seconds. They are vLLM's, so that what was made for it reads these histograms. Below its first
# bound between tokens, 10 ms, where a GPU spends its life, there are three more.
FIRST_TOKEN_BOUNDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_BOUNDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_BOUNDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
)  # fmt: skip


def length_bounds(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... tokens, up to `most` >= 1."""
    steps = (digit * 10**power for power in range(len(str(most))) for digit in (1, 2, 5))
    return tuple(float(bound) for bound in steps if bound <= most)


class Histogram:
    """How many values were at most as large as each bound, and their sum; constant memory.

    `bounds` rise strictly. One thread adds; any thread may take a `snapshot`.
    """

    __slots__ = ("_counts", "_total", "bounds")

    def __init__(self, bounds: Seq[float]):
        self.bounds = tuple(bounds)
        assert all(a < b for a, b in zip(self.bounds, self.bounds[1:], strict=False)), f"{bounds} do not rise"
        # By the first bound that is no smaller than the value; the last: there is none.
        self._counts = [0] * (len(self.bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        self._total += value
        self._counts[bisect_left(self.bounds, value)] += 1

    def snapshot(self) -> tuple[list[int], float]:
        """For each bound the number of values up to it, then the number of all values; and their sum."""
        counts = self._counts.copy()  # one step of the interpreter: no value is added amid it
        return list(accumulate(counts)), self._total


class Histograms:
    """What was measured of each sequence (one of the `n` of a request), by the names that vLLM gives it.

    All in seconds but the two of tokens. The first four are added to with each token, the others when a
    sequence ends: of one that a client or an error cut short, only its tokens. A preempted sequence keeps its
    first times, so that its waiting in between shows as a gap between two tokens.
    """

    __slots__ = (
        "e2e_request_latency", "inter_token_latency", "request_decode_time", "request_generation_tokens",
        "request_prefill_time", "request_prompt_tokens", "request_queue_time",
        "request_time_per_output_token", "time_to_first_token",
    )  # fmt: skip

    def __init__(self, max_model_len: int):
        self.time_to_first_token = Histogram(FIRST_TOKEN_BOUNDS)  # from the arrival at the engine
        self.request_queue_time = Histogram(REQUEST_BOUNDS)  # arrival to the first step
        self.request_prefill_time = Histogram(REQUEST_BOUNDS)  # first step to first token
        self.inter_token_latency = Histogram(TOKEN_BOUNDS)  # a value for each token but the first
        self.request_decode_time = Histogram(REQUEST_BOUNDS)  # first token to last token
        self.request_time_per_output_token = Histogram(TOKEN_BOUNDS)  # the mean gap of a sequence
        self.e2e_request_latency = Histogram(REQUEST_BOUNDS)  # arrival to end
        self.request_prompt_tokens = Histogram(length_bounds(max_model_len))
        self.request_generation_tokens = Histogram(length_bounds(max_model_len))

    def token(self, sequence: Sequence, before: float | None) -> None:
        """A sequence has a new token; `before` is when it had the one before, None for its first."""
        now = sequence.last_token_at
        assert now is not None, f"{sequence} has a token of no time"
        if before is not None:
            self.inter_token_latency.add(now - before)
            return
        started = sequence.first_scheduled_at
        assert started is not None, f"{sequence} has a token of no step"
        self.time_to_first_token.add(now - sequence.arrived_at)
        self.request_queue_time.add(started - sequence.arrived_at)
        self.request_prefill_time.add(now - started)

    def ended(self, sequence: Sequence, reason: FinishReason, metrics: RequestMetrics) -> None:
        self.request_prompt_tokens.add(sequence.num_prompt)
        self.request_generation_tokens.add(sequence.num_output)
        if reason not in ("stop", "length"):
            return
        first, last = sequence.first_token_at, sequence.last_token_at
        if metrics.total_s is not None:
            self.e2e_request_latency.add(metrics.total_s)
        if first is not None and last is not None:
            self.request_decode_time.add(last - first)
        if metrics.tpot_s is not None:
            self.request_time_per_output_token.add(metrics.tpot_s)

    def searched(self, prompt_tokens: int, tokens: int, reason: FinishReason, seconds: float) -> None:
        """One output of a beam search, at its end."""
        self.request_prompt_tokens.add(prompt_tokens)
        self.request_generation_tokens.add(tokens)
        if reason in ("stop", "length"):
            self.e2e_request_latency.add(seconds)

    def items(self) -> list[tuple[str, Histogram]]:
        return [(name, getattr(self, name)) for name in self.__slots__]


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
        num_generation_tokens=sequence.num_output,
        arrival_time=time.time() - (now - arrived),
        queued_ts=arrived,
        scheduled_ts=started,
        first_token_ts=first,
        last_token_ts=last,
    )


@dataclass(slots=True)
class Counters:
    """What `Engine.stats` reports besides the gauges.

    `engine_s` is Python of the engine (deciding, recording, detokenising), `dispatch_s` Python of the
    runner up to the start of the step, `wait_s` the wait for what the step sampled. `failed_in_a_row` counts
    the failed steps since the last good one.
    """

    histograms: Histograms
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
        self.histograms.ended(sequence, reason, metrics)
        self.cached_tokens += 0 if sequence.index else metrics.cached_tokens
        for name in ("queue_s", "ttft_s", "tpot_s"):
            if (value := getattr(metrics, name)) is not None:
                getattr(self, name).add(value)

    def searched(self, prompt_tokens: int, outputs: Seq[tuple[int, FinishReason]], seconds: float) -> None:
        """Count a beam search of so many seconds: a request, a prompt, and an end for each of its outputs
        (tokens, reason). It has no first token and no time from one to the next: its outputs are known at its
        end."""
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        for tokens, reason in outputs:
            self.finished[reason] += 1
            self.generated_tokens += tokens
            self.histograms.searched(prompt_tokens, tokens, reason, seconds)

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
