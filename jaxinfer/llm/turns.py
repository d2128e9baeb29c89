"""One engine for all who call: whoever waits for an answer runs a step, and files its events with all who
wait."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Generator
from types import FrameType

from jaxinfer.core import EngineDeadError, Request, TokenEvent
from jaxinfer.engine import Engine


class Turns:
    """Lets any number of threads and generators share an engine, a step at a time."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self._lock = threading.Lock()
        self._holder: int | None = None  # the thread that holds the lock
        self._left: list[tuple[str, list[TokenEvent]]] = []  # requests that nobody waits for any more
        self._mailboxes: dict[str, list[TokenEvent]] = {}

    def events(self, requests: list[Request]) -> Generator[TokenEvent]:
        """Run requests together until all have ended; closing this cancels those that have not."""
        mailbox: list[TokenEvent] = []
        unfinished = {request.request_id: request.sampling.n for request in requests}
        try:
            with self.turn():
                for request in requests:
                    self.engine.add(request)
                    self._mailboxes[request.request_id] = mailbox
            while unfinished:
                for event in self._news(mailbox):
                    if event.finish_reason is not None:
                        unfinished[event.request_id] -= 1
                        if not unfinished[event.request_id]:
                            del unfinished[event.request_id]
                    yield event
        finally:
            self._left += [(request.request_id, mailbox) for request in requests]
            # A garbage collection amid a step may close a forgotten stream: that step's turn clears up.
            if self._holder != threading.get_ident():
                with self.turn():
                    pass

    @contextlib.contextmanager
    def turn(self) -> Generator[None]:
        """Hold the engine. Ctrl-C waits for the turn to end: amid a step it would tear pages and queues."""
        with _interrupts_held_back(), self._lock:
            self._holder = threading.get_ident()
            try:
                yield
                self._clear_up()
            finally:
                self._holder = None

    def _clear_up(self) -> None:
        """Cancel what is unfinished of the requests that were left."""
        cancelled = False
        while self._left:
            request_id, mailbox = self._left.pop()
            # Else not ours: it was never added, or its id has been free and is another call's by now.
            if self._mailboxes.get(request_id) is mailbox:
                del self._mailboxes[request_id]
                cancelled |= self.engine.cancel(request_id)
        if cancelled and not self.engine.scheduler.has_unfinished:
            self._step()  # only the ends of the cancelled are left to tell: then the engine is idle

    def _news(self, mailbox: list[TokenEvent]) -> list[TokenEvent]:
        """What has come into a mailbox; runs a step when it is empty."""
        with self.turn():
            if not mailbox:
                if not self.engine.has_work:
                    raise EngineDeadError("the engine ended without an answer to this request")
                self._step()
            news = mailbox.copy()
            mailbox.clear()
        return news

    def _step(self) -> None:
        for event in self.engine.step():
            mailbox = self._mailboxes.get(event.request_id)
            if mailbox is not None:  # None: cancelled; nobody reads its last words
                mailbox.append(event)


@contextlib.contextmanager
def _interrupts_held_back() -> Generator[None]:
    """On the main thread, deliver a Ctrl-C after the block instead of amid it; a second one at once."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    caught: list[tuple[int, FrameType | None]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        caught.append((number, frame))
        if len(caught) > 1:
            handler(number, frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if len(caught) == 1:
            handler(*caught[0])
