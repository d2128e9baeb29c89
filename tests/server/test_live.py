"""The live feed: its frames, what they say against the engine's own books, and who may watch."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urljoin

import anyio
import httpx
import numpy as np
import pytest
import uvicorn
from fake_runner import FakeRunner
from fastapi import FastAPI
from fastapi.testclient import TestClient
from scripted import eventually
from starlette.applications import Starlette
from starlette.routing import Mount

from jaxinfer.core import Limits, Request, SamplingParams, StepResult
from jaxinfer.engine import Engine
from jaxinfer.engine.trace import NO_TRACE
from jaxinfer.llm import LLM
from jaxinfer.server.app import create_app
from jaxinfer.server.snapshot import (
    CACHED,
    COLOURS,
    FIRST_COLOUR,
    FREE,
    MOST_CELLS,
    SHARED,
    Recorder,
    Seen,
    page_codes,
    percentiles,
    runs,
    shape,
)
from jaxinfer.server.worker import StoppingError
from jaxinfer.text.tokenizer import ByteTokenizer

LIMITS = Limits(
    num_pages=200, page_size=8, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=512, vocab_size=259
)


class GatedRunner(FakeRunner):
    """Each step takes `step_s`, and waits until it may end."""

    def __init__(self, step_s: float = 0.0):
        super().__init__(LIMITS)
        self.step_s = step_s
        self.gate = threading.Event()
        self.gate.set()

    def fetch(self, pending: Any) -> StepResult:
        assert self.gate.wait(20)
        time.sleep(self.step_s)
        return super().fetch(pending)


def application(runner: FakeRunner | None = None, **options: Any) -> FastAPI:
    llm = LLM.from_parts(runner or FakeRunner(LIMITS), LIMITS, tokenizer=ByteTokenizer(), model_name="fake")
    return create_app(llm, **options)


def engine_of(app: FastAPI) -> Engine:
    return app.state.live._recorder._engine


@contextmanager
def watching(address: str, **headers: str) -> Generator[Iterator[tuple[str, Any]]]:
    """The events of /live as (name, data); the framing is checked on the way."""
    with httpx.stream("GET", address + "/live", headers=headers, timeout=10) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        yield parsed(answer.iter_bytes())


def parsed(parts: Iterator[bytes]) -> Iterator[tuple[str, Any]]:
    rest = b""
    for part in parts:
        *frames, rest = (rest + part).split(b"\n\n")
        for frame in frames:
            *names, data = frame.split(b"\n")
            assert data.startswith(b"data: ")
            assert all(name.startswith(b"event: ") for name in names)
            yield (
                names[0][7:].decode() if names else "message",
                json.loads(data[6:], parse_constant=pytest.fail),
            )
    assert rest == b""


def snapshots(events: Iterator[tuple[str, Any]]) -> Iterator[dict[str, Any]]:
    return (data for name, data in events if name == "snapshot")


def complete(address: str, **body: Any) -> httpx.Response:
    return httpx.post(address + "/v1/completions", json={"prompt": "once", **body}, timeout=20)


# ----------------------------------------------------------------------------------------- frames


def test_the_stream_begins_with_a_hello_and_goes_on_with_snapshots(serve: Callable[[FastAPI], str]):
    with watching(serve(application(served_model_name="shown"))) as events:
        assert next(events) == ("hello", {"model": "shown", "chat": False, "max_model_len": 512})
        seen = [next(events) for _ in range(3)]
    assert {name for name, _ in seen} == {"snapshot"}
    value = seen[0][1]
    assert value["running"] == value["waiting"] == 0
    assert value["pages"]["runs"] == [[FREE, 0, 199]]
    assert value["health"]["status"] == "ok"
    assert value["latency"]["first_token"] == {"count": 0, "p50": None, "p95": None, "p99": None}
    assert value["memory"]["rss_bytes"] > 1 << 20


def test_a_snapshot_says_what_the_engine_did(serve: Callable[[FastAPI], str]):
    app = application()
    address = serve(app)
    with watching(address) as events:
        feed = snapshots(events)
        next(feed)
        assert complete(address, prompt="a" * 100, max_tokens=20, ignore_eos=True).status_code == 200
        value = next(value for value in feed if value["generated_tokens"] == 20)
    engine = engine_of(app)
    assert value["steps_total"] == engine.stats()["steps"]
    assert sum(step[3] for step in value["steps"]) == 100  # prompt tokens, in chunks
    assert sum(step[1] for step in value["steps"]) == 19  # decode rows: the first token is the prompt's
    assert [step[0] for step in value["steps"]] == sorted(step[0] for step in value["steps"])
    assert value["latency"]["first_token"]["count"] == 1
    assert value["latency"]["inter_token"]["count"] == 19
    assert 0 < value["latency"]["inter_token"]["p50"] <= value["latency"]["inter_token"]["p99"] < 10
    assert value["finished"]["length"] == 1
    assert value["prompt_tokens"] == 100
    cached = engine.scheduler.pool.num_cached
    assert value["pages"]["cached"] == cached > 0
    assert sum(run[2] for run in value["pages"]["runs"] if run[0] == CACHED) == cached


def test_pages_and_requests_while_it_runs(serve: Callable[[FastAPI], str]):
    app = application(GatedRunner(step_s=0.01))
    address = serve(app)
    with watching(address) as events:
        feed = snapshots(events)
        next(feed)
        body = {"prompt": "b" * 40, "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", address + "/v1/completions", json=body, timeout=10) as answer:
            parts = answer.iter_bytes()
            next(parts)
            value = next(value for value in feed if value["requests"])
            (request,) = value["requests"]
            assert request["prompt_tokens"] == 40
            assert request["sequences"] == 1
            mapped = sum(n for code, _, n in value["pages"]["runs"] if code == request["code"])
            assert mapped == request["pages"] == value["pages"]["live"]
            assert value["running"] == 1
        assert next(value for value in feed if not value["running"])["pages"]["live"] == 0
    assert eventually(lambda: engine_of(app).scheduler.pool.num_live == 0)


def test_a_long_step_is_told_as_a_pulse(serve: Callable[[FastAPI], str]):
    runner = GatedRunner()
    address = serve(application(runner))
    with watching(address) as events:
        next(events)
        runner.gate.clear()
        asking = threading.Thread(target=complete, args=(address,), kwargs={"max_tokens": 2})
        asking.start()
        try:
            pulse = next(data for name, data in events if name == "pulse")
        finally:
            runner.gate.set()
            asking.join(20)
        assert pulse["health"]["step_s"] > 0.5
        assert pulse["health"]["sequences"] == 1
        assert next(snapshots(events))["health"]["status"] == "ok"


# ---------------------------------------------------------------------------------------- watchers


def test_watchers_are_bounded_and_a_disconnect_frees_one(serve: Callable[[FastAPI], str]):
    app = application()
    app.state.live.most_watchers = 2
    address = serve(app)
    with watching(address) as one:
        next(one)
        with watching(address) as two:
            next(two)
            refused = httpx.get(address + "/live", timeout=10)
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "5"
            assert refused.json()["error"]["code"] == "too_many_watchers"
            assert next(snapshots(two))
        assert eventually(lambda: app.state.live.watchers == 1)
        with watching(address) as three:
            assert next(three)[0] == "hello"
            assert next(snapshots(three))
            assert next(snapshots(one))
    assert eventually(lambda: app.state.live.watchers == 0)


def test_nothing_is_kept_while_nobody_watches(serve: Callable[[FastAPI], str]):
    app = application()
    address, engine = serve(app), engine_of(app)
    for _ in range(3):  # and again after each one
        before = engine.trace
        with watching(address) as events:
            next(snapshots(events))
            assert engine.trace is not before
        assert eventually(lambda before=before: engine.trace is before)
        assert app.state.live._pump is None
    assert engine.trace is NO_TRACE


@pytest.mark.anyio
async def test_a_slow_reader_gets_the_newest_frame_and_no_other():
    app = application()
    feed = app.state.live
    feed._interval_s = 0.0
    async with app.router.lifespan_context(app):
        frames = feed.watch()
        assert (await anext(frames)).startswith(b"event: hello\n")
        with anyio.fail_after(20):
            while feed._number < 50:
                await anyio.sleep(0.01)
        newest, number = feed._newest, feed._number
        assert await anext(frames) is newest
        assert await anext(frames) is not newest
        assert feed._number <= number + 2  # the one after is awaited, not taken from a queue
        await frames.aclose()
        assert feed.watchers == 0


def test_the_key_is_wanted_for_the_feed_and_not_for_the_page(serve: Callable[[FastAPI], str]):
    address = serve(application(api_key="secret"))
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        assert httpx.get(address + "/live", headers=headers).status_code == 401
    with watching(address, Authorization="Bearer secret") as events:
        assert next(snapshots(events))["running"] == 0
    page = httpx.get(address + "/")
    assert page.status_code == 200
    assert "secret" not in page.text


def test_the_page_loads_from_here_alone(serve: Callable[[FastAPI], str]):
    address = serve(application())
    page = httpx.get(address + "/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "://" not in page.text
    assert httpx.head(address + "/").status_code == 200
    for path in ("page.css", "stream.js", "chat.js", "engine.js", "icon.svg"):
        part = httpx.get(f"{address}/page/{path}")
        assert part.status_code == 200, path
        assert part.headers["x-content-type-options"] == "nosniff"
    assert httpx.get(address + "/page/../live.py").status_code == 404


def test_the_page_may_lie_behind_a_prefix():
    """Of a proxy, or of an application that it is a part of: no path in it starts at the root."""
    app = application()
    with TestClient(Starlette(routes=[Mount("/some/where", app)])) as client:
        page = client.get("/some/where/").text
        parts = re.findall(r'(?:href|src)="([^#"]+)"', page)
        assert len(parts) == 4
        scripts = [client.get(urljoin("/some/where/", part)) for part in parts]
        assert [answer.status_code for answer in scripts] == [200] * 4
        scripts.append(client.get("/some/where/page/stream.js"))
        asked = [p for script in scripts for p in re.findall(r'"(/?(?:v1|live|page)[/\w.]*)"', script.text)]
        assert {*asked} == {"live", "page/hello.json", "v1/chat/completions", "v1/completions"}
        hello = client.get("/some/where/page/hello.json").json()
    assert hello == {"model": "fake", "chat": False, "max_model_len": 512}
    with TestClient(application(api_key="secret")) as client:
        assert client.get("/page/hello.json").status_code == 401


def test_the_end_of_the_server_ends_the_stream(serve: Callable[[FastAPI], str]):
    app = application()
    with watching(serve(app)) as events:
        next(snapshots(events))
        app.state.worker.end()
        rest = list(events)
    name, last = rest[-1]
    assert name == "message"
    assert "shutting down" in last["error"]["message"]
    assert eventually(lambda: app.state.live.watchers == 0)


@pytest.mark.parametrize("protocol", ["h11", "auto"])
def test_a_server_of_another_kind_does_not_wait_for_watchers(protocol: str):
    """Whoever runs the application with a server of its own need not know of the live page."""
    server = uvicorn.Server(
        uvicorn.Config(application(), port=0, log_level="warning", http=protocol)  # pyright: ignore[reportArgumentType]
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert eventually(lambda: server.started)
    address = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    with watching(address) as events:
        next(snapshots(events))
        server.should_exit = True
        rest = list(events)
    thread.join(10)
    assert not thread.is_alive()
    assert "shutting down" in rest[-1][1]["error"]["message"]


@pytest.mark.anyio
async def test_the_end_of_the_lifespan_ends_the_streams():
    app = application()
    async with app.router.lifespan_context(app):
        frames = app.state.live.watch()
        await anext(frames)
    with anyio.fail_after(10), pytest.raises(StoppingError):
        [frame async for frame in frames]


# ------------------------------------------------------------------------------------------- shapes


def look_at(engine: Engine, steps: int) -> Seen:
    recorder = Recorder(engine)
    recorder.look()
    for _ in range(steps):
        engine.step()
    return recorder.look()


def request(name: str, prompt: list[int], n: int = 1) -> Request:
    sampling = SamplingParams(max_tokens=30, n=n, ignore_eos=True, seed=1)
    return Request(request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling)


def test_the_map_is_the_pools_own_book():
    engine = Engine(FakeRunner(LIMITS), LIMITS, prefix_caching=True)
    engine.add(request("ended", [7] * 50))
    while engine.has_work:
        engine.step()
    engine.add(request("twins", [3] * 33, n=2))
    engine.add(request("other", [5] * 20))
    seen = look_at(engine, 6)
    pool, codes = engine.scheduler.pool, page_codes(seen).tolist()
    assert {page for page, code in enumerate(codes, 1) if code == FREE} == set(pool.free_pages())
    assert {page for page, code in enumerate(codes, 1) if code == CACHED} == set(pool.cached_pages())
    for page, code in enumerate(codes, 1):
        assert (code == SHARED) == (pool.count(page) > 1), f"page {page}: {pool.count(page)} holders, {code}"
    value = shape(seen)
    assert value["pages"]["shared"] == 4  # the twins' prompt: 32 tokens
    assert value["pages"]["most_holders"] == 2
    assert {r["id"]: (r["sequences"], r["prompt_tokens"]) for r in value["requests"]} == {
        "twins": (2, 33),
        "other": (1, 20),
    }
    assert len({r["code"] for r in value["requests"]}) == 2
    # The other one's pages are all its own.
    other = next(r for r in value["requests"] if r["id"] == "other")
    assert Counter(codes)[other["code"]] == other["pages"]


def test_a_request_keeps_its_colour_and_ended_ones_give_theirs_back():
    engine = Engine(FakeRunner(LIMITS), LIMITS)
    recorder = Recorder(engine)
    for name in ("a", "b", "c"):
        engine.add(request(name, [1] * 9))
    engine.step()
    before = {h.request_id: h.colour for h in recorder.look().holders}
    engine.cancel("a")
    engine.add(request("d", [1] * 9))
    engine.step()
    after = {h.request_id: h.colour for h in recorder.look().holders}
    assert len(set(before.values())) == 3
    assert after == {"b": before["b"], "c": before["c"], "d": before["a"]}


def test_a_cancelled_sequence_leaves_no_time_behind():
    engine = Engine(FakeRunner(LIMITS), LIMITS)
    recorder = Recorder(engine)
    recorder.look()
    engine.add(request("a", [1] * 9))
    engine.add(request("b", [1] * 9))
    for _ in range(3):
        engine.step()
    engine.cancel("a")
    while engine.has_work:
        engine.step()
    trace: Any = engine.trace
    assert not trace._last_token
    assert len(trace.first_token) == 2
    assert len(trace.inter_token) == 2 + 29  # a's three tokens, b's thirty
    recorder.detach()
    assert engine.trace is NO_TRACE


def test_a_large_pool_is_told_in_few_cells():
    codes = np.zeros(100_000, np.uint8)
    codes[:30] = CACHED
    codes[30:49] = FIRST_COLOUR + COLOURS - 1
    codes[98] = SHARED
    per_cell = -(-len(codes) // MOST_CELLS)
    told = runs(codes, per_cell)
    assert per_cell == 49
    assert told[0] == [CACHED, 10, 1]  # what most of its used pages are
    assert told[1] == [FREE, 0, 1]
    assert told[2] == [SHARED, 1, 1]  # one page of 49: seen, and faint
    assert sum(run[2] for run in told) == -(-len(codes) // per_cell) <= MOST_CELLS
    assert runs(codes[:50], 49)[-1] == [FREE, 0, 1]  # the last cell has fewer pages


def test_a_look_at_a_large_pool_is_quick_to_shape():
    limits = dataclasses.replace(LIMITS, num_pages=100_001)
    engine = Engine(FakeRunner(limits), limits)
    engine.add(request("a", [1] * 60))
    value = shape(look_at(engine, 3))
    assert value["pages"]["per_cell"] == 49
    assert len(json.dumps(value)) < 16_000


class MeasuredRunner(FakeRunner):
    """Knows its machine, and what each step moves and computes."""

    def stats(self) -> dict[str, Any]:
        work = {"moved_bytes": 50.0 * self.fetches, "operations": 400.0 * self.fetches}
        return {"bandwidth": 1000.0, "matmul_rate": 2000.0, **work}


def test_rates_and_shares_are_of_the_last_seconds():
    now = [100.0]
    engine = Engine(MeasuredRunner(LIMITS), LIMITS, clock=lambda: now[0])
    recorder = Recorder(engine)
    assert shape(recorder.look())["roofline"] == {"mbu": 0.0, "mfu": 0.0}
    engine.add(request("a", [1] * 9))
    for _ in range(8):
        engine.step()
        now[0] += 0.25
        recorder.look()
    value = shape(recorder.look())
    assert value["generated_per_s"] == 4.0  # one a step
    assert value["computed_per_s"] == (9 + 7) / 2
    assert value["roofline"] == {"mbu": 0.2, "mfu": 0.8}
    now[0] += 2.0
    recorder.look()
    now[0] += 2.0
    assert shape(recorder.look())["generated_per_s"] == 0.0
    plain = Engine(FakeRunner(LIMITS), LIMITS)
    assert shape(Recorder(plain).look())["roofline"] == {"mbu": None, "mfu": None}


def test_percentiles_are_of_the_window_alone():
    times = [(0.0, 99.0), *((50.0, float(value)) for value in range(100, 0, -1))]
    assert percentiles(times, 100.0) == {"count": 100, "p50": 50.0, "p95": 95.0, "p99": 99.0}
    assert percentiles(times, 200.0)["p50"] is None
    assert percentiles([(1.0, 0.25)], 2.0) == {"count": 1, "p50": 0.25, "p95": 0.25, "p99": 0.25}
