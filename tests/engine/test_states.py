"""Sequences with a state: no token is run twice or left out, and nobody begins from what another left."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from fake_runner import DeviceError, FakeRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine_properties import FAIL_IN, MANY, MODES, VOCAB, World, limits, played, requests

from jaxinfer.core import Limits, Request, SamplingParams, Slice, StepPlan
from jaxinfer.engine import Engine
from jaxinfer.engine.scheduler import Scheduler

STATEFUL = limits.map(lambda lim: dataclasses.replace(lim, stateful=True))


class StatefulRunner(FakeRunner):
    """A FakeRunner whose model keeps a state of each sequence, too: its tokens so far, in order. A step in
    `fail_sampling` runs, and then its sampling fails on the host: pages and states are as the step left them.
    """

    def __init__(self, limits: Limits, fail_sampling: set[int] = frozenset(), **faults: Any):
        super().__init__(limits, **faults)
        self.states: dict[int, list[int]] = {}
        self.fail_sampling = fail_sampling

    def dispatch(self, plan: StepPlan) -> Any:
        places = [piece.state_place for piece in plan.slices]
        assert all(1 <= place <= self.limits.max_num_seqs for place in places), places
        assert len(set(places)) == len(places), f"two slices share a place: {places}"
        return super().dispatch(plan)

    def _run(self, piece: Slice) -> tuple[list[int], tuple]:
        seen, scores = super()._run(piece)
        held = self.states.get(piece.state_place, []) if piece.start else []
        self.garbage_reads += held != seen[: piece.start] and not self._broken
        self.states[piece.state_place] = held + seen[piece.start :]
        return seen, scores

    def sample(self, pending: Any, draws: Any) -> None:
        if self.dispatches - 1 in self.fail_sampling and pending.error is None:
            error = DeviceError("the draws cannot be packed")
            error.kv_lost = False
            raise error
        super().sample(pending, draws)


@settings(MANY, max_examples=300)
@given(st.data())
def test_any_schedule_gives_each_request_its_solo_output(data: st.DataObject) -> None:
    """Arrivals, cancels, continuations, preemptions; steps that fail on the device, before they reach it, and
    after they ran."""
    lim = data.draw(STATEFUL)
    steps = st.frozensets(st.integers(0, 40), max_size=4)
    runner = StatefulRunner(
        lim, fail_sampling=data.draw(steps), fail_steps=data.draw(steps), fail_in=data.draw(FAIL_IN)
    )
    world = World(lim, runner, **data.draw(MODES))
    world.prefix_caching = False  # asked for or not
    cancelled = played(world, data, requests, most=6)
    failed = {name for (name, _), reason in world.reasons.items() if reason == "error"}
    world.assert_as_alone(but=cancelled | failed)


def lim(**changes: Any) -> Limits:
    usual: dict[str, Any] = {
        "num_pages": 20, "page_size": 4, "max_num_seqs": 3, "max_num_batched_tokens": 16, "max_model_len": 40,
        "vocab_size": VOCAB, "stateful": True,
    }  # fmt: skip
    return Limits(**{**usual, **changes})


def asked(name: str, length: int, n: int = 1) -> Request:
    sampling = SamplingParams(max_tokens=6, seed=1, ignore_eos=True, n=n)
    return Request(request_id=name, prompt_token_ids=tuple(range(length)), sampling=sampling)


def test_what_ran_and_was_not_read_is_run_from_the_start() -> None:
    runner = StatefulRunner(lim(), fail_sampling={2})
    world = World(lim(), runner)
    world.add(asked("a", 5))
    world.add(asked("b", 3))
    world.drain()
    world.assert_as_alone()
    starts = [[piece.start for piece in plan.slices] for plan in runner.plans[:6]]
    assert starts[:3] == [[0, 0], [5, 3], [6, 4]]
    assert starts[3] == [0]  # a suspect alone, all of its tokens again


def test_the_same_faults_are_seen_where_tokens_are_run_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above relies on: `undo` as it is for pages would add tokens to a state again."""
    undo = Scheduler.undo

    def as_for_pages(self: Scheduler, plan: StepPlan) -> None:
        self.limits, held = dataclasses.replace(self.limits, stateful=False), self.limits
        undo(self, plan)
        self.limits = held

    monkeypatch.setattr(Scheduler, "undo", as_for_pages)
    world = World(lim(), StatefulRunner(lim(), fail_sampling={2}))
    world.add(asked("a", 5))
    world.add(asked("b", 3))
    with pytest.raises(AssertionError):
        world.drain()


def test_continuations_run_their_prompt_each_and_nothing_is_found_in_pages() -> None:
    runner = StatefulRunner(lim())
    world = World(lim(), runner, prefix_caching=True)
    assert world.engine.scheduler.tables.cache is None
    world.prefix_caching = False
    world.add(asked("a", 9, n=3))
    world.drain()
    world.add(asked("b", 9))
    world.drain()
    world.assert_as_alone()
    assert not any(plan.copies for plan in runner.plans)
    begun = [piece for plan in runner.plans for piece in plan.slices if piece.start == 0]
    assert [sum(piece.uid == uid for piece in begun) for uid in range(4)] == [1] * 4


def test_places_are_held_while_a_sequence_runs_and_handed_on() -> None:
    world = World(lim(max_num_seqs=2), StatefulRunner(lim(max_num_seqs=2)))
    for name in "abc":
        world.add(asked(name, 3))
    world.step()
    scheduler = world.engine.scheduler
    assert [s.state_place for s in scheduler.running] == [1, 2]
    assert [s.state_place for s in scheduler.waiting] == [0]
    world.engine.cancel("a")
    world.step()
    assert {s.request.request_id: s.state_place for s in scheduler.running} == {"b": 2, "c": 1}
    scheduler.running[0].state_place = 1
    assert "places of states" in " ".join(scheduler.check())
    scheduler.running[0].state_place = 2
    world.drain()


def test_models_without_states_have_no_places() -> None:
    runner = FakeRunner(lim(stateful=False))
    engine = Engine(runner, lim(stateful=False))
    engine.add(asked("a", 5))
    while engine.has_work:
        engine.step()
    assert all(piece.state_place == 0 for plan in runner.plans for piece in plan.slices)
    with pytest.raises(AssertionError):
        StatefulRunner(lim()).dispatch(runner.plans[0])
