"""The decisions of the scheduler, each in the smallest case that needs it."""

from __future__ import annotations

from typing import Any

import pytest
from fake_runner import FakeRunner, check_plan

from jaxinfer.core import (
    ConfigError,
    Limits,
    Request,
    Sampled,
    SamplingParams,
    Sequence,
    Status,
    StepPlan,
    StepResult,
)
from jaxinfer.engine import Scheduler
from jaxinfer.engine.drawing import Drawing
from jaxinfer.engine.validate import validate


def limits(**changes: Any) -> Limits:
    base: dict[str, Any] = {
        "num_pages": 101,
        "page_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
        "max_model_len": 64,
        "vocab_size": 50,
    }
    return Limits(**{**base, **changes})


class Bench:
    """A scheduler with sequences A, B, C, ... (uids 0, 1, 2, ...) and a fake device."""

    def __init__(self, lim: Limits, *, policy: Any = "fcfs", prefix_caching: bool = False, **runner: Any):
        self.limits = lim
        self.scheduler = Scheduler(lim, policy=policy, prefix_caching=prefix_caching)
        self.runner = FakeRunner(lim, **runner)
        self.sequences: list[Sequence] = []
        self.drawings: list[Drawing] = []

    def add(self, prompt: int | tuple[int, ...], **sampling: Any) -> Sequence:
        ids = tuple(range(1, prompt + 1)) if isinstance(prompt, int) else prompt
        request = Request(
            request_id=str(len(self.sequences)),
            prompt_token_ids=ids,
            sampling=SamplingParams(seed=1, **{"ignore_eos": True, **sampling}),
        )
        sequence = Sequence(
            uid=len(self.sequences),
            request=request,
            index=0,
            seed=1,
            max_tokens=validate(request, self.limits),
            tokens=list(ids),
            num_prompt=len(ids),
        )
        self.sequences.append(sequence)
        self.drawings.append(Drawing(sequence, self.limits, None))
        self.scheduler.add(sequence)
        return sequence

    def plan(self) -> StepPlan:
        plan = self.scheduler.schedule()
        assert plan is not None
        check_plan(plan, self.limits)
        return plan

    def step(self) -> dict[str, tuple[int, int]]:
        """Run a step; returns {name: (start, count)} in the order of the plan."""
        plan = self.plan()
        try:
            result = self.run(plan)
        except RuntimeError as error:
            self.scheduler.fail(plan, error)
        else:
            self.commit(plan, result)
        assert self.scheduler.check() == []
        return {"ABCDEFGH"[piece.uid]: (piece.start, piece.count) for piece in plan.slices}

    def start(self, plan: StepPlan) -> Any:
        """Dispatch a plan and say how its tokens are chosen; returns what `fetch` takes."""
        pending = self.runner.dispatch(plan)
        emitting = [plan.slices[index] for index in plan.emitting]
        self.runner.sample(pending, [self.drawings[piece.uid].draw(piece) for piece in emitting])
        return pending

    def run(self, plan: StepPlan) -> StepResult:
        return self.runner.fetch(self.start(plan))

    def commit(self, plan: StepPlan, result: StepResult) -> list[Any]:
        outcomes = self.scheduler.commit(plan, result)
        for outcome in outcomes:
            if outcome.sampled is not None:
                self.drawings[outcome.sequence.uid].append(outcome.sampled.token_id)
        return outcomes

    def steps(self, count: int) -> list[dict[str, tuple[int, int]]]:
        return [self.step() for _ in range(count)]


# ----------------------------------------------------------------------------------------- sharing a step


def test_the_example_of_core() -> None:
    bench = Bench(limits(max_num_batched_tokens=3))
    bench.add(5)
    assert bench.steps(3) == [{"A": (0, 3)}, {"A": (3, 2)}, {"A": (5, 1)}]


def test_decodes_come_first_and_share_the_budget_with_chunks() -> None:
    bench = Bench(limits(max_num_batched_tokens=8))
    bench.add(3)
    assert bench.step() == {"A": (0, 3)}
    bench.add(20)
    bench.add(2)
    assert bench.steps(3) == [
        {"A": (3, 1), "B": (0, 7)},
        {"A": (4, 1), "B": (7, 7)},
        {"A": (5, 1), "C": (0, 1), "B": (14, 6)},  # what the budget leaves of C is one token
    ]


