"""The loop: requests in, token events out, one step at a time.

    engine.add(request)
    while engine.has_work:
        for event in engine.step(): ...

One thread owns an engine; nothing here locks. `step` survives whatever a request or the device does: what
fails is reported as the end ("error") of the sequences concerned. What does raise is a fault of this code.
"""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Callable
from typing import Any

from jaxinfer.core import (
    FinishReason,
    Limits,
    Request,
    RequestError,
    Runner,
    Sampled,
    Sequence,
    StepPlan,
    TokenEvent,
)
from jaxinfer.engine.metrics import Counters, sequence_metrics
from jaxinfer.engine.output import SequenceOutput, Tokenizer
from jaxinfer.engine.scheduler import Outcome, Scheduler
from jaxinfer.engine.validate import continuation_seed, validate

logger = logging.getLogger(__name__)

FULL_CHECK_EVERY_S = 10.0
"""How often at most an idle engine looks at every page: with 60 000 of them that takes milliseconds."""


class Engine:
    """Runs any number of requests together on one `Runner`.

    `tokenizer` None serves token ids with empty text. `seed` feeds the seeds of requests that bring none
    (None: from the system). `clock` returns seconds and never goes back.
    """

    def __init__(
        self,
        runner: Runner,
        limits: Limits,
        tokenizer: Tokenizer | None = None,
        seed: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.runner = runner
        self.limits = limits
        self.tokenizer = tokenizer
        self.clock = clock
        self.scheduler = Scheduler(limits, clock)
        self._random = random.Random(seed)
        self._uids = itertools.count()
        self._outputs: dict[int, SequenceOutput] = {}  # by uid: every unfinished sequence
        self._uids_of: dict[str, set[int]] = {}  # by request id: its unfinished sequences
        self._unsaid: list[TokenEvent] = []  # the ends of cancelled sequences, for the next step to tell
        self._counters = Counters()
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
            outputs.append(SequenceOutput(sequence, self.tokenizer))
        for output in outputs:
            self._outputs[output.sequence.uid] = output
            self.scheduler.add(output.sequence)
        self._uids_of[request.request_id] = {output.sequence.uid for output in outputs}
        self._counters.requests += 1
        self._counters.prompt_tokens += len(request.prompt_token_ids)

    def cancel(self, request_id: str) -> bool:
        """End a request's unfinished sequences ("abort"); its pages are free for the next step.

        The next `step` returns the events of their ends. False when no such request is unfinished.
        """
        uids = self._uids_of.get(request_id)
        for uid in sorted(uids or ()):
            self.scheduler.finish(uid, "abort")
            self._unsaid.append(self._end(self._outputs[uid], "", None, "abort"))
        if uids is not None:
            self._check_when_idle()
        return uids is not None

    @property
    def has_work(self) -> bool:
        """True while `step` has something to run or to tell."""
        return bool(self._unsaid) or self.scheduler.has_unfinished

    # --------------------------------------------------------------------------------------- step

    def step(self) -> list[TokenEvent]:
        """Run one step; returns at most one event per sequence, in no order between sequences.

        Returns [] when there was nothing to do, or when the step sampled nothing (a prefill chunk).
        """
        began = self.clock()
        events, self._unsaid = self._unsaid, []
        plan = self.scheduler.schedule()
        if plan is None:
            return events
        try:
            outcomes, done = self._run(plan, began)
            for outcome in outcomes:
                events.append(self._tell(outcome))
            self._check_when_idle()
            self._counters.engine_s += self.clock() - done
        except BaseException as error:
            # Ctrl-C reached us amid the step, or a fault of ours. Whoever catches it may use the engine on.
            self.scheduler.abandon(plan)
            self._unsaid = events
            self._end_untold(error)
            raise
        return events

    def _end_untold(self, error: BaseException) -> None:
        """A step broke off: end ("error") whoever has a token, or an end, that was recorded and not told."""
        for output in tuple(self._outputs.values()):
            sequence = output.sequence
            if sequence.finish_reason is not None or sequence.num_output != output.num_told:
                message = f"the engine failed to tell what it had generated ({type(error).__name__})"
                self.scheduler.finish(sequence.uid, "error", message)  # nothing, for one that has ended
                self._unsaid.append(self._end(output, "", None, "error", message))

    def _run(self, plan: StepPlan, began: float) -> tuple[list[Outcome], float]:
        """Run a plan on the device and record it; returns the outcomes and when the device was done."""
        counters = self._counters
        planned = dispatched = self.clock()
        try:
            pending = self.runner.dispatch(plan)
            dispatched = self.clock()
            result = self.runner.fetch(pending)
        except Exception as error:
            done = self.clock()
            logger.exception("%r failed", plan)
            counters.failed_steps += 1
            counters.failed_in_a_row += 1
            outcomes = self.scheduler.fail(plan, error)
        else:
            done = self.clock()
            outcomes = self.scheduler.commit(plan, result)
            counters.failed_in_a_row = 0
            counters.computed_tokens += plan.num_tokens
        counters.steps += 1
        counters.engine_s += planned - began
        counters.dispatch_s += dispatched - planned
        counters.wait_s += done - dispatched
        return outcomes, done

    def _tell(self, outcome: Outcome) -> TokenEvent:
        """The event of one outcome. A stop string found in its text ends the sequence here."""
        sequence, sampled = outcome.sequence, outcome.sampled
        output = self._outputs[sequence.uid]
        if sampled is None:
            return self._end(output, "", None, sequence.finish_reason or "error", sequence.error)
        self._counters.generated_tokens += 1
        ended_by_id = sequence.finish_reason == "stop"
        try:
            text = output.push(sampled, ended_by_id, outcome.stop_reason)
        except Exception as error:
            logger.exception("detokenising %r failed", sequence)
            message = f"detokenising token {sampled.token_id} failed ({type(error).__name__})"
            self.scheduler.finish(sequence.uid, "error", message)
            return self._end(output, "", sampled, "error", message)
        if output.stopped and sequence.finish_reason is None:
            self.scheduler.finish(sequence.uid, "stop")
        if sequence.finish_reason is None:
            return output.event(text, sampled, None)
        # A stop string completed by the last token that max_tokens allows is a stop (B056).
        reason = "stop" if output.stopped else sequence.finish_reason
        return self._end(output, text, sampled, reason)

    def _end(
        self,
        output: SequenceOutput,
        text: str,
        sampled: Sampled | None,
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
        self._counters.ended(reason, metrics)
        del self._outputs[sequence.uid]
        request_id = sequence.request.request_id
        self._uids_of[request_id].discard(sequence.uid)
        if not self._uids_of[request_id]:
            del self._uids_of[request_id]
        return event

    # ------------------------------------------------------------------------------------- health

    @property
    def failed_in_a_row(self) -> int:
        """Failed steps since the last good one. Any thread may look."""
        return self._counters.failed_in_a_row

    def stats(self) -> dict[str, Any]:
        """Gauges and counts since the start, with what the runner adds. Times are seconds.

        `pages_*` count pages of the pool (page 0, which nobody owns, is in none); `running` and `waiting`
        count sequences, `requests` requests, `finished` sequences by reason. `prompt_tokens` counts each
        prompt once, `computed_tokens` what the device ran, recomputation included. `failed_in_a_row` counts
        the failed steps since the last good one. `host_share` is the Python part of all steps:
        (engine_s + dispatch_s) / (engine_s + dispatch_s + wait_s).
        """
        scheduler = self.scheduler
        return {
            **self.runner.stats(),
            "pages_total": self.limits.usable_pages,
            "pages_free": scheduler.pool.num_free,
            "pages_live": scheduler.pool.num_live,
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "preemptions": scheduler.preemptions,
            **self._counters.as_dict(),
        }

    def check(self) -> list[str]:
        """What is wrong with the books, one sentence each; an empty list when all is well."""
        problems = self.scheduler.check()
        known = {s.uid for s in self.scheduler.running} | set(self.scheduler.waiting)
        if known != set(self._outputs) or known != set().union(*self._uids_of.values()):
            problems.append(f"{len(known)} sequences are scheduled, {len(self._outputs)} have an output")
        return problems

    def _check_when_idle(self) -> None:
        """With no sequence left every page must be free. A fault is told and counted; it kills nobody."""
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
