"""A device made of Python lists, for tests of everything above the `Runner` protocol.

It keeps each token in pages as a real step keeps K/V, and chooses each token from the history as it READS
IT BACK through the page table: all of it, or the last W tokens where the model has a window. A wrong page, a
lost token, or a page handed out too early changes the answer, as it would on a device.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from jaxinfer.core import Limits, Request, Sampled, SamplingParams, Slice, StepPlan, StepResult
from jaxinfer.engine.validate import continuation_seed, validate

GARBAGE = (-1, -1, -1, -1)
"""What a page holds before anything was written to it, and after it was poisoned. A written place holds
(uid, epoch, position, token): what another sequence left, or this one before it was preempted, is garbage."""


class DeviceError(RuntimeError):
    """What a step raises when it was told to fail."""

    kv_lost = True


class FakeRunner:
    """Implements `core.Runner`; also refuses (AssertionError) any plan that breaks the contract.

    scripts: prompt -> the tokens that follow it, whatever the seed (the last one repeats).
    fail_steps: numbers of the calls of dispatch (from 0) that raise.
    fail_tokens, nan_tokens: a step raises, or a row yields NaN, when a sequence holds one of these tokens.
    fail_in: "dispatch" or "fetch" raises, and the content of every page is lost; or "host" does, before
    anything was written (`kv_lost` False).
    window: how many tokens the model sees, where that is not what the limits let the engine know.
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
    ):
        self.limits = limits
        self.window = window or limits.window
        assert not (scripts and self.window), "a script goes by the prompt, and a window forgets it"
        self.scripts = dict(scripts or {})
        self.fail_steps, self.fail_tokens, self.nan_tokens = fail_steps, fail_tokens, nan_tokens
        self.fail_in = fail_in
        self.cells = [[GARBAGE] * limits.page_size for _ in range(limits.num_pages)]
        self.plans: list[StepPlan] = []
        self.dispatches = self.fetches = self.garbage_reads = 0

    # ------------------------------------------------------------------------------------- Runner

    def dispatch(self, plan: StepPlan) -> Any:
        number, self.dispatches = self.dispatches, self.dispatches + 1
        self.plans.append(plan)
        check_plan(plan, self.limits)
        before = [list(cells) for cells in self.cells] if self.fail_in == "host" else []
        histories = [self._run(piece) for piece in plan.slices]
        if number in self.fail_steps or any(t in self.fail_tokens for h in histories for t in h):
            if self.fail_in == "host":
                self.cells = before
                error = DeviceError(f"step {number} failed")
                error.kv_lost = False
                raise error
            self.poison(range(self.limits.num_pages))
            if self.fail_in == "dispatch":
                raise DeviceError(f"step {number} failed")
            return DeviceError(f"step {number} failed")
        return [self._sample(p, h) if p.emit else None for p, h in zip(plan.slices, histories, strict=True)]

    def fetch(self, pending: Any) -> StepResult:
        self.fetches += 1
        if isinstance(pending, DeviceError):
            raise pending
        return StepResult(tuple(pending))

    def stats(self) -> dict[str, Any]:
        return {"compiled_programs": 0}

    # ---------------------------------------------------------------------------------- its inside

    def poison(self, pages: Iterable[int]) -> None:
        """Overwrite pages with garbage: nobody may be able to tell, if they are free."""
        for page in pages:
            self.cells[page] = [GARBAGE] * self.limits.page_size

    def _run(self, piece: Slice) -> list[int]:
        """Write a slice into its pages and read back all that its queries see; returns what the last sees."""
        size, end = self.limits.page_size, piece.start + piece.count
        for position, token in enumerate(piece.tokens, piece.start):
            page = piece.pages[position // size]
            assert page > 0, f"position {position} is written into page 0: {piece}"
            self.cells[page][position % size] = (piece.uid, piece.epoch, position, token)
        seen = []
        for position in range(first_seen(piece.start, self.window), end):
            *written, token = self.cells[piece.pages[position // size]][position % size]
            if written != [piece.uid, piece.epoch, position]:
                self.garbage_reads += 1
                token = -2
            seen.append(token)
        return seen[-(self.window or end) :]

    def _sample(self, piece: Slice, history: list[int]) -> Sampled:
        if any(token in self.nan_tokens for token in history):
            return Sampled(0, math.nan, 1)
        token = self._scripted(history)
        if token is None or token in piece.held_back:
            token = next_token(history, piece.sampling, piece.seed, piece.held_back, self.limits.vocab_size)
        logprob = -1.0 - token / self.limits.vocab_size
        top = ((0, -0.5), (token, logprob)) if token else ((0, logprob), (1, -math.inf))
        rank = 2 if token else 1
        fill = tuple((i, -math.inf) for i in range(2, self.limits.vocab_size) if i != token)
        return Sampled(token, logprob, rank, (top + fill)[: piece.sampling.logprobs or 0])

    def _scripted(self, history: list[int]) -> int | None:
        for prompt, script in self.scripts.items():
            if tuple(history[: len(prompt)]) == prompt:
                return script[min(len(history) - len(prompt), len(script) - 1)]
        return None


def first_seen(position: int, window: int | None) -> int:
    """The first position that the query at `position` sees."""
    return 0 if window is None else max(0, position - window + 1)


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
    ending = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else limits.eos_token_ids)
    output: list[int] = []
    while True:
        hold = ending if len(output) < sampling.min_tokens else ()
        token = next_token(history[-window:], sampling, seed, hold, limits.vocab_size)
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
    taken = [page for piece in plan.slices for page in piece.pages if page]
    assert len(set(taken)) == len(taken), f"a page is in two tables: {sorted(taken)}"
    for piece in plan.slices:
        assert piece.count >= 1, piece
        end, first = piece.start + piece.count, first_seen(piece.start, limits.window)
        assert len(piece.pages) == -(-end // limits.page_size), piece
        for index, page in enumerate(piece.pages):
            # Whatever no query of the slice sees has been given back, and nothing else has.
            seen = (index + 1) * limits.page_size > first
            assert (0 < page < limits.num_pages) if seen else page == 0, f"entry {index} of {piece}"
        if limits.window is not None:
            keys = limits.window - 1 + piece.count
            assert sum(page > 0 for page in piece.pages) <= -(-(keys - 1) // limits.page_size) + 1, piece
        assert piece.num_prompt >= 1, piece
        assert end >= piece.num_prompt or not piece.emit, piece
        assert piece.start + piece.count < limits.max_model_len, piece
