"""The step being decided: what each chosen sequence runs, and what is left to share out."""

from __future__ import annotations

from jaxinfer.core import Limits, Sequence, Slice, StepPlan


class Draft:
    """Collects (sequence, count) pairs within the token budget of one step, and becomes its StepPlan."""

    __slots__ = ("budget", "copies", "counts", "limits", "preempted")

    def __init__(self, limits: Limits):
        self.limits = limits
        self.budget = limits.max_num_batched_tokens
        self.counts: dict[int, tuple[Sequence, int]] = {}
        self.copies: dict[int, tuple[int, int]] = {}  # uid -> (page to copy, its own page)
        self.preempted: list[int] = []

    def room(self, sequence: Sequence) -> int:
        """Tokens of `sequence` for which budget is left."""
        return runnable(sequence, min(sequence.pending, self.budget))

    def take(self, sequence: Sequence, count: int) -> None:
        """Run `count` tokens of `sequence`, which has pages for them."""
        self.budget -= count
        self.counts[sequence.uid] = (sequence, count)

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence's slice, if it has one; what it would have used is left again.

        It has one when it decodes beside an older one's chunks: a suspect ran alone while that one waited.
        """
        _, count = self.counts.pop(sequence.uid, (sequence, 0))
        self.copies.pop(sequence.uid, None)
        self.budget += count

    def plan(self, step: int) -> StepPlan:
        """The plan: slices of one token first, otherwise in the order in which they were taken. From here on
        the sequences count what is in flight."""
        slices = [_slice(sequence, count) for sequence, count in self.counts.values()]
        slices.sort(key=lambda s: s.count > 1)
        for piece in slices:
            sequence, _ = self.counts[piece.uid]
            sequence.ahead += piece.count
            sequence.drawing += piece.emit
        return StepPlan(step, tuple(slices), tuple(self.preempted), tuple(self.copies.values()))


def runnable(sequence: Sequence, count: int) -> int:
    """`count`, or 0 where that is one token of a prompt to score: a slice of one token runs where nothing is
    scored. Its turn comes in a step with more budget, or more pages."""
    return 0 if count == 1 and targets_of(sequence, count) else count


def targets_of(sequence: Sequence, count: int) -> tuple[int, ...]:
    """The prompt tokens whose logprobs the next `count` tokens of a sequence give, where asked for."""
    if sequence.request.sampling.prompt_logprobs is None or sequence.index:
        return ()
    start = sequence.planned
    return tuple(sequence.tokens[start + 1 : min(start + count + 1, sequence.num_prompt)])


def _slice(sequence: Sequence, count: int) -> Slice:
    start, tokens = sequence.planned, sequence.tokens
    chained = start >= len(tokens)
    assert not chained or count == 1, f"{count} tokens of {sequence} that nobody knows yet"
    targets = targets_of(sequence, count)
    return Slice(
        uid=sequence.uid,
        start=start,
        tokens=(0,) if chained else tuple(tokens[start : start + count]),
        pages=tuple(sequence.pages),
        emit=start + count == len(tokens) + sequence.drawing,
        num_prompt=sequence.num_prompt,
        chained=chained,
        scored=sequence.request.sampling.prompt_logprobs if targets else None,
        targets=targets,
        state_place=sequence.state_place,
        epoch=sequence.epoch,
    )
