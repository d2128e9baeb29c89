"""The HTTP endpoint: OpenAI's routes over one LLM.

    app = create_app(LLM("smollm2-135m"), api_key="secret")

A handler reads a body, has it checked (`asked.py`), prepares its requests, hands them to the engine's thread
and writes what comes back. A client that goes away is noticed whether it streams or not, and its requests are
cancelled.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Depends, FastAPI
from fastapi.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from jaxinfer.core import JaxInferError, Request, RequestError, TokenEvent
from jaxinfer.server import wire
from jaxinfer.server.answers import Answer, news_size
from jaxinfer.server.asked import Asked, Bodies
from jaxinfer.server.beams import beam_events
from jaxinfer.server.bounds import LogprobRoom, logprob_entries
from jaxinfer.server.guards import HostCheck, key_check, origin_check
from jaxinfer.server.live import LiveFeed, page_routes
from jaxinfer.server.metrics import Metrics, RequestCounts
from jaxinfer.server.openapi import openapi
from jaxinfer.server.schema import (
    CompletionBody,
)
from jaxinfer.server.transport import (
    AccessLog,
    Crowd,
    Errors,
    EventStream,
    PartsResponse,
    json_response,
    on_error,
    read_body,
    unless_gone,
)
from jaxinfer.server.watchdog import watch_steps
from jaxinfer.server.wire import ApiError
from jaxinfer.server.worker import EngineWorker

if TYPE_CHECKING:
    from jaxinfer.llm import LLM

MAX_BODY_BYTES = 8 << 20

READ_AT_ONCE = 64 << 10
"""Bytes of a body that is read and checked on the event loop: some milliseconds."""


def create_app(
    llm: LLM,
    *,
    api_key: str | None = None,
    served_model_name: str | Sequence[str] | None = None,
    max_queue: int = 256,
    max_body_bytes: int = MAX_BODY_BYTES,
    receive_seconds: float | None = None,
    cors_origins: Sequence[str] = (),
    allowed_hosts: Sequence[str] | None = None,
    step_timeout: float | None = None,
    root_path: str = "",
    names_as_ids: bool = False,
    force_usage: bool = False,
) -> FastAPI:
    """The application. Its engine thread starts and stops with the application's lifespan.

    Bodies ask for the model by any of the names `served_model_name` (None or none: `llm.model_name`), and
    answers carry the first.
    `max_queue` sequences may wait besides the `max_num_seqs` that run; more are refused with 429.
    With an `api_key`, every route but /health and the page wants `Authorization: Bearer <api_key>`.
    A body must be there `receive_seconds` after its head (None: for ever). Pages of `cors_origins` ("*": all)
    may use the API from a browser. With `allowed_hosts`, requests must call the server by one of these names
    or one of the loopback interface's (None: by any): a server that listens there alone needs it.
    /health says 503 while a step has taken longer than `step_timeout` seconds (None: whatever it takes).
    Paths may begin with `root_path`, which a proxy then need not take away. `names_as_ids` is what bodies
    that leave out `return_tokens_as_token_ids` mean; `force_usage` tells every stream's usage in each chunk.
    """
    names = (served_model_name,) if isinstance(served_model_name, str) else tuple(served_model_name or ())
    names = names or (llm.model_name,)
    worker = EngineWorker(llm.engine, llm.limits, max_queue=max_queue, step_timeout_s=step_timeout)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        worker.start()
        watching = asyncio.create_task(watch_steps(worker))
        yield
        watching.cancel()
        live.close()
        await run_in_threadpool(worker.stop)
        for pool in (handlers.writer, handlers.reader):
            pool.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(title="jaxinfer", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.root_path = root_path
    app.state.worker = worker
    app.state.live = live = LiveFeed(llm, worker, names[0])
    handlers = _Handlers(llm, worker, names, max_body_bytes, receive_seconds)
    handlers.names_as_ids, handlers.force_usage = names_as_ids, force_usage
    checks = [origin_check(cors_origins), *([key_check(api_key)] if api_key else [])]
    keyed = APIRouter(dependencies=[Depends(check) for check in checks])
    keyed.add_api_route("/v1/completions", handlers.completions, methods=["POST"])
    keyed.add_api_route("/v1/chat/completions", handlers.chat_completions, methods=["POST"])
    keyed.add_api_route("/v1/chat/completions/batch", handlers.chat_batch, methods=["POST"])
    keyed.add_api_route("/v1/models", handlers.models, methods=["GET"])
    keyed.add_api_route("/v1/models/{name:path}", handlers.model, methods=["GET"])
    keyed.add_api_route("/tokenize", handlers.tokenize, methods=["POST"])
    keyed.add_api_route("/tokenizer_info", handlers.tokenizer_info, methods=["GET"])
    keyed.add_api_route("/load", handlers.load, methods=["GET"])
    keyed.add_api_route("/version", handlers.version, methods=["GET"])
    keyed.add_api_route("/invocations", handlers.invocations, methods=["POST"])
    keyed.add_api_route("/detokenize", handlers.detokenize, methods=["POST"])
    metrics = Metrics(llm.engine, worker, names[0])
    keyed.add_api_route("/metrics", metrics.handle, methods=["GET"])
    keyed.add_api_route("/live", live.handle, methods=["GET"])
    keyed.add_api_route("/page/hello.json", live.hello, methods=["GET"])
    document = openapi(keyed=api_key is not None)

    async def describe() -> Response:
        return json_response(document)

    keyed.add_api_route("/openapi.json", describe, methods=["GET"])
    app.include_router(keyed)
    app.include_router(page_routes())
    for path in ("/health", "/ping"):
        app.add_api_route(path, handlers.health, methods=["GET"])
    for kind in (ApiError, JaxInferError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, on_error)
    app.add_middleware(Errors)  # the first is the innermost
    app.add_middleware(Crowd)
    if allowed_hosts is not None:
        app.add_middleware(HostCheck, allowed=allowed_hosts)
    if cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(AccessLog)
    app.add_middleware(RequestCounts, metrics=metrics)
    return app


class _Handlers:
    """The handlers of one application."""

    def __init__(
        self,
        llm: LLM,
        worker: EngineWorker,
        names: Sequence[str],
        max_body_bytes: int,
        receive_seconds: float | None,
    ):
        self.llm, self.worker = llm, worker
        self.names, self.model_name = tuple(names), names[0]
        self.names_as_ids = self.force_usage = False
        self.max_body_bytes, self.receive_seconds = max_body_bytes, receive_seconds
        self.started_at = int(time.time())
        self.bodies = Bodies(llm, worker, names)
        self.logprobs = LogprobRoom()
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="jaxinfer-writer")  # see `_written`
        self.reader = ThreadPoolExecutor(1, thread_name_prefix="jaxinfer-reader")  # see `_read`

    async def completions(self, http: HttpRequest) -> Response:
        return await self._answer(http, await self._read(http, self.bodies.completion))

    async def chat_completions(self, http: HttpRequest) -> Response:
        return await self._answer(http, await self._read(http, self.bodies.chat))

    async def chat_batch(self, http: HttpRequest) -> Response:
        return await self._answer(http, await self._read(http, self.bodies.chat_batch))

    async def invocations(self, http: HttpRequest) -> Response:
        return await self._answer(http, await self._read(http, self.bodies.invocation))

    async def models(self) -> Response:
        return json_response({"object": "list", "data": [self._card(name) for name in self.names]})

    async def model(self, name: str) -> Response:
        self.bodies.check_model(name)
        return json_response(self._card(name))

    async def version(self) -> Response:
        return json_response({"version": metadata.version("jaxinfer")})

    async def load(self) -> Response:
        """How many bodies are being answered (vLLM's)."""
        return json_response({"server_load": self.worker.open_tickets})

    async def health(self) -> Response:
        health = self.worker.health()
        return json_response(health, 200 if health["status"] == "ok" else 503)

    async def tokenize(self, http: HttpRequest) -> Response:
        ids, spelled = await run_in_threadpool(await self._read(http, self.bodies.tokenize))
        most = self.llm.limits.max_model_len
        told = {"count": len(ids), "max_model_len": most, "tokens": list(ids), "token_strs": spelled}
        parts = await self._written(2 * len(ids), lambda: wire.grouped(wire.encoded_parts(told)))
        return PartsResponse(parts, lambda: None)

    async def tokenizer_info(self) -> Response:
        tokenizer, template = self.bodies.tokenizer(), self.llm.chat_template
        return json_response({
            "tokenizer_class": type(tokenizer).__name__,
            "model_max_length": self.llm.limits.max_model_len,
            "bos_token": tokenizer.bos_token,
            "eos_token": tokenizer.eos_token,
            "add_bos_token": tokenizer.adds_bos,
            "chat_template": None if template is None else template.source,
        })  # fmt: skip

    async def detokenize(self, http: HttpRequest) -> Response:
        spell = await self._read(http, self.bodies.detokenize)
        return json_response({"prompt": await run_in_threadpool(spell)})

    # ----------------------------------------------------------------------------------------- parts

    async def _read[Result](self, http: HttpRequest, check: Callable[[bytes], Result]) -> Result:
        """What `check` makes of the body. Of a large one that takes a second, which the event loop does not
        have; on a thread most of it is Python, which lets others run. One thread: several at once would take
        no less time, and more of it from the others."""
        raw = await read_body(http, self.max_body_bytes, self.receive_seconds)
        if len(raw) <= READ_AT_ONCE:
            return check(raw)
        return await asyncio.get_running_loop().run_in_executor(self.reader, check, raw)

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.started_at,
            "owned_by": "jaxinfer",
            "root": self.model_name,
            "parent": None,
            "max_model_len": self.llm.limits.max_model_len,
        }

    def _token_bytes(self, token_id: int, text: str) -> bytes:
        """A folder without a tokenizer serves token ids: its tokens have no text and no bytes."""
        tokenizer = self.llm.tokenizer
        return text.encode("utf-8") if tokenizer is None else tokenizer.token_bytes(token_id)

    def _prompt_texts(self, requests: Sequence[Request]) -> list[str]:
        """What `echo` repeats: a prompt as it came, or what its token ids spell."""
        spell = self.llm.tokenizer
        return [
            request.prompt
            if request.prompt is not None
            else ""
            if spell is None
            else spell.decode(request.prompt_token_ids, skip_special_tokens=False)
            for request in requests
        ]

    async def _answer(self, http: HttpRequest, asked: Asked) -> Response:
        body, wanted = asked.body, asked.wanted
        if body.return_tokens_as_token_ids is None and self.names_as_ids:
            wanted = replace(wanted, names_as_ids=True)
        if self.force_usage:
            wanted = replace(wanted, include_usage=True, usage_so_far=True)
        # Tokenising a long prompt takes a while and lets go of the GIL: other streams must not wait for it.
        # So does a schema, and one that is no schema ends here: never on the engine's thread.
        try:
            requests = await run_in_threadpool(asked.prepare)
            entries = logprob_entries(requests, self.llm.limits, stream=bool(body.stream))
        except RequestError as error:
            raise body.renamed(error) from None
        texts: Sequence[str] = ()
        if wanted.echo:
            spell = partial(self._prompt_texts, requests)
            texts = await run_in_threadpool(spell) if isinstance(body, CompletionBody) else body.echoes()
        answer = asked.kind(
            requests, self.model_name, token_bytes=self._token_bytes, wanted=wanted, prompt_texts=texts
        )
        http.state.answer = answer  # for the line in the log
        if not body.stream:
            whole = await unless_gone(http.receive, self._whole(answer, entries))
            return Response(status_code=499) if whole is None else whole
        # The first news is awaited before the status is sent: a request that fails at once gets its own.
        chunks = self._chunks(answer, entries)
        first = await unless_gone(http.receive, anext(chunks))
        if first is None:
            await chunks.aclose()
            return Response(status_code=499)
        return EventStream(first, chunks)

    async def _whole(self, answer: Answer, entries: int) -> Response:
        give_back = self.logprobs.take(entries)
        try:
            async with aclosing(self._news(answer)) as news:
                async for events in news:
                    for event in events:
                        answer.take(event)
            parts = await self._written(
                answer.size(), lambda: wire.grouped(wire.encoded_parts(answer.whole()))
            )
        except BaseException:
            give_back()
            raise
        return PartsResponse(parts, give_back)

    async def _news(self, answer: Answer) -> AsyncGenerator[list[TokenEvent]]:
        """The events of an answer that is told as a whole."""
        if answer.wanted.beams is not None:
            skip = answer.requests[0].sampling.skip_special_tokens
            decode = partial(self._decode, skip_special_tokens=skip)
            found = beam_events(self.worker, answer.requests, answer.wanted.beams, self.llm.limits, decode)
            async with aclosing(found):
                async for events in found:
                    yield events
            return
        ticket = await self.worker.submit(answer.requests)
        try:
            async for events in ticket:
                yield events
        finally:
            self.worker.cancel(ticket)

    def _decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        tokenizer = self.llm.tokenizer
        return "" if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    async def _chunks(self, answer: Answer, entries: int) -> AsyncGenerator[bytes]:
        """The stream as bytes, one item per batch of news or several. Raises what ends it early."""
        give_back = self.logprobs.take(entries)
        try:
            ticket = await self.worker.submit(answer.requests)
            try:
                async for events in ticket:
                    parts, failure = await self._written(news_size(events), partial(_frames, answer, events))
                    for part in parts:  # what came before the failure is sent before it
                        yield part
                    if failure is not None:
                        raise failure
            finally:
                self.worker.cancel(ticket)
        finally:
            give_back()
        yield (wire.frame(answer.last_chunk()) if answer.wanted.include_usage else b"") + wire.DONE

    async def _written[Result](self, size: int, write: Callable[[], Result]) -> Result:
        """What `write` gives. With many values to write it takes seconds, which the event loop does not have;
        a thread has, and lets go of the GIL between the pieces. One thread: their memory is needed once."""
        if size <= wire.AT_ONCE:
            return write()
        return await asyncio.get_running_loop().run_in_executor(self.writer, write)


def _frames(answer: Answer, events: Sequence[TokenEvent]) -> tuple[list[bytes], ApiError | None]:
    """The chunks of a batch of news, and what ends the answer."""
    frames: list[Iterable[bytes]] = []
    failure = None
    write = wire.frame_parts if news_size(events) > wire.AT_ONCE else lambda chunk: (wire.frame(chunk),)
    try:
        for event in events:
            frames += map(write, answer.chunks(event))
    except ApiError as error:
        failure = error
    return wire.grouped(itertools.chain.from_iterable(frames)), failure
