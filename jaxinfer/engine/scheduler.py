"""Decides what each step runs, and records what came of it.

    plan = scheduler.schedule()          decide: picks slices, takes pages, may preempt
    outcomes = scheduler.commit(plan, result)       record: advances, appends, finishes, frees
    outcomes = scheduler.fail(plan, error)          record: the step raised

Sequences are served in order of arrival, and two orders hold at all times: `running` and `waiting` are
sorted by uid, and everything that runs is older than everything that waits. Pages are only ever taken
from a younger sequence, so the oldest one always progresses and there is no livelock. With
`limits.window` a page goes back as soon as no later query sees it, and a sequence of any length runs in a
bounded number of pages.

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
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

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
from jaxinfer.engine.draft import Draft
from jaxinfer.engine.pages import PagePool, pages_for


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step did to one sequence: a token (`sampled`), an end (`sequence.finish_reason`), or both.

    `stop_reason` is the stop token id that ended it; None for EOS.
    """

    sequence: Sequence
    sampled: Sampled | None = None
    stop_reason: int | None = None


class Scheduler:
    """First come, first served, over one pool of pages. Not thread-safe; the only writer of Sequences.

    Sequences must be added in the order of their uid, and each must fit the pool alone (`validate`).
    """

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic):
        for name in ("max_num_seqs", "max_num_batched_tokens", "page_size", "window"):
            if (value := getattr(limits, name)) is not None and value < 1:
                raise ConfigError(f"limits: {name} must be at least 1, got {value}")
        self.limits = limits
        self.clock = clock
        self.pool = PagePool(limits.num_pages)
        self.running: list[Sequence] = []
        self.waiting: OrderedDict[int, Sequence] = OrderedDict()
        self.preemptions = 0
        self._next_step = 0
        # Planned and neither committed nor failed: step -> uid -> start of its slice. Pages given back
        # meanwhile are parked until the last such step that may still read or write them retires.
        self._in_flight: dict[int, dict[int, int]] = {}
        self._parked: dict[int, list[int]] = {}
        # After a failed step of several: uid -> the `computed` that clears it. See `fail`.
        self._suspects: dict[int, int] = {}

    # ---------------------------------------------------------------------------------- in and out

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence at the end of the queue."""
        self.waiting[sequence.uid] = sequence

    def finish(self, uid: int, reason: FinishReason, error: str | None = None) -> Sequence | None:
        """End a sequence from outside of a step: a stop string, a cancel, an error.

        Safe at any time, also while a step that holds it is in flight. Returns None when there is no
        unfinished sequence of that uid.
        """
        sequence = self.waiting.get(uid) or next((s for s in self.running if s.uid == uid), None)
        if sequence is not None:
            self._end(sequence, reason, error)
        return sequence

    # -------------------------------------------------------------------------------------- decide

    def schedule(self) -> StepPlan | None:
        """Decide the next step; None when nothing waits or runs.

        The budget goes to sequences with one pending token first, then to the chunks of sequences already
        running, then to admissions from the waiting queue, each oldest first. The oldest sequence of all
        moves in every step: decodes cannot use up its budget, because each of them was admitted with a token
        to spare beside it.
        """
        # A slice carries its tokens, and the token of a step in flight is not known yet.
        assert not self._in_flight, f"steps {list(self._in_flight)} are neither committed nor failed"
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
            assert not self.has_unfinished, f"nothing can be scheduled: {self}"
            return None
        step, self._next_step = self._next_step, self._next_step + 1
        self._in_flight[step] = draft.starts()
        return draft.plan(step)

    def _plan(self, draft: Draft, sequence: Sequence) -> bool:
        """Give `sequence` a slice as far as budget and pages reach; False when it gets none.

        When no page is free the youngest running sequence is preempted, if it is younger than this one.
        If not, this one waits with the pages it has: an older one takes them when it needs them.
        """
        if sequence.status is not Status.RUNNING or sequence.uid in self._suspects:
            return False
        return self._plan_anyhow(draft, sequence)

    def _plan_anyhow(self, draft: Draft, sequence: Sequence) -> bool:
        size = self.limits.page_size
        while count := draft.room(sequence):
            held = len(sequence.pages)  # the released ones too: their positions need no page any more
            count = min(count, (held + self.pool.num_free) * size - sequence.computed)
            if count > 0:
                more = self.pool.allocate(pages_for(sequence.computed + count, size) - held)
                assert more is not None, f"{count} tokens of {sequence} do not fit {self.pool}"
                sequence.pages += more
                draft.take(sequence, count)
                return True
            youngest = self.running[-1]
            if youngest is sequence:
                assert len(self.running) > 1, f"{sequence} does not fit {self.pool} alone"
                return False
            self._preempt(youngest, draft)
        return False

    def _admit(self, draft: Draft) -> None:
        """Start waiting sequences, in order; the first that cannot start holds back those behind it."""
        if draft.preempted:
            return  # whoever was preempted would be the first to come back, and to be preempted again
        while self.waiting and len(self.running) < self.limits.max_num_seqs:
            sequence = next(iter(self.waiting.values()))
            if sequence.uid in self._suspects or not draft.room(sequence) or not self._fits(sequence):
                return
            self._start(sequence)
            planned = self._plan(draft, sequence)
            assert planned, f"{sequence} was admitted without room"

    def _fits(self, sequence: Sequence) -> bool:
        """True when the pool holds all that will be wanted soon, with `sequence` admitted.

        Soon: its own tokens so far, and one more page of each, but never more than it can ever use at a
        time. An admission with less would be preempted before it has paid for its prefill. A sequence that
        is alone always fits, or `validate` would have refused it.
        """
        wanted = sum(self._soon(s) - s.live_pages for s in self.running)
        return wanted + self._soon(sequence) <= self.pool.num_free

    def _soon(self, sequence: Sequence) -> int:
        """Pages; never fewer than it holds, its slice of this step included."""
        limits = self.limits
        last = sequence.num_prompt + sequence.max_tokens - 1  # the last token generated needs no K/V
        # With a window: pages for whole chunks. It could go on with fewer, by a few tokens in each step.
        chunk = min(sequence.pending, limits.max_num_batched_tokens)
        most = limits.most_pages(min(len(sequence.tokens) + limits.page_size, last), chunk)
        return min(most, limits.usable_pages)

    def _start(self, sequence: Sequence) -> None:
        del self.waiting[sequence.uid]
        sequence.status = Status.RUNNING
        if sequence.first_scheduled_at is None:
            sequence.first_scheduled_at = self.clock()
        self.running.append(sequence)

    def _preempt(self, sequence: Sequence, draft: Draft) -> None:
        draft.drop(sequence)
        draft.preempted.append(sequence.uid)
        sequence.preemptions += 1
        self.preemptions += 1
        self._requeue(sequence)

    # -------------------------------------------------------------------------------------- record

    def commit(self, plan: StepPlan, result: StepResult) -> list[Outcome]:
        """Apply what a step did, once; slices whose sequence has ended or lost its pages since are void."""
        assert len(result.sampled) == len(plan.slices), f"{len(result.sampled)} results for {plan}"
        self._retire(plan)
        current = self._current(plan)
        outcomes = []
        now = self.clock()
        for piece, sampled in zip(plan.slices, result.sampled, strict=True):
            sequence = current.get(piece.uid)
            if sequence is None:
                continue
            sequence.computed = piece.start + piece.count
            self._release_behind(sequence)
            if self._suspects and sequence.computed >= self._suspects.get(piece.uid, sequence.computed + 1):
                del self._suspects[piece.uid]
            if not piece.emit:
                continue
            assert sampled is not None, f"no token for {sequence} in {plan}"
            outcomes.append(self._append(sequence, sampled, now))
        return outcomes

    def _append(self, sequence: Sequence, sampled: Sampled, now: float) -> Outcome:
        """Add a sampled token and decide the end: stop ids before lengths, so that both at once is "stop"."""
        token, sampling = sampled.token_id, sequence.request.sampling
        if not sampled.finite:
            self._end(sequence, "error", "the model's logits were not finite (NaN or infinity)")
            return Outcome(sequence)
        if not 0 <= token < self.limits.vocab_size:
            self._end(sequence, "error", f"sampled token {token} is outside the vocabulary")
            return Outcome(sequence)
        sequence.tokens.append(token)
        if sequence.first_token_at is None:
            sequence.first_token_at = now
        sequence.last_token_at = now
        if sequence.num_output > sampling.min_tokens:
            if token in self.limits.eos_token_ids and not sampling.ignore_eos:
                self._end(sequence, "stop")
                return Outcome(sequence, sampled)
            if token in sampling.stop_token_ids:
                self._end(sequence, "stop")
                return Outcome(sequence, sampled, token)
        if sequence.num_output >= sequence.max_tokens:
            self._end(sequence, "length")
        return Outcome(sequence, sampled)

    def fail(self, plan: StepPlan, error: BaseException) -> list[Outcome]:
        """A step raised, and the content of every page is lost: all that runs is recomputed.

        Not so when the error has an attribute `kv_lost` that is False: the device was not reached, and
        everyone keeps pages and `computed`.

        A plan of one sequence names the culprit, which ends with "error". Otherwise each sequence of the
        plan is suspect: it runs in a step of its own until it is past the place where the plan failed, so
        that only what fails alone is given up and the others go on.
        """
        kv_lost = getattr(error, "kv_lost", True)
        current = self._current(plan)
        self._retire(plan)
        if kv_lost:
            self.abandon(plan)
        if len(plan.slices) > 1:
            for piece in plan.slices:
                if piece.uid in current:
                    self._suspects[piece.uid] = piece.start + piece.count
            return []
        # The client hears no more than this: a device's own message is kilobytes, with paths of this machine.
        where = "on the device" if kv_lost else "before it reached the device"
        for sequence in current.values():
            self._end(sequence, "error", f"the step failed {where} ({type(error).__name__})")
        return [Outcome(sequence) for sequence in current.values()]

    def abandon(self, plan: StepPlan) -> None:
        """A step was interrupted by nobody's fault (Ctrl-C): all that runs is recomputed, nobody is suspect.

        Also for a plan that may have been recorded already: the interruption can come at any place.
        """
        if plan.step in self._in_flight:
            self._retire(plan)
        for sequence in reversed(tuple(self.running)):
            self._requeue(sequence)

    def _plan_suspect(self, draft: Draft) -> bool:
        """Plan the next suspect alone, if it is its turn and it gets pages.

        While it cannot, whoever runs already goes on; they are older, and end or need its pages some day.
        """
        suspect = next((s for s in self.running if s.uid in self._suspects), None)
        if suspect is None:
            if not self.waiting or len(self.running) >= self.limits.max_num_seqs:
                return False
            suspect = next(iter(self.waiting.values()))
            if suspect.uid not in self._suspects or not self._fits(suspect):
                return False
            self._start(suspect)
        return self._plan_anyhow(draft, suspect)

    # -------------------------------------------------------------------------------- common parts

    def _current(self, plan: StepPlan) -> dict[int, Sequence]:
        """The sequences of a plan that are still in the epoch it was planned in."""
        epochs = {piece.uid: piece.epoch for piece in plan.slices}
        return {s.uid: s for s in self.running if epochs.get(s.uid) == s.epoch}

    def _retire(self, plan: StepPlan) -> None:
        assert plan.step in self._in_flight, f"{plan} was recorded twice, or never planned"
        del self._in_flight[plan.step]
        self.pool.free(self._parked.pop(plan.step, ()))

    def _release_behind(self, sequence: Sequence) -> None:
        """Give back the pages that no query from `computed` on sees.

        A step in flight that starts at `computed` or later neither sees nor writes them, so they are free at
        once. Only one that was planned with an earlier start (its result is void, but it runs) may still
        read them: they are parked until it retires.
        """
        start, first, seen = sequence.computed, sequence.released, self.limits.first_page(sequence.computed)
        if first == seen:
            return
        pages, sequence.pages[first:seen] = sequence.pages[first:seen], [0] * (seen - first)
        sequence.released = seen
        self._free(pages, [n for n, at in self._in_flight.items() if at.get(sequence.uid, start) < start])

    def _release(self, sequence: Sequence) -> None:
        """Give all pages back."""
        pages, sequence.pages, sequence.released = sequence.pages[sequence.released :], [], 0
        sequence.epoch += 1
        self._free(pages, [n for n, at in self._in_flight.items() if sequence.uid in at])

    def _free(self, pages: list[int], steps: list[int]) -> None:
        """Free pages: at once, or when the last of `steps`, which are in flight and may use them, retires."""
        if steps:
            self._parked.setdefault(max(steps), []).extend(pages)
        else:
            self.pool.free(pages)

    def _requeue(self, sequence: Sequence) -> None:
        """Back to the front of the queue with nothing computed. Youngest first keeps the queue in order."""
        self._release(sequence)
        self.running.remove(sequence)
        sequence.computed = 0
        sequence.status = Status.WAITING
        self.waiting[sequence.uid] = sequence
        self.waiting.move_to_end(sequence.uid, last=False)

    def _end(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        else:
            del self.waiting[sequence.uid]
        self._suspects.pop(sequence.uid, None)
        self._release(sequence)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        sequence.error = error

    def check(self) -> list[str]:
        """What is wrong with the books, one sentence each; an empty list when all is well."""
        problems = self.pool.check()
        holders = Counter(page for s in self.running for page in s.pages[s.released :])
        holders.update(page for pages in self._parked.values() for page in pages)
        if holders.pop(0, 0):
            problems.append("page 0 is in a table where a page should be")
        wrong = {p: n for p, n in holders.items() if self.pool.count(p) != n}
        if wrong or len(holders) != self.pool.num_live:
            problems.append(
                f"{self.pool} but tables hold {len(holders)}; counts differ at {sorted(wrong)[:8]}"
            )
        limits = self.limits
        for s in self.running:
            covered = len(s.pages) >= pages_for(s.computed, limits.page_size)
            if s.status is not Status.RUNNING or not covered or s.pending < 1:
                problems.append(f"{s} should not run")
            if s.released != limits.first_page(s.computed) or any(s.pages[: s.released]):
                problems.append(f"{s} keeps pages behind its window, or gave back what it sees")
            if s.live_pages > limits.pages_per_sequence:
                problems.append(f"{s} holds more than {limits.pages_per_sequence} pages")
        for s in self.waiting.values():
            if s.status is not Status.WAITING or s.pages or s.released or s.computed:
                problems.append(f"{s} should not wait")
        order = [s.uid for s in self.running] + list(self.waiting)
        if order != sorted(order):
            problems.append(f"out of order: {order[:32]}")
        if not self._suspects.keys() <= set(order):
            problems.append(f"suspects {sorted(self._suspects)[:8]} are gone")
        return problems

    def __repr__(self) -> str:
        return f"Scheduler({len(self.running)} running, {len(self.waiting)} waiting, {self.pool})"
