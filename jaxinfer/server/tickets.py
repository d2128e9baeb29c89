"""What lies between the engine's thread and the event loop that waits for its news: a ticket for each HTTP
body, or for each step of a beam search."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Sequence

from jaxinfer.core import Request, TokenEvent

COALESCE_AT = 32
"""Unread events of one sequence that are merged into one."""

MAX_UNREAD = 16_384
"""Tokens and log-probabilities of each sequence that may wait to be read: some 4 MB at most. With more, which
come after what lies in the socket, the reader is too slow. It is minutes of an answer without
log-probabilities, and 780 tokens with 20 of them each."""


class Ticket:
    """The requests of one HTTP body, in the engine's hands, and the news of them not read yet.

    Iterate it from the event loop that submitted it: each item is a non-empty list of TokenEvents, in
    order per sequence. A reader slower than the engine gets merged events, so unread news is little more
    than its text and tokens, and a SlowReaderError beyond MAX_UNREAD of them. Iteration ends after the last
    sequence's end; it raises the error that ended the ticket early.
    """

    def __init__(self, requests: Sequence[Request], loop: asyncio.AbstractEventLoop):
        self.requests = tuple(requests)
        self.sequences = sum(request.sampling.n for request in requests)
        self.unfinished = self.sequences
        self.accepted: asyncio.Future[None] = loop.create_future()
        self.loop = loop
        self._news = asyncio.Event()
        self._lock = threading.Lock()
        # Unread news: level 0 as it came, each further level merged from the one before. Merging into one
        # event each time would copy a long answer again and again; so a token is copied log32 of n times.
        self._levels: list[list[TokenEvent]] = [[]]
        self._unread = 0
        self._error: Exception | None = None
        self._ended = False

    def __aiter__(self) -> Ticket:
        return self

    async def __anext__(self) -> list[TokenEvent]:
        while True:
            await self._news.wait()
            with self._lock:
                events = [event for level in reversed(self._levels) for event in level]
                self._levels, self._unread = [[]], 0
                if not self._ended:
                    self._news.clear()
                elif not events:
                    break
            if events:
                return events
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

    # The rest is the engine thread's side. `wake` must follow, on the ticket's loop.

    def push(self, event: TokenEvent) -> None:
        with self._lock:
            if self._ended:  # by an error, of a reader too slow: the rest is not kept
                return
            self._file(event)
            self._unread += len(event.token_ids) + sum(map(len, event.logprobs or ()))
            if event.finish_reason is not None:
                self.unfinished -= 1
                self._ended = self.unfinished <= 0

    def _file(self, event: TokenEvent) -> None:
        self._levels[0].append(event)
        for level, events in enumerate(self._levels):
            if len(events) < COALESCE_AT * self.sequences:
                break
            if level + 1 == len(self._levels):
                self._levels.append([])
            self._levels[level + 1] += _coalesce(events)
            self._levels[level] = []

    def fail(self, error: Exception, *, keep: bool = True) -> None:
        """End it by an error, after what is unread or (`keep` False) in its place."""
        with self._lock:
            self._error = error
            self._ended = True
            if not keep:
                self._levels, self._unread = [[]], 0

    @property
    def overflows(self) -> bool:
        """True when more is unread than is kept for a reader."""
        return not self._ended and self._unread > MAX_UNREAD * self.sequences

    @property
    def ended(self) -> bool:
        return self._ended

    def wake(self) -> None:
        if not self.accepted.done():
            if self._error is not None:
                self.accepted.set_exception(self._error)
            else:
                self.accepted.set_result(None)
        self._news.set()


def _coalesce(events: list[TokenEvent]) -> list[TokenEvent]:
    """One event per sequence that says what its events said, in the order of their first ones."""
    groups: dict[tuple[str, int], list[TokenEvent]] = defaultdict(list)
    for event in events:
        groups[event.request_id, event.index].append(event)
    return [merge_events(group) for group in groups.values()]


def merge_events(events: Sequence[TokenEvent]) -> TokenEvent:
    """The one event that says what these consecutive events of one sequence said."""
    if len(events) == 1:
        return events[0]
    last = events[-1]
    with_logprobs = any(e.logprobs is not None for e in events)
    return TokenEvent(
        request_id=last.request_id,
        index=last.index,
        text="".join(e.text for e in events),
        token_ids=tuple(i for e in events for i in e.token_ids),
        logprobs=tuple(p for e in events for p in e.logprobs or ()) if with_logprobs else None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        error=last.error,
        metrics=last.metrics,
        prompt_logprobs=next((e.prompt_logprobs for e in events if e.prompt_logprobs is not None), None),
    )
