"""What lies between ASGI and the handlers: bodies with a cap, clients that go away, event streams, errors,
and a line in the log for each request.

Starlette cancels a streaming handler when its client leaves, but not one that computes a whole answer; here
both are watched by the same function. Nothing here knows of models or engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxinfer.server.logs import request_label
from jaxinfer.server.wire import ApiError, api_error, encode, frame

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("jaxinfer.server.access")

MAX_REQUEST_ID = 128
"""Characters of a client's X-Request-Id that are sent back to it."""

MAX_PATH = 200
"""Characters of a path that are written."""

CROWDED = "jaxinfer.crowded"
"""In the state of a scope: its connection is one too many, of this many."""

MAX_UNHEARD, UNHEARD_S = 1 << 20, 2.0
"""Of a request that is refused unheard, how much is read, and how long."""

MAX_TOO_LARGE = 32 << 20
"""Of a body that is too long, how much is read beyond what may be, for UNHEARD_S."""

QUIET = ("/health", "/metrics")
"""Paths that machines ask every few seconds: their lines are of level DEBUG."""


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Strict JSON, whatever the value."""
    return Response(encode(value), status, headers, media_type="application/json")


class PartsResponse(Response):
    """JSON that is sent part by part, each when the client has taken most of those before; `at_end` is called
    when all is sent, or the client is gone."""

    def __init__(self, parts: list[bytes], at_end: Callable[[], None]):
        super().__init__(media_type="application/json")
        self.headers["content-length"] = str(sum(map(len, parts)))
        self._parts = parts
        self._at_end = weakref.finalize(self, at_end)  # also where nobody comes to send it

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            self._parts.reverse()
            while self._parts:
                part = self._parts.pop()
                await send({"type": "http.response.body", "body": part, "more_body": bool(self._parts)})
        except OSError:  # the client left
            return
        finally:
            self._at_end()


async def read_body(http: HttpRequest, most: int, within_s: float | None = None) -> bytes:
    """The body, unless it is longer than `most` bytes: then ApiError 413, after what of the rest can soon be
    read; or not all there `within_s` from now: then ApiError 408. Either ends the connection: more may still
    be coming."""
    close = {"Connection": "close"}
    too_large = ApiError(
        413, f"the body is longer than {most} bytes", code="request_too_large", headers=close
    )
    declared = http.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > most:
        if int(declared[:20]) <= most + MAX_TOO_LARGE:  # else it would be reset all the same
            await _read_past(http, most + MAX_TOO_LARGE)
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(within_s):
            async for part in http.stream():
                body += part
                if len(body) > most:
                    break
    except TimeoutError:
        what = f"the body was not complete within {within_s:g} s"
        raise ApiError(408, what, code="request_timeout", headers=close) from None
    if len(body) > most:
        body.clear()
        await _read_past(http, MAX_TOO_LARGE, begun=True)
        raise too_large
    return bytes(body)


async def _read_past(http: HttpRequest, most: int, *, begun: bool = False) -> None:
    """Read what is left of a body, up to `most` bytes for UNHEARD_S, and keep nothing: a connection that is
    closed with something unread in it is reset, and a client that sends all of its body before it reads never
    sees the answer. One that waits to be asked for its body (`Expect: 100-continue`) is not asked, if it has
    not `begun`."""
    if not begun and http.headers.get("expect", "").lower() == "100-continue":
        return
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(UNHEARD_S):
            read = 0
            while read <= most:
                message = await http.receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
                read += len(message.get("body", b""))


async def unless_gone[Result](receive: Receive, work: Awaitable[Result]) -> Result | None:
    """The result of `work`, or None when the client goes away first; `work` is cancelled then.

    The body must have been read: what `receive` says next is that the client left.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events: `first`, then what `rest` yields. An error on the way is the last event.

    `rest` is closed when the client leaves, wherever it waits.
    """

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes]):
        # X-Accel-Buffering: nginx would otherwise hold events back.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.headers["content-type"] = "text/event-stream; charset=utf-8"
        self._first, self._rest = first, rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await unless_gone(receive, self._send_all(send))
        finally:
            await self._rest.aclose()

    async def _send_all(self, send: Send) -> None:
        try:
            await _send_part(send, self._first)
            async for part in self._rest:
                await _send_part(send, part)
        except OSError:  # the client left while we were sending
            return
        except Exception as error:
            problem = api_error(error)
            if problem.status == 500:
                logger.error("a stream ended early", exc_info=error)
            await _send_part(send, frame(problem.body))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_part(send: Send, part: bytes) -> None:
    await send({"type": "http.response.body", "body": part, "more_body": True})


# ------------------------------------------------------------------------------------- ids and errors


async def on_error(http: HttpRequest, error: Exception) -> Response:
    """The exception handler of the application: every error is OpenAI's error object."""
    if isinstance(error, HTTPException):
        what = (
            f"no such route: {http.method} {http.url.path}"
            if error.status_code in (404, 405)
            else error.detail
        )
        problem = ApiError(error.status_code, what, headers=error.headers)
    elif isinstance(error, ClientDisconnect):
        return Response(status_code=499)
    else:
        problem = api_error(error)
    return json_response(problem.body, problem.status, problem.headers)


