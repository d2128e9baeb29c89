"""A load put to an engine, in one loop for all of them: what runs in process, and what is simulated.

    records = drive(llm.engine, load, RealClock())

The engine decides nothing here and the clock is the caller's: by `RealClock` the run is measured; by a
virtual clock that a simulated runner moves on, the same loop foretells it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from jaxinfer.bench.load import Load
from jaxinfer.bench.records import RequestRecord, Status
from jaxinfer.core import Limits, Request, RequestError, SamplingParams, TokenEvent
from jaxinfer.engine import Engine


class Clock(Protocol):
    """Time as the driver sees it, in seconds; it never goes back."""

    def now(self) -> float: ...

    def wait_until(self, at_s: float) -> None:
        """Return when `now()` is `at_s` or later."""
        ...


class RealClock:
    """The clock on the wall, as the engine has it."""

    def now(self) -> float:
        return time.monotonic()

    def wait_until(self, at_s: float) -> None:
        while (left := at_s - time.monotonic()) > 0:
            time.sleep(left)


GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
"""Answers are as long as the load says, and cost no draws."""


def drive(
    engine: Engine,
    load: Load,
    clock: Clock,
    *,
    sampling: SamplingParams = GREEDY,
    advance: Callable[[float], None] | None = None,
) -> list[RequestRecord]:
    """Run a load to its end: one record a request, in the order of the load. Times are from the start of the
    run.

    The engine must have no other work; this thread steps it. `sampling` is of every request, with
    `max_tokens` as the load says. `advance(1)` is called at the end of each request. A request that the
    engine refuses is recorded, not raised. What is unfinished when an exception (Ctrl-C) passes through is
    cancelled.
    """
    assert not engine.has_work, "the engine has requests of somebody else"
    assert sampling.n == 1, f"{sampling.n} answers a request have no one latency"
    # Before time starts: drawing prompts takes longer than a step.
    requests = [_request(load, index, sampling, engine.limits) for index in range(len(load.arrivals))]
    run = _Run(engine, load, clock, requests, advance or (lambda amount: None))
    try:
        return run.to_the_end()
    finally:
        run.cancel()


def _request(load: Load, index: int, sampling: SamplingParams, limits: Limits) -> Request | RequestError:
    """One request of a load, or why the engine would refuse it."""
    try:
        return load.request(index, f"bench-{index}", sampling, limits)
    except RequestError as error:
        return error


class _Open:
    """A request amid its run."""

    __slots__ = ("arrived", "index", "sent", "tokens")

    def __init__(self, index: int, arrived: float, sent: float):
        self.index, self.arrived, self.sent = index, arrived, sent
        self.tokens: list[float] = []


class _Run:
    def __init__(
        self,
        engine: Engine,
        load: Load,
        clock: Clock,
        requests: list[Request | RequestError],
        advance: Callable[[float], None],
    ):
        self.engine, self.load, self.clock, self.advance = engine, load, clock, advance
        self.requests = requests
        self.records: list[RequestRecord | None] = [None] * len(requests)
        self.open: dict[str, _Open] = {}
        self.next = 0
        # Of a closed loop: when each free place became free, which is when its next request arrives.
        self.free = deque([0.0] * min(load.concurrency or 0, len(requests)))
        self.start = clock.now()

    def now(self) -> float:
        return self.clock.now() - self.start

    def to_the_end(self) -> list[RequestRecord]:
        while self.open or self.next < len(self.requests):
            self._add_due()
            if self.engine.has_work:
                events = self.engine.step()
                now = self.now()  # a client cannot have heard of them earlier
                for event in events:
                    self._hear(event, now)
            elif self.open:
                raise AssertionError(f"the engine forgot {sorted(self.open)[:5]}")
            elif (at_s := self._next_arrival()) is not None:
                self.clock.wait_until(self.start + at_s)
        return [record for record in self.records if record is not None]

    def _next_arrival(self) -> float | None:
        """When the next request should arrive; None when there is none, or no place for it."""
        if self.next == len(self.requests):
            return None
        if self.load.concurrency is None:
            return self.load.arrivals[self.next].at_s
        return self.free[0] if self.free else None

    def _add_due(self) -> None:
        """Hand over every request whose time has come."""
        while (arrived := self._next_arrival()) is not None and arrived <= (now := self.now()):
            if self.load.concurrency is not None:
                self.free.popleft()
            request = self.requests[self.next]
            opened = _Open(self.next, arrived, now)
            self.next += 1
            try:
                if isinstance(request, RequestError):
                    raise request
                self.engine.add(request)
            except RequestError as error:
                self._close(opened, self.now(), "refused", None, str(error))
            else:
                self.open[request.request_id] = opened

    def _hear(self, event: TokenEvent, now: float) -> None:
        opened = self.open.get(event.request_id)
        if opened is None:
            return
        opened.tokens += [now] * len(event.token_ids)
        if event.finish_reason is not None:
            del self.open[event.request_id]
            status: Status = "ok" if event.finish_reason in ("stop", "length") else "failed"
            cached = 0 if event.metrics is None else event.metrics.cached_tokens
            error = None if status == "ok" else event.error or event.finish_reason
            self._close(opened, now, status, event.finish_reason, error, cached)

    def _close(
        self,
        opened: _Open,
        now: float,
        status: Status,
        reason: str | None,
        error: str | None,
        cached: int = 0,
    ) -> None:
        arrival = self.load.arrivals[opened.index]
        self.records[opened.index] = RequestRecord(
            index=opened.index,
            arrived_s=opened.arrived,
            sent_s=opened.sent,
            token_s=tuple(opened.tokens),
            ended_s=now,
            prompt_tokens=arrival.num_prompt,
            asked_tokens=arrival.output_tokens,
            cached_tokens=cached,
            status=status,
            finish_reason=reason,
            error=error,
        )
        if self.load.concurrency is not None:
            self.free.append(now)
        self.advance(1)

    def cancel(self) -> None:
        """Leave the engine idle, whatever happened."""
        if self.open:
            for request_id in self.open:
                self.engine.cancel(request_id)
            while self.engine.has_work:
                self.engine.step()
