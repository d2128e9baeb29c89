"""The engine's thread, and the bridge between it and asyncio.

One thread owns the engine: it alone calls `add`, `cancel` and `step`. Handlers hand it work under one
condition and read `Ticket`s; a ticket is all the requests of one HTTP body. The thread sleeps on the
condition when there is nothing to do, and wakes each event loop once per step, however many tickets that
step touched.

    handler (asyncio)                         engine thread
    ticket = await submit(requests)  ──add──▶ engine.add
    async for events in ticket       ◀─push── engine.step
    cancel(ticket)  (client gone)    ─cancel▶ engine.cancel
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from jaxinfer.core import (
    EngineDeadError,
    FinishReason,
    JaxInferError,
    Limits,
    Request,
    RequestError,
    TokenEvent,
)
from jaxinfer.server.questions import Question
from jaxinfer.server.tickets import Ticket

logger = logging.getLogger(__name__)

FAILING_AT = 3
"""Failed steps in a row from which on the engine is not healthy. Two are what one bad request costs."""


class OverloadedError(JaxInferError):
    """As many sequences run and wait as the server admits; try again after `retry_after_s`."""

    retry_after_s = 1


class SlowReaderError(JaxInferError):
    """A client reads its answer so much slower than it is made that the rest is not kept for it."""


class StoppingError(EngineDeadError):
    """The server is shutting down and takes no new requests."""


class EngineLike(Protocol):
    """What the worker needs of an engine."""

    @property
    def has_work(self) -> bool: ...

    @property
    def failed_in_a_row(self) -> int: ...

    def add(self, request: Request) -> Any: ...

    def cancel(self, request_id: str) -> Any: ...

    def step(self) -> Iterable[TokenEvent]: ...

    def count_search(
        self, prompt_tokens: int, outputs: Sequence[tuple[int, FinishReason]], seconds: float
    ) -> None: ...


class Places:
    """Places of so many sequences, kept from one ticket to the next (`EngineWorker.reserve`)."""

    def __init__(self, sequences: int):
        self.sequences = sequences


class EngineWorker:
    """Runs an engine on a thread of its own for any number of asyncio handlers.

    At most `limits.max_num_seqs` sequences run and `max_queue` more wait; `submit` refuses what would go
    beyond, at once. An exception out of `engine.step` is a fault of ours, not of a request (the engine
    answers those itself): the thread ends, every open ticket fails, and `death` names its type; the log
    has the rest.
    """

    def __init__(
        self, engine: EngineLike, limits: Limits, *, max_queue: int = 256, step_timeout_s: float | None = None
    ):
        self.step_timeout_s = step_timeout_s
        self.capacity = limits.max_num_seqs + max_queue
        self.max_queue = max_queue
        self.death: str | None = None
        self._engine = engine
        self._wakeup = threading.Condition()
        self._commands: list[tuple[str, Ticket]] = []  # guarded by _wakeup, as is all below
        self._open: dict[Ticket, int] = {}  # every ticket from submit to its end, and places of its own
        self._reserved: list[Places] = []
        self._searches: list[Callable[[], None]] = []  # that have ended, for the engine to count
        self._questions: list[Question] = []
        self._stopping = False
        self._step_began: float | None = None
        self._tickets: dict[str, Ticket] = {}  # by request id; the engine thread's own
        self._thread = threading.Thread(target=self._run, name="jaxinfer-engine", daemon=True)

    # ---------------------------------------------------------------------------- from event loops

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def check_room(self, sequences: int) -> None:
        """Raise what `submit` would raise now for so many sequences: a cheap look before tokenising."""
        if sequences > self.capacity:
            raise RequestError(
                f"{sequences} sequences (prompts times n) are more than this server takes at once, "
                f"{self.capacity}; send fewer per request",
                "n",
            )
        with self._wakeup:
            self._check_alive()
            load = self._load()
            if load + sequences > self.capacity:
                raise OverloadedError(
                    f"{load} sequences run or wait and the server admits {self.capacity}; try again later"
                )

    def _check_alive(self) -> None:
        if self.death is not None:
            raise EngineDeadError(f"the engine has stopped: {self.death}")
        if self._stopping:
            raise StoppingError("the server is shutting down")

    def _load(self) -> int:
        return sum(self._open.values()) + sum(places.sequences for places in self._reserved)

    @contextmanager
    def reserve(self, sequences: int) -> Generator[Places]:
        """Keep places for tickets that come one after the other. Raises as `check_room`."""
        places = Places(sequences)
        with self._wakeup:
            self.check_room(sequences)
            self._reserved.append(places)
        try:
            yield places
        finally:
            with self._wakeup:
                self._reserved.remove(places)

    async def submit(self, requests: Sequence[Request], places: Places | None = None) -> Ticket:
        """Hand requests over together; returns when the engine has taken all of them. `places` that were
        reserved have room for them; without, they need their own.

        Raises RequestError (the engine refused one: none of them runs), OverloadedError or
        EngineDeadError.
        """
        ticket = Ticket(requests, asyncio.get_running_loop())
        with self._wakeup:
            if places is None:
                self.check_room(ticket.sequences)
            else:
                assert ticket.sequences <= places.sequences, f"{ticket.sequences} of {places.sequences}"
                self._check_alive()
            self._open[ticket] = ticket.sequences if places is None else 0
            self._commands.append(("add", ticket))
            self._wakeup.notify()
        try:
            await ticket.accepted
        except asyncio.CancelledError:
            self.cancel(ticket)
            raise
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Stop what still runs of a ticket, before the next step. Harmless after its end."""
        if ticket.ended:
            return
        with self._wakeup:
            if self.death is None:
                self._commands.append(("cancel", ticket))
                self._wakeup.notify()

    async def ask[Result](self, look: Callable[[], Result]) -> Result:
        """What `look()` gives on the engine's thread, between two steps; it may read all of the engine.

        It must be short: the next step waits for it. Raises what it raises, StoppingError or EngineDeadError.
        """
        question = Question(look, asyncio.get_running_loop())
        with self._wakeup:
            self._check_alive()
            self._questions.append(question)
            self._wakeup.notify()
        return await question.answer

    def count_search(
        self, prompt_tokens: int, outputs: Sequence[tuple[int, FinishReason]], seconds: float
    ) -> None:
        """`Engine.count_search`, on the engine's thread, soon."""
        with self._wakeup:
            if self.death is None:
                count = partial(self._engine.count_search, prompt_tokens, outputs, seconds)
                self._searches.append(count)
                self._wakeup.notify()

    def end(self) -> None:
        """Ask the thread to end after its current step; open tickets fail with StoppingError."""
        with self._wakeup:
            self._stopping = True
            self._wakeup.notify()

    def stop(self, timeout_s: float = 10.0) -> None:
        """`end`, and wait for it."""
        self.end()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    @property
    def open_tickets(self) -> int:
        """Bodies whose requests run or wait."""
        with self._wakeup:
            return len(self._reserved) + sum(places > 0 for places in self._open.values())

    def health(self) -> dict[str, Any]:
        """What is true of the thread now. `step_s` is how long the step in progress has taken.

        `status` is "ok", "failing" (the last FAILING_AT steps failed; the next good one ends it), "stuck" (a
        step has taken longer than `step_timeout_s`, for as long as it goes on), "stopping" or "dead".
        """
        failed = self._engine.failed_in_a_row
        with self._wakeup:
            began = self._step_began
            alive = self._thread.is_alive() and self.death is None
            status = "ok" if failed < FAILING_AT else "failing"
            seconds = None if began is None else time.monotonic() - began
            limit = self.step_timeout_s
            if seconds is not None and limit is not None and seconds > limit:
                status = "stuck"
            return {
                "status": "dead" if not alive else "stopping" if self._stopping else status,
                "sequences": self._load(),
                "capacity": self.capacity,
                "step_s": None if seconds is None else round(seconds, 3),
                "failed_in_a_row": failed,
                "error": self.death,
            }

    # ----------------------------------------------------------------------------- the thread itself

    def _run(self) -> None:
        try:
            while self._turn():
                pass
            self._end(StoppingError("the server is shutting down"), None)
        except BaseException as error:
            logger.exception("the engine thread ends")
            # The log has it all. A device's own message is kilobytes with paths of this machine in them.
            death = type(error).__name__
            self._end(EngineDeadError(f"the engine has stopped: {death}"), death)

    def _turn(self) -> bool:
        """Obey what was asked, run one step, pass its events on. False when it is time to end."""
        with self._wakeup:
            self._step_began = None
            while not (self._is_asked or self._engine.has_work):
                self._wakeup.wait()
            if self._stopping:
                return False
            commands, self._commands = self._commands, []
            searches, self._searches = self._searches, []
            self._step_began = time.monotonic()
        for count in searches:
            count()
        touched: dict[Ticket, None] = {}
        for what, ticket in commands:
            if what == "add":
                self._add(ticket)
            else:
                self._drop(ticket)
            touched[ticket] = None
        self._settle(touched)  # before the step: it may take long, and submitters wait to hear
        touched.clear()
        with self._wakeup:  # only now: a question that was taken away before a fault would never be answered
            questions, self._questions = self._questions, []
        for question in questions:
            question.put()
        if self._engine.has_work:
            for event in self._engine.step():
                ticket = self._tickets.get(event.request_id)
                if ticket is not None:  # None: cancelled; nobody reads its last words
                    ticket.push(event)
                    touched[ticket] = None
        for ticket in touched:
            if ticket.overflows:
                error = SlowReaderError("the answer was not read while it was made; the rest is not kept")
                logger.warning("%d sequences end: %s", ticket.unfinished, error)
                self._cancel_requests(ticket)
                ticket.fail(error, keep=False)
        self._settle(touched)
        return True

    @property
    def _is_asked(self) -> bool:
        return bool(self._commands or self._questions or self._searches or self._stopping)

    def _settle(self, touched: Iterable[Ticket]) -> None:
        """Free the places of tickets that have ended, and tell the readers of all of them."""
        for ticket in touched:
            if ticket.ended:
                self._forget(ticket)
        _wake(touched)

    def _add(self, ticket: Ticket) -> None:
        for request in ticket.requests:
            try:
                self._engine.add(request)
            except JaxInferError as error:  # this one cannot be served; whatever else is raised is a fault
                ticket.fail(error)
                self._cancel_requests(ticket)
                return
            self._tickets[request.request_id] = ticket

    def _drop(self, ticket: Ticket) -> None:
        if not ticket.ended:
            self._cancel_requests(ticket)
            ticket.fail(StoppingError("the request was cancelled"))

    def _cancel_requests(self, ticket: Ticket) -> None:
        for request in ticket.requests:
            if self._tickets.pop(request.request_id, None) is not None:
                self._engine.cancel(request.request_id)

    def _forget(self, ticket: Ticket) -> None:
        """The ticket has ended: its place is free."""
        for request in ticket.requests:
            self._tickets.pop(request.request_id, None)
        with self._wakeup:
            self._open.pop(ticket, None)

    def _end(self, error: Exception, death: str | None) -> None:
        with self._wakeup:
            self.death = death
            self._stopping = True
            self._step_began = None
            self._commands = []
            questions, self._questions = self._questions, []
            open_tickets = list(self._open)
        for ticket in open_tickets:
            if not ticket.ended:
                ticket.fail(error)
            if death is None:
                self._cancel_requests(ticket)
            self._forget(ticket)
        for question in questions:
            question.fail(error)
        _wake(open_tickets)


def _wake(tickets: Iterable[Ticket]) -> None:
    """One call per event loop, not per ticket: waking a loop costs a system call."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Ticket]] = defaultdict(list)
    for ticket in tickets:
        by_loop[ticket.loop].append(ticket)
    for loop, group in by_loop.items():
        try:
            loop.call_soon_threadsafe(_wake_all, group)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            logger.debug("an event loop closed before its requests ended")


def _wake_all(tickets: list[Ticket]) -> None:
    for ticket in tickets:
        ticket.wake()
