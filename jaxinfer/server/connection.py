"""One TCP connection of a client, with an end to its patience: uvicorn's own, two clocks, and a count.

uvicorn waits for ever for a head or a body that trickles in, and for a client that does not read. Here

* a request's head must be there `receive_s` after its first byte (or after the connection was made), and its
  body GRACE_S later than the handler's own limit (`transport.read_body`, which can still answer 408);
* a client that lets more than the transport's high-water mark (64 KiB) lie must have read most of it
  `stall_s` later.

Either way the connection is cut: the handler sees a client that went away, and cancels its requests. An idle
connection is closed by uvicorn (`timeout_keep_alive`), and cut `stall_s` later if answers are still unread.

Requests on a connection beyond `most` are marked for the application to refuse (`transport.Crowd`); where
there are twice as many, new ones are cut without a word.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxinfer.server.transport import CROWDED, bare_answer
from jaxinfer.server.wire import ApiError

logger = logging.getLogger(__name__)

GRACE_S = 5.0
"""How long after `receive_s` a body is cut that no handler waits for, or whose 408 did not end it."""


def connection_class(receive_s: float, stall_s: float, most: int) -> type[H11Protocol]:
    """The protocol class for `uvicorn.Config(http=...)` with these limits."""

    class Limited(Connection):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            self.receive_s, self.stall_s, self.most = receive_s, stall_s, most

    return Limited


class Connection(H11Protocol):
    """See the module."""

    receive_s: float
    stall_s: float
    most: int
    _receiving: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None
    _heard: Any = None  # the request whose body `_receiving` waits for; None while it waits for a head

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > 2 * self.most:
            transport.abort()
            return
        if len(self.connections) > self.most:
            self.app_state = {**self.app_state, CROWDED: self.most}
        self._receiving = self._cut_after(self.receive_s, "sent no request")

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def _should_upgrade(self) -> bool:
        """Never, and without uvicorn's warnings, one a request: whoever asks for another protocol is answered
        in this one, as HTTP has it."""
        return False

    def send_400_response(self, msg: str) -> None:
        """For what is no HTTP. A handler that waits for the rest of its body hears that its client left."""
        if self.cycle is not None and not self.cycle.response_complete:
            began = self.cycle.response_started
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if began:
                self.transport.abort()
                return
        self.transport.write(bare_answer(ApiError(400, msg, code="invalid_http")))
        self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()  # which may start the next request, sent ahead of its turn
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._receiving, self._stalled):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stalled is None:
            self._stalled = self._cut_after(self.stall_s, "did not read")

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        self._cut_if_closing()

    def shutdown(self) -> None:
        super().shutdown()
        self._cut_if_closing()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._cut_if_closing()

    def cut_unless_heard(self) -> None:
        """End the connection if its request is not complete: nobody waits for the rest any more."""
        if self.conn.their_state is h11.SEND_BODY:
            self.transport.abort()

    def _watch(self) -> None:
        """Keep the clock of what is expected of the client now: a head, a body or nothing."""
        theirs, idle = self.conn.their_state, self.cycle is None or self.cycle.response_complete
        if self.transport.is_closing():
            self._cut_if_closing()
        elif theirs is h11.SEND_BODY:
            if self._heard is not self.cycle:
                self._expect(self.receive_s + GRACE_S, "did not send its body", self.cycle)
        elif theirs is h11.IDLE and idle and self.conn.trailing_data[0]:
            if self._receiving is None or self._heard is not None:
                self._expect(self.receive_s, "did not send its head", None)
        else:  # the request is complete, or nothing of the next one is there: keep-alive has its own clock
            self._expect(None, "", None)

    def _expect(self, seconds: float | None, what: str, heard: Any) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
        self._receiving = None if seconds is None else self._cut_after(seconds, what)
        self._heard = heard

    def _cut_after(self, seconds: float, what: str) -> asyncio.TimerHandle:
        return self.loop.call_later(seconds, self._cut, what, seconds)

    def _cut(self, what: str, seconds: float) -> None:
        logger.info("a client %s within %g s: its connection is cut", what, seconds)
        self.transport.abort()

    def _cut_if_closing(self) -> None:
        """A closing transport first sends what it holds, which a client that does not read never takes."""
        if self.transport.is_closing() and self._stalled is None:
            self._stalled = self._cut_after(self.stall_s, "did not read")
