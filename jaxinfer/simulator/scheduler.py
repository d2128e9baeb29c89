"""The engine's scheduler, with whoever does nothing but decode moved as a group: the same decisions, sooner.

A step of the engine costs Python time for every sequence that runs; here it costs for what happens in it. All
that decides is inherited: chunks, admission, the prefix cache, preemption, ends. `CruisingScheduler` keeps
steady decoders out of its loops (`jaxinfer.simulator.cruise`), and takes them in again, all of them, for a
step in which one could matter to another: when pages run short, or when somebody waits who is more urgent.

That both decide alike, to the last step and page, is a property test (tests/simulator/test_cruise.py). It
rests on this:

* A sequence that decodes takes one token of the budget, and a page when its last one is full. Who gets which
  page matters to nobody; only whether there are enough.
* While nobody comes, goes or computes a prompt, what the first waiting sequence needs does not become less,
  and what is there for it not more: it is enough to refuse it a few times (`QUIET`).
* A sampled token is found in no prompt that waits, so a page that fills by decoding is shared with nobody,
  and is registered in the prefix cache when that comes to matter: when its sequence ends or is preempted.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from heapq import merge

from jaxinfer.core import Limits, Sampled, Sequence, Slice, StepPlan, StepResult
from jaxinfer.engine.draft import Draft
from jaxinfer.engine.pages import pages_for
from jaxinfer.engine.prefix import Node
from jaxinfer.engine.queue import rank_of
from jaxinfer.engine.scheduler import Outcome, Policy, Scheduler
from jaxinfer.engine.tables import Found
from jaxinfer.simulator.cruise import Cruise, Member, Window, seen

QUIET = 3
"""Steps in a row without a slice of its own, an end or an arrival, after which nobody new can be admitted: a
prompt's pages are known to the prefix cache two steps after its last slice was planned."""


class Step:
    """A step as planned. `plan` holds the slices that were decided one by one; besides, `rows` sequences
    decode a token each and see `keys[v]` keys together where no query sees more than `windows[v]`.

    `decodes` of the slices were chosen in the order of rank, before all others. `index` is the step's number
    in the group's own count; None once nobody of the group is in it.
    """

    __slots__ = ("decodes", "index", "keys", "plan", "rows")

    def __init__(self, plan: StepPlan, decodes: int, rows: int, keys: tuple[int, ...], index: int | None):
        self.plan, self.decodes = plan, decodes
        self.rows, self.keys, self.index = rows, keys, index

    def __repr__(self) -> str:
        return f"Step({self.plan}, {self.rows} more)"


def token_of(uid: int, vocab_size: int) -> int:
    """The id that a simulated step samples for a sequence: always the same one, told from those of others."""
    return vocab_size - 1 - uid % vocab_size