def test_budget_of_one_serves_one_after_the_other() -> None:
    bench = Bench(limits(max_num_batched_tokens=1))
    bench.add(2, max_tokens=2)
    bench.add(1, max_tokens=1)
    assert bench.steps(4) == [{"A": (0, 1)}, {"A": (1, 1)}, {"A": (2, 1)}, {"B": (0, 1)}]


def test_at_most_max_num_seqs_run() -> None:
    bench = Bench(limits(max_num_seqs=2))
    for _ in range(4):
        bench.add(1, max_tokens=2)
    assert bench.steps(4) == [
        {"A": (0, 1), "B": (0, 1)},
        {"A": (1, 1), "B": (1, 1)},
        {"C": (0, 1), "D": (0, 1)},
        {"C": (1, 1), "D": (1, 1)},
    ]
    assert bench.scheduler.schedule() is None


def test_a_slice_has_the_pages_of_its_tokens_and_no_more() -> None:
    bench = Bench(limits(max_num_batched_tokens=4))
    sequence = bench.add(8, max_tokens=2)
    pages = []
    for _ in range(3):
        plan = bench.plan()
        pages.append(plan.slices[0].pages)
        bench.commit(plan, bench.run(plan))
        assert plan.slices[0].num_prompt == 8
    assert [len(p) for p in pages] == [1, 2, 3]
    assert pages[2][:2] == pages[1]
    assert (sequence.status, sequence.pages, bench.scheduler.pool.num_live) == (Status.FINISHED, [], 0)


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "page_size"])
def test_limits_that_allow_no_step_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        Scheduler(limits(**{name: 0}))


# --------------------------------------------------------------------------------------- running out of pages


def test_the_youngest_waits_and_is_preempted_when_an_older_one_needs_its_pages() -> None:
    """6 usable pages of 2: A and B decode until the pool is empty."""
    bench = Bench(limits(num_pages=7, page_size=2))
    a, b = bench.add(3, max_tokens=10), bench.add(3, max_tokens=10)
    assert bench.steps(3)[-1] == {"A": (4, 1), "B": (4, 1)}
    bench.step()
    assert bench.scheduler.pool.num_free == 0
    assert bench.step() == {"A": (6, 1)}
    assert (b.preemptions, b.computed, b.status) == (1, 0, Status.WAITING)
    assert a.preemptions == 0
    while a.status is Status.RUNNING:
        assert "B" not in bench.step(), "B would be preempted again at once"
    assert b.num_output == 4
    resumed = bench.step()
    assert resumed == {"B": (0, 7)}, "prompt and generated tokens together (B030)"
    assert b.num_output == 5
    assert bench.scheduler.preemptions == 1


def test_the_example_of_the_scheduler() -> None:
    bench = Bench(limits(num_pages=7, page_size=4, max_num_batched_tokens=8))
    bench.add(6, max_tokens=12)
    bench.add(3, max_tokens=12)
    steps = [(bench.step(), bench.scheduler.pool.num_free) for _ in range(13)]
    assert [steps[i - 1] for i in (1, 2, 4, 8, 12, 13)] == [
        ({"A": (0, 6), "B": (0, 2)}, 3),
        ({"A": (6, 1), "B": (2, 1)}, 3),
        ({"A": (8, 1), "B": (4, 1)}, 1),
        ({"A": (12, 1)}, 0),
        ({"A": (16, 1)}, 6),
        ({"B": (0, 8)}, 4),
    ]


def test_a_decode_without_a_page_waits_with_what_it_has() -> None:
    """7 usable pages of 2: the odd page goes to A, and B neither runs nor loses its own."""
    bench = Bench(limits(num_pages=8, page_size=2))
    a, b = bench.add(3, max_tokens=8), bench.add(3, max_tokens=8)
    bench.steps(4)
    assert bench.scheduler.pool.num_free == 1
    assert bench.step() == {"A": (6, 1)}
    assert bench.step() == {"A": (7, 1)}
    assert (b.status, len(b.pages), b.preemptions) == (Status.RUNNING, 3, 0)
    bench.step()
    assert (a.pages and len(a.pages), b.preemptions) == (5, 1)


