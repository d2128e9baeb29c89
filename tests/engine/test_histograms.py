"""What the engine measures of each sequence, against a clock that the test moves."""

from __future__ import annotations

import dataclasses
import random
import threading
from typing import Any

import pytest
from fake_runner import FakeRunner

from jaxinfer.core import Limits, Request, SamplingParams
from jaxinfer.engine import Engine
from jaxinfer.engine.metrics import (
    FIRST_TOKEN_BOUNDS,
    REQUEST_BOUNDS,
    TOKEN_BOUNDS,
    Histogram,
    length_bounds,
)

LIMITS = Limits(
    num_pages=33, page_size=4, max_num_seqs=4, max_num_batched_tokens=8, max_model_len=100, vocab_size=50
)


class Clock:
    """Seconds that pass only when told."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def engine(limits: Limits = LIMITS, **runner: Any) -> tuple[Engine, Clock]:
    clock = Clock()
    return Engine(FakeRunner(limits, **runner), limits, seed=0, clock=clock), clock


def request(name: str, prompt: int, **changes: Any) -> Request:
    sampling = SamplingParams(**{"seed": 1, "max_tokens": 4, "ignore_eos": True, **changes})
    return Request(request_id=name, prompt_token_ids=tuple(range(1, prompt + 1)), sampling=sampling)


def step(target: Engine, clock: Clock, seconds: float) -> None:
    """A step that takes so long: the clock moves while the device works."""
    fetch = target.runner.fetch

    def slow(pending: Any) -> Any:
        clock.now += seconds
        return fetch(pending)

    target.runner.fetch = slow  # type: ignore[method-assign]
    try:
        target.step()
    finally:
        target.runner.fetch = fetch  # type: ignore[method-assign]


def measured(target: Engine) -> dict[str, tuple[int, Any]]:
    """Number and sum of the values of each histogram."""
    found = {name: histogram.snapshot() for name, histogram in target.histograms.items()}
    return {name: (counts[-1], pytest.approx(total)) for name, (counts, total) in found.items()}


def test_a_histogram_counts_what_is_at_most_each_bound() -> None:
    drawn = random.Random(3)
    values = [*TOKEN_BOUNDS, 0.0, 1e9, *(drawn.expovariate(5) for _ in range(500))]
    histogram = Histogram(TOKEN_BOUNDS)
    for value in values:
        histogram.add(value)
    counts, total = histogram.snapshot()
    assert counts == [*(sum(v <= bound for v in values) for bound in TOKEN_BOUNDS), len(values)]
    assert total == pytest.approx(sum(values))


@pytest.mark.parametrize(
    ("most", "bounds"),
    [(1, (1,)), (9, (1, 2, 5)), (10, (1, 2, 5, 10)), (499, (1, 2, 5, 10, 20, 50, 100, 200))],
)
def test_lengths_are_counted_up_to_the_longest(most: int, bounds: tuple[int, ...]) -> None:
    assert length_bounds(most) == bounds


@pytest.mark.parametrize("bounds", [FIRST_TOKEN_BOUNDS, TOKEN_BOUNDS, REQUEST_BOUNDS])
def test_bounds_rise(bounds: tuple[float, ...]) -> None:
    assert list(bounds) == sorted(set(bounds))
    with pytest.raises(AssertionError, match="rise"):
        Histogram((*bounds, bounds[0]))


def test_each_time_of_a_request_is_counted_once() -> None:
    """A prompt of 20 takes three steps of 8: the third one samples."""
    target, clock = engine()
    target.add(request("a", 20))
    clock.now += 7.0  # in the queue
    for _ in range(3):
        step(target, clock, 0.5)
    first = measured(target)
    assert first["time_to_first_token"] == (1, 8.5)
    assert first["request_queue_time"] == (1, 7.0)
    assert first["request_prefill_time"] == (1, 1.5)
    assert first["inter_token_latency"][0] == first["e2e_request_latency"][0] == 0, "not known yet"
    for seconds in (0.09, 0.18, 2.0):
        step(target, clock, seconds)
    assert not target.has_work
    assert measured(target) == {
        **first,
        "inter_token_latency": (3, 2.27),
        "request_decode_time": (1, 2.27),
        "request_time_per_output_token": (1, 2.27 / 3),
        "e2e_request_latency": (1, 10.77),
        "request_prompt_tokens": (1, 20),
        "request_generation_tokens": (1, 4),
    }
    counts, _ = target.histograms.inter_token_latency.snapshot()
    by_bound = dict(zip(TOKEN_BOUNDS, counts, strict=False))
    assert (by_bound[0.075], by_bound[0.1], by_bound[0.2], by_bound[1.0], by_bound[2.5]) == (0, 1, 2, 2, 3)


def test_every_gap_and_every_continuation_counts() -> None:
    target, clock = engine()
    target.add(request("a", 3, n=3, max_tokens=5))
    while target.has_work:
        step(target, clock, 1.0)
    found = measured(target)
    assert found["inter_token_latency"] == (3 * 4, 12.0)
    assert found["time_to_first_token"][0] == found["e2e_request_latency"][0] == 3
    assert found["request_generation_tokens"] == (3, 15)
    assert found["request_generation_tokens"][0] == sum(target.stats()["finished"].values())


def test_one_token_is_no_gap() -> None:
    target, clock = engine()
    target.add(request("a", 3, max_tokens=1))
    step(target, clock, 1.0)
    found = measured(target)
    assert found["inter_token_latency"] == found["request_time_per_output_token"] == (0, 0)
    assert found["request_decode_time"] == (1, 0)


def test_what_was_cut_short_is_no_whole_request() -> None:
    """The short times of those who left would make the percentiles look good."""
    target, clock = engine(nan_tokens={9})
    target.add(request("left", 3))
    target.add(request("queued", 4))
    target.add(request("broken", 9))
    target.cancel("queued")
    step(target, clock, 1.0)
    target.cancel("left")
    while target.has_work:
        step(target, clock, 1.0)
    found = measured(target)
    assert target.stats()["finished"] == {"stop": 0, "length": 0, "abort": 2, "error": 1}
    for name in ("e2e_request_latency", "request_decode_time", "request_time_per_output_token"):
        assert found[name] == (0, 0), name
    assert found["request_prompt_tokens"] == (3, 16)
    assert found["request_generation_tokens"] == (3, 1)
    assert found["time_to_first_token"][0] == 1


def test_a_preemption_is_a_gap_and_no_second_first_token() -> None:
    limits = dataclasses.replace(LIMITS, num_pages=7)
    target, clock = engine(limits)
    target.add(request("a", 6, max_tokens=12))
    target.add(request("b", 3, max_tokens=12))
    while target.has_work:
        step(target, clock, 1.0)
    assert target.stats()["preemptions"] > 0
    found = measured(target)
    assert found["time_to_first_token"][0] == found["request_queue_time"][0] == 2
    assert found["inter_token_latency"][0] == 2 * 11
    assert found["inter_token_latency"][1] == found["request_decode_time"][1].expected
    counts, _ = target.histograms.inter_token_latency.snapshot()
    assert counts[TOKEN_BOUNDS.index(1.0)] < 2 * 11, "somebody waited for pages"


def test_other_threads_read_whole_numbers_that_only_grow() -> None:
    histogram, stop = Histogram((1.0, 2.0)), threading.Event()

    def add() -> None:
        while not stop.is_set():
            for value in (0.5, 1.5, 9.0):
                histogram.add(value)

    adding = threading.Thread(target=add)
    adding.start()
    try:
        before = [0, 0, 0]
        for _ in range(3000):
            counts, _ = histogram.snapshot()
            assert counts == sorted(counts)
            assert all(now >= then for now, then in zip(counts, before, strict=True))
            before = counts
    finally:
        stop.set()
        adding.join()
