"""With a window, any schedule in any small pool gives what the same engine gives that keeps every page.

The fake model sees the last W tokens only, reads them back through the page table, and hashes them: a page
given back too early, or handed to two, changes the answer. What is free is poisoned after every step.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from fake_runner import FakeRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine_properties import (
    CULPRIT,
    EOS,
    FAIL_IN,
    HARMLESS,
    MANY,
    MODES,
    VOCAB,
    World,
    played,
    requests,
)

from jaxinfer.core import Limits, Request, SamplingParams
from jaxinfer.engine import Engine, validate


class WindowWorld(World):
    """A World that also looks at the pages of every sequence after each step."""

    def step(self) -> list[Any]:
        events = super().step()
        limits, scheduler = self.limits, self.engine.scheduler
        for sequence in scheduler.running:
            assert sequence.live_pages <= scheduler._soon(sequence) <= limits.pages_per_sequence
            if not scheduler._suspects:  # a failure on the host leaves pages of a chunk that did not run
                assert sequence.live_pages <= limits.most_pages(sequence.planned, 1) + sequence.ahead
        tables = [page for s in scheduler.running for page in s.pages if page]
        assert len(set(tables)) == scheduler.pool.num_live
        assert len(tables) == len(set(tables)) or any(r.sampling.n > 1 for r in self.requests.values())
        return events

    def assert_as_without_window(self, *, but: set[str] = frozenset()) -> None:
        """Every token equals that of an engine that knows no window, in a pool that never lacks a page."""
        per_sequence = -(-self.limits.max_model_len // self.limits.page_size)
        limits = dataclasses.replace(
            self.limits, window=None, sinks=0, num_pages=per_sequence * 4 + 1, max_num_seqs=4
        )
        runner = FakeRunner(limits, window=self.limits.window, sinks=self.limits.sinks)
        other = Engine(runner, limits, seed=0)
        for request in self.requests.values():
            most = validate(request, self.limits)
            sampling = dataclasses.replace(request.sampling, max_tokens=most)
            other.add(dataclasses.replace(request, sampling=sampling))
        full: dict[tuple[str, int], list[int]] = {key: [] for key in self.tokens}
        reasons = {}
        while other.has_work:
            for event in other.step():
                full[event.request_id, event.index] += event.token_ids
                reasons[event.request_id, event.index] = event.finish_reason
        assert other.stats()["preemptions"] == runner.garbage_reads == 0
        for (name, index), tokens in self.tokens.items():
            if name in but:
                assert tokens == full[name, index][: len(tokens)]
            else:
                assert (tokens, self.reasons[name, index]) == (full[name, index], reasons[name, index])


@st.composite
def window_limits(draw: st.DrawFn) -> Limits:
    """Windows of 1 .. 40, sinks at times, pages of 1 .. 8 tokens, and a pool from what token by token takes,
    mostly."""
    window, size = draw(st.integers(1, 40)), draw(st.integers(1, 8))
    sinks = draw(st.sampled_from([0, 0, 1, 4, 9]))
    fewest = -(-(window - 1) // size) + 1 + -(-sinks // size)
    pages = draw(st.one_of(st.integers(0, 6).map(lambda more: fewest + more), st.integers(1, 24)))
    return Limits(
        num_pages=pages + 1,
        page_size=size,
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.one_of(st.integers(1, 6), st.integers(7, 64))),
        max_model_len=draw(st.integers(4, 120)),
        vocab_size=VOCAB,
        eos_token_ids=draw(st.sampled_from([frozenset(), EOS])),
        window=window,
        sinks=sinks,
    )


@st.composite
def long_requests(draw: st.DrawFn, name: str, tokens: st.SearchStrategy[int] = HARMLESS) -> Request:
    """Like `requests`, and prompts several windows long."""
    request = draw(requests(name, tokens))
    copies = draw(st.sampled_from([1, 1, 3]))
    return dataclasses.replace(request, prompt_token_ids=request.prompt_token_ids * copies)


@settings(MANY, max_examples=600)
@given(st.data())
def test_any_schedule_gives_what_an_engine_that_keeps_every_page_gives(data: st.DataObject) -> None:
    """Arrivals and cancels at any step, chunks and preemptions as the pool has it."""
    world = WindowWorld(lim := data.draw(window_limits()), FakeRunner(lim), **data.draw(MODES))
    cancelled = played(world, data, long_requests, most=8, most_steps=8)
    world.assert_as_without_window(but=cancelled)
    world.assert_as_alone(but=cancelled)


@settings(MANY, max_examples=600)
@given(st.data())
def test_failing_steps_and_interruptions_change_nothing(data: st.DataObject) -> None:
    """Some steps fail, some sequences fail every step they are in, some steps are interrupted."""
    lim = data.draw(window_limits())
    failing = set(data.draw(st.lists(st.integers(0, 80), max_size=6)))
    runner = FakeRunner(lim, fail_steps=failing, fail_tokens={CULPRIT}, fail_in=data.draw(FAIL_IN))
    world = WindowWorld(lim, runner, **data.draw(MODES))
    tokens = st.sampled_from([*range(38)] * 3 + [CULPRIT])
    for number in range(data.draw(st.integers(1, 6))):
        world.add(data.draw(long_requests(f"r{number}", tokens)))
        for _ in range(data.draw(st.integers(0, 5))):
            world.step()
        if data.draw(st.integers(0, 3)) == 0 and not world.engine.asynchronous:
            world.engine.scheduler.schedule()
            world.engine.scheduler.abandon()
            assert world.engine.check() == []
    world.drain()
    errors = {name for (name, _), reason in world.reasons.items() if reason == "error"}
    harmless = [
        n for n in world.requests if not failing and CULPRIT not in world.requests[n].prompt_token_ids
    ]
    for (name, index), told in world.tokens.items():
        if name in harmless and CULPRIT not in told:
            assert world.reasons[name, index] != "error"
    world.assert_as_without_window(but=errors)


@settings(MANY, max_examples=300)
@given(st.data())
def test_whoever_is_accepted_alone_finishes(data: st.DataObject) -> None:
    """Refused or finished, never stuck; and refused only where the pool is below what one window takes."""
    lim = dataclasses.replace(data.draw(window_limits()), max_model_len=data.draw(st.integers(100, 400)))
    prompt = tuple(data.draw(st.lists(HARMLESS, min_size=1, max_size=99)))
    sampling = SamplingParams(
        seed=1, ignore_eos=True, max_tokens=data.draw(st.integers(1, 100 - len(prompt)))
    )
    world = WindowWorld(lim, FakeRunner(lim))
    accepted = world.add(Request(request_id="r", prompt_token_ids=prompt, sampling=sampling))
    assert lim.window is not None
    total = len(prompt) + (sampling.max_tokens or 0) - 1
    fewest = min(-(-total // lim.page_size), -(-(lim.window - 1) // lim.page_size) + 1 + lim.sink_pages)
    assert accepted == (fewest <= lim.usable_pages)
    if not accepted:
        return
    while world.engine.has_work:
        before = world.engine.stats()["computed_tokens"]
        world.step()
        assert world.engine.stats()["computed_tokens"] > before, "it moves in every step"
    assert world.reasons["r", 0] == "length"
    assert world.engine.stats()["computed_tokens"] == total, "and nothing is computed twice"
    world.drain()
    world.assert_as_alone()


@settings(MANY, max_examples=200)
@given(st.data())
def test_the_oldest_moves_in_every_step(data: st.DataObject) -> None:
    lim = data.draw(window_limits())
    world = WindowWorld(lim, FakeRunner(lim))
    if not world.add(data.draw(long_requests("oldest").filter(lambda r: r.sampling.n == 1))):
        return
    for number in range(data.draw(st.integers(1, 6))):
        world.add(data.draw(long_requests(f"r{number}")))
    while ("oldest", 0) not in world.reasons:
        world.step()
        assert any(piece.uid == 0 for piece in world.runner.plans[-1].slices)


@pytest.mark.parametrize("seed", range(12))
def test_a_crowd_of_long_prompts_in_a_small_pool(seed: int) -> None:
    """Forty requests, many longer than the pool, preempting one another all the time."""
    draw = random.Random(seed)
    window, size = draw.randint(1, 40), draw.choice([1, 2, 4, 8])
    lim = Limits(
        num_pages=-(-(window - 1) // size) + 2 + draw.randint(0, 12),
        page_size=size,
        max_num_seqs=draw.choice([2, 8, 32]),
        max_num_batched_tokens=draw.choice([1, 8, 50]),
        max_model_len=300,
        vocab_size=VOCAB,
        eos_token_ids=EOS,
        window=window,
    )
    world = WindowWorld(lim, FakeRunner(lim))
    for number in range(40):
        prompt = tuple(draw.randrange(38) for _ in range(draw.choice([3, 20, draw.randint(1, 150)])))
        sampling = SamplingParams(seed=number, max_tokens=draw.randint(1, 60), ignore_eos=draw.random() < 0.7)
        assert world.add(Request(request_id=f"r{number}", prompt_token_ids=prompt, sampling=sampling))
        if draw.random() < 0.5:
            world.step()
    world.drain()
    world.assert_as_without_window()
