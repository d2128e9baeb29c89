"""A device made of Python lists, for tests of everything above the `Runner` protocol.

It keeps each token in pages as a real step keeps K/V, and chooses each token from the history as it READS
IT BACK through the page table: all of it, or the last W tokens where the model has a window. A wrong page, a
lost token, or a page handed out too early changes the answer, as it would on a device.

A written place holds (position, token, path): `path` is a hash of all tokens up to it, as K/V depend on
all of them. So places that another sequence filled are right where its tokens were the same, nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.core import Draw, Limits, Request, Sampled, SamplingParams, Slice, StepPlan, StepResult
from jaxinfer.engine.validate import continuation_seed, held_back_ids, validate

GARBAGE = (-1, -2, -3)
"""What a page holds before anything was written to it, and after it was poisoned."""


class DeviceError(RuntimeError):
    """What a step raises when it was told to fail."""

    kv_lost = True


@dataclass
class Pending:
    """A step on the fake device. `histories[i]` is what the last query of slice i sees."""

    plan: StepPlan
    histories: list[list[int]]
    scores: list[tuple[Sampled, ...]]
    error: DeviceError | None = None
    sampled: list[Sampled | None] = field(default_factory=list)
    drawn: bool = False


class FakeRunner:
    """Implements `core.Runner`; also refuses (AssertionError) any plan that breaks the contract.

    scripts: prompt -> the tokens that follow it, whatever the seed (the last one repeats).
    fail_steps: numbers of the calls of dispatch (from 0) that raise.
    fail_tokens, nan_tokens: a step raises, or a row yields NaN, when a sequence holds one of these tokens.
    fail_in: "dispatch", "sample" or "fetch" raises, and the content of every page is lost; or "host" does,
    before anything was written (`kv_lost` False).
    window, sinks: how many tokens the model sees, where that is not what the limits let the engine know.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        scripts: Mapping[tuple[int, ...], tuple[int, ...]] | None = None,
        fail_steps: Collection[int] = (),
        fail_tokens: Collection[int] = (),
        nan_tokens: Collection[int] = (),
        fail_in: str = "fetch",
        window: int | None = None,
        sinks: int = 0,
    ):
        self.limits = limits
        self.window, self.sinks = window or limits.window, sinks or limits.sinks
        assert not (scripts and self.window), "a script goes by the prompt, and a window forgets it"
        self.scripts = dict(scripts or {})
        self.fail_steps, self.fail_tokens, self.nan_tokens = fail_steps, fail_tokens, nan_tokens
        self.fail_in = fail_in
        self.cells = [[GARBAGE] * limits.page_size for _ in range(limits.num_pages)]
        self.plans: list[StepPlan] = []
        self.dispatches = self.fetches = self.garbage_reads = self.most_in_flight = 0
        self._in_flight: list[Pending] = []
        self._last: dict[int, int] = {}  # uid -> the token sampled for it in the step dispatched last
        self._broken = False  # a step has failed, and nobody knows yet

    # ------------------------------------------------------------------------------------- Runner

    def dispatch(self, plan: StepPlan) -> Pending:
        number, self.dispatches = self.dispatches, self.dispatches + 1
        self.plans.append(plan)
        # One that was never told how to sample was dropped, by an interruption.
        self._in_flight = [pending for pending in self._in_flight if pending.drawn]
        check_plan(plan, self.limits)
        before = [list(cells) for cells in self.cells] if self.fail_in == "host" else []
        self._copy(plan)
        read = [self._run(piece) for piece in plan.slices]
        seen = [token for history, _ in read for token in history]
        pending = Pending(plan, [history for history, _ in read], [scores for _, scores in read])
        if number in self.fail_steps or any(token in self.fail_tokens for token in seen):
            error = DeviceError(f"step {number} failed")
            if self.fail_in == "host":
                self.cells = before
                error.kv_lost = False
                raise error
            self.poison(range(self.limits.num_pages))
            if self.fail_in == "dispatch":
                raise error
            pending.error, self._broken = error, True
        self._in_flight.append(pending)
        self.most_in_flight = max(self.most_in_flight, len(self._in_flight))
        return pending

    def sample(self, pending: Pending, draws: Seq[Draw | None]) -> None:
        plan = pending.plan
        assert pending is self._in_flight[-1], f"{plan} is not the last step dispatched"
        assert not pending.drawn, f"{plan} was sampled before"
        assert len(draws) == len(plan.emitting), f"{len(draws)} draws for {plan}"
        pending.drawn = True
        if pending.error is not None and self.fail_in == "sample":
            self._fail(pending)
        pending.sampled = [None] * len(plan.slices)
        self._last = {}
        for index, draw in zip(plan.emitting, draws, strict=True):
            piece = plan.slices[index]
            if draw is not None:
                assert draw.position == piece.start + piece.count, f"{draw} for {piece}"
                pending.sampled[index] = sampled = self._sample(draw, pending.histories[index])
                self._last[piece.uid] = sampled.token_id

    def fetch(self, pending: Pending) -> StepResult:
        self.fetches += 1
        assert pending.drawn, f"{pending.plan} was never sampled"
        while self._in_flight[0] is not pending:  # dropped by an engine that does not want it any more
            self._in_flight.pop(0)
        if pending.error is not None:
            self._fail(pending)
        self._in_flight.pop(0)
        return StepResult(tuple(pending.sampled), tuple(pending.scores))

    def stats(self) -> dict[str, Any]:
        return {"compiled_programs": 0}

    # ---------------------------------------------------------------------------------- its inside

    def _fail(self, pending: Pending) -> None:
        self._in_flight.clear()
        self._broken = False
        self.poison(range(self.limits.num_pages))
        assert pending.error is not None
        raise pending.error

    def poison(self, pages: Iterable[int]) -> None:
        """Overwrite pages with garbage: nobody may be able to tell, if they are free."""
        for page in pages:
            self.cells[page] = [GARBAGE] * self.limits.page_size

    def _copy(self, plan: StepPlan) -> None:
        contents = [list(self.cells[source]) for source, _ in plan.copies]
        for (_, target), content in zip(plan.copies, contents, strict=True):
            self.cells[target] = content

    def _run(self, piece: Slice) -> tuple[list[int], tuple[Sampled, ...]]:
        """Write a slice into its pages and read back all that its queries see: what the last one sees, and
        how likely the targets were."""
        size, end = self.limits.page_size, piece.start + piece.count
        tokens = piece.tokens
        if piece.chained:
            tokens = (self._last.get(piece.uid, -7),)
            assert self._broken or piece.uid in self._last, f"{piece} follows no draw"
        path = self._cell(piece, piece.start - 1)[2] if piece.start else 0
        for position, token in enumerate(tokens, piece.start):
            page = piece.pages[position // size]
            assert page > 0, f"position {position} is written into page 0: {piece}"
            path = hash((path, token))
            self.cells[page][position % size] = (position, token, path)
        first = first_seen(piece.start, self.window)
        sinks = range(min(self.sinks, first))
        seen, path = [], None
        for position in (*sinks, *range(first, end)):
            if position == first and sinks.stop != first:
                path = None
            at, token, here = self._cell(piece, position)
            if at != position or (path is not None and here != hash((path, token))):
                self.garbage_reads += not self._broken
                token = -2
            seen.append(token)
            path = here
        scores = tuple(
            score_of(seen[: piece.start + i + 1 - first + len(sinks)], target, piece.scored or 0)
            for i, target in enumerate(piece.targets)
        )
        return visible(seen, self.window, self.sinks), scores

    def _cell(self, piece: Slice, position: int) -> tuple[int, int, int]:
        size = self.limits.page_size
        return self.cells[piece.pages[position // size]][position % size]

    def _sample(self, draw: Draw, history: list[int]) -> Sampled:
        if any(token in self.nan_tokens for token in history):
            return Sampled(0, math.nan, 1)
        forbidden = forbidden_by(draw, self.limits.vocab_size)
        token = self._scripted(history)
        if token is None or token in forbidden:
            token = next_token(history, draw.sampling, draw.seed, forbidden, self.limits.vocab_size)
        logprob = -1.0 - token / self.limits.vocab_size
        top = ((0, -0.5), (token, logprob)) if token else ((0, logprob), (1, -math.inf))
        rank = 2 if token else 1
        fill = tuple((i, -math.inf) for i in range(2, self.limits.vocab_size) if i != token)
        return Sampled(token, logprob, rank, (top + fill)[: draw.sampling.logprobs or 0])

    def _scripted(self, history: list[int]) -> int | None:
        for prompt, script in self.scripts.items():
            if tuple(history[: len(prompt)]) == prompt:
                return script[min(len(history) - len(prompt), len(script) - 1)]
        return None


def forbidden_by(draw: Draw, vocab_size: int) -> set[int]:
    """The ids that a draw takes out, by changes to logits or by its mask."""
    forbidden: set[int] = set()
    if draw.changes is not None:
        pairs = zip(draw.changes.ids, draw.changes.addends, strict=True)
        forbidden = {token for token, addend in pairs if addend == -math.inf}
    if draw.mask is not None:
        forbidden |= {i for i in range(vocab_size) if not draw.mask[i // 8] >> (i % 8) & 1}
    return forbidden


def score_of(history: list[int], target: int, count: int) -> Sampled:
    """How likely the fake model finds `target` after a history."""
    logprob = -(1 + hash((tuple(history), target)) % 1000) / 100
    return Sampled(target, logprob, 1, tuple((i, -0.5 - i) for i in range(count)))


def first_seen(position: int, window: int | None) -> int:
    """The first position that the query at `position` sees."""
    return 0 if window is None else max(0, position - window + 1)


def visible(history: list[int], window: int | None, sinks: int) -> list[int]:
    """What the query at the last token of a history sees: the last `window` tokens, and the first `sinks`."""
    if window is None or len(history) <= window + sinks:
        return history
    return history[:sinks] + history[-window:]


def next_token(
    history: list[int], sampling: SamplingParams, seed: int, held_back: Collection[int], vocab_size: int
) -> int:
    """The token that follows a history: a hash, so that one wrong token changes all that come after."""
    for attempt in range(1000):
        # The hash of a tuple of integers is the same in every process.
        token = hash((tuple(history), 0 if sampling.greedy else seed, attempt)) % vocab_size
        if token not in held_back:
            return token
    raise AssertionError(f"held back nearly everything: {held_back}")


def expected(request: Request, limits: Limits, index: int = 0) -> tuple[tuple[int, ...], str]:
    """What FakeRunner makes of a request that runs alone, without pages or steps: tokens and reason."""
    window = limits.window or limits.max_model_len
    sampling, history = request.sampling, list(request.prompt_token_ids)
    most = validate(request, limits)
    assert sampling.seed is not None or sampling.greedy, "only a seeded request can be foretold"
    seed = continuation_seed(sampling.seed or 0, index)
    ending = set(held_back_ids(sampling, limits.eos_token_ids))
    output: list[int] = []
    while True:
        hold = ending if len(output) < sampling.min_tokens else ()
        seen = visible(history, window, limits.sinks)
        token = next_token(seen, sampling, seed, hold, limits.vocab_size)
        history.append(token)
        output.append(token)
        if token in ending:
            return tuple(output), "stop"
        if len(output) == most:
            return tuple(output), "length"


def check_plan(plan: StepPlan, limits: Limits) -> None:
    """Raise AssertionError where a plan breaks what core.StepPlan and core.Limits promise a runner."""
    assert 1 <= len(plan.slices) <= limits.max_num_seqs, plan
    assert plan.num_tokens <= limits.max_num_batched_tokens, plan
    kinds = [piece.count > 1 for piece in plan.slices]
    assert kinds == sorted(kinds), f"slices of one token come first: {kinds}"
    assert len({piece.uid for piece in plan.slices}) == len(plan.slices), plan
    written = [page for piece in plan.slices for page in piece.pages[piece.start // limits.page_size :]]
    assert len(set(written)) == len(written), f"a page is written by two slices: {sorted(written)}"
    for piece in plan.slices:
        behind = set(piece.pages[: piece.start // limits.page_size])
        assert not behind & set(written), f"{piece} reads a page that is being written"
    for source, target in plan.copies:
        assert 0 < source < limits.num_pages, plan
        assert target in written, f"the copy into {target} serves no slice"
    for piece in plan.slices:
        _check_slice(piece, limits)


def _check_slice(piece: Slice, limits: Limits) -> None:
    assert piece.count >= 1, piece
    end, first = piece.start + piece.count, first_seen(piece.start, limits.window)
    assert len(piece.pages) == -(-end // limits.page_size), piece
    for index, page in enumerate(piece.pages):
        # What no query of the slice sees may have been given back, and nothing else.
        seen = (index + 1) * limits.page_size > first or index < limits.sink_pages
        assert (0 if seen is False else 1) <= page < limits.num_pages, f"entry {index} of {piece}"
    assert piece.num_prompt >= 1, piece
    assert end >= piece.num_prompt or not piece.emit, piece
    assert end < limits.max_model_len, piece
    assert not piece.chained or (piece.count == 1 and piece.start >= piece.num_prompt and piece.emit), piece
    assert not piece.targets or piece.count > 1, piece
    assert len(piece.targets) <= piece.count, piece
