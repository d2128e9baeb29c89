"""The contract between the engine and the device: what one step runs, and what came of it.

A step goes in three calls, so that the device never waits for the host. `dispatch` starts the forward pass,
which may run tokens that only the device knows yet (`Slice.chained`). `sample` says how the next tokens are
chosen, once the host knows all tokens before them: penalties, masks, and what has ended meanwhile. `fetch`
waits.

    dispatch(n + 1)   the forward pass of step n + 1 is queued behind step n
    fetch(n)          wait for the tokens of step n; the device goes on with n + 1
    sample(n + 1)     the host's work on step n is done: masks and penalties for n + 1 are known
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from jaxinfer.core.sampling import SamplingParams


class Slice(NamedTuple):
    """Run `tokens` at positions `start .. start + count - 1` of one sequence, in this step.

    `pages` covers positions `0 .. start + count - 1` (P = ceil((start + count) / Z) page ids); with a
    window, those that the query at `start` no longer sees may be 0. When `emit`, the slice reaches the end of
    the sequence and the step samples the token at position `start + count` as its Draw says. `chained`: the
    one token (0 in `tokens`) is what the step before samples for this sequence. `num_prompt` is the length of
    the sequence's prompt. `scored` k asks for the logprobs of the prompt tokens that follow the slice's own
    ones, with k alternatives. `state_place`: where layers of linear attention keep the state of the sequence
    (`Limits.stateful`); a slice that starts at 0 begins from none, whatever that place holds.
    """

    uid: int
    start: int
    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    emit: bool
    num_prompt: int = 0
    chained: bool = False
    scored: int | None = None
    targets: tuple[int, ...] = ()
    state_place: int = 0
    epoch: int = 0  # the sequence's when this was planned; the engine's own business

    @property
    def count(self) -> int:  # type: ignore[override]
        """Tokens that it runs. (Not that of tuples: it is one because hundreds are made in a step.)"""
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step does, decided before the device hears of it. Slices of one token come first.

    `copies` are pairs of pages (from, to) whose K/V is copied before anything is written; all are read
    before any is written.
    """

    step: int
    slices: tuple[Slice, ...]
    preempted: tuple[int, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(s.count for s in self.slices)

    @property
    def emitting(self) -> tuple[int, ...]:
        """Indexes of the slices that emit, in the order of their Draws."""
        return tuple(index for index, piece in enumerate(self.slices) if piece.emit)

    def __repr__(self) -> str:
        ones = sum(s.count == 1 for s in self.slices)
        chunks = len(self.slices) - ones
        return f"StepPlan({self.step}: {ones} of one token, {chunks} chunks, {self.num_tokens} tokens)"


class LogitChanges:
    """Changes to the logits of a row, an entry per id: logit' = (logit / f if logit > 0 else logit * f) + a.

    Parallel arrays, so that a device takes them as they are; `ids` holds each id once. A factor of 1 and an
    addend of 0 change nothing; an addend of -inf takes the id out.
    """

    __slots__ = ("addends", "factors", "ids")

    def __init__(self, ids: array[int], factors: array[float], addends: array[float]):
        self.ids, self.factors, self.addends = ids, factors, addends

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Draw:
    """How the token after one emitting slice is chosen, at `position` of its sequence.

    The noise depends on `seed` and `position` alone. `mask`: bit i % 32 of word i // 32 (little-endian int32)
    says whether id i may be chosen; ceil(V / 32) words, None allows all.
    """

    sampling: SamplingParams
    seed: int
    position: int
    changes: LogitChanges | None = None
    mask: bytes | None = None


class Sampled(NamedTuple):
    """What a step chose for one emitting slice. `top` holds (id, logprob) of the most likely tokens, `told`
    (id, logprob, rank) of those that the request names (`SamplingParams.logprob_token_ids`)."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()
    told: tuple[tuple[int, float, int], ...] = ()

    @property
    def finite(self) -> bool:
        """False when the row's logits held NaN or infinity, or (rank 0) no id could be chosen: its token
        means nothing."""
        return math.isfinite(self.logprob)


@dataclass(frozen=True, slots=True)
class StepResult:
    """`sampled[i]` belongs to `plan.slices[i]`; None where the slice did not emit, or had no Draw.

    `scores[i]` holds one Sampled for each of `plan.slices[i].targets`: how likely that token was.
    """

    sampled: tuple[Sampled | None, ...]
    scores: tuple[tuple[Sampled, ...], ...] = ()


class Runner(Protocol):
    """The device as the engine sees it.

    A step that fails raises from any of the three calls; the runner has then already replaced the KV state (a
    donated cache is gone after a failed step), so all pages' content is lost and the engine recomputes. When
    `dispatch` raises, the step before it can still be fetched; steps after one that failed in `sample` or
    `fetch` are void. An exception with an attribute `kv_lost` False was raised before the device was
    touched: pages are intact.
    """

    def dispatch(self, plan: StepPlan) -> Any:
        """Start the forward pass of a plan; returns what `sample` and `fetch` take."""
        ...

    def sample(self, pending: Any, draws: Seq[Draw | None]) -> None:
        """Choose the next tokens: one Draw for each of `plan.emitting`, None where nobody wants it now."""
        ...

    def fetch(self, pending: Any) -> StepResult:
        """Wait for what a step sampled. Steps are fetched in the order of their dispatch."""
        ...

    def stats(self) -> dict[str, Any]: ...
