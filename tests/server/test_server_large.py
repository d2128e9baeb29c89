"""Answers of very many log-probabilities: they keep nobody waiting, and all of them together have a bound."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from cpu_time import longest_callback
from fastapi import FastAPI
from fastapi.testclient import TestClient
from scripted import ScriptedEngine, ScriptedLLM, eventually

from jaxinfer.core import Logprob, RequestError, TokenEvent
from jaxinfer.server import bounds, wire
from jaxinfer.server.app import create_app
from jaxinfer.server.worker import OverloadedError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOKENS = 16_000
KNOWN = {i: Logprob(-0.125 * i, i + 1, chr(i)) for i in range(97, 118)}


class TalkativeEngine(ScriptedEngine):
    """Says all that it has to say in one step, with 21 log-probabilities of each token."""

    def _advance(self, request_id: str, index: int) -> TokenEvent:
        rows, request = self.running[request_id], self.requests[request_id]
        del rows[index]
        prompt = (None, *[KNOWN] * (len(request.prompt_token_ids) - 1))
        return TokenEvent(
            request_id=request_id,
            index=index,
            text="a" * TOKENS,
            token_ids=(97,) * TOKENS,
            logprobs=(KNOWN,) * TOKENS if request.sampling.logprobs else None,
            finish_reason="length",
            prompt_logprobs=prompt if request.sampling.prompt_logprobs is not None else None,
        )


def application(engine: ScriptedEngine | None = None) -> FastAPI:
    llm = ScriptedLLM(engine or TalkativeEngine())
    llm.limits = dataclasses.replace(llm.limits, max_model_len=TOKENS + 200, num_pages=20_000)
    return create_app(llm)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_others_are_answered_while_a_large_answer_is_written(
    serve: Callable[[FastAPI], str], monkeypatch: pytest.MonkeyPatch, path: str, stream: bool
) -> None:
    address = serve(application())
    body: dict[str, Any] = {"max_tokens": TOKENS, "stream": stream, "n": 2}
    if path == CHAT:
        body |= {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20}
    else:
        body |= {"prompt": "a", "logprobs": 20}
    with longest_callback(monkeypatch) as longest:
        began = time.process_time()
        answer = httpx.post(address + path, json=body, timeout=60)
        took = time.process_time() - began
    assert answer.status_code == 200
    assert len(answer.content) > 2 * TOKENS * 21 * 10
    # Written on the event loop it was one wait, nearly as long as the answer took.
    assert longest() < took / 8, (longest(), took)


def test_a_large_answer_says_the_same_as_a_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = [
        (COMPLETIONS, {"prompt": "abc", "logprobs": 3, "echo": True, "prompt_logprobs": 2, "n": 2}),
        (COMPLETIONS, {"prompt": ["abc", "de"], "logprobs": 1, "return_token_ids": True, "max_tokens": 8}),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 2}),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "prompt_logprobs": 1}),
    ]

    def answers() -> list[Any]:
        with TestClient(application(ScriptedEngine())) as client:
            whole = [client.post(path, json={**body, "seed": 1}).json() for path, body in bodies]
            streamed = [
                client.post(path, json={**body, "stream": True}).text
                for path, body in bodies
                if "prompt_logprobs" not in body
            ]
        events = [json.loads(e[6:]) for s in streamed for e in s.split("\n\n") if e.startswith("data: {")]
        joined: list[Any] = [whole, [e["choices"] for e in events]]
        return json.loads(
            json.dumps(joined), object_hook=lambda o: {k: v for k, v in o.items() if k not in NEW}
        )

    small = answers()
    monkeypatch.setattr("jaxinfer.server.wire.AT_ONCE", 3)
    monkeypatch.setattr("jaxinfer.server.answers.SHORT", 1)
    whole, streamed = answers()
    assert whole == small[0]
    # How tokens are batched into chunks is a matter of time: what they say together is not.
    assert "".join(map(json.dumps, itertools.chain(*streamed))).count("logprob") > 10


NEW = ("id", "created")


def test_parts_are_written_as_the_whole_is(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(3)

    def value(depth: int) -> Any:
        kind = draw.random()
        if depth == 0 or kind < 0.3:
            return draw.choice([None, True, 1, -2.5, "é☃\u2028", ""])
        if kind < 0.6:
            return {draw.choice("abcdé"): value(depth - 1) for _ in range(draw.randrange(5))}
        return [value(depth - 1) for _ in range(draw.randrange(40))]

    for most in (1, 5, 50):
        monkeypatch.setattr(wire, "AT_ONCE", most)
        for _ in range(50):
            some = value(4)
            assert b"".join(wire.encoded_parts(some)) == wire.encode(some)
        for size in (0, 1, 7, 200):
            numbers = list(range(size))
            parts = wire.Parts(size, lambda i, j, numbers=numbers: numbers[i:j])
            for told in (parts, wire.joined(parts, [1, 2]), wire.joined([1, 2], parts)):
                expected = told[:]
                assert b"".join(wire.encoded_parts({"a": told})) == wire.encode({"a": expected})
                assert wire.encode({"a": told}) == wire.encode({"a": expected})
                assert expected[2:4] == told[2:4]
    with pytest.raises(ValueError, match="JSON"):
        list(wire.encoded_parts([1.0] * 100 + [float("nan")]))


def test_the_pieces_of_a_large_value_are_small() -> None:
    entry = {
        "token": "a",
        "logprob": -1.0,
        "bytes": [97],
        "top_logprobs": [{"token": "b", "logprob": -2.0}] * 20,
    }
    value = {"choices": [{"logprobs": {"content": [entry] * 5000}} for _ in range(3)]}
    assert max(map(len, wire.encoded_parts(value))) < 100_000


def test_all_answers_in_progress_have_one_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine()
    app = application(engine)
    monkeypatch.setattr(bounds, "MAX_LOGPROBS_HELD", 100)
    body = {"prompt": "a", "logprobs": 5, "max_tokens": 10}  # 60 of them
    with TestClient(app) as client, ThreadPoolExecutor(1) as pool:
        engine.gate.clear()
        first = pool.submit(client.post, COMPLETIONS, json=body)
        assert eventually(lambda: client.get("/health").json()["sequences"] == 1)
        for stream in (False, True):
            refused = client.post(COMPLETIONS, json={**body, "stream": stream})
            assert refused.status_code == 429
            assert refused.headers["retry-after"]
            assert "hold 60 log-probabilities and this one 60" in refused.json()["error"]["message"]
        fits = {**body, "max_tokens": 5}
        second = threading.Thread(target=client.post, args=(COMPLETIONS,), kwargs={"json": fits})
        second.start()
        assert eventually(lambda: client.get("/health").json()["sequences"] == 2)
        engine.gate.set()
        assert first.result().status_code == 200
        second.join()
        for bad in ({"prompt": [999]}, {"prompt": "a" * 101}):  # refused early, and by the engine
            assert client.post(COMPLETIONS, json={**body, **bad}).status_code == 400
        for stream in (False, True, False):  # each has given its room back
            assert client.post(COMPLETIONS, json={**body, "stream": stream}).status_code == 200


def test_a_stream_counts_what_may_lie_unread_and_a_client_that_left_nothing() -> None:
    llm = ScriptedLLM()
    limits = dataclasses.replace(llm.limits, max_model_len=100_000, num_pages=100_000)
    llm.limits = limits
    request = llm.prepare([1] * 100, {"logprobs": 5, "prompt_logprobs": 1, "max_tokens": 50_000, "n": 2})
    assert bounds.logprob_entries([request], limits, stream=True) == 200 + 2 * bounds.MAX_UNREAD
    assert bounds.logprob_entries([request], limits) == 200 + 2 * 50_000 * 6
    room = bounds.LogprobRoom()
    give_back = room.take(3_000_000)
    with pytest.raises(OverloadedError):
        room.take(1_000_001)
    room.take(0)
    give_back()
    give_back()
    assert room.taken == 0
    assert not issubclass(OverloadedError, RequestError)
