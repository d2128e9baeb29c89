"""The step being decided: what each chosen sequence runs, and what is left to share out."""

from __future__ import annotations

from jaxinfer.core import Limits, Sequence, Slice, StepPlan
from jaxinfer.engine.validate import held_back_ids


class Draft:
    """Collects (sequence, count) pairs within the token budget of one step, and becomes its StepPlan."""

    __slots__ = ("budget", "counts", "limits", "preempted")

    def __init__(self, limits: Limits):
        self.limits = limits
        self.budget = limits.max_num_batched_tokens
        self.counts: dict[int, tuple[Sequence, int]] = {}
        self.preempted: list[int] = []

    def room(self, sequence: Sequence) -> int:
        """Tokens of `sequence` for which budget is left."""
        return min(sequence.pending, self.budget)

    def take(self, sequence: Sequence, count: int) -> None:
        """Run `count` tokens of `sequence`, which has pages for them."""
        self.budget -= count
        self.counts[sequence.uid] = (sequence, count)

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence's slice, if it has one; what it would have used is left again.

        It has one when it decodes beside an older one's chunks: a suspect ran alone while that one waited.
        """
        _, count = self.counts.pop(sequence.uid, (sequence, 0))
        self.budget += count

    def starts(self) -> dict[int, int]:
        """uid -> position of the first token that it runs."""
        return {uid: sequence.computed for uid, (sequence, _) in self.counts.items()}

    def plan(self, step: int) -> StepPlan:
        """The plan: slices of one token first, otherwise in the order in which they were taken."""
        slices = [self._slice(sequence, count) for sequence, count in self.counts.values()]
        slices.sort(key=lambda s: s.count > 1)
        return StepPlan(step, tuple(slices), tuple(self.preempted))

    def _slice(self, sequence: Sequence, count: int) -> Slice:
        start, sampling = sequence.computed, sequence.request.sampling
        hold = sequence.num_output < sampling.min_tokens
        return Slice(
            uid=sequence.uid,
            start=start,
            tokens=(sequence.tokens[start],) if count == 1 else tuple(sequence.tokens[start : start + count]),
            pages=tuple(sequence.pages),
            emit=start + count == len(sequence.tokens),
            sampling=sampling,
            seed=sequence.seed,
            held_back=held_back_ids(sampling, self.limits.eos_token_ids) if hold else (),
            epoch=sequence.epoch,
            num_prompt=sequence.num_prompt,
        )
