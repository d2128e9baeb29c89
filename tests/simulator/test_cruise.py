"""The simulation is the engine: every time of every token, exactly, whether steady decoders go as a group or
one by one, and whether the scheduler is driven here or by a real Engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import VOCAB, World, ask, crowded, through_the_engine, worlds

from jaxinfer.core import Limits, StepPlan
from jaxinfer.simulator import CruisingScheduler, Outcome, SimulatedRunner, Step, scheduler
from jaxinfer.simulator.cruise import Cruise
from jaxinfer.simulator.runner import Pending

EXAMPLES = settings(max_examples=100, deadline=None)


def assert_same(a: Outcome, b: Outcome) -> None:
    for one, other in zip(a.served, b.served, strict=True):
        assert one == other
    assert (a.peaks, a.preemptions, a.ended_s) == (b.peaks, b.preemptions, b.ended_s)
    assert a.held_s == pytest.approx(b.held_s)
    ours, theirs = dataclasses.asdict(a.totals), dataclasses.asdict(b.totals)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value == pytest.approx(theirs[name], rel=1e-9), name


def assert_as_the_engine(world: World, outcome: Outcome) -> None:
    heard, stats = through_the_engine(world)
    for served, one in zip(outcome.served, heard, strict=True):
        assert served.token_s.tolist() == one.token_s
        assert (served.arrived_s, served.ended_s) == (one.arrived_s, one.ended_s)
        assert (served.cached_tokens, served.preemptions) == (one.cached_tokens, one.preemptions)
        assert served.finish_reason == one.reason
    assert outcome.totals.steps == stats["steps"]
    assert outcome.totals.tokens == stats["computed_tokens"]
    assert outcome.preemptions == stats["preemptions"]


@given(world=worlds())
@EXAMPLES
def test_a_group_moves_as_its_members_would(world: World) -> None:
    assert_same(world.simulate(), world.simulate(cruise=False))


@given(world=worlds())
@EXAMPLES
def test_the_simulation_is_the_engine(world: World) -> None:
    assert_as_the_engine(world, world.simulate())


@given(world=worlds(), every=st.integers(1, 9))
@EXAMPLES
def test_a_group_can_be_disbanded_at_any_time(world: World, every: int) -> None:
    """`check` disbands it, with steps in flight, and finds the books in order."""
    simulation = world.simulation()
    planner, count = simulation.scheduler, [0]
    plan, commit = planner.plan_step, planner.commit_step

    def at_times(act: Callable[[], Any], result: Any) -> Any:
        count[0] += 1
        if count[0] % every == 0:
            assert not act()
            assert not planner.group.members
        return result

    planner.plan_step = lambda: at_times(planner.disband, plan())  # type: ignore[method-assign]
    planner.commit_step = lambda step: at_times(planner.check, commit(step))  # type: ignore[method-assign]
    outcome = simulation.run(world.asks, concurrency=world.concurrency)
    assert_same(outcome, world.simulate())


def long_world(**changes: Any) -> World:
    """A long one, in which pages run short, prompts share a beginning, and the queue is never empty for
    long."""
    limits = Limits(
        num_pages=150, page_size=4, max_num_seqs=24, max_num_batched_tokens=64, max_model_len=400,
        vocab_size=VOCAB,
    )  # fmt: skip
    asks = tuple(
        ask(f"r{i}", 0.02 * i, [*range(i % 3, i % 3 + 9), *([i % 19] * (i % 40))], 5 + i * 7 % 90)
        for i in range(150)
    )
    return World(limits, asks, **changes)


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_long_run_with_preemptions_is_the_engine(asynchronous: bool, prefix_caching: bool) -> None:
    world = long_world(asynchronous=asynchronous, prefix_caching=prefix_caching)
    outcome = world.simulate()
    assert outcome.preemptions > 5
    assert_as_the_engine(world, outcome)
    assert_same(outcome, world.simulate(cruise=False))
    assert_same(outcome, world.simulate())


@pytest.mark.parametrize("first", range(0, 150, 30))
def test_crowded_worlds_are_the_engine(first: int) -> None:
    preemptions = evictions = 0
    for seed in range(first, first + 30):
        world = crowded(seed)
        simulation = world.simulation()
        outcome = simulation.run(world.asks, concurrency=world.concurrency)
        assert_same(outcome, world.simulate(cruise=False))
        if seed % 5 == 0:
            assert_as_the_engine(world, outcome)
        cache = simulation.scheduler.tables.cache
        preemptions, evictions = (
            preemptions + outcome.preemptions,
            evictions + (cache.evictions if cache else 0),
        )
    assert min(preemptions, evictions) > 100


def test_most_of_the_work_is_done_by_the_group() -> None:
    """Else the equalities above would be of one thing with itself."""
    world = long_world()
    simulation = world.simulation()
    alone = grouped = 0
    plan = simulation.scheduler.plan_step

    def counted() -> Step | None:
        nonlocal alone, grouped
        step = plan()
        if step is not None:
            alone += sum(piece.emit for piece in step.plan.slices)
            grouped += step.rows
        return step

    simulation.scheduler.plan_step = counted  # type: ignore[method-assign]
    simulation.run(world.asks)
    assert grouped > 5 * alone > 0


# ------------------------------------------------------------------------------------- planted faults


class Dropping(SimulatedRunner):
    """Forgets the time of one step."""

    def dispatch(self, plan: StepPlan) -> Pending:
        if plan.step == 20:
            return Pending(plan, self.clock())
        return super().dispatch(plan)


def test_a_runner_that_drops_a_step_is_found() -> None:
    world = long_world()
    outcome = world.simulate()
    heard, _ = through_the_engine(world, Dropping)
    assert [one.token_s for one in heard] != [served.token_s.tolist() for served in outcome.served]


def test_a_group_that_forgets_a_page_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Cruise.take_pages
    monkeypatch.setattr(Cruise, "take_pages", lambda self: take(self)[1:])
    with pytest.raises(AssertionError):
        assert_same(long_world().simulate(), long_world().simulate(cruise=False))


def test_a_group_that_miscounts_its_keys_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Cruise.begin

    def wrong(self: Cruise) -> None:
        begin(self)
        self.keys[0] += 1

    monkeypatch.setattr(Cruise, "begin", wrong)
    with pytest.raises(AssertionError):
        assert_same(long_world().simulate(), long_world().simulate(cruise=False))


def test_an_admission_that_is_never_tried_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CruisingScheduler, "_let_go", _let_go_and_stay_quiet)
    with pytest.raises(AssertionError):
        assert_same(long_world().simulate(), long_world().simulate(cruise=False))


def _let_go_and_stay_quiet(self: CruisingScheduler, sequence: Any) -> None:
    del self.active[sequence.uid]
    self._quiet = 10
    super(CruisingScheduler, self)._let_go(sequence)


@pytest.mark.parametrize(
    ("name", "wrong", "seed"),
    [
        ("_holds_all", lambda sequence: True, 129),
        ("_is_known", lambda sequence: True, 44),
        ("merge", lambda decodes, added, key: [*decodes, *list(added)[::-1]], 5),
        ("QUIET", 0, 0),
    ],
)
def test_each_care_is_needed(name: str, wrong: Any, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What looks superfluous decides who gets a page, in a world where it matters."""
    expected = crowded(seed).simulate(cruise=False)
    monkeypatch.setattr(scheduler, name, wrong)
    with pytest.raises(AssertionError):
        assert_same(crowded(seed).simulate(), expected)
