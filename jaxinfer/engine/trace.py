"""A trace of what the engine did, in Chrome's trace event format (opens in Perfetto and chrome://tracing).

One line of the file is one event: `ts` and `dur` in microseconds since the trace began. Process 1 is the
engine (steps, and counters of pages and sequences), process 2 has a track for each request.
"""

from __future__ import annotations

import contextlib
import json
import logging
from pathlib import Path
from typing import IO, Any

from jaxinfer.core import ConfigError, FinishReason, Request, Sequence, StepPlan

logger = logging.getLogger(__name__)

ENGINE, REQUESTS = 1, 2
EVEN, ODD, HOST = 1, 2, 3
"""Tracks of the engine: a step begins before the one before it has ended, so they take turns."""
FLUSH_EVERY = 64
"""Events between two flushes, so that the trace of a process that was killed is nearly whole."""


class Trace:
    """Writes events as they come. The base class writes nothing."""

    def arrived(self, request: Request, now: float) -> None:
        """A request was queued."""

    def step(
        self, plan: StepPlan, bucket: str, padding: int, gauges: dict[str, int],
        dispatched: float, waited: float, done: float, told: float,
    ) -> None:  # fmt: skip
        """A step is recorded: started at `dispatched`, waited for from `waited` to `done`, told by `told`."""

    def token(self, sequence: Sequence, now: float) -> None:
        """A sequence has a new token."""

    def ended(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        """A sequence has ended."""

    def close(self) -> None:
        """No more events follow."""


NO_TRACE = Trace()


class FileTrace(Trace):
    """The events in a file. Times are those of the engine's clock, in seconds."""

    def __init__(self, path: str | Path):
        """Raises ConfigError when the file cannot be written."""
        try:
            self._file: IO[str] = open(path, "w", encoding="utf-8")  # noqa: SIM115 - lives as long as the engine
        except OSError as error:
            raise ConfigError(f"trace: {path} cannot be written ({error.strerror or error})") from None
        self._failed = False
        self._began: float | None = None
        self._count = 0
        self._file.write("[\n")
        for process, name in ((ENGINE, "engine"), (REQUESTS, "requests")):
            self._write({"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}})

    def arrived(self, request: Request, now: float) -> None:
        args = {"id": request.request_id, "prompt_tokens": len(request.prompt_token_ids)}
        self._write(
            {"ph": "i", "pid": REQUESTS, "tid": 0, "ts": self._us(now), "name": "arrived", "args": args}
        )

    def step(
        self, plan: StepPlan, bucket: str, padding: int, gauges: dict[str, int],
        dispatched: float, waited: float, done: float, told: float,
    ) -> None:  # fmt: skip
        args: dict[str, Any] = {
            "bucket": bucket,
            "tokens": plan.num_tokens,
            "padding": padding,
            "slices": [f"{p.uid}: {p.start}+{p.count}{' emits' if p.emit else ''}" for p in plan.slices],
            "preempted": list(plan.preempted),
            "copies": len(plan.copies),
        }
        start = self._us(dispatched)
        common = {"ph": "X", "pid": ENGINE}
        self._write(
            {
                **common,
                "tid": EVEN + plan.step % 2,
                "ts": start,
                "dur": self._us(done) - start,
                "name": f"step {plan.step}",
                "args": args,
            }
        )
        wait = self._us(waited)
        self._write(
            {**common, "tid": HOST, "ts": wait, "dur": self._us(done) - wait, "name": "wait for the device"}
        )
        end = self._us(done)
        self._write(
            {**common, "tid": HOST, "ts": end, "dur": self._us(told) - end, "name": "record and tell"}
        )
        self._write({"ph": "C", "pid": ENGINE, "ts": end, "name": "gauges", "args": gauges})

    def token(self, sequence: Sequence, now: float) -> None:
        args = {"position": len(sequence.tokens) - 1}
        self._write(
            {
                "ph": "i",
                "pid": REQUESTS,
                "tid": sequence.uid,
                "ts": self._us(now),
                "name": "token",
                "args": args,
            }
        )

    def ended(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        track = {"pid": REQUESTS, "tid": sequence.uid}
        name = f"{sequence.request.request_id}[{sequence.index}]"
        self._write({"ph": "M", **track, "name": "thread_name", "args": {"name": name}})
        arrived, started = sequence.arrived_at, sequence.first_scheduled_at
        first = sequence.first_token_at
        spans = [
            ("queue", arrived, started or now),
            ("prefill", started, first or now),
            ("decode", first, now),
        ]
        args = {
            "reason": reason,
            "prompt_tokens": sequence.num_prompt,
            "output_tokens": sequence.num_output,
            "cached_tokens": sequence.cached_tokens,
            "preemptions": sequence.preemptions,
        }
        for span, begin, end in spans:
            if begin is not None:
                start = self._us(begin)
                self._write(
                    {
                        "ph": "X",
                        **track,
                        "ts": start,
                        "dur": self._us(end) - start,
                        "name": span,
                        "args": args,
                    }
                )

    def close(self) -> None:
        if self._file.closed:
            return
        with contextlib.suppress(OSError):
            if not self._failed:
                self._file.write("{}]\n")  # the comma after the last event wants a successor
            self._file.close()

    def _us(self, seconds: float) -> int:
        if self._began is None:
            self._began = seconds
        return round((seconds - self._began) * 1e6)

    def _write(self, event: dict[str, Any]) -> None:
        """A disk that is full ends the trace, and nothing else."""
        if self._failed or self._file.closed:
            return
        try:
            self._file.write(json.dumps(event) + ",\n")
            self._count += 1
            if self._count % FLUSH_EVERY == 0:
                self._file.flush()
        except OSError as error:
            self._failed = True
            logger.error("the trace ends here: %s cannot be written (%s)", self._file.name, error.strerror)
