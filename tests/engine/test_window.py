"""Pages that fall behind every window go back: when exactly, how many are left, and what is refused."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from fake_runner import first_seen
from hypothesis import given
from hypothesis import strategies as st
from test_scheduler import Bench, limits

from jaxinfer.core import (
    ConfigError,
    Limits,
    Request,
    RequestError,
    SamplingParams,
    Status,
    StepPlan,
)
from jaxinfer.engine.validate import validate


def windowed(window: int = 6, **changes: Any) -> Limits:
    """Pages of 4, unless changed."""
    return limits(**{"window": window, "max_model_len": 4096, **changes})


def words(count: int) -> tuple[int, ...]:
    return tuple(i % 49 + 1 for i in range(count))


# ------------------------------------------------------------------------------------------- arithmetic


@given(st.integers(1, 9), st.integers(1, 24), st.integers(1, 12), st.integers(1, 80))
def test_most_pages_is_what_a_run_of_slices_reaches_and_no_more(
    size: int, window: int, chunk: int, tokens: int
) -> None:
    """Against counting: every slice of at most `chunk` tokens at every place of the sequence."""
    lim = windowed(window, page_size=size)
    reached = 0
    for start in range(tokens):
        end = min(start + chunk, tokens)
        held = {p // size for p in range(first_seen(start, window), end)}
        assert min(held) == lim.first_page(start)
        reached = max(reached, len(held))
    bound = lim.most_pages(tokens, chunk)
    assert reached <= bound
    if tokens >= window + chunk + 2 * size:  # long enough to have met every alignment
        assert reached == bound
    assert dataclasses.replace(lim, window=None).most_pages(tokens, chunk) == -(-tokens // size)


def test_pages_per_sequence() -> None:
    mistral = windowed(4096, page_size=16, max_num_batched_tokens=512, max_model_len=32768)
    assert mistral.pages_per_sequence == 289  # 256 of window, 32 of chunk, and one for where it begins
    assert mistral.most_pages(32768, 1) == 257
    assert dataclasses.replace(mistral, window=None).pages_per_sequence == 2048
    assert dataclasses.replace(mistral, max_model_len=1000).pages_per_sequence == 63
    assert windowed(1, max_num_batched_tokens=1).pages_per_sequence == 1


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="window must be at least 1, got 0"):
        Bench(windowed(0))


# -------------------------------------------------------------------------------------------- releasing


def test_a_page_goes_when_the_next_query_no_longer_sees_it() -> None:
    """Window 6, pages of 4: the query at 9 sees 4 .. 9, so page 0 goes once 9 tokens are computed."""
    bench = Bench(windowed())
    a = bench.add(7, max_tokens=20)
    held = {}
    while a.status is Status.RUNNING or not a.computed:
        bench.step()
        if a.status is Status.RUNNING:
            held[a.computed] = (a.released, len(a.pages), bench.scheduler.pool.num_live)
    assert held[7] == (0, 2, 2)
    assert held[8] == (0, 2, 2)
    assert held[9] == (1, 3, 2)
    assert held[12] == (1, 3, 2)
    assert held[13] == (2, 4, 2)
    assert max(live for _, _, live in held.values()) == 2
    assert (a.pages, a.released, bench.scheduler.pool.num_live) == ([], 0, 0)


def test_a_slice_keeps_the_places_of_the_released() -> None:
    bench = Bench(windowed(max_num_batched_tokens=8))
    bench.add(20, max_tokens=2)
    bench.steps(2)
    pages = bench.plan().slices[0].pages
    assert [page > 0 for page in pages] == [False, False, True, True, True]  # the query at 16 sees 11 on


def test_the_released_are_handed_out_again() -> None:
    """B runs in the pages that A gave back."""
    bench = Bench(windowed(num_pages=7, max_num_batched_tokens=8))
    a = bench.add(24, max_tokens=9)
    bench.steps(2)
    gone = {page for page in bench.runner.plans[-1].slices[0].pages if page} - set(a.pages)
    b = bench.add(4, max_tokens=9)
    bench.steps(3)
    assert gone & set(b.pages)


def test_without_a_window_nothing_goes() -> None:
    bench = Bench(limits())
    a = bench.add(40, max_tokens=20)
    bench.steps(10)
    assert (a.released, a.live_pages) == (0, len(a.pages))
    assert "pages=12" in repr(a)


@pytest.mark.parametrize("how", ["preempted", "abandoned", "failed", "cancelled"])
def test_whatever_ends_it_gives_back_what_is_left_once(how: str) -> None:
    bench = Bench(windowed(max_num_batched_tokens=8), fail_steps={4} if how == "failed" else ())
    a, b = bench.add(15, max_tokens=20), bench.add(3, max_tokens=20)
    bench.steps(4)
    assert (a.released, a.computed) == (3, 17)
    if how == "preempted":
        bench.scheduler._requeue(b)
        bench.scheduler._requeue(a)
    elif how == "abandoned":
        bench.plan()
        bench.scheduler.abandon()
    elif how == "failed":
        bench.step()
    else:
        bench.scheduler.finish(a.uid, "abort")
        bench.scheduler.finish(b.uid, "abort")
    assert (a.pages, a.released, bench.scheduler.pool.num_live) == ([], 0, 0)
    assert bench.scheduler.check() == []
    if how != "cancelled":
        assert bench.step()["A"] == (0, 8), "it starts again with the keys of its first window"
        assert bench.scheduler.check() == []


def test_a_failure_before_the_device_was_touched_leaves_what_was_released() -> None:
    bench = Bench(windowed(), fail_steps={3}, fail_in="host")
    a = bench.add(12, max_tokens=9)
    bench.add(2, max_tokens=9)
    bench.steps(4)
    assert (a.released, a.computed, a.live_pages) == (2, 14, 2)
    assert bench.steps(2) == [{"A": (14, 1)}, {"B": (4, 1)}]


def test_check_sees_what_is_wrong() -> None:
    bench = Bench(windowed(max_num_batched_tokens=8))
    a = bench.add(24, max_tokens=9)
    bench.steps(2)
    first = a.pages[a.released]
    a.pages[a.released] = 0
    assert any("page 0" in problem for problem in bench.scheduler.check())
    a.pages[a.released] = first
    a.pages[0] = first
    assert any("behind its window" in problem for problem in bench.scheduler.check())
    a.pages[0] = 0
    a.released -= 1
    assert any("behind its window" in problem for problem in bench.scheduler.check())
    a.released += 1
    assert bench.scheduler.check() == []


# ------------------------------------------------------------------------------------- steps in flight


def test_a_pipeline_of_two_steps_reads_what_was_written() -> None:
    """Step n + 1 is planned and started before n is recorded; what n's commit frees is poisoned at once, and
    n + 1 has not read it, nor does n + 2."""
    bench = Bench(windowed(5, max_num_batched_tokens=4))
    a = bench.add(24, max_tokens=9)
    flying: list[tuple[StepPlan, Any]] = []
    while a.finish_reason is None:
        plan = bench.scheduler.schedule()
        started = (plan, bench.start(plan)) if plan is not None else None
        if flying:
            before, pending = flying.pop()
            bench.commit(before, bench.runner.fetch(pending))
            bench.runner.poison([0, *bench.scheduler.pool.free_pages()])
            assert bench.scheduler.check() == []
        if started is not None:
            flying.append(started)
    assert bench.runner.garbage_reads == 0
    assert bench.runner.most_in_flight == 2
    assert a.num_output == 9


def test_two_thousand_tokens_in_eight_pages() -> None:
    bench = Bench(windowed(16, num_pages=9))
    a = bench.add(words(1500), max_tokens=500)
    steps = 0
    while bench.scheduler.has_unfinished:
        bench.step()
        steps += 1
        assert a.live_pages <= 5
        bench.runner.poison([0, *bench.scheduler.pool.free_pages()])
    assert (a.finish_reason, len(a.tokens), bench.runner.garbage_reads) == ("length", 2000, 0)
    assert steps < 1500 / 12 + 501, "chunks of what the free pages hold"


def test_the_smallest_pool_moves_it_token_by_token_and_a_smaller_one_is_refused() -> None:
    """Window 16, pages of 4: 15 keys before the query begin anywhere in a page, so five pages."""
    bench = Bench(windowed(16, num_pages=6))
    a = bench.add(words(100), max_tokens=100)
    while bench.scheduler.has_unfinished:
        bench.step()
    assert (a.finish_reason, len(a.tokens)) == ("length", 200)
    tight = windowed(16, num_pages=5)
    with pytest.raises(RequestError) as caught:
        Bench(tight).add(words(100), max_tokens=100)
    assert caught.value.param == "prompt"
    numbers = set(re.findall(r"\d+", str(caught.value)))
    assert {"100", "5", "16", "4"} <= numbers, caught.value  # tokens, pages needed, window, pages and size
    with pytest.raises(RequestError) as caught:
        Bench(tight).add(10, max_tokens=100)
    assert caught.value.param == "max_tokens"
    assert {"10", "100", "5", "16", "4", "7"} <= set(re.findall(r"\d+", str(caught.value)))
    with pytest.raises(RequestError) as caught:
        Bench(tight).add(10, min_tokens=8)
    assert caught.value.param == "min_tokens"
    assert validate(asked(10), tight) == 7, "what needs no page back is served: 16 tokens in 4 pages"
    assert validate(asked(100), windowed(16, num_pages=6)) == 4096 - 100, "nothing but the model's limit"


def asked(prompt: int, **sampling: Any) -> Request:
    return Request(request_id="r", prompt_token_ids=(1,) * prompt, sampling=SamplingParams(**sampling))


def test_long_prompts_run_side_by_side_in_a_pool_that_holds_neither() -> None:
    """14 usable pages of 4, window 16: two of 200 tokens want 7 for a chunk of 8, and 5 to decode."""
    bench = Bench(windowed(16, num_pages=15, max_num_batched_tokens=8))
    bench.add(words(200), max_tokens=30)
    bench.add(words(200), max_tokens=30)
    together = 0
    while bench.scheduler.has_unfinished:
        together += len(bench.step()) == 2
    assert together >= 25
    assert bench.scheduler.preemptions == 0


@pytest.mark.parametrize(("usable", "admitted"), [(11, False), (12, True)])
def test_an_admission_waits_for_pages_for_whole_chunks(usable: int, admitted: bool) -> None:
    """A decodes in 5 pages and B's chunks of 8 take 7; with 5 it would go on by a page at a time."""
    bench = Bench(windowed(16, num_pages=usable + 1, max_num_batched_tokens=8))
    a, b = bench.add(20, max_tokens=30), bench.add(40, max_tokens=30)
    while a.pending > 1 or not a.num_output:
        assert set(bench.step()) == {"A"}
    bench.steps(2)
    assert (b.status is Status.RUNNING) == admitted
    assert bench.scheduler.preemptions == 0


def test_a_pool_with_no_room_for_a_whole_chunk_serves_one_after_the_other() -> None:
    bench = Bench(windowed(16, num_pages=7, max_num_batched_tokens=64))
    a, b = bench.add(words(100), max_tokens=5), bench.add(words(100), max_tokens=5)
    assert bench.step() == {"A": (0, 24)}
    while bench.scheduler.has_unfinished:
        assert len(bench.step()) == 1
    assert (a.finish_reason, b.finish_reason, b.preemptions) == ("length", "length", 0)


# ------------------------------------------------------------------------------------ sampled vocabulary


def test_holding_back_all_that_can_be_sampled_is_refused() -> None:
    few = limits(sampled_vocab=20)  # of 50
    everything = list(range(20))
    with pytest.raises(RequestError, match="every one of the 20 tokens that can be sampled") as caught:
        validate(asked(1, min_tokens=1, stop_token_ids=everything), few)
    assert caught.value.param == "min_tokens"
    validate(asked(1, min_tokens=1, stop_token_ids=everything), limits())
    validate(asked(1, min_tokens=1, stop_token_ids=[*range(19), 20, 21]), few)  # 19 is left
    validate(asked(1, stop_token_ids=everything), few)
