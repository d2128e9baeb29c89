"""The sequences that decode one token in every step, moved together: a step costs what happens in it.

Most of what the scheduler does in a step is to find, for each of hundreds of sequences, that it runs one more
token. Here such sequences are members of a group with one clock. What will happen to a member is known when
it joins, and is kept by the number of the step: that it needs a page, that a page is full, that its last
token is planned, that it has ended. Between these, nothing about it changes but numbers that follow from the
clock, which `Member.settle` writes down when anybody is to see them.

    step of the group   0   1   2   3   4        pages of 2, prompt of 3 tokens computed, 3 tokens to generate
    runs position       -   3   4   -   -        (the first token came with the prompt)
    needs a page            -   yes
    fills a page            yes -                (when the step is recorded)
    stops                           x            its last token is in flight
    ends                        x                when step 2 is recorded, which may be after step 3 is planned
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable

from jaxinfer.core import Sequence

Window = int | None


class Member:
    """One sequence of the group. `offset + i` is the position that it runs in step i of the group, `stop` the
    first step in which it does not run any more.

    It runs from step `joined` on. Its Sequence is as it was when `planned` steps were planned and `committed`
    of them recorded.
    """

    __slots__ = ("committed", "joined", "last", "offset", "planned", "sequence", "stop")

    def __init__(self, sequence: Sequence, step: int):
        self.sequence = sequence
        self.offset = sequence.planned - step
        self.stop = step + sequence.max_tokens - sequence.num_output - sequence.drawing
        self.last = sequence.num_prompt + sequence.max_tokens - 1  # positions that ever need a page
        self.joined = self.planned = self.committed = step

    def settle(self, planned: int, committed: int, token: int, times: array[float]) -> array[float]:
        """Write into the sequence what it is after so many steps; returns the times of the tokens that this
        brought. `times[i]`: when step i was recorded. Every token of the sequence is `token`."""
        sequence = self.sequence
        new_plans = min(planned, self.stop) - self.planned
        new_tokens = max(0, committed - self.committed)
        sequence.computed += new_tokens
        sequence.ahead += new_plans - new_tokens
        sequence.drawing += new_plans - new_tokens
        self.planned += new_plans
        if not new_tokens:
            return array("d")
        told = times[self.committed : committed]
        sequence.tokens += [token] * new_tokens
        sequence.last_token_at = told[-1]
        self.committed = committed
        return told


class Cruise:
    """The group, its clock and its calendar. `planned` steps were planned, `committed` of them recorded.

    `rows` members run in the step planned last, and see `keys[v]` keys together where no query sees more than
    `windows[v]`. `registers`: whether anybody wants to know of full pages.
    """

    def __init__(self, windows: Iterable[Window], page_size: int, *, registers: bool):
        self.windows = tuple(windows)
        self.page_size, self.registers = page_size, registers
        self.members: dict[int, Member] = {}
        self.planned = self.committed = 0
        self.rows = 0
        self.keys = [0] * len(self.windows)
        self.times: array[float] = array("d")
        self._growing = [0] * len(self.windows)  # members whose queries will see a key more in the next step
        # By step of the group: who needs a page to be planned; whose keys stop to grow, as indexes of
        # windows; who is not planned any more; and, when the step is recorded, who fills a page, who ends.
        self._pages: defaultdict[int, list[Member]] = defaultdict(list)
        self._slower: defaultdict[int, list[int]] = defaultdict(list)
        self._stops: defaultdict[int, list[Member]] = defaultdict(list)
        self._full: defaultdict[int, list[Member]] = defaultdict(list)
        self._ends: defaultdict[int, list[Member]] = defaultdict(list)

    def stopping(self) -> int:
        """Members that run no more in the step about to be planned."""
        return len(self._stops.get(self.planned, ()))

    def wanting_pages(self) -> int:
        """Members that need a page in the step about to be planned; joining adds to them."""
        return len(self._pages.get(self.planned, ()))

    def begin(self) -> None:
        """The next step is about to be planned: whoever is done stops, everybody else goes on."""
        step = self.planned
        for member in self._stops.pop(step, ()):
            self.rows -= 1
            for view, window in enumerate(self.windows):
                self.keys[view] -= seen(member.offset + step, window)
        for view in self._slower.pop(step, ()):
            self._growing[view] -= 1
        for view, count in enumerate(self._growing):
            self.keys[view] += count

    def join(self, sequence: Sequence) -> None:
        """From the step about to be planned on, which `begin` has begun, the sequence is a member.

        It must have one token to run, a generated one, and must not wait for its last one.
        """
        step, size, planned = self.planned, self.page_size, sequence.planned
        member = Member(sequence, step)
        assert member.stop > step, f"{sequence} waits for its last token and cannot go on"
        self.members[sequence.uid] = member
        self.rows += 1
        for view, window in enumerate(self.windows):
            self.keys[view] += seen(planned + 1, window)
            whole = member.stop if window is None else window - planned - 1 + step  # it sees `window` keys
            if whole > step:
                self._growing[view] += 1
                self._slower[min(whole + 1, member.stop)].append(view)
        self._when(self._pages, member, step + len(sequence.pages) * size - planned)
        if self.registers:
            self._when(self._full, member, step + (-planned - 1) % size)
        self._stops[member.stop].append(member)
        self._ends[member.stop - 1].append(member)

    def take_pages(self) -> list[Member]:
        """Who needs a page in the step about to be planned. Told once."""
        wanting = self._pages.pop(self.planned, [])
        if wanting:
            again = self.planned + self.page_size
            self._pages[again] += [member for member in wanting if again < member.stop]
        return wanting

    def recorded(self) -> tuple[list[Member], list[Member]]:
        """Who fills a page with the step about to be recorded, and who ends with it. Told once; of the next
        page that one of them fills is told on `tell_of_next`."""
        return self._full.pop(self.committed, []), self._ends.pop(self.committed, [])

    def tell_of_next(self, member: Member) -> None:
        """It has filled a page with the step recorded last, and the next one is of interest, too."""
        self._when(self._full, member, self.committed - 1 + self.page_size)

    def _when(self, calendar: defaultdict[int, list[Member]], member: Member, step: int) -> None:
        if step < member.stop:
            calendar[step].append(member)


def seen(context: int, window: Window) -> int:
    """Keys that the query of the last of `context` tokens sees."""
    return context if window is None else min(context, window)
