"""Times steps of the real programs on made-up plans: any batch at any context, without computing the context.

What K/V the pages hold does not change how long attention takes, so rows may stand at position 4000 of pages
that nobody has filled. Steps are started as the engine starts them, the next before the last is fetched.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxinfer.config import StepShape, choose_step_shape
from jaxinfer.core import Draw, SamplingParams, Slice, StepPlan
from jaxinfer.planner import ModelCosts, StepWork
from jaxinfer.planner.costs import Span
from jaxinfer.runtime import JaxRunner

GREEDY = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class StepKind:
    """Slices of a step, and whether they sample. Those of one token first."""

    spans: tuple[Span, ...]
    emit: bool

    @property
    def places(self) -> int:
        """Tokens without padding."""
        return sum(count for _, count in self.spans)


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """What a step asked for, its padding included, and how long it took: the median of its repeats."""

    work: StepWork
    seconds: float


def step_kinds(ladder: Sequence[StepShape], tokens_in_pool: int, most_context: int) -> list[StepKind]:
    """Steps that tell the terms of a calibration apart: every number of decode rows of the ladder and every
    number of chunk tokens, short and long contexts, with and without sampling.

    `tokens_in_pool`: rows share it, so that no page is read twice in a step. A budget of few steps: each
    bucket compiles, and the largest take a second on a CPU.
    """
    kinds: list[StepKind] = []
    for rows in sorted({shape.decode_rows for shape in ladder if not shape.chunk_rows}):
        longest = min(most_context - 2, tokens_in_pool // rows - 1)
        for context, emit in ((64, False), (64, True), (longest // 3, True), (longest, True)):
            kinds.append(StepKind(((min(context, longest), 1),) * rows, emit))
        if rows > 2:  # a bucket that is not full tells what a row costs from what a place does
            kinds.append(StepKind(((min(64, longest), 1),) * (rows - rows // 4), emit=True))
    for tokens in sorted({shape.chunk_tokens for shape in ladder if shape.chunk_rows}):
        longest = min(most_context, tokens_in_pool) - tokens - 1
        if longest < 0:
            continue
        for start, emit in ((0, False), (0, True), (longest // 3, False), (longest, False)):
            kinds.append(StepKind(((start, tokens),), emit))
        half = tokens // 2
        if half > 1 and longest >= 0:
            kinds.append(StepKind(((0, half), (0, tokens - half)), emit=False))
    return list(dict.fromkeys(kinds))


def plan_of(kind: StepKind, step: int, runner: JaxRunner) -> StepPlan:
    """A plan of that kind over pages of the runner's pool, each row its own as long as they last."""
    size = runner.page_size
    pages = itertools.cycle(range(1, runner.num_pages))
    slices = tuple(
        Slice(
            uid=row, start=start, tokens=(1,) * count, emit=kind.emit, num_prompt=start + count,
            pages=tuple(itertools.islice(pages, -(-(start + count) // size))),
            state_place=row + 1 if runner.num_states else 0,
        )
        for row, (start, count) in enumerate(kind.spans)
    )  # fmt: skip
    return StepPlan(step, slices)


def measure_step(
    runner: JaxRunner, costs: ModelCosts, kind: StepKind, *, least_s: float = 0.15, repeats: int = 4
) -> MeasuredStep:
    """Run steps of a kind one behind the other, `repeats` at least and `least_s` seconds in all."""
    plan = plan_of(kind, 0, runner)
    shape = choose_step_shape(plan, runner.ladder)
    draws = [Draw(GREEDY, seed=1, position=piece.start + piece.count) for piece in plan.slices if piece.emit]

    def start():
        pending = runner.dispatch(plan)
        runner.sample(pending, draws)
        return pending

    runner.fetch(start())  # compiles what is missing
    before = start()
    times: list[float] = []
    began = last = time.perf_counter()
    while len(times) < repeats or last - began < least_s:
        following = start()
        runner.fetch(before)
        now = time.perf_counter()
        times.append(now - last)
        last, before = now, following
    runner.fetch(before)
    head_places = next((s.rows for s in runner.programs.samples if s.rows >= len(draws)), 0) if draws else 0
    work = costs.work(kind.spans, len(draws), places=shape.tokens, head_places=head_places)
    return MeasuredStep(work, statistics.median(times[1:]))


def measure_steps(
    runner: JaxRunner,
    costs: ModelCosts,
    kinds: Sequence[StepKind],
    done: Callable[[int], None] = lambda _: None,
) -> list[MeasuredStep]:
    """Each kind in turn; `done(1)` after each. The pool's content is overwritten: no request may be in it."""
    steps = []
    for kind in kinds:
        steps.append(measure_step(runner, costs, kind))
        done(1)
    return steps
