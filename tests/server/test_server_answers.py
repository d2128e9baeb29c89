"""The bytes of answers, whole and streamed, and what happens to them when something goes wrong."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from scripted import ScriptedEngine, ScriptedLLM, eventually

from jaxinfer.server.app import create_app

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}


def client_of(engine: ScriptedEngine | None = None, **options: Any) -> TestClient:
    return TestClient(create_app(ScriptedLLM(engine), **options))  # pyright: ignore[reportArgumentType]


def stream(client: TestClient, path: str, body: dict) -> list[Any]:
    """The data of every event; the framing is checked on the way."""
    answer = client.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, rest = answer.content.split(b"\n\n")
    assert rest == b""
    assert all(event.startswith(b"data: ") and b"\n" not in event for event in events)
    texts = [event[6:].decode("ascii") for event in events]
    return [text if text == "[DONE]" else json.loads(text) for text in texts]


def choices(chunks: list[Any], index: int = 0) -> list[dict]:
    return [c for chunk in chunks[:-1] for c in chunk["choices"] if c["index"] == index]


NOT_ASKED_FOR = dict.fromkeys(("stop_reason", "prompt_logprobs", "prompt_token_ids", "token_ids"))
"""vLLM's additions to OpenAI's shapes: clients of vLLM read them without asking whether they are there."""


def test_a_completion_is_openais():
    with client_of() as client:
        answer = client.post(COMPLETIONS, json={"model": "scripted", "prompt": "abc"}).json()
    assert answer.pop("id").startswith("cmpl-")
    assert abs(answer.pop("created") - time.time()) < 60
    assert answer == {
        "object": "text_completion",
        "model": "scripted",
        "choices": [
            {"index": 0, "text": "ABCABCAB", "logprobs": None, "finish_reason": "length", **NOT_ASKED_FOR}
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 8,
            "total_tokens": 11,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
        "metrics": {},
    }


def test_a_chat_is_openais():
    with client_of() as client:
        answer = client.post(CHAT, json={"messages": [USER], "max_tokens": 4}).json()
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    message = {"role": "assistant", "content": "U:HI", "refusal": None}
    not_asked_for = dict(NOT_ASKED_FOR)
    assert answer["prompt_logprobs"] is not_asked_for.pop("prompt_logprobs")
    assert answer["prompt_token_ids"] is not_asked_for.pop("prompt_token_ids")
    assert answer["choices"] == [
        {"index": 0, "message": message, "logprobs": None, "finish_reason": "length", **not_asked_for}
    ]


@pytest.mark.parametrize("prompts", [["ab", "cd", "ef"], [[97, 98], [99, 100], [101, 102]]])
def test_list_prompts_and_n_are_counted_through(prompts: list):
    body = {"prompt": prompts, "n": 2, "max_tokens": 3}
    with client_of() as client:
        answer = client.post(COMPLETIONS, json=body).json()
        chunks = stream(client, COMPLETIONS, body)
    expected = ["ABA", "ABA", "CDC", "CDC", "EFE", "EFE"]
    assert [c["index"] for c in answer["choices"]] == list(range(6))
    assert [c["text"] for c in answer["choices"]] == expected
    assert answer["usage"]["prompt_tokens"] == 6
    assert answer["usage"]["completion_tokens"] == 18
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
    for index, text in enumerate(expected):
        mine = choices(chunks, index)
        assert "".join(c["text"] for c in mine) == text
        assert [c["finish_reason"] for c in mine] == [None, None, "length"]


@pytest.mark.parametrize(
    ("path", "body"), [(COMPLETIONS, {"prompt": "abc"}), (CHAT, {"messages": [USER], "n": 2})]
)
def test_a_stream_has_one_identity_and_ends_with_done(path: str, body: dict):
    with client_of() as client:
        chunks = stream(client, path, body)
    assert chunks[-1] == "[DONE]"
    assert "[DONE]" not in chunks[:-1]
    assert len({(c["id"], c["created"], c["object"], c["model"]) for c in chunks[:-1]}) == 1
    assert all("usage" not in c for c in chunks[:-1])
    assert all(len(c["choices"]) == 1 and "finish_reason" in c["choices"][0] for c in chunks[:-1])
    for index in range(body.get("n", 1)):
        reasons = [c["finish_reason"] for c in choices(chunks, index)]
        assert reasons == [None] * (len(reasons) - 1) + ["length"]


def test_a_chat_stream_announces_speaks_and_ends():
    with client_of() as client:
        chunks = stream(client, CHAT, {"messages": [USER], "max_tokens": 3})
    deltas = [c["delta"] for c in choices(chunks)]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert [d["content"] for d in deltas[1:]] == ["U", ":", "H"]  # the end comes with the last text


def test_the_usage_so_far_grows_with_every_chunk_of_a_chat():
    options = {"include_usage": True, "continuous_usage_stats": True}
    with client_of() as client:
        chunks = stream(client, CHAT, {"messages": [USER], "max_tokens": 3, "stream_options": options})
    assert [c["usage"]["completion_tokens"] for c in chunks[:-1]] == [0, 1, 2, 3, 3]
    assert [len(c["choices"]) for c in chunks[:-1]] == [1, 1, 1, 1, 0]


def test_usage_comes_in_a_chunk_of_its_own_when_asked_for():
    body = {"prompt": ["ab", "cde"], "max_tokens": 2, "stream_options": {"include_usage": True}}
    with client_of() as client:
        chunks = stream(client, COMPLETIONS, body)
        body["stream_options"] = {"include_usage": False}
        without = stream(client, COMPLETIONS, body)
    assert all(c["usage"] is None and c["choices"] for c in chunks[:-2])
    assert chunks[-2]["choices"] == []
    assert chunks[-2]["usage"]["prompt_tokens"] == 5
    assert chunks[-2]["usage"]["completion_tokens"] == 4
    assert all("usage" not in c for c in without[:-1])


def test_logprobs_of_a_completion():
    with client_of() as client:
        body = {"prompt": "abc", "max_tokens": 3, "logprobs": 3}
        whole = client.post(COMPLETIONS, json=body).json()["choices"][0]["logprobs"]
        streamed = [c["logprobs"] for c in choices(stream(client, COMPLETIONS, body))]
        none = client.post(COMPLETIONS, json={**body, "logprobs": 0}).json()["choices"][0]["logprobs"]
    assert whole["tokens"] == ["A", "B", "C"]
    assert whole["token_logprobs"] == [-1.0] * 3
    assert whole["text_offset"] == [0, 1, 2]
    assert whole["top_logprobs"][0] == {"@": -0.5, "A": -1.0, "?": -9999.0}
    assert [*whole["top_logprobs"][0]] == ["A", "@", "?"]  # the chosen one first, the others by rank
    joined = {key: [entry for part in streamed for entry in part[key]] for key in whole}
    assert joined == whole
    assert none["top_logprobs"] == [{"A": -1.0}, {"B": -1.0}, {"C": -1.0}]


def test_logprobs_of_a_chat():
    with client_of() as client:
        body = {"messages": [USER], "max_tokens": 2, "logprobs": True, "top_logprobs": 2}
        whole = client.post(CHAT, json=body).json()["choices"][0]["logprobs"]["content"]
        streamed = [c["logprobs"] for c in choices(stream(client, CHAT, body))]
        one = client.post(CHAT, json={**body, "top_logprobs": 1}).json()["choices"][0]["logprobs"]["content"]
        del body["top_logprobs"]
        none = client.post(CHAT, json=body).json()["choices"][0]["logprobs"]["content"]
    first = {"token": "U", "logprob": -1.0, "bytes": [85]}
    likelier = {"token": "T", "logprob": -0.5, "bytes": [84]}
    assert whole[0] == {**first, "top_logprobs": [likelier, first]}
    assert [entry for part in streamed if part for entry in part["content"]] == whole
    assert one[0] == {**first, "top_logprobs": [likelier]}  # the chosen one is not among the 1 likeliest
    assert [entry["top_logprobs"] for entry in none] == [[], []]


def test_part_of_a_character_has_its_exact_bytes():
    emoji = list("é☃".encode())
    engine = ScriptedEngine(length=5)
    with client_of(engine) as client:
        body = {"prompt": emoji, "logprobs": 1}
        entry = client.post(COMPLETIONS, json=body).json()["choices"][0]["logprobs"]
    assert entry["tokens"] == [f"bytes:\\x{byte:02x}" for byte in bytes(emoji).upper()]
    assert entry["text_offset"] == [0, 0, 1, 1, 1]


def test_a_failure_before_the_first_token_has_a_status():
    for streamed in (False, True):
        with client_of(ScriptedEngine(fail_at=0)) as client:
            answer = client.post(COMPLETIONS, json={"prompt": "abc", "stream": streamed})
            assert answer.status_code == 500
            assert answer.json()["error"]["message"] == "row of NaN logits"
            assert client.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("engine", "message", "code"),
    [
        (ScriptedEngine(fail_at=3), "row of NaN logits", "generation_error"),
        (ScriptedEngine(die_at=4), "the engine has stopped: RuntimeError", "engine_stopped"),
    ],
)
def test_a_failure_after_the_first_chunk_is_an_event(engine: ScriptedEngine, message: str, code: str):
    with client_of(engine) as client:
        chunks = stream(client, COMPLETIONS, {"prompt": "abc"})
    *said, last = chunks
    assert "".join(c["choices"][0]["text"] for c in said) == "ABC"
    assert message in last["error"]["message"]
    assert last["error"]["code"] == code
    assert engine.running == {} or engine.die_at


def test_a_dead_engine_answers_nobody_and_says_so():
    with client_of(ScriptedEngine(die_at=2)) as client:
        assert client.get("/health").json()["status"] == "ok"
        answer = client.post(COMPLETIONS, json={"prompt": "abc"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_stopped")
        assert client.get("/health").status_code == 503
        for _ in range(2):
            assert client.post(CHAT, json={"messages": [USER]}).status_code == 503


def test_health_says_so_while_every_step_fails():
    engine = ScriptedEngine()
    with client_of(engine) as client:
        for failed, status, word in (
            (2, 200, "ok"),
            (3, 503, "failing"),
            (9, 503, "failing"),
            (0, 200, "ok"),
        ):
            engine.failed_in_a_row = failed
            answer = client.get("/health")
            assert (answer.status_code, answer.json()["status"]) == (status, word)
            assert answer.json()["failed_in_a_row"] == failed


def test_what_is_not_ours_says_nothing_of_its_inside():
    llm = ScriptedLLM()
    llm.prepare = lambda *_: 1 / 0  # pyright: ignore[reportAttributeAccessIssue]
    with TestClient(create_app(llm), raise_server_exceptions=False) as client:  # pyright: ignore
        answer = client.post(COMPLETIONS, json={"prompt": "abc"})
    assert answer.status_code == 500
    assert "division" not in answer.text
    assert answer.json()["error"]["type"] == "server_error"


def test_overload_is_a_429_with_retry_after_and_the_accepted_finish(serve):
    engine = ScriptedEngine()
    engine.gate.clear()
    llm = ScriptedLLM(engine, max_num_seqs=2)
    url = serve(create_app(llm, max_queue=2))  # pyright: ignore[reportArgumentType]
    with ThreadPoolExecutor(4) as pool, httpx.Client(base_url=url) as client:
        accepted = [
            pool.submit(httpx.post, url + COMPLETIONS, json={"prompt": "abc"}, timeout=20) for _ in range(4)
        ]
        assert eventually(lambda: client.get("/health").json()["sequences"] == 4)
        for streamed in (False, True):
            # At once: the gate is shut, so that a place would not have become free.
            answer = client.post(COMPLETIONS, json={"prompt": "abc", "stream": streamed})
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["type"] == "rate_limit_error"
        engine.gate.set()
        assert [f.result().json()["choices"][0]["text"] for f in accepted] == ["ABCABCAB"] * 4
        assert client.post(COMPLETIONS, json={"prompt": "abc"}).status_code == 200


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("held", [True, False], ids=["before its first token", "amid its answer"])
def test_a_client_that_goes_away_frees_its_place(serve, streamed: bool, held: bool):
    engine = ScriptedEngine(length=10**9, step_s=0.002)
    url = serve(create_app(ScriptedLLM(engine)))  # pyright: ignore[reportArgumentType]
    host, port = url.removeprefix("http://").split(":")
    if held:
        engine.gate.clear()
    body = json.dumps({"prompt": "abc", "stream": streamed}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert eventually(lambda: len(engine.running) == 1)
        if streamed and not held:
            assert b"200 OK" in connection.recv(100)
    assert eventually(lambda: held or not engine.running, 2)
    engine.gate.set()
    assert eventually(lambda: not engine.running, 2)
    assert len(engine.cancelled) == 1
    assert eventually(lambda: httpx.get(url + "/health").json()["sequences"] == 0, 2)


def test_a_slow_reader_neither_blocks_others_nor_loses_text(serve):
    engine = ScriptedEngine(length=20_000)
    url = serve(create_app(ScriptedLLM(engine)))  # pyright: ignore[reportArgumentType]
    body = {"prompt": "abcdefghij", "stream": True}
    text, threads = [], threading.active_count()
    with httpx.stream("POST", url + COMPLETIONS, json=body, timeout=30) as answer:
        lines = answer.iter_lines()
        text.append(json.loads(next(lines)[6:])["choices"][0]["text"])
        assert eventually(lambda: not engine.running, 20)  # the engine went on while nobody read
        assert httpx.post(url + COMPLETIONS, json={"prompt": "x", "max_tokens": 2}).status_code == 200
        for line in lines:
            if line.startswith("data: {"):
                text.append(json.loads(line[6:])["choices"][0]["text"])
    assert len("".join(text)) == 20_000
    assert threading.active_count() <= threads + 1
