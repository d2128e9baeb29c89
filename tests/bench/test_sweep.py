"""The knee: of a queue whose knee is known, of ranges without one, of runs that contradict each other."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from served_answers import Queue, fixed

from jaxinfer.bench import Objective
from jaxinfer.bench.knee import Knee, Patience, Range, Verdict, find_knee
from jaxinfer.bench.sweep import Plan, page, sweep
from jaxinfer.bench.workbench import Workbench
from jaxinfer.core import ConfigError


def exact(knee: float):
    """A probe without noise; its latency grows in proportion to the load."""
    return lambda rate, number, confirms: Verdict(rate, rate <= knee, rate / knee)


@given(st.floats(0.1, 1000), st.floats(0.02, 0.3))
def test_an_exact_knee_is_found_within_the_tolerance(knee: float, tolerance: float) -> None:
    found = find_knee(exact(knee), Range(0.01, 5.0, 10_000.0), Patience(tolerance, most_runs=200))
    assert (found.kind, found.confirmed) == ("found", True)
    assert found.below is not None
    assert found.above is not None
    assert found.below <= knee < found.above <= found.below * (1 + tolerance) * 1.0001
    assert found.confirming is not None
    low, high = found.confirming
    assert low.rate < found.below
    assert low.holds
    assert high.rate > found.above
    assert not high.holds


@settings(max_examples=30)
@given(st.floats(2, 300), st.integers(0, 10_000))
def test_noise_is_voted_down(knee: float, seed: int) -> None:
    """Latencies that are off by up to 8 %: the knee is off by no more than that and the tolerance."""
    noise = random.Random(seed)

    def probe(rate: float, number: int, confirms: bool) -> Verdict:
        margin = rate / knee * noise.uniform(0.92, 1.08)
        return Verdict(rate, margin <= 1, margin)

    found = find_knee(probe, Range(0.1, 8.0, 1000.0), Patience(0.1, near=0.1, most_runs=100))
    if found.kind == "found":
        assert found.below is not None
        assert found.above is not None
        assert 0.9 * knee <= found.above
        assert found.below <= 1.1 * knee
    else:
        assert found.kind == "unsettled"
        assert "unsettled" in found.says()


def test_a_range_without_a_knee_says_so() -> None:
    low = find_knee(exact(0.5), Range(1.0, 4.0, 16.0))
    assert (low.kind, low.below, low.above) == ("below", None, 1.0)
    assert "broken at the lowest load tried, 1 " in low.says()
    high = find_knee(exact(50.0), Range(1.0, 4.0, 16.0))
    assert (high.kind, high.below, high.above) == ("above", 16.0, None)
    assert "holds at the highest load tried, 16 " in high.says()


def test_a_confirmation_that_disagrees_moves_the_search() -> None:
    """Short runs hold up to 10; long ones, which count, up to 6 only."""

    def probe(rate: float, number: int, confirms: bool) -> Verdict:
        knee = 6.0 if confirms else 10.0 if number < 10 else 6.0
        return Verdict(rate, rate <= knee, 2.0 if rate > knee else 0.5)

    found = find_knee(probe, Range(0.5, 4.0, 64.0))
    assert (found.kind, found.confirmed) == ("found", True)
    assert found.below == pytest.approx(6.0, rel=0.11)


def test_contradictions_are_told() -> None:
    verdicts = iter(range(1000))

    def probe(rate: float, number: int, confirms: bool) -> Verdict:
        holds = next(verdicts) % 2 == 0 and not confirms
        return Verdict(rate, holds, 3.0)

    found = find_knee(probe, Range(0.5, 4.0, 64.0), Patience(most_runs=60))
    assert not found.confirmed
    assert found.kind != "found"


def test_runs_that_are_used_up_leave_it_unconfirmed() -> None:
    found = find_knee(exact(7.0), Range(0.1, 1.0, 100.0), Patience(0.01, most_runs=6))
    assert (found.kind, found.confirmed, len(found.verdicts)) == ("unsettled", False, 6)
    assert "unsettled after 6 runs" in found.says()
    assert "NOT confirmed" in Knee("found", 1.0, 1.1).says()


def test_ranges_and_patience_are_checked() -> None:
    for wrong in (
        lambda: Range(2, 1, 3),
        lambda: Range(0, 1, 3),
        lambda: Patience(0.0),
        lambda: Patience(repeats=0),
    ):
        with pytest.raises(ConfigError):
            wrong()


# -------------------------------------------------------------------------------------- a real queue


@pytest.mark.parametrize("seed", [0, 1])
def test_the_knee_of_a_queue_is_where_theory_has_it(seed: int) -> None:
    """M/M/1: P95 of the time in the system is ln 20 / (service rate - arrival rate)."""
    served, limit = 100.0, 0.1
    knee = served - math.log(20) / limit  # 70 a second
    queue = Queue(served)
    said: list[str] = []
    bench = Workbench(queue, Objective.parse("ttft_p95=100ms"), say=said.append)
    report = sweep(bench, Plan(*fixed(4, 1), seed=seed, duration_s=150, patience=Patience(0.05)), 4)
    found = report["knee"]
    assert found["confirmed"], found["says"]
    assert found["holds_at"] == pytest.approx(knee, rel=0.08)
    assert found["breaks_at"] <= found["holds_at"] * 1.051
    assert report["capacity_requests_per_s"] == pytest.approx(served, rel=0.2)
    assert report["predicted_knee"] is None
    # Every run has arrivals of its own, and those that confirm are the longest.
    assert len({load.seed for load in queue.loads}) == len(queue.loads)
    purposes = [run["purpose"] for run in report["runs"]]
    assert purposes[:2] == ["capacity", "start"]
    assert purposes[-2:] == ["confirms below", "confirms above"]
    below, above = report["runs"][-2:]
    assert below["rate"] < found["holds_at"] < found["breaks_at"] < above["rate"]
    assert below["measured"]["slo"]["holds"]
    assert not above["measured"]["slo"]["holds"]
    assert below["load"]["requests"] >= 2 * 150 * below["rate"]
    assert "confirmed" in page(report)
    assert said[-1] == found["says"]


def test_a_stated_range_needs_no_capacity() -> None:
    queue = Queue(100.0)
    bench = Workbench(queue, Objective.parse("ttft_p95=100ms"))
    plan = Plan(*fixed(4, 1), duration_s=20, low=1.0, start=2.0, high=20.0)
    report = sweep(bench, plan, 0)
    assert report["capacity_requests_per_s"] is None
    assert report["knee"]["kind"] == "above"
    assert "highest load tried, 20 requests/s" in page(report)
    assert all(load.concurrency is None for load in queue.loads)


def test_an_objective_that_no_load_meets_is_told() -> None:
    bench = Workbench(Queue(100.0), Objective.parse("ttft_p95=1us"))
    report = sweep(bench, Plan(*fixed(4, 1), duration_s=5), 0)
    assert report["knee"]["kind"] == "below"
    assert "lowest load tried" in page(report)


def test_a_sweep_needs_an_objective() -> None:
    with pytest.raises(ConfigError, match="SLO"):
        sweep(Workbench(Queue(10.0)), Plan(*fixed(4, 1)), 0)


def test_predictions_have_a_knee_of_their_own() -> None:
    """What foretells is a queue of half the speed: the knees stand side by side."""
    slow = Queue(100.0)
    bench = Workbench(
        Queue(200.0),
        Objective.parse("ttft_p95=100ms"),
        lambda load: slow.run(load, lambda amount: None).records,
    )
    report = sweep(bench, Plan(*fixed(4, 1), duration_s=30, low=1.0, start=60.0, high=400.0), 0)
    assert report["knee"]["holds_at"] == pytest.approx(200 - math.log(20) / 0.1, rel=0.15)
    assert report["predicted_knee"]["holds_at"] == pytest.approx(100 - math.log(20) / 0.1, rel=0.15)
    assert report["runs"][0]["predicted"]["ok"] == report["runs"][0]["measured"]["ok"]
    assert "predicted: the SLO holds up to" in page(report)
