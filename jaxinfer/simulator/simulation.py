"""A load put to the scheduler and a step-time model: what the engine would do, far sooner than it would.

The loop is that of `Engine.step` and of a driver of loads around it, in virtual time: hand over what has
arrived, plan a step, give it to the device, wait for the step before it and record that.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from array import array
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Protocol

from jaxinfer.core import FinishReason, Limits, Request, RequestError, Sequence
from jaxinfer.engine import validate
from jaxinfer.engine.scheduler import Policy
from jaxinfer.simulator.clock import VirtualClock
from jaxinfer.simulator.runner import Timeline
from jaxinfer.simulator.scheduler import CruisingScheduler, Step
from jaxinfer.simulator.timing import StepTimer, Totals


@dataclass(frozen=True, slots=True)
class Ask:
    """A request, and when it should arrive, in seconds from the start (0 in a closed loop). `in_vocabulary`:
    its prompt is known to hold ids of the model alone, because it was drawn from them."""

    at_s: float
    request: Request
    in_vocabulary: bool = False


class Arriving(Protocol):
    """What an Ask says. `request` is read once, when it arrives, and may be made only then; where it raises
    RequestError, that is why the engine would refuse it."""

    @property
    def at_s(self) -> float: ...

    @property
    def request(self) -> Request: ...

    @property
    def in_vocabulary(self) -> bool: ...


class Asks(Protocol):
    """Those of a load, in the order of arrival: a sequence of Ask, or something that makes them."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Arriving: ...


@dataclass(frozen=True, slots=True)
class Served:
    """What came of one request; times are seconds from the start. `arrived_s` is when it was to arrive,
    `sent_s` when the scheduler had it, between two steps; `started_s` when its first slice was planned.
    `error` says why it was refused; then it has no tokens."""

    index: int
    arrived_s: float
    sent_s: float
    ended_s: float
    token_s: array[float]
    started_s: float | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None


@dataclass(slots=True)
class Peaks:
    """The most at any one step: sequences running and waiting, and pages that somebody holds."""

    running: int = 0
    waiting: int = 0
    pages: int = 0

    def see(self, running: int, waiting: int, pages: int) -> None:
        """A step as it was planned."""
        if running > self.running:
            self.running = running
        if waiting > self.waiting:
            self.waiting = waiting
        if pages > self.pages:
            self.pages = pages


@dataclass(frozen=True, slots=True)
class Outcome:
    """A simulated run. `served` is in the order of the load. `ended_s`: when the last step had run. `held_s`:
    seconds of steps that left somebody waiting, by the limit that was reached ("max_num_seqs", then
    "max_num_batched_tokens"); else it was "num_pages"."""

    served: tuple[Served, ...]
    totals: Totals
    peaks: Peaks
    preemptions: int
    ended_s: float
    held_s: dict[str, float]


class Simulation:
    """One engine's worth of scheduling on a simulated device. Runs once.

    `limits`, `policy` and `prefix_caching` are those of an engine; `timer` knows whether it is asynchronous.
    cruise: False moves every sequence one by one, as the engine does; the outcome is the same.
    """

    def __init__(
        self,
        limits: Limits,
        timer: StepTimer,
        *,
        policy: Policy = "fcfs",
        prefix_caching: bool = False,
        cruise: bool = True,
    ):
        self.limits, self.timer = limits, timer
        self.clock = VirtualClock()
        self.scheduler = CruisingScheduler(
            limits, self.clock, policy=policy, prefix_caching=prefix_caching,
            windows=timer.windows, cruise=cruise,
        )  # fmt: skip
        self.peaks = Peaks()
        self.held_s: dict[str, float] = {}
        self._timeline = Timeline()
        self._flight: tuple[Step, float] | None = None  # a step on the device, and when it has run

    def run(
        self,
        asks: Asks,
        *,
        concurrency: int | None = None,
        advance: Callable[[float], None] | None = None,
    ) -> Outcome:
        """Run a load to its end. `asks` are in the order of arrival; with `concurrency` the next one arrives
        when one of so many places is free. `advance(1)` is called at the end of each request.

        A request that the engine would refuse is told so in its Served. What a simulation cannot serve
        raises RequestError when it arrives: more than one answer a request, and a timeout.
        """
        door = _Door(self, asks, concurrency, advance or (lambda amount: None))
        with _uncollected():
            self._run(door)
        served = tuple(s for s in door.served if s is not None)
        assert len(served) == len(asks), f"{self.scheduler} forgot {len(asks) - len(served)} requests"
        preemptions = self.scheduler.preemptions
        return Outcome(served, self.timer.totals, self.peaks, preemptions, self.clock(), self.held_s)

    def _run(self, door: _Door) -> None:
        while True:
            door.let_in()
            if self.scheduler.has_unfinished:
                for sequence in self._step():
                    door.let_out(sequence)
            elif (at_s := door.next_arrival()) is not None:
                self.clock.wait_until(at_s)
            else:
                return

    def _step(self) -> list[Sequence]:
        """One step of an engine; returns the sequences that ended."""
        scheduler, before = self.scheduler, self._flight
        self._flight = None
        ended: list[Sequence] = []
        step = scheduler.plan_step()
        if step is not None:
            self.peaks.see(len(scheduler.running), len(scheduler.waiting), scheduler.pool.num_live)
            seconds = self.timer.seconds(step)
            if scheduler.waiting:
                limit = self._limit_of(step)
                self.held_s[limit] = self.held_s.get(limit, 0.0) + seconds
            self._flight = step, self._timeline.run(self.clock(), seconds)
        if before is not None:
            ended += self._record(*before)
        if self._flight is not None and not self.timer.asynchronous:
            started, self._flight = self._flight, None
            ended += self._record(*started)
        return ended

    def _limit_of(self, step: Step) -> str:
        """What keeps those who wait from running beside a step."""
        if len(self.scheduler.running) >= self.limits.max_num_seqs:
            return "max_num_seqs"
        full = step.rows + step.plan.num_tokens >= self.limits.max_num_batched_tokens
        return "max_num_batched_tokens" if full else "num_pages"

    def _record(self, step: Step, done_at: float) -> list[Sequence]:
        self.clock.wait_until(done_at)
        outcomes = self.scheduler.commit_step(step)
        return [outcome.sequence for outcome in outcomes if outcome.sequence.finish_reason is not None]


