"""JAXINFER_DEBUG: how much a command tells of its inside, on stderr.

    1   the traceback behind an error
    2   also a line per step: what it ran, its bucket, milliseconds
    3   also each request's life (arrived, first token, end), and all books of the engine are checked after
        every step
    4   also every slice with its pages, before it runs

The lines are DEBUG records of the logger "jaxinfer.debug"; the engine's own records of that level show too.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.terminal import UsageError
from jaxinfer.core import FinishReason, Request, Sequence, StepPlan
from jaxinfer.engine.trace import Trace

if TYPE_CHECKING:
    from jaxinfer.core import TokenEvent
    from jaxinfer.engine import Engine

VARIABLE = "JAXINFER_DEBUG"
TRACEBACKS, STEPS, REQUESTS, SLICES = 1, 2, 3, 4

logger = logging.getLogger("jaxinfer.debug")


def level() -> int:
    """What the environment asks for; 0 is nothing. Raises UsageError for what is no level."""
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", "0", "1", "2", "3", "4"):
        raise UsageError(f"{VARIABLE} must be a number from 0 to 4, got {asked[:80]!r}")
    return int(asked or 0)


def set_up() -> None:
    """From STEPS on, write the DEBUG records of this package to stderr. Raises UsageError, as `level`."""
    if level() < STEPS:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s.%(msecs)03d %(name)s: %(message)s", "%H:%M:%S"))
    package = logging.getLogger("jaxinfer")
    package.setLevel(logging.DEBUG)
    package.handlers = [handler]  # and not one more for each `main` of a process
    package.propagate = False


def watch(engine: Engine) -> None:
    """Let an engine tell what the level asks for."""
    asked = level()
    if asked >= STEPS:
        engine.trace = LogTrace(engine.trace, asked)
    if asked >= REQUESTS:
        _check_after_every_step(engine)
    if asked >= SLICES:
        _tell_of_slices(engine)


class LogTrace(Trace):
    """Logs what the engine tells a trace, and passes it on to the one that was there before."""

    def __init__(self, inner: Trace, asked: int):
        self._inner, self._asked = inner, asked
        self._speaking: set[int] = set()  # uids whose first token has been told of, and not their end

    def arrived(self, request: Request, now: float) -> None:
        self._inner.arrived(request, now)
        if self._asked >= REQUESTS:
            tokens, n = len(request.prompt_token_ids), request.sampling.n
            logger.debug("%s arrived: %d prompt tokens, n %d", request.request_id, tokens, n)

    def step(
        self, plan: StepPlan, bucket: str, padding: int, gauges: dict[str, int],
        dispatched: float, waited: float, done: float, told: float,
    ) -> None:  # fmt: skip
        self._inner.step(plan, bucket, padding, gauges, dispatched, waited, done, told)
        spans = (told - dispatched, done - waited, told - done)
        logger.debug(
            "%r bucket %s: %.2f ms (waited %.2f, told %.2f); %s",
            plan,
            bucket or "-",
            *(1e3 * span for span in spans),
            ", ".join(f"{name} {value}" for name, value in gauges.items()),
        )

    def token(self, sequence: Sequence, now: float) -> None:
        self._inner.token(sequence, now)
        if sequence.finish_reason is None:  # the end of one that has ended is told already
            self._first_token(sequence)

    def ended(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        self._inner.ended(sequence, reason, now)
        self._first_token(sequence)
        self._speaking.discard(sequence.uid)
        if self._asked >= REQUESTS:
            logger.debug(
                "%s ended: %s after %.1f ms, %d tokens, %d cached, %d preemptions%s",
                _name(sequence),
                reason,
                1e3 * (now - sequence.arrived_at),
                sequence.num_output,
                sequence.cached_tokens,
                sequence.preemptions,
                f" ({sequence.error})" if sequence.error else "",
            )

    def close(self) -> None:
        self._inner.close()

    def _first_token(self, sequence: Sequence) -> None:
        if self._asked < REQUESTS or sequence.first_token_at is None or sequence.uid in self._speaking:
            return
        self._speaking.add(sequence.uid)
        after = sequence.first_token_at - sequence.arrived_at
        logger.debug("%s first token after %.1f ms", _name(sequence), 1e3 * after)


def _name(sequence: Sequence) -> str:
    return f"{sequence.request.request_id}[{sequence.index}] (uid {sequence.uid})"


def _check_after_every_step(engine: Engine) -> None:
    step = engine.step

    def checked() -> list[TokenEvent]:
        events = step()
        for problem in engine.check():
            logger.error("the books are wrong after a step: %s", problem)
        return events

    engine.step = checked  # type: ignore[method-assign]


def _tell_of_slices(engine: Engine) -> None:
    """Before a step runs, not with its result: a kernel that takes the process down leaves this behind."""
    runner = engine.runner
    dispatch = runner.dispatch

    def told(plan: StepPlan) -> Any:
        for piece in plan.slices:
            logger.debug(
                "step %d: uid %d runs %d+%d%s%s%s, pages %s",
                plan.step,
                piece.uid,
                piece.start,
                piece.count,
                ", emits" if piece.emit else "",
                ", chained" if piece.chained else "",
                f", scores {len(piece.targets)}" if piece.targets else "",
                list(piece.pages),
            )
        for source, target in plan.copies:
            logger.debug("step %d: page %d is copied to %d", plan.step, source, target)
        return dispatch(plan)

    runner.dispatch = told  # type: ignore[method-assign]
