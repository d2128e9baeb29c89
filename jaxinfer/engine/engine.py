"""The loop: requests in, token events out, one step at a time.

    engine.add(request)
    while engine.has_work:
        for event in engine.step(): ...

One thread owns an engine; nothing here locks. `step` survives whatever a request or the device does: what
fails is reported as the end ("error") of the sequences concerned. What does raise is a fault of this code.

Asynchronous, the device does not wait for Python: `step` starts the forward pass of the next step before it
waits for the tokens of the last one, and tells of those while the device works (core/steps.py).
"""

from __future__ import annotations

import heapq
import itertools
import logging
import random
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

from jaxinfer.core import (
    Draw,
    FinishReason,
    Limits,
    Request,
    RequestError,
    Runner,
    Sequence,
    Slice,
    StepPlan,
    TokenEvent,
)
from jaxinfer.engine.drawing import Drawing
from jaxinfer.engine.metrics import Counters, Histograms, sequence_metrics
from jaxinfer.engine.output import SequenceOutput, Tokenizer
from jaxinfer.engine.scheduler import Outcome, Policy, Scheduler
from jaxinfer.engine.trace import NO_TRACE, Trace
from jaxinfer.engine.validate import continuation_seed, validate

logger = logging.getLogger(__name__)

FULL_CHECK_EVERY_S = 10.0
"""How often at most an idle engine looks at every page: with 60 000 of them that takes milliseconds."""


class Flight(NamedTuple):
    """A step on the device: its plan, what the runner gave for it, and when it was started."""

    plan: StepPlan
    pending: Any
    dispatched_at: float


