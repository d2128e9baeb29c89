"""A client for one streamed answer: sends a request, notes when each event came. Standard library only.

The time of an event is that of the call in which its last byte arrived, before anything is parsed, so that a
client that is busy with other streams still notes what the system gave it together as together.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass(slots=True)
class Answer:
    """An HTTP answer. `events` are the `data:` of a stream and when each came, by the loop's clock; `body` is
    that of an answer which is no stream."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    events: list[tuple[float, bytes]] = field(default_factory=list)
    body: bytes = b""


class Url:
    """Where a server is. Raises ValueError for what is no http or https address."""

    def __init__(self, url: str):
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"a server's address looks like http://127.0.0.1:8000, got {url!r}")
        self.host = parts.hostname
        self.tls = parts.scheme == "https"
        self.port = parts.port or (443 if self.tls else 80)
        path = parts.path.rstrip("/")
        self.path = path.removesuffix("/v1")
        self.text = f"{parts.scheme}://{self.host}:{self.port}{self.path}"

    def request(self, method: str, path: str, body: bytes | None, key: str | None) -> bytes:
        """The bytes of a request; its answer ends with the connection."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {self.path}{path} HTTP/1.1", f"Host: {host}:{self.port}", "Connection: close"]
        lines.append("Accept: text/event-stream, application/json, text/plain")
        if key:
            lines.append(f"Authorization: Bearer {key}")
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode() + (body or b"")


async def ask(url: Url, method: str, path: str, body: object = None, key: str | None = None) -> Answer:
    """Send a request and read its whole answer. Raises OSError when there is no connection, and
    ConnectionError when it breaks or what comes is no HTTP. Cancelling it closes the connection."""
    data = None if body is None else json.dumps(body).encode()
    return await send(url, url.request(method, path, data, key))


async def send(url: Url, request: bytes) -> Answer:
    """As `ask`, for a request that was made before."""
    loop = asyncio.get_running_loop()
    context = ssl.create_default_context() if url.tls else None
    transport, reader = await loop.create_connection(
        lambda: _Reader(request), url.host, url.port, ssl=context
    )
    try:
        return await reader.done
    finally:
        transport.close()


class _Reader(asyncio.Protocol):
    """Takes an answer apart as it comes: head, chunks, events."""

    def __init__(self, request: bytes):
        self._request = request
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[Answer] = self._loop.create_future()
        self._answer = Answer()
        self._raw = bytearray()  # what has come and is not taken apart yet
        self._text = bytearray()  # of a stream: an event that is not complete
        self._left: int | None = None  # of a body of stated length: bytes to come
        self._chunked = self._stream = self._in_body = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = self._loop.time()
        if self.done.done():
            return
        self._raw += data
        try:
            if self._in_body or self._head():
                self._body(now)
        except (ValueError, IndexError) as error:
            self.done.set_exception(ConnectionError(f"what came is no HTTP answer: {error}"))

    def _head(self) -> bool:
        """Read status and headers, once they are all there."""
        end = self._raw.find(b"\r\n\r\n")
        if end < 0:
            return False
        first, *lines = self._raw[:end].decode("latin-1").split("\r\n")
        del self._raw[: end + 4]
        answer = self._answer
        answer.status = int(first.split(" ", 2)[1])
        for line in lines:
            name, _, value = line.partition(":")
            answer.headers[name.strip().lower()] = value.strip()
        self._chunked = "chunked" in answer.headers.get("transfer-encoding", "").lower()
        if not self._chunked and "content-length" in answer.headers:
            self._left = int(answer.headers["content-length"])
        self._stream = answer.headers.get("content-type", "").startswith("text/event-stream")
        self._in_body = True
        return True

    def _body(self, now: float) -> None:
        if not self._chunked:
            self._take(bytes(self._raw), now)
            if self._left is not None:
                self._left -= len(self._raw)
            self._raw.clear()
            if self._left is not None and self._left <= 0:
                self._end()
            return
        while (line := self._raw.find(b"\r\n")) >= 0:
            size = int(bytes(self._raw[:line]).split(b";")[0], 16)
            if size == 0:
                self._end()
                return
            if len(self._raw) < line + 2 + size + 2:
                return
            self._take(bytes(self._raw[line + 2 : line + 2 + size]), now)
            del self._raw[: line + 2 + size + 2]

    def _take(self, data: bytes, now: float) -> None:
        """Bytes of the body."""
        if not self._stream:
            self._answer.body += data
            return
        self._text += data.replace(b"\r\n", b"\n")
        while (end := self._text.find(b"\n\n")) >= 0:
            for line in bytes(self._text[:end]).split(b"\n"):
                if line.startswith(b"data:"):
                    self._answer.events.append((now, line[5:].strip()))
            del self._text[: end + 2]

    def _end(self) -> None:
        if not self.done.done():
            self.done.set_result(self._answer)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.done.done():
            return
        whole = (
            self._in_body and not self._chunked and self._left is None
        )  # such a body ends with its connection
        if exc is None and whole:
            self._end()
        else:
            self.done.set_exception(exc or ConnectionError("the connection was closed amid the answer"))
