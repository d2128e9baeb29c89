"""The loop that puts a load to an engine: who arrives when, what it notes, and that a simulation does so
too."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from served_answers import LIMITS, fixed, timed_engine

from jaxinfer.bench import (
    Arrival,
    Lengths,
    Load,
    Prompts,
    RealClock,
    Summary,
    at_once,
    closed,
    constant,
    drive,
    poisson,
)
from jaxinfer.bench.predicted import Predictor
from jaxinfer.config import shape_ladder
from jaxinfer.core import SamplingParams
from jaxinfer.engine import Engine
from jaxinfer.planner import DeviceSheet, ModelCosts, RooflineTime
from jaxinfer.simulator import SimulatedRunner, StepTimer, VirtualClock


def test_one_request_takes_a_step_a_token() -> None:
    engine, clock = timed_engine(0.1)
    (only,) = drive(engine, constant(1.0, 1, *fixed(10, 5)), clock)
    assert only.token_s == pytest.approx((0.1, 0.2, 0.3, 0.4, 0.5))
    assert (only.status, only.finish_reason, only.output_tokens, only.asked_tokens) == ("ok", "length", 5, 5)
    assert only.ttft_s == pytest.approx(0.1)
    assert only.tpot_s == pytest.approx(0.1)


def test_who_comes_amid_a_step_has_waited_for_its_end() -> None:
    """The second request is due at 0.15, amid the second step: it is handed over late, and that counts."""
    engine, clock = timed_engine(0.1)
    load = Load((Arrival(0.0, 10, 4), Arrival(0.15, 10, 4)))
    _, second = drive(engine, load, clock)
    assert second.arrived_s == 0.15
    assert second.sent_s == pytest.approx(0.2)
    assert second.ttft_s == pytest.approx(0.15)


def test_an_overload_shows_in_the_latencies() -> None:
    """Four places, each request 8 steps: 20 a second can be served, 100 come."""
    engine, clock = timed_engine(0.025)
    records = drive(engine, constant(100.0, 200, *fixed(4, 8)), clock)
    ttft = [record.ttft_s for record in records]
    assert None not in ttft
    assert ttft[-1] > 5  # type: ignore[operator]
    assert Summary.of(records).requests_per_s == pytest.approx(20, rel=0.1)


def test_a_closed_loop_never_has_more_open_than_its_places() -> None:
    engine, clock = timed_engine(0.1)
    records = drive(engine, closed(3, 11, *fixed(10, 5)), clock)
    for record in records:
        others = [r for r in records if r.arrived_s <= record.arrived_s < r.ended_s]
        assert len(others) <= 3
    ends = sorted(record.ended_s for record in records)
    arrivals = sorted(record.arrived_s for record in records)
    assert arrivals == pytest.approx([0.0] * 3 + ends[:8])


def test_what_the_engine_refuses_is_recorded_and_the_rest_goes_on() -> None:
    engine, clock = timed_engine(0.1)
    load = Load((Arrival(0.0, 10, 4), Arrival(0.0, 127, 4), Arrival(0.3, 10, 4)))
    records = drive(engine, load, clock)
    assert [record.status for record in records] == ["ok", "refused", "ok"]
    assert "max_model_len" in (records[1].error or "")
    assert records[1].token_s == ()
    assert Summary.of(records).refused == 1


def test_a_refusal_in_a_closed_loop_frees_its_place() -> None:
    engine, clock = timed_engine(0.1)
    load = Load(tuple(Arrival(0.0, 127, 4) for _ in range(5)), 0, 2)
    assert [record.status for record in drive(engine, load, clock)] == ["refused"] * 5


def test_failed_steps_are_failed_requests() -> None:
    engine, clock = timed_engine(0.1, fail_tokens=[7], fail_in="fetch")
    load = Load((Arrival(0.0, (1, 2, 3), 3), Arrival(0.0, (7, 8, 9), 3)))
    first, second = drive(engine, load, clock)
    assert first.status == "ok"
    assert (second.status, second.finish_reason) == ("failed", "error")
    assert second.error


def test_an_answer_may_end_early_when_the_model_may_end_it() -> None:
    limits = dataclasses.replace(LIMITS, eos_token_ids=frozenset({9}))
    engine, clock = timed_engine(0.1, limits, scripts={(1, 2, 3): (5, 9)})
    load = Load((Arrival(0.0, (1, 2, 3), 6),))
    (early,) = drive(engine, load, clock, sampling=SamplingParams(temperature=0.0))
    assert (early.output_tokens, early.asked_tokens, early.finish_reason) == (2, 6, "stop")
    assert Summary.of([early]).short == 1
    (whole,) = drive(engine, load, clock)
    assert whole.output_tokens == 6


def test_shared_prefixes_are_found_and_nothing_else_is() -> None:
    engine, clock = timed_engine(0.01)
    alone = drive(engine, constant(1.0, 12, *fixed(40, 3)), clock)
    assert {record.cached_tokens for record in alone} == {0}
    engine, clock = timed_engine(0.01)
    prompts = Prompts(Lengths("fixed", 24, 24), shared=16)
    shared = drive(engine, constant(1.0, 12, prompts, Lengths("fixed", 3, 3), seed=1), clock)
    assert [record.cached_tokens for record in shared] == [0] + [16] * 11


def test_an_interruption_leaves_the_engine_idle() -> None:
    engine, clock = timed_engine(0.1)
    ends = 0

    def advance(amount: float) -> None:
        nonlocal ends
        ends += 1
        if ends == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        drive(engine, at_once(6, *fixed(10, 5)), clock, advance=advance)
    assert not engine.has_work
    assert engine.check() == []
    assert len(drive(engine, at_once(6, *fixed(10, 5), seed=1), clock)) == 6


def test_the_real_clock_waits() -> None:
    clock = RealClock()
    at_s = clock.now() + 0.02
    clock.wait_until(at_s)
    assert clock.now() >= at_s
    clock.wait_until(0.0)


# ------------------------------------------------------------------------------------------ foretold


def roofline() -> RooflineTime:
    from tiny import TINY

    sheet = DeviceSheet("slow", 0, 1e9, {"float32": 1e11, "bfloat16": 1e11}, 0.0, "")
    return RooflineTime(ModelCosts(TINY, "float32", "float32"), sheet)


@settings(max_examples=12)
@given(
    st.sampled_from(["poisson", "closed", "at once"]),
    st.integers(0, 1000),
    st.booleans(),
    st.sampled_from([0, 16]),
)
def test_a_prediction_is_the_engine_itself_in_virtual_time(
    kind: str, seed: int, asynchronous: bool, shared: int
) -> None:
    """`drive` with a simulated runner under the real engine, and the simulation that predictions use,
    agree."""
    prompts, outputs = Prompts(Lengths.parse("uniform:5-60"), shared=shared), Lengths.parse("uniform:1-30")
    if kind == "poisson":
        load = poisson(200.0, 30, prompts, outputs, seed=seed)
    else:
        load = (
            closed(5, 30, prompts, outputs, seed=seed) if kind == "closed" else at_once(30, prompts, outputs)
        )
    ladder = shape_ladder(LIMITS.max_num_seqs, LIMITS.max_num_batched_tokens, platform="cpu")
    options: dict[str, Any] = {"asynchronous": asynchronous}
    predicted = Predictor(LIMITS, roofline(), ladder, prefix_caching=True, **options)(load)

    clock = VirtualClock()
    runner = SimulatedRunner(StepTimer(roofline(), ladder, **options), LIMITS, clock)
    engine = Engine(runner, LIMITS, clock=clock, prefix_caching=True, **options)
    driven = drive(engine, load, clock)
    for one, other in zip(predicted, driven, strict=True):
        assert one.token_s == pytest.approx(other.token_s)
        assert (one.arrived_s, one.sent_s) == pytest.approx((other.arrived_s, other.sent_s))
        assert (one.cached_tokens, one.status) == (other.cached_tokens, other.status)


def test_a_prediction_tells_of_what_would_be_refused() -> None:
    ladder = shape_ladder(LIMITS.max_num_seqs, LIMITS.max_num_batched_tokens, platform="cpu")
    load = Load((Arrival(0.0, 10, 4), Arrival(0.0, 127, 4)))
    first, second = Predictor(LIMITS, roofline(), ladder)(load)
    assert (first.status, second.status) == ("ok", "refused")
    assert "max_model_len" in (second.error or "")