class Engine:
    """Runs any number of requests together on one `Runner`.

    `tokenizer` None serves token ids with empty text. `seed` feeds the seeds of requests that bring none
    (None: from the system). `clock` returns seconds and never goes back. `asynchronous` plans a step while
    the one before it runs; the tokens are the same either way.
    """

    def __init__(
        self,
        runner: Runner,
        limits: Limits,
        tokenizer: Tokenizer | None = None,
        seed: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        policy: Policy = "fcfs",
        prefix_caching: bool = False,
        asynchronous: bool = False,
        trace: Trace = NO_TRACE,
    ):
        self.runner = runner
        self.limits = limits
        self.tokenizer = tokenizer
        self.clock = clock
        self.trace = trace
        self.scheduler = Scheduler(limits, clock, policy=policy, prefix_caching=prefix_caching)
        self.asynchronous = asynchronous
        self._random = random.Random(seed)
        self._uids = itertools.count()
        self._outputs: dict[int, SequenceOutput] = {}  # by uid: every unfinished sequence
        self._uids_of: dict[str, set[int]] = {}  # by request id: its unfinished sequences
        # A heap of (time, request id, uids of its sequences, timeout); rid of the ended when they abound.
        self._deadlines: list[tuple[float, str, tuple[int, ...], float]] = []
        self._unsaid: list[TokenEvent] = []  # the ends of cancelled sequences, for the next step to tell
        self._flight: Flight | None = None
        self._unread = False  # a step was dropped: an error of it would come to light in the next one
        self.histograms = Histograms(limits.max_model_len)
        self._counters = Counters(self.histograms)
        self._next_full_check = float("-inf")

    # --------------------------------------------------------------------------------- in and out

    def add(self, request: Request) -> None:
        """Queue a request; it makes `sampling.n` sequences.

        Raises RequestError, having queued nothing, for a request that cannot be served (`validate`) or
        whose id is that of an unfinished one.
        """
        max_tokens = validate(request, self.limits, has_tokenizer=self.tokenizer is not None)
        if request.request_id in self._uids_of:
            raise RequestError(f"request id {request.request_id!r} is in use", "request_id")
        sampling, now = request.sampling, self.clock()
        outputs = []
        spell = self.tokenizer.spellings if sampling.bad_words and self.tokenizer else None
        banned = () if spell is None else spell(sampling.bad_words)
        for index in range(sampling.n):
            sequence = Sequence(
                uid=next(self._uids),
                request=request,
                index=index,
                seed=self._random.getrandbits(64)
                if sampling.seed is None
                else continuation_seed(sampling.seed, index),
                max_tokens=max_tokens,
                tokens=list(request.prompt_token_ids),
                num_prompt=len(request.prompt_token_ids),
                arrived_at=now,
            )
            structure = sampling.structure
            matcher = self.tokenizer.matcher(sampling) if structure and self.tokenizer else None
            if structure and matcher is not None and matcher.finished:
                raise RequestError(f"{structure.param} allows no text at all", structure.param)
            drawing = Drawing(sequence, self.limits, matcher, banned)
            outputs.append(SequenceOutput(sequence, self.tokenizer, drawing))
        for output in outputs:
            self._outputs[output.sequence.uid] = output
            self.scheduler.add(output.sequence)
        self._uids_of[request.request_id] = {output.sequence.uid for output in outputs}
        if request.timeout_s is not None:
            uids = tuple(output.sequence.uid for output in outputs)
            entry = (now + request.timeout_s, request.request_id, uids, request.timeout_s)
            heapq.heappush(self._deadlines, entry)
            if len(self._deadlines) > 64 + 2 * len(self._uids_of):
                self._deadlines = [d for d in self._deadlines if self._is_unfinished(d[1], d[2])]
                heapq.heapify(self._deadlines)
        if request.counted:
            self._counters.requests += 1
            self._counters.prompt_tokens += len(request.prompt_token_ids)
        self.trace.arrived(request, now)

    def cancel(self, request_id: str, error: str | None = None) -> bool:
        """End a request's unfinished sequences ("abort"); its pages are free for the next step.

        The next `step` returns the events of their ends. False when no such request is unfinished.
        """
        uids = self._uids_of.get(request_id)
        for uid in sorted(uids or ()):
            self.scheduler.finish(uid, "abort", error)
            self._unsaid.append(self._end(self._outputs[uid], "", None, "abort", error))
        if uids is not None:
            self._forget_void_flight()
            self._check_when_idle()
        return uids is not None

    @property
    def has_work(self) -> bool:
        """True while `step` has something to run or to tell."""
        return bool(self._unsaid) or self.scheduler.has_unfinished

    def get_num_unfinished_requests(self) -> int:
        """How many requests run or wait (vLLM's name)."""
        return len(self._uids_of)

    # --------------------------------------------------------------------------------------- step

    def step(self) -> list[TokenEvent]:
        """Run one step; returns at most two events per sequence, in no order between sequences.

        Returns [] when there was nothing to do, when nothing was sampled (a prefill chunk), or, asynchronous,
        when the first step has only been started.
        """
        began = self.clock()
        events: list[TokenEvent] = []
        try:
            self._expire(began)
            events, self._unsaid = self._unsaid, []
            self._advance(events, began)
            self._check_when_idle()
        except BaseException as error:
            # Ctrl-C reached us amid the step, or a fault of ours. Whoever catches it may use the engine on.
            self._flight = None
            self.scheduler.abandon()
            self._unsaid = events + self._unsaid
            self._end_untold(error)
            raise
        return events

    def _advance(self, events: list[TokenEvent], began: float) -> None:
        """Plan and start a step; finish the one before; choose the tokens of the new one."""
        clock, runner, counters = self.clock, self.runner, self._counters
        before, self._flight = self._flight, None
        plan = self.scheduler.schedule()
        planned = clock()
        counters.engine_s += planned - began
        started: Flight | None = None
        failure: Exception | None = None
        if plan is not None:
            try:
                started = Flight(plan, runner.dispatch(plan), planned)
            except Exception as error:
                failure = error
            counters.dispatch_s += clock() - planned
        if before is not None and not self._finish(before, events):
            # Its failure made the new step void, too; where the pages are intact, that one is forgotten.
            if plan is not None and self.scheduler.flies(plan):
                self.scheduler.undo(plan)
            return
        if plan is None:
            return
        if failure is None and started is not None:
            failure = self._sample(started, events)
        if failure is not None:
            self._failed(plan, failure, events)
            return
        self._flight = started
        if not self.asynchronous and started is not None:
            self._flight = None
            self._finish(started, events)
        self._forget_void_flight()

    def _sample(self, flight: Flight, events: list[TokenEvent]) -> Exception | None:
        """Say how the next tokens are chosen; returns what that raised."""
        began, plan = self.clock(), flight.plan
        current = self.scheduler.current(plan)
        draws = [
            self._draw(plan.slices[index], events) if plan.slices[index].uid in current else None
            for index in plan.emitting
        ]
        try:
            self.runner.sample(flight.pending, draws)
        except Exception as error:
            return error
        finally:
            self._counters.dispatch_s += self.clock() - began
        return None

    def _draw(self, piece: Slice, events: list[TokenEvent]) -> Draw | None:
        """The draw of one slice. A structure that cannot go on ends its own sequence."""
        output = self._outputs[piece.uid]
        try:
            return output.drawing.draw(piece)
        except Exception as error:
            logger.exception("the next token of %r cannot be chosen", output.sequence)
            message = f"the structure of the output cannot be followed ({type(error).__name__})"
            self.scheduler.finish(piece.uid, "error", message)
            events.append(self._end(output, "", None, "error", message))
            return None

    def _finish(self, flight: Flight, events: list[TokenEvent]) -> bool:
        """Wait for a step, record it and tell of it; False when it failed."""
        clock, counters = self.clock, self._counters
        waiting = clock()
        try:
            result = self.runner.fetch(flight.pending)
        except Exception as error:
            counters.wait_s += clock() - waiting
            self._failed(flight.plan, error, events)
            return False
        done = clock()
        counters.wait_s += done - waiting
        outcomes = self.scheduler.commit(flight.plan, result)
        self._unread = False
        counters.failed_in_a_row = 0
        counters.steps += 1
        counters.computed_tokens += flight.plan.num_tokens
        for outcome in outcomes:
            if outcome.scores:
                self._outputs[outcome.sequence.uid].score(outcome.scored_from, outcome.scores)
            if outcome.sampled is not None or outcome.sequence.finish_reason is not None:
                events.append(self._tell(outcome))
        told = clock()
        counters.engine_s += told - done
        if self.trace is not NO_TRACE:
            shape = getattr(flight.pending, "shape", None)
            padding = 0 if shape is None else shape.tokens - flight.plan.num_tokens
            bucket = "" if shape is None else str(shape)
            self.trace.step(
                flight.plan, bucket, padding, self._gauges(), flight.dispatched_at, waiting, done, told
            )
            for outcome in outcomes:
                if outcome.sampled is not None:
                    self.trace.token(outcome.sequence, done)
        return True

    def _failed(self, plan: StepPlan, error: Exception, events: list[TokenEvent]) -> None:
        logger.error("%r failed", plan, exc_info=error)
        counters = self._counters
        counters.steps += 1
        counters.failed_steps += 1
        counters.failed_in_a_row += 1
        # The error may be of a step that nobody waited for: then it is found out who fails alone.
        sure, self._unread = not self._unread, False
        for outcome in self.scheduler.fail(plan, error, sure=sure):
            events.append(self._tell(outcome))

    def _forget_void_flight(self) -> None:
        """Nobody waits for a step whose sequences have all ended. Its pages may be used again at once, since
        whatever runs next runs after it."""
        if self._flight is not None and not self.scheduler.current(self._flight.plan):
            self.scheduler.retire(self._flight.plan)
            self._flight, self._unread = None, True

    def _expire(self, now: float) -> None:
        """End the requests whose time is up."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id, uids, timeout = heapq.heappop(self._deadlines)
            if self._is_unfinished(request_id, uids):
                self.cancel(request_id, f"not finished within its timeout of {timeout:g} s")

    def _is_unfinished(self, request_id: str, uids: tuple[int, ...]) -> bool:
        """Whether one of these sequences runs; the request's id may be that of a later one by now."""
        return not self._uids_of.get(request_id, set()).isdisjoint(uids)

    def _end_untold(self, error: BaseException) -> None:
        """A step broke off: end ("error") whoever has a token, or an end, that was recorded and not told."""
        for output in tuple(self._outputs.values()):
            sequence = output.sequence
            if sequence.finish_reason is not None or sequence.num_output != output.num_told:
                message = f"the engine failed to tell what it had generated ({type(error).__name__})"
                self.scheduler.finish(sequence.uid, "error", message)  # nothing, for one that has ended
                self._unsaid.append(self._end(output, "", None, "error", message))

    def _tell(self, outcome: Outcome) -> TokenEvent:
        """The event of one outcome. A stop string found in its text ends the sequence here."""
        sequence, sampled = outcome.sequence, outcome.sampled
        output = self._outputs[sequence.uid]
        if sampled is None:
            return self._end(output, "", None, sequence.finish_reason or "error", sequence.error)
        if sequence.request.counted:
            self._counters.generated_tokens += 1
            self.histograms.token(sequence, output.token_at)
        output.token_at = sequence.last_token_at
        ended_by_id = sequence.finish_reason == "stop"
        what = f"following the structure of the output to token {sampled.token_id}"
        try:
            complete = False
            if not ended_by_id:
                output.drawing.append(sampled.token_id)
                complete = output.drawing.finished
            what = f"detokenising token {sampled.token_id}"
            text = output.push(sampled, ended_by_id, outcome.stop_reason)
            stopped = output.stopped or complete
        except Exception as error:
            logger.error("%s failed for %r", what, sequence, exc_info=error)
            message = f"{what} failed ({type(error).__name__})"
            self.scheduler.finish(sequence.uid, "error", message)
            return self._end(output, "", sampled, "error", message)
        if stopped and sequence.finish_reason is None:
            self.scheduler.finish(sequence.uid, "stop")
        if sequence.finish_reason is None:
            return output.event(text, sampled, None)
        # A stop string or structure completed by the last token that max_tokens allows is a stop (B056).
        reason = "stop" if stopped else sequence.finish_reason
        return self._end(output, text, sampled, reason)

    def _end(
        self,
        output: SequenceOutput,
        text: str,
        sampled: Any,
        reason: FinishReason,
        error: str | None = None,
    ) -> TokenEvent:
        """The last event of a sequence, which is forgotten: the text still held back, and the metrics."""
        sequence = output.sequence
        try:
            text += output.finish()
        except Exception as failure:  # the text room failed: what was shown so far stands
            logger.exception("detokenising the end of %r failed", sequence)
            error = error or f"detokenising failed ({type(failure).__name__})"
            reason = "error"
        if reason == "length" and output.stopped:
            reason = "stop"  # a match that only the end of the text decided
        metrics = sequence_metrics(sequence, self.clock())
        event = output.event(text, sampled, reason, error, metrics)  # whatever it raises, nobody is forgotten
        if sequence.request.counted:
            self._counters.ended(sequence, reason, metrics)
        del self._outputs[sequence.uid]
        request_id = sequence.request.request_id
        self._uids_of[request_id].discard(sequence.uid)
        if not self._uids_of[request_id]:
            del self._uids_of[request_id]
        self.trace.ended(sequence, reason, self.clock())
        return event

    def count_search(
        self, prompt_tokens: int, outputs: Seq[tuple[int, FinishReason]], seconds: float
    ) -> None:
        """Count a beam search that has ended as one request of so many prompt tokens; of each output, its
        tokens and how it ended. Its requests were not `counted`."""
        self._counters.searched(prompt_tokens, outputs, seconds)

    # ------------------------------------------------------------------------------------- health

    @property
    def failed_in_a_row(self) -> int:
        """Failed steps since the last good one. Any thread may look."""
        return self._counters.failed_in_a_row

    def stats(self) -> dict[str, Any]:
        """Gauges and counts since the start, with what the runner adds. Times are seconds. Any thread may
        ask; what is read amid a step may be of two moments within it.

        `pages_*` count pages of the pool (page 0, which nobody owns, is in none): free + cached + live =
        total. `running` and `waiting` count sequences, `requests` requests, `finished` sequences by reason.
        `prompt_tokens` counts each prompt once, `cached_tokens` those found in the prefix cache,
        `computed_tokens` what the device ran, recomputation included. `failed_in_a_row` counts the failed
        steps since the last good one. `host_share` is the Python part of all steps:
        (engine_s + dispatch_s) / (engine_s + dispatch_s + wait_s).
        """
        cache = self.scheduler.tables.cache
        return {
            **self.runner.stats(),
            "pages_total": self.limits.usable_pages,
            "max_num_seqs": self.limits.max_num_seqs,
            "max_num_batched_tokens": self.limits.max_num_batched_tokens,
            **self._gauges(),
            "prefix_cache": {} if cache is None else cache.stats(),
            "preemptions": self.scheduler.preemptions,
            **self._counters.as_dict(),
        }

    def _gauges(self) -> dict[str, int]:
        scheduler, pool = self.scheduler, self.scheduler.pool
        return {
            "pages_free": pool.num_free,
            "pages_cached": pool.num_cached,
            "pages_live": pool.num_live,
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
        }

    def check(self) -> list[str]:
        """What is wrong with the books, one sentence each; an empty list when all is well."""
        problems = self.scheduler.check()
        scheduler = self.scheduler
        known = {s.uid for s in scheduler.running} | {s.uid for s in scheduler.waiting}
        if known != set(self._outputs) or known != set().union(*self._uids_of.values()):
            problems.append(f"{len(known)} sequences are scheduled, {len(self._outputs)} have an output")
        return problems

    def _check_when_idle(self) -> None:
        """With no sequence left every page must be free or cached. A fault is told and counted; it kills
        nobody."""
        if self.scheduler.has_unfinished:
            return
        problems, now = [], self.clock()
        if self.scheduler.pool.num_live:
            problems.append(f"idle, but {self.scheduler.pool}")
        if now >= self._next_full_check:
            self._next_full_check = now + FULL_CHECK_EVERY_S
            problems += self.check()
        if problems:
            self._counters.invariant_failures += 1
            logger.error("engine invariant broken: %s", "; ".join(problems))

    def __repr__(self) -> str:
        return f"Engine({self.scheduler!r}, {self._counters.steps} steps)"
