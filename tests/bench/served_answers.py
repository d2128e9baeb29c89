"""Requests, engines and queues that the tests of `jaxinfer.bench` share."""

from __future__ import annotations

from typing import Any

import numpy as np
from fake_runner import FakeRunner

from jaxinfer.bench import Lengths, Load, Prompts, RequestRecord
from jaxinfer.bench.target import Advance, Run
from jaxinfer.core import Limits, StepResult
from jaxinfer.engine import Engine
from jaxinfer.simulator import VirtualClock

LIMITS = Limits(
    num_pages=100, page_size=8, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128, vocab_size=512,
)  # fmt: skip


def fixed(prompt: int, output: int) -> tuple[Prompts, Lengths]:
    return Prompts(Lengths("fixed", prompt, prompt)), Lengths("fixed", output, output)


def record(
    index: int = 0, arrived: float = 0.0, tokens: tuple[float, ...] = (1.0, 2.0), **changes: Any
) -> RequestRecord:
    """One that was answered, its tokens at these times."""
    values: dict[str, Any] = {
        "index": index, "arrived_s": arrived, "sent_s": arrived, "token_s": tokens,
        "ended_s": tokens[-1] if tokens else arrived, "prompt_tokens": 10, "asked_tokens": len(tokens),
        "finish_reason": "length",
    }  # fmt: skip
    return RequestRecord(**{**values, **changes})


class TimedRunner(FakeRunner):
    """A fake device whose steps take `step_s` of a virtual clock."""

    def __init__(self, clock: VirtualClock, step_s: float, limits: Limits = LIMITS, **options: Any):
        super().__init__(limits, **options)
        self.clock, self.step_s = clock, step_s

    def fetch(self, pending: Any) -> StepResult:
        self.clock.wait_until(self.clock.now() + self.step_s)
        return super().fetch(pending)


def timed_engine(step_s: float, limits: Limits = LIMITS, **options: Any) -> tuple[Engine, VirtualClock]:
    clock = VirtualClock()
    runner = TimedRunner(clock, step_s, limits, **options)
    return Engine(runner, limits, clock=clock, prefix_caching=True), clock


class Queue:
    """A target of one server with exponential service times of mean 1 / `rate_s` (M/M/1 under Poisson
    arrivals).

    The time that a request is in it is exponential, too: of mean 1 / (rate_s - arrivals per second).
    """

    most_tokens = None
    most_sequences = 1

    def __init__(self, rate_s: float):
        self.rate_s = rate_s
        self.loads: list[Load] = []

    def describe(self) -> dict[str, Any]:
        return {"model": "queue", "target": "queue", "device": None, "engine": {}}

    def run(self, load: Load, advance: Advance) -> Run:
        self.loads.append(load)
        service = np.random.default_rng(load.seed + 1).exponential(1 / self.rate_s, len(load.arrivals))
        free, records = 0.0, []
        for index, (arrival, seconds) in enumerate(zip(load.arrivals, service.tolist(), strict=True)):
            arrived = arrival.at_s if load.concurrency is None else free
            free = max(free, arrived) + seconds
            records.append(record(index, arrived, (free,)))
            advance(1)
        return Run(load, records)
