"""Decides what each step runs, and records what came of it.

    plan = scheduler.schedule()          decide: picks slices, takes pages, may preempt
    outcomes = scheduler.commit(plan, result)       record: advances, appends, finishes, frees
    outcomes = scheduler.fail(plan, error)          record: the step raised

Sequences are served by rank: their order of arrival, or under the policy "priority" their arrival put off by
AGEING_S for each level, so that whoever waits long enough overtakes. `running` and `waiting` are in that
order. Pages are only ever taken from a less urgent sequence, so the most urgent one always progresses and
there is no livelock. With `limits.window` a page goes back as soon as no later query sees it.

A step may be planned while the one before it is in flight: its sequences count as computed what is `ahead`,
and a token that is being sampled is run as a chained slice. What the earlier step then brings (an end, a stop
string) makes the later slice void: results of an earlier epoch, or of a sequence that has ended, are dropped.

A worked example (a test runs it): pages of 4, 6 of them usable, budget 8; A has 6 prompt tokens, B has 3,
and both generate 12. A cell is start+count of the slice.

    step    A      B     free pages
    1       0+6    0+2       3       A's prompt, and as much of B's as the budget leaves
    2       6+1    2+1       3       B's prompt ends: it samples its first token, as A did in step 1
    4       8+1    4+1       1       both begin a page
    8      12+1     -        0       A takes the last page; B needs one and is the youngest: it waits
    12     16+1     -        6       A needs one: B is preempted; then A has its 12 tokens and ends
    13             0+8       4       B again, its 3 prompt tokens and the 5 it had generated
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable
from typing import Literal, NamedTuple

from jaxinfer.core import (
    ConfigError,
    FinishReason,
    Limits,
    Sampled,
    Sequence,
    Status,
    StepPlan,
    StepResult,
)
from jaxinfer.engine.draft import Draft, runnable
from jaxinfer.engine.pages import PagePool, pages_for
from jaxinfer.engine.queue import WaitingQueue, rank_of, remove_ranked
from jaxinfer.engine.tables import Found, PageTables

AGEING_S = 10.0
"""Seconds of waiting that outweigh one level of priority."""

Policy = Literal["fcfs", "priority"]


class Outcome(NamedTuple):
    """What a step did to one sequence: a token (`sampled`), an end (`sequence.finish_reason`), or both.

    `stop_reason` is the stop token id that ended it; None for EOS. `scores` belong to the prompt tokens from
    position `scored_from` on.
    """

    sequence: Sequence
    sampled: Sampled | None = None
    stop_reason: int | None = None
    scores: tuple[Sampled, ...] = ()
    scored_from: int = 0


class Scheduler:
    """Decides over one pool of pages. Not thread-safe; the only writer of Sequences.

    Each sequence must fit the pool alone (`validate`).
    """

    def __init__(
        self,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
        *,
        policy: Policy = "fcfs",
        prefix_caching: bool = False,
    ):
        for name in ("max_num_seqs", "max_num_batched_tokens", "page_size", "window"):
            if (value := getattr(limits, name)) is not None and value < 1:
                raise ConfigError(f"limits: {name} must be at least 1, got {value}")
        if limits.sinks < 0 or (limits.sinks and limits.window is None):
            raise ConfigError(
                f"limits: sinks {limits.sinks} beside window {limits.window}; sinks need a window"
            )
        self.limits = limits
        self.clock = clock
        self.policy = policy
        cacheable = limits.window is None and not limits.stateful
        self.tables = PageTables(limits, prefix_caching=prefix_caching and cacheable)
        self.running: list[Sequence] = []
        self.waiting = WaitingQueue()
        self.preemptions = 0
        self._next_step = 0
        self._in_flight: set[int] = set()  # planned, and neither committed nor failed
        # After a failed step of several: uid -> the `computed` that clears it. See `fail`.
        self._suspects: dict[int, int] = {}

    @property
    def pool(self) -> PagePool:
        return self.tables.pool

    # ---------------------------------------------------------------------------------- in and out

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence into the queue, at its rank."""
        late = AGEING_S * sequence.request.priority if self.policy == "priority" else 0.0
        base = sequence.arrived_at if self.policy == "priority" else 0.0
        sequence.rank = (base + late, sequence.uid)
        self.waiting.push(sequence)

    def find(self, uid: int) -> Sequence | None:
        """The unfinished sequence of that uid."""
        return self.waiting.get(uid) or next((s for s in self.running if s.uid == uid), None)

    def finish(self, uid: int, reason: FinishReason, error: str | None = None) -> Sequence | None:
        """End a sequence from outside of a step: a stop string, a cancel, an error.

        Safe at any time, also while a step that holds it is in flight. Returns None when there is no
        unfinished sequence of that uid.
        """
        sequence = self.find(uid)
        if sequence is not None:
            self._end(sequence, reason, error)
        return sequence

    # -------------------------------------------------------------------------------------- decide

    def schedule(self) -> StepPlan | None:
        """Decide the next step; None when nothing waits or runs, or all that runs waits for a step in flight.

        The budget goes to sequences with one pending token first, then to the chunks of sequences already
        running, then to admissions from the waiting queue, each most urgent first. The most urgent sequence
        of all moves in every step: decodes cannot use up its budget, because each of them was admitted with
        a token to spare beside it.
        """
        draft = Draft(self.limits)
        if not (self._suspects and self._plan_suspect(draft)):
            for sequence in tuple(self.running):
                if sequence.pending == 1:
                    self._plan(draft, sequence)
            for sequence in tuple(self.running):
                if sequence.pending > 1:
                    self._plan(draft, sequence)
            self._admit(draft)
        if not draft.counts:
            assert self._in_flight or not self.has_unfinished, f"nothing can be scheduled: {self}"
            return None
        step, self._next_step = self._next_step, self._next_step + 1
        self._in_flight.add(step)
        return draft.plan(step)

    def _plan(self, draft: Draft, sequence: Sequence) -> bool:
        """Give `sequence` a slice as far as budget and pages reach; False when it gets none.

        When no page is to be had the least urgent running sequence is preempted, if it is less urgent than
        this one. If not, this one waits with the pages it has: a more urgent one takes them at its need.
        """
        if sequence.status is not Status.RUNNING or sequence.uid in self._suspects:
            return False
        return self._plan_anyhow(draft, sequence)

    def _plan_anyhow(self, draft: Draft, sequence: Sequence) -> bool:
        if sequence.num_output + sequence.drawing >= sequence.max_tokens:
            return False  # the token in flight is its last one
        while count := draft.room(sequence):
            count = runnable(sequence, min(count, self.tables.reach(sequence) - sequence.planned))
            if count > 0:
                self.tables.extend(sequence, sequence.planned + count)
                draft.take(sequence, count)
                return True
            last = self.running[-1]
            if last is sequence:
                assert len(self.running) > 1 or sequence.ahead, f"{sequence} does not fit {self.pool} alone"
                return False
            self._preempt(last, draft)
        return False

    def _admit(self, draft: Draft) -> None:
        """Start waiting sequences, in order; the first that cannot start holds back those behind it."""
        if draft.preempted:
            return  # whoever was preempted would be the first to come back, and to be preempted again
        while self.waiting:
            sequence = self.waiting.first()
            if sequence.uid in self._suspects or not draft.budget:
                return
            request, siblings = sequence.request, []
            # Of a model with a state, pages are of no use without the state that belongs to them.
            if request.sampling.n > 1 and not self.limits.stateful:
                siblings = [s for s in self.running if s.request is request]
            if any(s.computed < s.num_prompt for s in siblings):
                return  # the prompt is being computed already: soon it is there to share
            # Copies are read before any is written: not from a page that is itself being filled by one.
            found = self.tables.find(sequence, (s for s in siblings if s.uid not in draft.copies))
            if len(self.running) >= self.limits.max_num_seqs or not self._fits(sequence, found):
                # Under "priority" someone urgent may have come after whoever runs.
                last = self.running[-1] if self.running else sequence
                if last.rank > sequence.rank and self._would_fit(sequence, found):
                    self._preempt(self.running[-1], draft)
                    continue
                return
            self._start(sequence, found, draft)
            if not self._plan(draft, sequence):
                ok = draft.budget < 2 and sequence.uid not in draft.copies
                assert ok, f"{sequence} was admitted without room"
                return

    def _fits(self, sequence: Sequence, found: Found) -> bool:
        """True when the pool holds all that will be wanted soon, with `sequence` admitted.

        Soon: its own tokens so far, and one more page of each, but never more than it can ever use at a
        time. An admission with less would be preempted before it has paid for its prefill. A sequence that
        is alone always fits, or `validate` would have refused it.
        """
        wanted = sum(self._soon(s) - s.live_pages for s in self.running)
        shared = sum(page > 0 and self.pool.count(page) > 0 for page in found.pages)
        return wanted + self._soon(sequence) - shared <= self.pool.num_available

    def _would_fit(self, sequence: Sequence, found: Found) -> bool:
        """Whether `_fits` could come true if all that is less urgent gave its pages back."""
        more_urgent = [s for s in self.running if s.rank < sequence.rank]
        wanted = sum(self._soon(s) for s in more_urgent) + self._soon(sequence)
        held = {page for s in more_urgent for page in s.pages}
        shared = sum(page in held for page in found.pages if page)
        return wanted - shared <= self.limits.usable_pages

    def _soon(self, sequence: Sequence) -> int:
        """Pages; never fewer than it holds, its slice of this step included."""
        limits = self.limits
        last = sequence.num_prompt + sequence.max_tokens - 1  # the last token generated needs no K/V
        # With a window: pages for whole chunks. It could go on with fewer, by a few tokens in each step.
        chunk = max(1, min(sequence.pending, limits.max_num_batched_tokens))
        length = len(sequence.tokens) + sequence.drawing
        most = limits.most_pages(min(length + limits.page_size, last), chunk)
        return max(min(most, limits.usable_pages), sequence.live_pages)

    def _start(self, sequence: Sequence, found: Found, draft: Draft) -> None:
        self.waiting.remove(sequence)
        sequence.status = Status.RUNNING
        if sequence.first_scheduled_at is None:
            sequence.first_scheduled_at = self.clock()
        copy = self.tables.start(sequence, found)
        if copy is not None:
            draft.copies[sequence.uid] = copy
        insort(self.running, sequence, key=rank_of)

    def _preempt(self, sequence: Sequence, draft: Draft) -> None:
        draft.drop(sequence)
        draft.preempted.append(sequence.uid)
        sequence.preemptions += 1
        self.preemptions += 1
        self._requeue(sequence)

    def _plan_suspect(self, draft: Draft) -> bool:
        """Plan the next suspect alone, if it is its turn and it gets pages.

        While it cannot, whoever runs goes on; they are more urgent, and end or need its pages some day.
        """
        suspect = next((s for s in self.running if s.uid in self._suspects), None)
        if suspect is None:
            if not self.waiting or len(self.running) >= self.limits.max_num_seqs:
                return False
            suspect, found = self.waiting.first(), Found()
            if suspect.uid not in self._suspects or not self._fits(suspect, found):
                return False
            self._start(suspect, found, draft)
        return self._plan_anyhow(draft, suspect)

    # -------------------------------------------------------------------------------------- record

    def commit(self, plan: StepPlan, result: StepResult) -> list[Outcome]:
        """Apply what a step did, once; slices whose sequence has ended or lost its pages since are void."""
        assert len(result.sampled) == len(plan.slices), f"{len(result.sampled)} results for {plan}"
        self.retire(plan)
        current = self.current(plan)
        outcomes = []
        now = self.clock()
        scores = result.scores or ((),) * len(plan.slices)
        for piece, sampled, scored in zip(plan.slices, result.sampled, scores, strict=True):
            sequence = current.get(piece.uid)
            if sequence is None:
                continue
            sequence.computed = piece.start + piece.count
            sequence.ahead -= piece.count
            sequence.drawing -= piece.emit
            if sampled is not None and not sampled.finite:
                message = "no token is left to choose: biases, masks and held-back ids exclude all"
                if sampled.rank:
                    message = "the model's logits were not finite (NaN or infinity)"
                    self.tables.forget(sequence)
                self._end(sequence, "error", message)
                outcomes.append(Outcome(sequence))
                continue
            self.tables.advance(sequence)
            if self._suspects and sequence.computed >= self._suspects.get(piece.uid, sequence.computed + 1):
                del self._suspects[piece.uid]
            if piece.emit:
                assert sampled is not None, f"no token for {sequence} in {plan}"
                outcomes.append(self._append(sequence, sampled, now, scored, piece.start + 1))
            elif scored:
                outcomes.append(Outcome(sequence, scores=scored, scored_from=piece.start + 1))
        return outcomes

    def _append(
        self, sequence: Sequence, sampled: Sampled, now: float, scores: tuple[Sampled, ...], scored_from: int
    ) -> Outcome:
        """Add a sampled token and decide the end: stop ids before lengths, so that both at once is "stop"."""
        token, sampling = sampled.token_id, sequence.request.sampling
        if not 0 <= token < self.limits.vocab_size:
            self._end(sequence, "error", f"sampled token {token} is outside the vocabulary")
            return Outcome(sequence)
        sequence.tokens.append(token)
        if sequence.first_token_at is None:
            sequence.first_token_at = now
        sequence.last_token_at = now
        stop_reason = None
        if sequence.num_output > sampling.min_tokens:
            if token in self.limits.eos_token_ids and not sampling.ignore_eos:
                self._end(sequence, "stop")
            elif token in sampling.stop_token_ids:
                stop_reason = token
                self._end(sequence, "stop")
        if sequence.finish_reason is None and sequence.num_output >= sequence.max_tokens:
            self._end(sequence, "length")
        return Outcome(sequence, sampled, stop_reason, scores, scored_from)

    def fail(self, plan: StepPlan, error: BaseException, *, sure: bool = True) -> list[Outcome]:
        """A step raised, and the content of every page is lost: all that runs is recomputed, and a step in
        flight behind it is void.

        Not so when the error has an attribute `kv_lost` that is False: the device was not reached, and
        everyone keeps pages and `computed`, but for whoever began with a copy that was not made.

        A plan of one sequence names the culprit, which ends with "error". Otherwise each sequence of the
        plan is suspect: it runs in a step of its own until it is past the place where the plan failed, so
        that only what fails alone is given up and the others go on. The same where it is not `sure` that the
        error is of this plan: a step before it was not read.
        """
        kv_lost = getattr(error, "kv_lost", True)
        current = self.current(plan)
        if kv_lost:
            self.retire(plan)
            self.abandon()
        else:
            self.undo(plan)
        if len(plan.slices) > 1 or not sure:
            for piece in plan.slices:
                if piece.uid in current:
                    self._suspects[piece.uid] = piece.start + piece.count
            return []
        # The client hears no more than this: a device's own message is kilobytes, with paths of this machine.
        where = "on the device" if kv_lost else "before it reached the device"
        for sequence in current.values():
            self._end(sequence, "error", f"the step failed {where} ({type(error).__name__})")
        return [Outcome(sequence) for sequence in current.values()]

    def undo(self, plan: StepPlan) -> None:
        """A plan did not run, or nobody reads what came of it, and the pages are as they were: forget it. A
        sequence with a state begins anew: its tokens may be in the state already, and must not be twice."""
        self.retire(plan)
        uncopied = {target for _, target in plan.copies}
        current = self.current(plan)
        for piece in plan.slices:
            if piece.uid in current:
                current[piece.uid].ahead -= piece.count
                current[piece.uid].drawing -= piece.emit
        for sequence in tuple(self.running):
            # One of its pages was to be filled by this step.
            unfilled = uncopied.intersection(sequence.pages)
            if unfilled or (self.limits.stateful and sequence.uid in current):
                self._requeue(sequence)

    def abandon(self) -> None:
        """What the pages hold is lost, or not known (Ctrl-C amid a step): all that runs is recomputed, every
        step in flight is void, and nobody is suspect for it. Can come at any place."""
        self._in_flight.clear()
        for sequence in reversed(tuple(self.running)):
            self._requeue(sequence)
        self.tables.lost()

    def current(self, plan: StepPlan) -> dict[int, Sequence]:
        """By uid: the sequences of a plan that are still in the epoch it was planned in."""
        epochs = {piece.uid: piece.epoch for piece in plan.slices}
        return {s.uid: s for s in self.running if epochs.get(s.uid) == s.epoch}

    def flies(self, plan: StepPlan) -> bool:
        """Whether a plan is in flight."""
        return plan.step in self._in_flight

    def retire(self, plan: StepPlan) -> None:
        """A plan has left the device, or nobody waits for it any more."""
        assert plan.step in self._in_flight, f"{plan} was recorded twice, or never planned"
        self._in_flight.remove(plan.step)

    # -------------------------------------------------------------------------------- common parts

    def _requeue(self, sequence: Sequence) -> None:
        """Back into the queue with nothing computed."""
        self._let_go(sequence)
        sequence.computed = 0
        sequence.status = Status.WAITING
        self.waiting.push(sequence)

    def _let_go(self, sequence: Sequence) -> None:
        """A running sequence stops to run: its pages go back, and what is in flight for it is void."""
        remove_ranked(self.running, sequence)
        self.tables.release(sequence)
        sequence.epoch += 1
        sequence.ahead = sequence.drawing = 0

    def _end(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        if sequence.status is Status.RUNNING:
            self._let_go(sequence)
        else:
            self.waiting.remove(sequence)
        self._suspects.pop(sequence.uid, None)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        sequence.error = error

    def check(self) -> list[str]:
        """What is wrong with the books, one sentence each; an empty list when all is well."""
        problems = self.tables.check(self.running)
        for s in self.running:
            covered = len(s.pages) >= pages_for(s.planned, self.limits.page_size)
            behind = s.pending < (0 if s.ahead else 1)
            if s.status is not Status.RUNNING or not covered or behind or min(s.ahead, s.drawing) < 0:
                problems.append(f"{s} should not run")
            if (s.ahead or s.drawing) and not self._in_flight:
                problems.append(f"{s} waits for a step that is not in flight")
        for s in self.waiting:
            if s.status is not Status.WAITING or s.pages or s.released or s.planned or s.drawing:
                problems.append(f"{s} should not wait")
        for name, group in (("running", self.running), ("waiting", list(self.waiting))):
            ranks = [s.rank for s in group]
            if ranks != sorted(ranks):
                problems.append(f"{name} is out of order: {ranks[:32]}")
        known = {s.uid for s in self.running} | {s.uid for s in self.waiting}
        if not self._suspects.keys() <= known:
            problems.append(f"suspects {sorted(self._suspects)[:8]} are gone")
        return problems

    def __repr__(self) -> str:
        return f"Scheduler({len(self.running)} running, {len(self.waiting)} waiting, {self.pool})"
