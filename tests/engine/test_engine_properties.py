"""Any schedule gives every request what it gets alone, and the books are exact at every step."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from fake_runner import FakeRunner, expected
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxinfer.core import Limits, Request, RequestError, SamplingParams, TokenEvent
from jaxinfer.engine import Engine, validate

VOCAB = 40
EOS = frozenset({3, 7})
CULPRIT, NAN = 38, 39  # where a test says so they do harm, in a prompt or sampled


@dataclass
class World:
    """One engine and what it has said. `run` steps it, checking everything that must hold always."""

    limits: Limits
    runner: FakeRunner
    asynchronous: bool = False
    prefix_caching: bool = False
    policy: Any = "fcfs"
    engine: Engine = field(init=False)
    requests: dict[str, Request] = field(default_factory=dict)
    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    reasons: dict[tuple[str, int], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.engine = Engine(
            self.runner,
            self.limits,
            seed=0,
            policy=self.policy,
            prefix_caching=self.prefix_caching,
            asynchronous=self.asynchronous,
        )

    def add(self, request: Request) -> bool:
        try:
            self.engine.add(request)
        except RequestError:
            return False
        self.requests[request.request_id] = request
        for index in range(request.sampling.n):
            self.tokens[request.request_id, index] = []
        return True

    def step(self) -> list[TokenEvent]:
        events = self.engine.step()
        told = Counter((e.request_id, e.index) for e in events)
        assert max(told.values(), default=0) <= 1 + self.asynchronous, (
            "a token, and that the next step failed"
        )
        for event in events:
            key = event.request_id, event.index
            assert key not in self.reasons, f"{key} goes on after its end"
            self.tokens[key] += event.token_ids
            if event.finish_reason is not None:
                self.reasons[key] = event.finish_reason
        assert self.engine.check() == []
        pool = self.engine.scheduler.pool
        assert pool.num_free + pool.num_cached + pool.num_live == self.limits.usable_pages
        self.runner.poison([0, *pool.free_pages()])  # what is free may hold anything
        assert self.runner.garbage_reads == 0
        return events

    def drain(self) -> None:
        """Run to the end, within a number of steps that a livelock exceeds."""
        # Each step alone moves the oldest by a token, and each may be recomputed for each older one's token.
        longest = self.limits.max_model_len
        bound = 50 + 4 * longest * (len(self.tokens) + 1)
        steps = 0
        while self.engine.has_work:
            self.step()
            steps += 1
            assert steps < bound, f"no end after {steps} steps: {self.engine}"
        assert set(self.reasons) == set(self.tokens), "every sequence ends with a reason"
        stats = self.engine.stats()
        assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"] == self.limits.usable_pages
        assert self.prefix_caching or not stats["pages_cached"]
        assert (stats["running"], stats["waiting"], stats["invariant_failures"]) == (0, 0, 0)
        assert sum(stats["finished"].values()) == len(self.tokens)

    def assert_as_alone(self, *, but: set[str] = frozenset()) -> None:
        """Every sequence that was not cut short has its solo tokens; one that was has the first of them."""
        for (request_id, index), tokens in self.tokens.items():
            reason = self.reasons[request_id, index]
            alone, alone_reason = expected(self.requests[request_id], self.limits, index)
            if request_id in but:
                assert tuple(tokens) == alone[: len(tokens)]
            else:
                assert (tuple(tokens), reason) == (alone, alone_reason)


limits = st.builds(
    Limits,
    num_pages=st.integers(2, 24),
    page_size=st.sampled_from([1, 2, 4, 8]),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.one_of(st.integers(1, 6), st.integers(7, 64)),
    max_model_len=st.integers(4, 48),
    vocab_size=st.just(VOCAB),
    eos_token_ids=st.sampled_from([frozenset(), EOS]),
)


HARMLESS = st.integers(0, 37)
FAIL_IN = st.sampled_from(["dispatch", "sample", "fetch", "host"])
MODES = st.fixed_dictionaries(
    {
        "asynchronous": st.booleans(),
        "prefix_caching": st.booleans(),
        "policy": st.sampled_from(["fcfs", "priority"]),
    }
)
FCFS = MODES.map(lambda modes: {**modes, "policy": "fcfs"})


@st.composite
def requests(draw: st.DrawFn, name: str, tokens: st.SearchStrategy[int] = HARMLESS) -> Request:
    most = draw(st.one_of(st.none(), st.integers(1, 12)))
    return Request(
        request_id=name,
        prompt_token_ids=tuple(draw(st.lists(tokens, min_size=1, max_size=30))),
        sampling=SamplingParams(
            n=draw(st.sampled_from([1, 1, 1, 2, 3])),
            max_tokens=most,
            min_tokens=draw(st.integers(0, most or 3)),
            seed=draw(st.integers(0, 2**64 - 1)),
            temperature=draw(st.sampled_from([0.0, 1.0])),
            stop_token_ids=draw(st.sampled_from([(), (11,), (11, 12, 13)])),
            ignore_eos=draw(st.booleans()),
            prompt_logprobs=draw(st.sampled_from([None] * 5 + [0])),
        ),
        priority=draw(st.sampled_from([0, 0, -3, 5])),
        cache_salt=draw(st.sampled_from([None, None, "salt"])),
    )


MANY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def played(
    world: World,
    data: st.DataObject,
    asks: Callable[[str], st.SearchStrategy[Request]],
    *,
    most: int,
    most_steps: int = 5,
) -> set[str]:
    """At most so many requests, some steps after each and now and then a cancel, to the end of all; who was
    cancelled."""
    cancelled: set[str] = set()
    for number in range(data.draw(st.integers(1, most))):
        world.add(data.draw(asks(f"r{number}")))
        for _ in range(data.draw(st.integers(0, most_steps))):
            world.step()
        if world.requests and data.draw(st.integers(0, 4)) == 0:
            name = data.draw(st.sampled_from(sorted(world.requests)))
            if world.engine.cancel(name):
                cancelled.add(name)
    world.drain()
    return cancelled


@settings(MANY, max_examples=1000)
@given(st.data())
def test_any_schedule_gives_each_request_its_solo_output(data: st.DataObject) -> None:
    """Arrivals at any step, cancels at any step, pools from one page on (B001-B007, B026, B028, B030)."""
    world = World(lim := data.draw(limits), FakeRunner(lim), **data.draw(MODES))
    cancelled = played(world, data, requests, most=8)
    world.assert_as_alone(but=cancelled)
    for name in cancelled:
        assert "abort" in [r for (i, _), r in world.reasons.items() if i == name]


@settings(MANY, max_examples=400)
@given(st.data())
def test_failing_steps_hurt_nobody_for_good(data: st.DataObject) -> None:
    """Steps that fail by chance: all that ran is recomputed; only who fails alone may end in error (B150)."""
    lim = data.draw(limits)
    failing = set(data.draw(st.lists(st.integers(0, 60), max_size=6)))
    runner = FakeRunner(lim, fail_steps=failing, fail_in=data.draw(FAIL_IN))
    world = World(lim, runner, **data.draw(MODES))
    for number in range(data.draw(st.integers(1, 6))):
        world.add(data.draw(requests(f"r{number}")))
        for _ in range(data.draw(st.integers(0, 3))):
            world.step()
    world.drain()
    alone = {
        plan.slices[0].uid
        for i, plan in enumerate(world.runner.plans)
        if i in failing and len(plan.slices) == 1
    }
    errors = [key for key, reason in world.reasons.items() if reason == "error"]
    # A step in flight behind one that fails is void, so that its own failure does not count.
    assert len(errors) <= len(alone) if world.asynchronous else len(errors) == len(alone)
    world.assert_as_alone(but={name for name, _ in errors})


@settings(MANY, max_examples=400)
@given(st.data())
def test_only_the_culprit_fails(data: st.DataObject) -> None:
    """A token that breaks any step it is in, and one that gives NaN, end their own sequences (B150, B159)."""
    lim = data.draw(limits)
    runner = FakeRunner(lim, fail_tokens={CULPRIT}, nan_tokens={NAN}, fail_in=data.draw(FAIL_IN))
    world = World(lim, runner, **data.draw(MODES))
    for number in range(data.draw(st.integers(1, 6))):
        world.add(data.draw(requests(f"r{number}", st.sampled_from([*range(38)] * 3 + [CULPRIT, NAN]))))
        for _ in range(data.draw(st.integers(0, 3))):
            world.step()
    world.drain()
    for (name, index), reason in world.reasons.items():
        alone, alone_reason = expected(world.requests[name], lim, index)
        tokens = tuple(world.tokens[name, index])
        history = world.requests[name].prompt_token_ids + alone
        # The last token of all is never run, so it can harm nobody.
        bad = next((i for i, token in enumerate(history[:-1]) if token in (CULPRIT, NAN)), None)
        if bad is None:
            assert (tokens, reason) == (alone, alone_reason)
        else:
            assert reason == "error"
            assert tokens == alone[: max(0, bad + 1 - len(world.requests[name].prompt_token_ids))]


@pytest.mark.parametrize("seed", range(12))
def test_a_crowd_in_a_small_pool(seed: int) -> None:
    """Sixty requests through a pool that holds a few: preempted all the time, and served all the same."""
    draw = random.Random(seed)
    lim = Limits(
        num_pages=draw.randint(10, 30),
        page_size=draw.choice([1, 4, 16]),
        max_num_seqs=draw.choice([2, 8, 32]),
        max_num_batched_tokens=draw.choice([1, 8, 50]),
        max_model_len=64,
        vocab_size=VOCAB,
        eos_token_ids=EOS,
    )
    modes = {"asynchronous": draw.random() < 0.5, "prefix_caching": draw.random() < 0.5}
    world = World(lim, FakeRunner(lim), **modes)
    for number in range(60):
        prompt = tuple(draw.randrange(38) for _ in range(draw.randint(1, 20)))
        sampling = SamplingParams(seed=number, max_tokens=draw.randint(1, 30), ignore_eos=draw.random() < 0.7)
        world.add(Request(request_id=f"r{number}", prompt_token_ids=prompt, sampling=sampling))
        if draw.random() < 0.5:
            world.step()
    world.drain()
    world.assert_as_alone()


@settings(MANY, max_examples=200)
@given(st.data())
def test_the_oldest_moves_in_every_step(data: st.DataObject) -> None:
    """Whatever comes later, the oldest sequence advances at each step until its end."""
    lim = data.draw(limits)
    world = World(lim, FakeRunner(lim), **data.draw(FCFS))
    oldest = data.draw(requests("oldest").filter(lambda r: r.sampling.n == 1))
    if not world.add(oldest):
        return
    for number in range(data.draw(st.integers(1, 6))):
        world.add(data.draw(requests(f"r{number}")))
    while ("oldest", 0) not in world.reasons:
        told, computed = len(world.tokens["oldest", 0]), world.engine.stats()["computed_tokens"]
        world.step()
        if not world.asynchronous:
            assert any(piece.uid == 0 for piece in world.runner.plans[-1].slices)
        elif world.engine.stats()["computed_tokens"] == computed:
            assert len(world.tokens["oldest", 0]) >= told, "only the first step brings nothing"
    assert world.engine.stats()["finished"]["error"] == 0
    _, reason = expected(oldest, lim)
    assert world.reasons["oldest", 0] == reason
    assert validate(oldest, lim) >= len(world.tokens["oldest", 0])