class Errors:
    """Answers what a handler did not expect to raise. Starlette's own answer to that is made outside of every
    other middleware: it would have no X-Request-Id, and no page of another origin could read it."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def noting(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, noting)
        except Exception as error:
            if started or scope["type"] != "http":
                raise
            logger.exception("a request failed")
            await (await on_error(HttpRequest(scope), error))(scope, receive, send)


class Crowd:
    """Refuses what comes over a connection beyond the most that are kept (`connection.py` marks them), but
    for what machines ask: a server that has much to do is not one to be restarted."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        most = scope.get("state", {}).get(CROWDED)
        if scope["type"] != "http" or most is None or scope["path"] in QUIET:
            await self.app(scope, receive, send)
            return
        http = HttpRequest(scope, receive)
        await _read_past(http, MAX_UNHEARD)
        error = ApiError(
            503,
            f"the server keeps no more than {most} connections (--max-connections); try again later",
            code="too_many_connections",
            headers={"Retry-After": "1", "Connection": "close"},
        )
        await (await on_error(http, error))(scope, receive, send)


def bare_answer(error: ApiError) -> bytes:
    """A whole answer as bytes, for a request that is none: with an id, a line in the log, and the end of the
    connection."""
    label = uuid.uuid4().hex
    token = request_label.set(label)
    try:
        _say({"method": "-", "path": "-"}, label, error.status, 0.0, None)
    finally:
        request_label.reset(token)
    body = encode(error.body)
    head = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\nContent-Type: application/json\r\n"
        f"X-Request-Id: {label}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode("ascii") + body


def is_leaving(receive: Receive) -> Callable[[], bool]:
    """Asks whether the server that runs the application shuts down and waits for the answer in progress, as
    far as it can be known: all that uvicorn tells such an answer is that its connection will not be kept.
    (What else there is, the lifespan's end, comes only after the last answer.)"""
    cycle = getattr(receive, "__self__", None)
    kept = getattr(cycle, "keep_alive", False)
    return lambda: kept and not getattr(cycle, "keep_alive", True)


class AccessLog:
    """Gives every answer an X-Request-Id and every request a line when it ends.

    The id is the client's own, cut to a sane length, or a new one. It is a label for logs only: the engine's
    ids are its own, so clients may send the same one twice. A handler that leaves its `wire.Answer` in the
    request's state as `answer` has the tokens of it reported.
    """

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        theirs = Headers(scope=scope).get("x-request-id", "")[:MAX_REQUEST_ID]
        label = theirs if theirs.isascii() and theirs.isprintable() and theirs else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        status, complete, began = 500, False, time.monotonic()

        async def labelled(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = label
            await send(message)
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)

        token = request_label.set(label)
        left = False
        try:
            await self.app(scope, receive, labelled)
            left = not complete
        finally:
            _say(scope, label, 499 if left else status, time.monotonic() - began, state.pop("answer", None))
            request_label.reset(token)


def _say(scope: Scope, label: str, status: int, seconds: float, answer: Any) -> None:
    path = scope.get("raw_path") or scope["path"].encode("utf-8", "backslashreplace")
    # raw_path is as it was sent, percent signs and all: a decoded line end would forge a line.
    request: dict[str, Any] = {
        "request_id": label,
        "method": scope["method"],
        "path": path.partition(b"?")[0].decode("latin-1")[:MAX_PATH],
        "status": status,
        "seconds": round(seconds, 6),
    }
    tokens = ""
    if answer is not None:
        usage = answer.usage()
        request |= {"prompt_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
        tokens = f", {request['prompt_tokens']} + {request['output_tokens']} tokens"
    level = logging.DEBUG if scope["path"] in QUIET else logging.INFO
    text = "%s %s %d in %.3f s%s"
    values = (request["method"], request["path"], status, seconds, tokens)
    access_logger.log(level, text, *values, extra={"request": request})
