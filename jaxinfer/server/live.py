"""The live page at `/`, and `/live`: what the engine is doing, as server-sent events.

    event: hello      {"model", "chat", "max_model_len"}       once, first (/page/hello.json says it, too)
    event: snapshot   {...}                                    a few times a second (snapshot.shape)
    event: pulse      {"health": {...}}                        while a step takes long

One task asks the engine's thread for a look while anybody watches, and nobody asks otherwise. A watcher reads
the newest frame when it is ready for one: a slow reader misses frames and holds one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from jaxinfer.core import JaxInferError
from jaxinfer.server.snapshot import Recorder, Seen, shape
from jaxinfer.server.transport import EventStream, is_leaving, json_response, unless_gone
from jaxinfer.server.wire import ApiError, frame
from jaxinfer.server.worker import EngineWorker, StoppingError

if TYPE_CHECKING:
    from jaxinfer.llm import LLM

logger = logging.getLogger(__name__)

INTERVAL_S = 0.25
"""Between two snapshots, and longer where a look would take more than MOST_SHARE of the engine's time."""
MOST_SHARE = 0.01
PULSE_S = 1.0
"""How long a look may take before the watchers hear that a step takes long."""
MOST_WATCHERS = 8

PAGE = Path(__file__).parent / "page"
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page/stream.js": ("stream.js", "text/javascript; charset=utf-8"),
    "/page/chat.js": ("chat.js", "text/javascript; charset=utf-8"),
    "/page/engine.js": ("engine.js", "text/javascript; charset=utf-8"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}
HEADERS = {
    # Everything comes from this server, and no page may frame this one.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes() -> APIRouter:
    """The page's files. There is no secret in them, so they want no key: the page asks for it."""
    router = APIRouter()
    for path, (name, media_type) in FILES.items():
        router.add_api_route(path, _file(PAGE / name, media_type), methods=["GET", "HEAD"])
    return router


def _file(path: Path, media_type: str) -> Any:
    content = path.read_bytes()

    async def send() -> Response:
        return Response(content, headers=HEADERS, media_type=media_type)

    return send


class LiveFeed:
    """The snapshots of one engine, for at most `most_watchers` at a time."""

    def __init__(
        self,
        llm: LLM,
        worker: EngineWorker,
        model: str,
        *,
        interval_s: float = INTERVAL_S,
        most_watchers: int = MOST_WATCHERS,
    ):
        self.watchers = 0
        self.most_watchers = most_watchers
        self._worker = worker
        self._recorder = Recorder(llm.engine)
        self._interval_s = interval_s
        self._took: deque[float] = deque(maxlen=4)  # seconds of the last looks
        self._llm, self._model = llm, model
        self._pump: asyncio.Task[None] | None = None
        self._detaching: asyncio.Task[None] | None = None
        self._closed = False
        self._newest = b""
        self._number = 0  # of the newest frame
        self._end: Exception | None = None
        self._news = asyncio.Event()  # replaced with each frame, so that setting it wakes all and stays set

    async def handle(self, http: HttpRequest) -> Response:
        """GET /live."""
        frames = _until(is_leaving(http.receive), self.watch())
        first = await unless_gone(http.receive, anext(frames))
        if first is None:
            await frames.aclose()
            return Response(status_code=499)
        return EventStream(first, frames)

    async def watch(self) -> AsyncGenerator[bytes]:
        """The hello, then the newest frame whenever there is one that this watcher has not had.

        Raises ApiError 429 where too many watch, and what ends the engine.
        """
        if self._closed:
            raise StoppingError("the server is shutting down")
        if self.watchers >= self.most_watchers:
            raise ApiError(
                429,
                f"{self.watchers} watch the engine already, and no more than {self.most_watchers} may",
                code="too_many_watchers",
                headers={"Retry-After": "5"},
            )
        self.watchers += 1
        try:
            if self._pump is None or self._pump.done():
                self._newest, self._end = b"", None
                self._pump = asyncio.create_task(self._run())
            seen = self._number if not self._newest else -1
            yield _event("hello", self.greeting())
            while True:
                while self._number == seen and self._end is None:
                    await self._news.wait()
                if self._end is not None:
                    raise self._end
                seen = self._number
                yield self._newest
        finally:
            self.watchers -= 1
            if self.watchers == 0 and self._pump is not None:
                self._pump.cancel()
                self._pump = None

    async def hello(self) -> Response:
        """GET /page/hello.json: for a page that asks before it has heard, or where too many watch."""
        return json_response(self.greeting())

    def greeting(self) -> dict[str, Any]:
        template = self._llm.chat_template
        return {
            "model": self._model,
            "chat": template is not None and template.given,
            "max_model_len": self._llm.limits.max_model_len,
        }

    def close(self) -> None:
        """Every watcher's stream ends now: the server shuts down, and must not wait for them."""
        self._closed = True
        self._fail(StoppingError("the server is shutting down"))

    async def _run(self) -> None:
        """Look again and again. The first look attaches: steps are kept from there on."""
        try:
            while True:
                seen = await self._look()
                value = await run_in_threadpool(shape, seen)
                self._publish(_event("snapshot", {**value, "health": self._worker.health()}))
                await asyncio.sleep(self.wait_s)
        except JaxInferError as error:
            self._fail(error)
        except Exception as error:
            logger.exception("the engine cannot be watched")
            self._fail(error)
        finally:
            self._detach_later()

    @property
    def wait_s(self) -> float:
        """Until the next look. The shortest of the last ones counts: others may have waited for a core."""
        return max(self._interval_s, min(self._took, default=0.0) / MOST_SHARE)

    def _timed_look(self) -> Seen:
        """On the engine's thread."""
        began = time.perf_counter()
        seen = self._recorder.look()
        self._took.append(time.perf_counter() - began)
        return seen

    async def _look(self) -> Seen:
        asking = asyncio.ensure_future(self._worker.ask(self._timed_look))
        try:
            while not (await asyncio.wait({asking}, timeout=PULSE_S))[0]:
                self._publish(_event("pulse", {"health": self._worker.health()}))
            return await asking
        finally:
            asking.cancel()

    def _detach_later(self) -> None:
        def detach() -> None:  # on the engine's thread; somebody may watch again by then
            if self.watchers == 0:
                self._recorder.detach()

        async def ask() -> None:
            try:
                await self._worker.ask(detach)
            except JaxInferError:
                logger.debug("the engine ended while it was watched")

        self._detaching = asyncio.create_task(ask())

    def _publish(self, data: bytes) -> None:
        self._newest = data
        self._number += 1
        self._wake()

    def _fail(self, error: Exception) -> None:
        self._end = error
        self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


async def _until(ended: Callable[[], bool], frames: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """The frames, and an end for them when the server shuts down: it would wait for whoever watches."""
    try:
        async for one in frames:
            if ended():
                raise StoppingError("the server is shutting down")
            yield one
    finally:
        await frames.aclose()


def _event(name: str, value: Any) -> bytes:
    return b"event: " + name.encode("ascii") + b"\n" + frame(value)
