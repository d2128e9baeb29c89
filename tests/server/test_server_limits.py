"""What one client may cost the others: refused by name before it runs, or ended while it does."""

from __future__ import annotations

import asyncio
import logging

import pytest
from fastapi.testclient import TestClient
from scripted import ScriptedEngine, ScriptedLLM, eventually

from jaxinfer.core import ConfigError, Limits, Request, RequestError, SamplingParams
from jaxinfer.server import bounds
from jaxinfer.server.app import create_app
from jaxinfer.server.launch import ServerConfig
from jaxinfer.server.logs import JsonLines, PlainLines
from jaxinfer.server.tickets import MAX_UNREAD
from jaxinfer.server.worker import EngineWorker, SlowReaderError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LIMITS = Limits(
    num_pages=9000, page_size=4, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=8192, vocab_size=256
)


def app(**options):
    return create_app(ScriptedLLM(), **options)  # pyright: ignore[reportArgumentType]


def test_a_text_that_cannot_fit_is_refused_without_tokenising_it():
    llm = ScriptedLLM()
    seen: list[int] = []
    encode = llm.tokenizer.encode
    llm.prepare = lambda *a, **k: seen.append(1) or encode("")  # pyright: ignore[reportAttributeAccessIssue]
    most = bounds.CHARACTERS_PER_TOKEN * llm.limits.max_model_len
    parts = [{"type": "text", "text": "x" * (most // 2)}] * 2
    with TestClient(create_app(llm)) as client:  # pyright: ignore[reportArgumentType]
        for path, body in (
            (COMPLETIONS, {"prompt": "x" * (most + 1)}),
            (COMPLETIONS, {"prompt": ["a", "x" * (most + 1)]}),
            (CHAT, {"messages": [{"role": "user", "content": parts}, {"role": "user", "content": "y"}]}),
        ):
            answer = client.post(path, json=body)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == ("prompt" if path == COMPLETIONS else "messages")
            assert "max_model_len" in answer.json()["error"]["message"]
        llm.tokenizer.encode = lambda *a, **k: seen.append(1) or []  # pyright: ignore[reportAttributeAccessIssue]
        llm.encode_chat = llm.tokenizer.encode
        message = {"role": "user", "content": parts + parts}
        tool = {"type": "function", "function": {"name": "f", "description": "x" * most}}
        for param, body in (
            ("prompt", {"prompt": "x" * (most + 1)}),
            ("messages", {"messages": [message]}),
            ("tools", {"messages": [{"role": "user", "content": "y"}], "tools": [tool]}),
        ):
            answer = client.post("/tokenize", json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not seen
    bounds.check_texts(["x" * most], llm.limits, "prompt")
    bounds.check_texts([[1] * (most + 1)], llm.limits, "prompt")  # ids: counted by the engine's own check


@pytest.mark.parametrize(
    ("sampling", "prompt", "refused"),
    [
        ({"n": 128, "logprobs": 20}, 10, True),
        ({"n": 128, "logprobs": 20, "max_tokens": 300}, 10, False),
        ({"n": 1, "logprobs": 20, "prompt_logprobs": 20}, 4000, False),
        ({"n": 128}, 10, False),
    ],
)
def test_an_answer_of_too_many_logprobs_is_refused(sampling: dict, prompt: int, refused: bool):
    requests = [Request(request_id="r", prompt_token_ids=(1,) * prompt, sampling=SamplingParams(**sampling))]
    if refused:
        with pytest.raises(RequestError, match="21993216") as caught:
            bounds.logprob_entries(requests, LIMITS)
        assert caught.value.param == "logprobs"
    else:
        bounds.logprob_entries(requests, LIMITS)
    if sampling.get("prompt_logprobs"):
        with pytest.raises(RequestError):
            bounds.logprob_entries(requests * 30, LIMITS)


@pytest.mark.anyio
async def test_a_reader_that_never_reads_is_ended_and_holds_nothing():
    llm = ScriptedLLM(ScriptedEngine(length=10**9))
    worker = EngineWorker(llm.engine, llm.limits)
    worker.start()
    try:
        ticket = await worker.submit([llm.prepare("abc", SamplingParams(n=2, logprobs=20))])
        assert await asyncio.to_thread(eventually, lambda: worker.health()["sequences"] == 0, 30)
        assert llm.engine.cancelled == ["r0"]
        assert not llm.engine.running
        with pytest.raises(SlowReaderError):
            await anext(ticket)
        assert ticket._levels == [[]]
        said = sum(len(r) for r in llm.engine.running.values())
        assert said == 0
        assert MAX_UNREAD / 21 < llm.engine.steps < 2 * MAX_UNREAD / 21 + 5
        other = await worker.submit([llm.prepare("abc", SamplingParams(max_tokens=2))])
        assert sum([len(e.token_ids) async for events in other for e in events]) == 2
    finally:
        await asyncio.to_thread(worker.stop)


def test_pages_of_other_origins_may_use_it_only_where_named():
    asks = {"Origin": "https://good.example", "Access-Control-Request-Method": "POST"}
    with TestClient(app()) as client:
        assert "access-control-allow-origin" not in client.get("/health", headers=asks).headers
        assert client.options(COMPLETIONS, headers=asks).status_code == 405
    with TestClient(app(cors_origins=["https://good.example"], api_key="k")) as client:
        preflight = client.options(COMPLETIONS, headers=asks)
        assert preflight.status_code == 200, "a browser sends no key with it"
        assert preflight.headers["access-control-allow-origin"] == "https://good.example"
        refused = client.post(COMPLETIONS, json={}, headers=asks)
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (
            401,
            "https://good.example",
        )
        bad = client.options(COMPLETIONS, headers={**asks, "Origin": "https://bad.example"})
        assert "access-control-allow-origin" not in bad.headers


@pytest.mark.parametrize(
    "wrong",
    [
        {"cors_origin": ("example.org",)},
        {"cors_origin": ("https://example.org/page",)},
        {"receive_seconds": 0},
        {"stall_seconds": 0},
        {"keep_alive_seconds": -1},
        {"max_queue": -1},
    ],
)
def test_wrong_settings_are_refused(wrong: dict):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ServerConfig(**wrong)


def test_a_line_of_the_log_is_one_line_of_json_whatever_it_says():
    try:
        raise ValueError("a\nb")
    except ValueError as error:
        record = logging.LogRecord(
            "x", logging.ERROR, "f", 1, "%s\n{", ('"é☃',), (ValueError, error, error.__traceback__)
        )
    line = JsonLines().format(record)
    assert line.isascii()
    assert "\n" not in line
    assert '"message": "\\"' in line
    assert "ValueError: a" in line
    assert PlainLines().format(record).count("Traceback") == 1