def test_the_preempted_come_back_in_order_of_arrival() -> None:
    bench = Bench(limits(num_pages=9, page_size=1, max_num_seqs=3))
    for _ in range(4):
        bench.add(1, max_tokens=7)
    order: list[str] = []
    while bench.scheduler.has_unfinished:
        order += [name for name in bench.step() if name not in order]
        assert [s.uid for s in bench.scheduler.running] == sorted(s.uid for s in bench.scheduler.running)
        uids = [s.uid for s in bench.scheduler.waiting]
        assert uids == sorted(uids)
    assert order == ["A", "B", "C", "D"]
    assert bench.scheduler.preemptions > 0
    assert bench.sequences[0].preemptions == 0


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    """C is as small as can be and would fit into what B gives back; it would be preempted next."""
    bench = Bench(limits(num_pages=7, page_size=2))
    bench.add(3, max_tokens=10)
    bench.add(3, max_tokens=10)
    bench.steps(4)
    bench.add(1, max_tokens=1)
    assert bench.step() == {"A": (6, 1)}


def test_an_admission_needs_room_for_what_those_who_run_want_soon() -> None:
    """5 usable pages of 4: A (6 tokens, 2 pages) will want a third, so B (7 tokens and a page) must wait."""
    bench = Bench(limits(num_pages=6, page_size=4, max_num_batched_tokens=8))
    bench.add(6, max_tokens=6)
    bench.add(7, max_tokens=6)
    assert bench.step() == {"A": (0, 6)}
    bench = Bench(limits(num_pages=6, page_size=4, max_num_batched_tokens=8))
    bench.add(6, max_tokens=3)  # 8 tokens at most: two pages are all it will ever want
    bench.add(7, max_tokens=6)
    assert bench.step() == {"A": (0, 6), "B": (0, 2)}


def test_a_prompt_as_large_as_the_pool_runs_alone() -> None:
    bench = Bench(limits(num_pages=6, page_size=4, max_num_batched_tokens=8))
    bench.add(2, max_tokens=3)
    big = bench.add(20, max_tokens=1)
    bench.add(2, max_tokens=1)
    names = [set(step) for step in bench.steps(6)]
    assert names == [{"A"}, {"A"}, {"A"}, {"B"}, {"B"}, {"B"}]
    assert big.finish_reason == "length"
    assert bench.step() == {"C": (0, 2)}


# ------------------------------------------------------------------------------------------ steps in flight


def test_a_result_for_a_sequence_cancelled_in_flight_is_void() -> None:
    """Its pages are free at once: whoever gets them writes them after the step in flight (B010, B028)."""
    bench = Bench(limits())
    a, b = bench.add(5), bench.add(5)
    plan = bench.plan()
    pending = bench.start(plan)
    assert bench.scheduler.finish(a.uid, "abort") is a
    assert (a.pages, bench.scheduler.pool.num_live) == ([], 2)
    assert bench.scheduler.check() == []
    outcomes = bench.commit(plan, bench.runner.fetch(pending))
    assert [o.sequence for o in outcomes] == [b]
    assert (a.num_output, b.num_output, bench.scheduler.pool.num_live) == (0, 1, 2)


def test_a_result_from_before_a_preemption_is_void() -> None:
    """The sequence lost its pages and runs again when the result comes."""
    bench = Bench(limits())
    a = bench.add(5)
    old = bench.plan()
    pending = bench.start(old)
    bench.scheduler._requeue(a)
    assert (a.status, a.computed, a.ahead, a.drawing, a.epoch) == (Status.WAITING, 0, 0, 0, 1)
    new = bench.plan()
    assert new.slices[0].epoch == 1
    after = bench.start(new)
    assert bench.commit(old, bench.runner.fetch(pending)) == []
    assert (a.computed, a.num_output) == (0, 0)
    assert len(bench.commit(new, bench.runner.fetch(after))) == 1
    assert (a.computed, a.num_output) == (5, 1)


def test_a_step_is_planned_while_the_one_before_it_is_in_flight() -> None:
    """A token that is being sampled is run by the device as it comes, to the last but one of max_tokens."""
    bench = Bench(limits())
    a = bench.add(5, max_tokens=3)
    first = bench.plan()
    pending = bench.start(first)
    second = bench.plan()
    (piece,) = second.slices
    assert (piece.start, piece.count, piece.chained, piece.emit) == (5, 1, True, True)
    after = bench.start(second)
    assert bench.scheduler.check() == []
    bench.commit(first, bench.runner.fetch(pending))
    third = bench.plan()
    assert (third.slices[0].start, third.slices[0].chained) == (6, True)
    last = bench.start(third)
    assert bench.scheduler.schedule() is None, "the third token is the last one"
    bench.commit(second, bench.runner.fetch(after))
    bench.commit(third, bench.runner.fetch(last))
    assert (a.finish_reason, a.num_output) == ("length", 3)
    alone = Bench(limits())
    alone.add(5, max_tokens=3)
    alone.steps(3)
    assert a.tokens == alone.sequences[0].tokens