class CruisingScheduler(Scheduler):
    """Decides as `Scheduler` does; ask it by `plan_step` and `commit_step`.

    windows: those by which keys are counted in `Step.keys`. cruise: False moves everybody one by one, as the
    engine does. The times of all tokens are in `token_times`, by uid; whoever reads them may take them out.
    """

    def __init__(
        self,
        limits: Limits,
        clock: Callable[[], float],
        *,
        policy: Policy = "fcfs",
        prefix_caching: bool = False,
        windows: Iterable[Window] = (None,),
        cruise: bool = True,
    ):
        super().__init__(limits, clock, policy=policy, prefix_caching=prefix_caching)
        self.windows = tuple(windows)
        self.token_times: dict[int, array[float]] = {}
        self.active: dict[int, Sequence] = {}  # by uid: who runs and is no member of the group
        self.group = self._new_group()
        # With a window pages go back while a sequence decodes: then everybody is moved one by one.
        self._cruise = cruise and limits.window is None
        self._flying: list[Step] = []
        self._quiet = 0

    def _new_group(self) -> Cruise:
        return Cruise(self.windows, self.limits.page_size, registers=self.tables.cache is not None)

    # -------------------------------------------------------------------------------------- decide

    def plan_step(self) -> Step | None:
        """`schedule`, told as a Step; None when there is nothing to run now."""
        if not self._smooth():
            return self._plan_one_by_one()
        group = self.group
        if group.stopping():
            self._quiet = 0  # its token of the budget is somebody's
        group.begin()
        if group.rows and not self.active and (self._quiet >= QUIET or not self.waiting):
            self._take_pages()
            self._quiet += 1
            return self._planned(StepPlan(self._next_step, ()), 0)
        draft = Draft(self.limits)
        ranked = sorted(self.active.values(), key=rank_of)
        for sequence in ranked:
            if self._steady(sequence):
                del self.active[sequence.uid]
                group.join(sequence)
                self._quiet = 0
        self._take_pages()
        draft.budget -= group.rows
        for sequence in ranked:
            if sequence.uid in self.active and sequence.pending == 1:
                self._plan(draft, sequence)
        decodes = len(draft.counts)
        for sequence in ranked:
            if sequence.uid in self.active and sequence.pending > 1:
                self._plan(draft, sequence)
        if self.waiting and self._quiet < QUIET and len(self.running) < self.limits.max_num_seqs:
            self._admit(draft)
        assert not draft.preempted, f"{self} preempted in a step that was thought smooth"
        if not (draft.counts or group.rows):
            assert self._in_flight or not self.has_unfinished, f"nothing can be scheduled: {self}"
            return None
        self._quiet = 0 if draft.counts else self._quiet + 1
        return self._planned(draft.plan(self._next_step), decodes)

    def _planned(self, plan: StepPlan, decodes: int) -> Step:
        """The step about to be planned is this: slices, and the group."""
        group = self.group
        step = Step(plan, decodes, group.rows, tuple(group.keys), group.planned)
        self._in_flight.add(self._next_step)
        self._next_step += 1
        group.planned += 1
        self._flying.append(step)
        return step

    def _take_pages(self) -> None:
        """A page for each of the group who needs one in the step about to be planned."""
        wanting = self.group.take_pages()
        pages = self.pool.allocate(len(wanting))
        assert pages is not None, f"{self} was thought to have enough pages"
        for member, page in zip(wanting, reversed(pages), strict=True):
            member.sequence.pages.append(page)

    def _plan_one_by_one(self) -> Step | None:
        self.disband()
        plan = self.schedule()
        if plan is None:
            return None
        step = Step(plan, 0, 0, (0,) * len(self.windows), None)
        self._flying.append(step)
        return step

    def _smooth(self) -> bool:
        """Whether the next step is one in which nobody can be preempted."""
        if not self._cruise or self._suspects:
            return False
        if self.waiting and self.running and self.waiting.first().rank < self.running[-1].rank:
            return False  # who waits may take the place of who runs
        size, budget = self.limits.page_size, self.limits.max_num_batched_tokens
        wanted = self.group.wanting_pages()
        for sequence in self.active.values():
            end = sequence.planned + min(sequence.pending, budget)
            wanted += max(0, pages_for(end, size) - len(sequence.pages))
        return wanted <= self.pool.num_available

    def _steady(self, sequence: Sequence) -> bool:
        """Whether a sequence has come to where it runs one generated token in each step."""
        return (
            sequence.pending == 1
            and sequence.planned >= sequence.num_prompt
            and sequence.num_output + sequence.drawing < sequence.max_tokens
        )

    def disband(self) -> None:
        """Every member is on its own again, what is in flight for it a slice of the plan in flight."""
        group, self.group = self.group, self._new_group()
        for step in self._flying:
            if step.index is None:
                continue
            assert step.index >= group.committed, f"{step} was recorded and still flies"
            flown = [m for m in group.members.values() if m.joined <= step.index < m.stop]
            assert len(flown) == step.rows, f"{len(flown)} members are in {step}"
            self._add_slices(step, ((m.sequence, m.offset + step.index) for m in flown))
            step.index = None
        for member in group.members.values():
            sequence = member.sequence
            self._settle(member, group)
            self.tables.advance(sequence)
            self.active[sequence.uid] = sequence
        self._quiet = 0

    def _fits(self, sequence: Sequence, found: Found) -> bool:
        # As inherited, in sums: a member never wants more than two pages soon.
        members, available = self.group.members, self.pool.num_available
        shared = sum(page > 0 and self.pool.count(page) > 0 for page in found.pages)
        wanted = sum(self._soon(s) - s.live_pages for s in self.active.values())
        wanted += self._soon(sequence) - shared
        if wanted + 2 * len(members) <= available:
            return True
        return wanted + sum(self._soon_of(m) - len(m.sequence.pages) for m in members.values()) <= available

    def _soon(self, sequence: Sequence) -> int:
        member = self.group.members.get(sequence.uid)
        return super()._soon(sequence) if member is None else self._soon_of(member)

    def _soon_of(self, member: Member) -> int:
        length = member.offset + self.group.planned + 1
        most = pages_for(min(length + self.limits.page_size, member.last), self.limits.page_size)
        return max(min(most, self.limits.usable_pages), len(member.sequence.pages))

    # -------------------------------------------------------------------------------------- record

    def commit_step(self, step: Step) -> list[Outcome]:
        """`commit` of what a simulated step brings. Returns the outcomes of all ends, and of the tokens of
        whoever is no member."""
        first = self._flying.pop(0)
        assert first is step, f"{step} is recorded before {first}"
        if step.index is None:
            return self._commit_slices(step.plan)
        group = self.group
        assert step.index == group.committed, f"{step} is recorded at {group.committed}"
        full, ended = group.recorded()
        # Who ends does so by `commit`, in its place among the others; and so does begin again at its first
        # page whose place in the prefix cache was evicted: it may meet another there.
        over = {member.sequence.uid for member in ended}
        full = [member for member in full if member.sequence.uid not in over]
        lost = [member for member in full if not _is_known(member.sequence)]
        if ended or lost:
            self._quiet = 0
            self._commit_singly(step, ended, lost)
        group.committed += 1
        group.times.append(self.clock())
        outcomes = self._commit_slices(step.plan)
        for member in full:
            if member not in lost:
                self._settle(member, group)
                self.tables.advance(member.sequence)
            if not _holds_all(member.sequence):
                group.tell_of_next(member)
        return outcomes

    def _commit_singly(self, step: Step, ended: list[Member], lost: list[Member]) -> None:
        """Leave a step that is about to be recorded to `commit`, for these of the group."""
        group = self.group
        singly = [*ended, *lost]
        for member in singly:
            self._settle(member, group)
        assert step.index is not None
        self._add_slices(step, [(m.sequence, m.offset + step.index) for m in singly])
        for member in ended:
            del group.members[member.sequence.uid]
            self.active[member.sequence.uid] = member.sequence
        for member in lost:
            member.committed += 1  # its sequence will have it by `commit`

    def _commit_slices(self, plan: StepPlan) -> list[Outcome]:
        if not plan.slices:
            self.retire(plan)
            return []
        vocab = self.limits.vocab_size
        sampled = [Sampled(token_of(p.uid, vocab), -1.0, 1) if p.emit else None for p in plan.slices]
        return self.commit(plan, StepResult(tuple(sampled)))

    def _append(
        self, sequence: Sequence, sampled: Sampled, now: float, scores: tuple[Sampled, ...], scored_from: int
    ) -> Outcome:
        self._times_of(sequence.uid).append(now)
        return super()._append(sequence, sampled, now, scores, scored_from)

    def _times_of(self, uid: int) -> array[float]:
        times = self.token_times.get(uid)
        if times is None:
            times = self.token_times[uid] = array("d")
        return times

    def _settle(self, member: Member, group: Cruise) -> None:
        """Write down what a member has come to."""
        uid = member.sequence.uid
        token = token_of(uid, self.limits.vocab_size)
        told = member.settle(group.planned, group.committed, token, group.times)
        if told:
            self._times_of(uid).extend(told)

    def _add_slices(self, step: Step, places: Iterable[tuple[Sequence, int]]) -> None:
        """Turn members that are in a step, each at a position, into slices of its plan, in their places."""
        places = sorted(places, key=lambda place: place[0].rank)
        added = [
            Slice(
                uid=sequence.uid,
                start=position,
                tokens=(0,),
                pages=(),
                emit=True,
                num_prompt=sequence.num_prompt,
                chained=True,
                epoch=sequence.epoch,
            )
            for sequence, position in places
        ]
        if not added:
            return
        step.rows -= len(added)
        step.keys = tuple(
            keys - sum(seen(piece.start + 1, window) for piece in added)
            for keys, window in zip(step.keys, self.windows, strict=True)
        )
        plan = step.plan
        slices = plan.slices
        ranked = self.running if step.decodes else (sequence for sequence, _ in places)
        ranks = {s.uid: s.rank for s in ranked}
        decodes = merge(slices[: step.decodes], added, key=lambda piece: ranks.get(piece.uid, _NO_RANK))
        slices = *decodes, *slices[step.decodes :]
        step.plan = StepPlan(plan.step, slices, plan.preempted, plan.copies)
        step.decodes += len(added)

    # -------------------------------------------------------------------------------- common parts

    def add(self, sequence: Sequence) -> None:
        self._quiet = 0
        super().add(sequence)

    def current(self, plan: StepPlan) -> dict[int, Sequence]:
        group = self.group.members
        found = {}
        for piece in plan.slices:
            member = group.get(piece.uid)
            sequence = self.active.get(piece.uid) if member is None else member.sequence
            if sequence is not None and sequence.epoch == piece.epoch:
                found[piece.uid] = sequence
        return found

    def _start(self, sequence: Sequence, found: Found, draft: Draft) -> None:
        super()._start(sequence, found, draft)
        self.active[sequence.uid] = sequence

    def _let_go(self, sequence: Sequence) -> None:
        if sequence.uid in self.group.members:
            self.disband()
        self._quiet = 0
        del self.active[sequence.uid]
        super()._let_go(sequence)

    def check(self) -> list[str]:
        self.disband()
        return super().check()


_NO_RANK = (float("-inf"), -1)
"""Of a slice whose sequence runs no more: its place does not matter."""


def _is_known(sequence: Sequence) -> bool:
    """Whether the prefix cache can go on from the pages that it knew of last."""
    cursor = sequence.cursor
    return isinstance(cursor, Node) and cursor.parent is not None


def _holds_all(sequence: Sequence) -> bool:
    """Whether the prefix cache knows all full pages of a sequence, and all by the pages that it holds.

    Then none of them leaves the tree while it runs. And once a page that begins with sampled tokens is the
    next, nobody else can find what it fills: that may as well be registered when it ends.
    """
    node, size = sequence.cursor, len(sequence.pages)
    if not isinstance(node, Node) or node.parent is None:
        return False
    while node.parent is not None:
        if node.depth > size or sequence.pages[node.depth - 1] != node.page:
            return False
        node = node.parent
    return True
