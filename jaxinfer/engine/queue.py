"""The sequences that wait, most urgent first."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from jaxinfer.core import Sequence

rank_of = attrgetter("rank")
"""The rank of a sequence, as a key to sort by: called for all that runs, in every step."""


class WaitingQueue:
    """Ordered by `Sequence.rank`; a newcomer of the lowest urgency, the usual one, is appended in O(1)."""

    __slots__ = ("_by_uid", "_order")

    def __init__(self) -> None:
        self._order: list[Sequence] = []
        self._by_uid: dict[int, Sequence] = {}

    def push(self, sequence: Sequence) -> None:
        order = self._order
        if order and order[-1].rank > sequence.rank:
            insort(order, sequence, key=rank_of)
        else:
            order.append(sequence)
        self._by_uid[sequence.uid] = sequence

    def remove(self, sequence: Sequence) -> None:
        del self._by_uid[sequence.uid]
        remove_ranked(self._order, sequence)

    def first(self) -> Sequence:
        return self._order[0]

    def get(self, uid: int) -> Sequence | None:
        return self._by_uid.get(uid)

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._order)


def remove_ranked(ordered: list[Sequence], sequence: Sequence) -> None:
    """Take a sequence out of a list that is ordered by rank."""
    # The most urgent one is who leaves the queue, and who of equal answers ends first.
    place = 0 if ordered[0] is sequence else bisect_left(ordered, sequence.rank, key=rank_of)
    assert ordered[place] is sequence, f"{sequence} is not where its rank {sequence.rank} belongs"
    del ordered[place]