def test_a_plan_is_recorded_once() -> None:
    bench = Bench(limits())
    bench.add(5)
    plan = bench.plan()
    result = bench.run(plan)
    bench.scheduler.commit(plan, result)
    for record in (bench.scheduler.commit, bench.scheduler.fail):
        with pytest.raises(AssertionError):
            record(plan, result)  # type: ignore[arg-type]
        assert bench.sequences[0].num_output == 1


def test_finish_knows_only_the_unfinished() -> None:
    bench = Bench(limits())
    waiting = bench.add(5)
    assert bench.scheduler.finish(7, "abort") is None
    assert bench.scheduler.finish(waiting.uid, "abort") is waiting
    assert bench.scheduler.finish(waiting.uid, "abort") is None
    assert not bench.scheduler.has_unfinished


# --------------------------------------------------------------------------------------------- failed steps


def test_after_a_failed_step_each_of_its_sequences_runs_alone_until_it_is_past_the_place() -> None:
    bench = Bench(limits(), fail_steps={1})
    for _ in range(3):
        bench.add(3, max_tokens=9)
    bench.step()
    assert bench.step() == {"A": (3, 1), "B": (3, 1), "C": (3, 1)}
    assert bench.scheduler.pool.num_live == 0
    assert [s.num_output for s in bench.sequences] == [1, 1, 1]
    late = bench.add(2)
    assert bench.steps(4) == [
        {"A": (0, 4)},
        {"B": (0, 4)},
        {"C": (0, 4)},
        {"A": (4, 1), "B": (4, 1), "C": (4, 1), "D": (0, 2)},
    ]
    assert [s.num_output for s in bench.sequences] == [3, 3, 3, 1]
    assert late.preemptions == 0


def test_suspects_run_alone_for_as_many_chunks_as_it_takes() -> None:
    bench = Bench(limits(max_num_batched_tokens=4), fail_steps={2})
    bench.add(2)
    bench.add(9)
    bench.steps(2)
    assert bench.step() == {"A": (3, 1), "B": (5, 3)}
    assert bench.steps(4) == [{"A": (0, 4)}, {"B": (0, 4)}, {"B": (4, 4)}, {"A": (4, 1), "B": (8, 1)}]


def test_only_who_fails_alone_ends_in_error() -> None:
    bench = Bench(limits(), fail_tokens={49})
    bench.add(3, max_tokens=2)
    culprit = bench.add((1, 49), max_tokens=2)
    bench.add(4, max_tokens=2)
    names = []
    while bench.scheduler.has_unfinished:
        names.append("".join(bench.step()))
    assert names == ["ABC", "A", "B", "A", "C", "C"], "A is recomputed once more after B failed alone"
    assert [s.finish_reason for s in bench.sequences] == ["length", "error", "length"]
    assert culprit.error == "the step failed on the device (DeviceError)"


def test_a_failure_before_the_device_was_touched_loses_nothing() -> None:
    """B's chunk fails on the host: A and C keep pages and `computed`, as B does; each runs alone once."""
    bench = Bench(limits(), fail_tokens={49}, fail_in="host")
    bench.add(3, max_tokens=9)
    bench.step()
    bench.add((1, 49), max_tokens=9)
    bench.add(4, max_tokens=9)
    assert bench.step() == {"A": (3, 1), "B": (0, 2), "C": (0, 4)}
    assert bench.scheduler.pool.num_live == 3
    assert bench.steps(4) == [{"A": (3, 1)}, {"B": (0, 2)}, {"C": (0, 4)}, {"A": (4, 1), "C": (4, 1)}]
    assert [s.finish_reason for s in bench.sequences] == [None, "error", None]
    assert bench.sequences[1].error == "the step failed before it reached the device (DeviceError)"


