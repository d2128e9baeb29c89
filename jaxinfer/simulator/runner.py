"""The device as the engine sees it, made of a step-time model and a clock: to be put under a real Engine."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

from jaxinfer.core import Draw, Limits, Sampled, StepPlan, StepResult
from jaxinfer.simulator.clock import VirtualClock
from jaxinfer.simulator.scheduler import token_of
from jaxinfer.simulator.timing import StepTimer


class Timeline:
    """When the device is done with what it was given: one step after the other, none before it is there."""

    __slots__ = ("free_at",)

    def __init__(self) -> None:
        self.free_at = 0.0

    def run(self, given_at: float, seconds: float) -> float:
        """When a step that is dispatched at `given_at` has run."""
        self.free_at = max(self.free_at, given_at) + seconds
        return self.free_at


class Pending(NamedTuple):
    """A step on its way, and when the device has run it."""

    plan: StepPlan
    done_at: float


class SimulatedRunner:
    """Implements `core.Runner` in virtual time: `fetch` moves the clock on to the end of the step.

    The tokens are arbitrary ids, the same one for all of a sequence (`token_of`), so that only `max_tokens`
    ends anything: ask with ignore_eos. What changes logits, masks and scores is taken and has no effect.
    """

    def __init__(self, timer: StepTimer, limits: Limits, clock: VirtualClock):
        self.timer, self.limits, self.clock = timer, limits, clock
        self.timeline = Timeline()

    def dispatch(self, plan: StepPlan) -> Pending:
        return Pending(plan, self.timeline.run(self.clock(), self.timer.seconds_of(plan)))

    def sample(self, pending: Pending, draws: Seq[Draw | None]) -> None:
        assert len(draws) == len(pending.plan.emitting), f"{len(draws)} draws for {pending.plan}"

    def fetch(self, pending: Pending) -> StepResult:
        self.clock.wait_until(pending.done_at)
        vocab = self.limits.vocab_size
        sampled = [
            Sampled(token_of(piece.uid, vocab), -1.0, 1) if piece.emit else None
            for piece in pending.plan.slices
        ]
        scores = tuple(
            tuple(Sampled(target, -1.0, 1) for target in piece.targets) for piece in pending.plan.slices
        )
        return StepResult(tuple(sampled), scores)

    def stats(self) -> dict[str, Any]:
        return {"simulated_steps": self.timer.totals.steps}