@contextlib.contextmanager
def _uncollected() -> Generator[None]:
    """Without Python's search for cycles, which looks again and again at millions of tokens. What the
    scheduler lets go of is in none."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Door:
    """Lets requests in when they arrive, and writes down what came of them."""

    def __init__(
        self,
        simulation: Simulation,
        asks: Asks,
        concurrency: int | None,
        advance: Callable[[float], None],
    ):
        self.simulation, self.asks, self.advance = simulation, asks, advance
        self.served: list[Served | None] = [None] * len(asks)
        self._next = 0
        # Of a closed loop: when each free place became free, which is when its next request arrives.
        self._free = None if concurrency is None else deque([0.0] * min(concurrency, len(asks)))
        self._uids = itertools.count()
        self._open: dict[int, tuple[int, float, float]] = {}  # by uid: what Served begins with

    def next_arrival(self) -> float | None:
        """When the next request should arrive; None when there is none, or no place for it."""
        if self._next == len(self.asks):
            return None
        if self._free is None:
            return self.asks[self._next].at_s
        return self._free[0] if self._free else None

    def let_in(self) -> None:
        """Hand over every request whose time has come."""
        now, scheduler = self.simulation.clock(), self.simulation.scheduler
        while (arrived := self.next_arrival()) is not None and arrived <= now:
            index, self._next = self._next, self._next + 1
            if self._free is not None:
                self._free.popleft()
            try:
                ask = self.asks[index]
                request = ask.request
                most = validate(
                    request, self.simulation.limits, has_tokenizer=False, in_vocabulary=ask.in_vocabulary
                )
            except RequestError as error:
                self._close(Served(index, arrived, now, now, array("d"), error=str(error)))
                continue
            if request.sampling.n != 1 or request.timeout_s is not None:
                name = "timeout_s" if request.sampling.n == 1 else "n"
                raise RequestError(f"{request.request_id}: {name} is not simulated; leave it out", name)
            ids = request.prompt_token_ids
            sequence = Sequence(
                uid=next(self._uids), request=request, index=0, seed=0, max_tokens=most,
                tokens=list(ids), num_prompt=len(ids), arrived_at=now,
            )  # fmt: skip
            self._open[sequence.uid] = index, arrived, now
            scheduler.add(sequence)

    def let_out(self, sequence: Sequence) -> None:
        """A request has ended, now."""
        times = self.simulation.scheduler.token_times.pop(sequence.uid)
        served = Served(
            *self._open.pop(sequence.uid), self.simulation.clock(), times, sequence.first_scheduled_at,
            cached_tokens=sequence.cached_tokens, preemptions=sequence.preemptions,
            finish_reason=sequence.finish_reason, error=sequence.error,
        )  # fmt: skip
        self._close(served)

    def _close(self, served: Served) -> None:
        self.served[served.index] = served
        if self._free is not None:
            self._free.append(served.ended_s)
        self.advance(1)