def test_a_suspect_without_pages_lets_the_others_go_on() -> None:
    """After the failure A and B no longer fit together with what C needs; C's turn comes when they end."""
    bench = Bench(limits(num_pages=10, page_size=1), fail_steps={3})
    for _ in range(3):
        bench.add(1, max_tokens=5)
    while bench.scheduler.has_unfinished:
        bench.step()
    assert [s.finish_reason for s in bench.sequences] == ["length"] * 3


def test_a_preempted_one_that_is_in_the_plan_already_leaves_it() -> None:
    """B fails alone, so A is recomputed; C, suspect, got its turn meanwhile and decodes beside A's chunks."""
    bench = Bench(limits(num_pages=27, page_size=1, max_num_batched_tokens=3), fail_tokens={49})
    bench.add(20, max_tokens=3)
    bench.steps(7)
    bench.add((49,), max_tokens=12)
    c = bench.add(1, max_tokens=15)
    while c.num_output < 8:
        last = bench.step()
    assert last == {"C": (7, 1), "A": (15, 2)}
    assert bench.scheduler.pool.num_free == 1
    plan = bench.plan()
    assert [piece.uid for piece in plan.slices] == [0]
    assert (plan.preempted, plan.num_tokens) == ((2,), 3)


# ------------------------------------------------------------------------------------------- how it ends


def outcome_of(bench: Bench, token: int, logprob: float = -1.0) -> Any:
    plan = bench.plan()
    sampled = tuple(Sampled(token, logprob, 1) if piece.emit else None for piece in plan.slices)
    return bench.scheduler.commit(plan, StepResult(sampled))[0]


def test_min_tokens_holds_back_every_id_that_would_end_it() -> None:
    bench = Bench(limits(eos_token_ids=frozenset({2, 11})))
    bench.add(3, ignore_eos=False, min_tokens=2, stop_token_ids=[5])
    assert [held_back(bench) for _ in range(3)] == [(2, 5, 11), (2, 5, 11), ()]
    bench = Bench(limits(eos_token_ids=frozenset({2, 11})))
    bench.add(3, ignore_eos=True, min_tokens=2, stop_token_ids=[5])
    assert held_back(bench) == (5,), "an ignored EOS is a token like any other"


def held_back(bench: Bench) -> tuple[int, ...]:
    plan = bench.plan()
    changes = bench.drawings[0].draw(plan.slices[0]).changes
    bench.commit(plan, StepResult((Sampled(1, -1.0, 1),)))
    held = () if changes is None else zip(changes.ids, changes.addends, strict=True)
    return tuple(sorted(token for token, addend in held if addend == float("-inf")))


def test_a_stop_before_min_tokens_does_not_count() -> None:
    """Even if a runner chose what was held back."""
    bench = Bench(limits(eos_token_ids=frozenset({2})))
    sequence = bench.add(3, ignore_eos=False, min_tokens=1)
    outcome_of(bench, 2)
    assert sequence.finish_reason is None
    outcome_of(bench, 2)
    assert sequence.finish_reason == "stop"


@pytest.mark.parametrize("token", [2, 11])
def test_each_eos_ends_it(token: int) -> None:
    bench = Bench(limits(eos_token_ids=frozenset({2, 11})))
    bench.add(3, ignore_eos=False, max_tokens=1)
    outcome = outcome_of(bench, token)
    assert (outcome.sequence.finish_reason, outcome.stop_reason) == ("stop", None), "stop goes before length"


def test_a_stop_token_id_says_which() -> None:
    bench = Bench(limits(eos_token_ids=frozenset({2})))
    bench.add(3, stop_token_ids=[9, 2])
    outcome = outcome_of(bench, 2)
    assert (outcome.sequence.finish_reason, outcome.stop_reason) == ("stop", 2), "EOS is ignored, 2 is not"


@pytest.mark.parametrize(
    ("token", "logprob", "message"),
    [
        (1, float("nan"), "finite"),
        (1, float("-inf"), "finite"),
        (50, -1.0, "vocabulary"),
        (-1, -1.0, "vocabulary"),
    ],
)
def test_a_result_that_means_nothing_is_an_error(token: int, logprob: float, message: str) -> None:
    bench = Bench(limits())
    sequence = bench.add(3)
    outcome = outcome_of(bench, token, logprob)
    assert (sequence.finish_reason, outcome.sampled) == ("error", None)
    assert message in (sequence.error or "")
    assert bench.scheduler.pool.num_live == 0
