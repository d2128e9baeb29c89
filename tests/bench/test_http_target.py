"""Loads over HTTP: to the real endpoint, and to servers whose bytes are cut anywhere, or wrong."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Generator
from typing import Any

import pytest
from fake_runner import FakeRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from served_answers import LIMITS, fixed
from serving import serving

from jaxinfer.bench import Arrival, Lengths, Load, Objective, Prompts, Summary, closed, constant, scrape
from jaxinfer.bench.http_target import HttpTarget
from jaxinfer.bench.sse import Url, ask
from jaxinfer.bench.target import warm_up
from jaxinfer.core import ConfigError
from jaxinfer.llm import LLM
from jaxinfer.server.app import create_app
from jaxinfer.text.tokenizer import ByteTokenizer

quiet: Callable[[float], None] = lambda amount: None  # noqa: E731


def fake_llm() -> LLM:
    return LLM.from_parts(FakeRunner(LIMITS), LIMITS, tokenizer=ByteTokenizer(), model_name="fake")


@pytest.fixture(scope="module")
def served() -> Generator[tuple[str, LLM]]:
    """The endpoint over the fake device: 4 sequences run, 2 may wait, the key is "k"."""
    llm = fake_llm()
    with serving(create_app(llm, api_key="k", max_queue=2)) as address:
        yield address, llm


def target(served: tuple[str, LLM], **options: Any) -> HttpTarget:
    return HttpTarget(served[0], api_key="k", vocab_size=LIMITS.vocab_size, **options)


def test_a_load_over_http_is_answered_token_by_token() -> None:
    prompts, outputs = Prompts(Lengths.parse("uniform:5-30"), shared=16), Lengths.parse("uniform:1-20")
    told: list[float] = []
    load = constant(100.0, 30, prompts, outputs, seed=4)
    app = create_app(fake_llm(), max_queue=30)  # a place for each: a busy machine must refuse none
    with serving(app) as address:
        run = HttpTarget(address, vocab_size=LIMITS.vocab_size).run(load, told.append)
    assert [record.status for record in run.records] == ["ok"] * 30
    for record, arrival in zip(run.records, load.arrivals, strict=True):
        assert record.output_tokens == arrival.output_tokens
        assert record.prompt_tokens == arrival.num_prompt
        assert record.arrived_s == arrival.at_s
        assert record.arrived_s <= record.sent_s <= record.token_s[0] <= record.ended_s
        assert record.finish_reason == "length"
    assert sum(record.cached_tokens for record in run.records) >= 16 * 20
    assert sum(told) == 30
    # The device is fake and counts no bytes; what the engine itself counts comes from /metrics.
    assert run.engine["steps"]
    assert run.engine["steps"] > 0
    assert run.engine["prefix_hit_tokens"] == sum(record.cached_tokens for record in run.records)
    assert run.engine["mbu"] is None


def test_refusals_are_counted_apart(served: tuple[str, LLM]) -> None:
    run = target(served).run(closed(30, 60, *fixed(20, 30)), quiet)
    summary = Summary.of(run.records, Objective.parse("ttft_p50=10s"))
    assert summary.refused > 0
    assert summary.ok > 0
    assert summary.ok + summary.refused == 60
    assert all(name.startswith("429") for name in summary.errors)
    assert summary.ttft.count == summary.ok
    too_long = target(served).run(Load((Arrival(0.0, 500, 4),)), quiet)
    assert too_long.records[0].status == "refused"
    assert "max_model_len" in (too_long.records[0].error or "")


def test_what_a_server_says_of_itself(served: tuple[str, LLM]) -> None:
    said = target(served).describe()
    assert (said["model"], said["target"], said["not_understood"]) == ("fake", served[0], [])
    assert target(served).most_tokens == LIMITS.max_model_len
    with pytest.raises(ConfigError, match="does not serve 'other'"):
        target(served, model="other")
    with pytest.raises(ConfigError, match="401"):
        HttpTarget(served[0])
    with pytest.raises(ConfigError, match="no server answers"):
        HttpTarget("http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="looks like"):
        HttpTarget("ftp://x")


def test_a_warm_up_of_refusals_is_told(served: tuple[str, LLM]) -> None:
    with pytest.raises(ConfigError, match="no request of the warm-up was answered: 400"):
        warm_up(target(served), Load((Arrival(0.0, 500, 4),)), quiet)


def test_the_metrics_of_the_endpoint_are_understood(served: tuple[str, LLM]) -> None:
    text = asyncio.run(ask(Url(served[0]), "GET", "/metrics", key="k")).body.decode()
    counts = scrape.stats(text)
    assert counts is not None
    stats = served[1].stats()
    assert counts["steps"] == stats["steps"]
    assert counts["preemptions"] == stats["preemptions"]
    assert counts["prefix_cache"]["hits"] == stats["prefix_cache"]["hits"]
    assert counts["wait_s"] == pytest.approx(stats["wait_s"])
    assert scrape.stats("vllm:steps_total 3\n") is None


# ------------------------------------------------------------------------------------- other servers


class Bytes:
    """A server of one answer to every completion, written in pieces of `cut` bytes."""

    def __init__(self, answer: bytes, cut: int = 1 << 20, refuse: tuple[str, ...] = ()):
        self.answer, self.cut, self.refuse = answer, cut, refuse
        self.bodies: list[dict[str, Any]] = []
        self.ends = True

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        if head.startswith("get /v1/models"):
            answer = whole(b'{"data": [{"id": "m"}]}')
        elif head.startswith("get"):
            answer = whole(b"no", "404 Not Found")
        else:
            length = int(head.split("content-length: ")[1].split("\r\n")[0])
            body = json.loads(await reader.readexactly(length))
            self.bodies.append(body)
            wrong = next((name for name in self.refuse if name in body), None)
            message = f'{{"error": {{"message": "unknown parameter {wrong}"}}}}'
            answer = self.answer if wrong is None else whole(message.encode(), "400 Bad Request")
        for start in range(0, len(answer), self.cut):
            writer.write(answer[start : start + self.cut])
            await writer.drain()
        if self.ends or head.startswith("get"):
            writer.close()

    def __enter__(self) -> str:
        self._loop = asyncio.new_event_loop()
        started = threading.Event()

        def run() -> None:
            asyncio.set_event_loop(self._loop)
            self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
            started.set()
            self._loop.run_forever()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        started.wait(10)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


def whole(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def chunk(text: str = "", reason: str | None = None, **more: Any) -> bytes:
    value = {"choices": [{"index": 0, "text": text, "finish_reason": reason}], **more}
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def stream(*events: bytes, chunked: bool = True) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    if not chunked:
        return head + b"\r\n" + b"".join(events)
    framed = b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in events)
    return head + b"Transfer-Encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n"


USAGE = (
    b'data: {"choices": [], "usage": {"completion_tokens": 5, '
    b'"prompt_tokens_details": {"cached_tokens": 2}}}\n\n'
)
ANSWER = (chunk("a"), chunk("b\u00e9\n"), chunk("", "length"), USAGE, b"data: [DONE]\n\n")


@settings(max_examples=15)
@given(st.integers(1, 200), st.booleans())
def test_a_stream_may_be_cut_anywhere(cut: int, chunked: bool) -> None:
    """Of a server without token ids: two chunks have text, the usage counts five tokens."""
    with Bytes(stream(*ANSWER, chunked=chunked), cut) as url:
        run = HttpTarget(url).run(Load((Arrival(0.0, 3, 5),)), quiet)
    (record,) = run.records
    assert (record.status, record.error) == ("ok", None)
    assert (record.output_tokens, record.cached_tokens, record.finish_reason) == (5, 2, "length")
    assert record.token_s[1:] == (record.token_s[1],) * 4
    assert run.engine == {}


def test_what_a_server_does_not_know_is_left_out_and_told() -> None:
    server = Bytes(stream(*ANSWER), refuse=("return_token_ids", "ignore_eos"))
    with server as url:
        found = HttpTarget(url)
        found.run(Load((Arrival(0.0, 3, 5),)), quiet)
    assert sorted(found.describe()["not_understood"]) == ["ignore_eos", "return_token_ids"]
    assert "ignore_eos" not in server.bodies[-1]
    assert server.bodies[-1]["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("answer", "status", "told"),
    [
        (stream(chunk("a"), b'data: {"error": {"message": "boom"}}\n\n'), "failed", "boom"),
        (stream(chunk("a"), b"data: [DONE]\n\n"), "failed", "without a finish_reason"),
        (stream(chunk("a"), b"data: what\n\n"), "failed", "no chunk of a completion"),
        (stream(chunk("a"))[:-20], "failed", "amid the answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", "failed", "amid the answer"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "failed", "no HTTP"),
        (whole(b"busy", "503 Unavailable"), "refused", "503 busy"),
        (whole(b"{}", "500 Oops"), "failed", "500"),
    ],
)
def test_broken_answers_are_failures(answer: bytes, status: str, told: str) -> None:
    server = Bytes(stream(*ANSWER))
    with server as url:
        found = HttpTarget(url)
        server.answer = answer
        (record,) = found.run(Load((Arrival(0.0, 3, 5),)), quiet).records
    assert record.status == status
    assert told in (record.error or "")


def test_a_request_without_an_end_fails_in_time() -> None:
    server = Bytes(stream(*ANSWER))
    with server as url:
        found = HttpTarget(url, timeout_s=0.2)
        server.answer, server.ends = stream(chunk("a"), chunked=False), False
        (record,) = found.run(Load((Arrival(0.0, 3, 5),)), quiet).records
    assert record.status == "failed"
    assert "no end within 0.2 s" in (record.error or "")
    assert record.ended_s >= 0.2
