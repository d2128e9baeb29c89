"""Bodies that are large: they keep nobody waiting, and what cannot fit is refused before it is looked at."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from cpu_time import longest_callback
from fastapi import FastAPI
from fastapi.testclient import TestClient
from scripted import ScriptedLLM

from jaxinfer.core import RequestError
from jaxinfer.engine.validate import TOO_LONG
from jaxinfer.server import bounds
from jaxinfer.server.app import READ_AT_ONCE, create_app
from jaxinfer.server.messages import PIECE, in_pieces
from jaxinfer.server.schema import ChatBody, parse_body

COMPLETIONS, CHAT, BATCH = "/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch"
USER = {"role": "user", "content": "a"}
PART = {"type": "text", "text": "a"}
MANY = 200_000


def application(max_model_len: int) -> FastAPI:
    llm = ScriptedLLM()
    llm.limits = dataclasses.replace(llm.limits, max_model_len=max_model_len, num_pages=max_model_len)
    return create_app(llm)  # pyright: ignore[reportArgumentType]


MESSAGES, PARTS = {"messages": [USER] * MANY}, {"messages": [{"role": "user", "content": [PART] * MANY}]}
TALKS = {"messages": [[USER] * MANY]}


@pytest.mark.parametrize(
    ("path", "body", "max_model_len"),
    [
        # What cannot fit is refused as soon as it is read,
        (CHAT, MESSAGES, 128),
        (CHAT, PARTS, 128),
        (BATCH, TALKS, 128),
        (COMPLETIONS, {"prompt": [1] * 4_000_000}, 128),
        ("/detokenize", {"tokens": [1] * 4_000_000}, 128),
        # and what could is looked at on a thread, piece by piece.
        (CHAT, MESSAGES, 250_000),
        (CHAT, PARTS, 250_000),
        (BATCH, TALKS, 250_000),
    ],
)
def test_others_are_answered_while_a_large_body_is_read(
    serve: Callable[[FastAPI], str],
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    max_model_len: int,
) -> None:
    raw = json.dumps(body, separators=(",", ":")).encode()
    address = serve(application(max_model_len))
    with longest_callback(monkeypatch) as longest:
        began = time.process_time()
        status = httpx.post(address + path, content=raw, timeout=60).status_code
        took = time.process_time() - began
    assert status == 400
    print(f"{path} {len(raw)} bytes: {took:.2f} s of CPU time, {longest():.3f} s in one callback")
    # On the event loop it was one callback, nearly as long as all of it took.
    assert longest() < max(0.05, took / 4), (longest(), took)


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        (CHAT, {"messages": [USER] * 129}, "messages", "messages are 129; at most 128"),
        (BATCH, {"messages": [[USER], [USER] * 129]}, "messages", r"messages\[1\] are 129; at most 128"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [PART] * 65}] * 2},
            "messages",
            "content, are 130; at",
        ),
        ("/tokenize", {"messages": [USER] * 129}, "messages", "messages are 129"),
        ("/detokenize", {"tokens": [1] * 129}, "tokens", "tokens has 129 token ids; at most 128"),
        (COMPLETIONS, {"prompt": [1] * 129}, "prompt", "prompt has 129 tokens, .* at most 127"),
        (COMPLETIONS, {"prompt": [[1], [1] * 129]}, "prompt", "prompt has 129 tokens"),
        (COMPLETIONS, {"prompt": "a", "stop_token_ids": [1] * 4097}, "stop_token_ids", "4097 entries"),
        (
            COMPLETIONS,
            {"prompt": "a", "structured_outputs": {"choice": [1] * 4097}},
            "structured_outputs.choice",
            "4097 entries; at most 4096",
        ),
    ],
)
def test_what_is_too_many_is_named(path: str, body: dict[str, Any], param: str, said: str) -> None:
    with TestClient(application(128)) as client:
        answer = client.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert re.search(said, error["message"]), error
    assert (error["code"] == TOO_LONG) == (param == "prompt")


def test_what_is_just_not_too_many_passes() -> None:
    with TestClient(application(128)) as client:
        assert client.post("/detokenize", json={"tokens": [97] * 128}).json() == {"prompt": "a" * 128}
        assert client.post("/tokenize", json={"messages": [USER] * 128}).json()["count"] == 128 * 4 + 2
        padded = {"prompt": "a", "user": " " * READ_AT_ONCE}
        assert client.post(COMPLETIONS, json=padded).status_code == 200
        wrong = client.post(COMPLETIONS, json={**padded, "temprature": 1})
        assert wrong.json()["error"]["param"] == "temprature"
        assert client.post(COMPLETIONS, json={**padded, "model": "gpt-9"}).status_code == 404
    limits = ScriptedLLM().limits
    bounds.check_counts({"prompt": [1] * 1000, "truncate_prompt_tokens": 5}, limits)
    for shape in (
        {"messages": 3},
        {"messages": [3, [4]]},
        {"messages": [[3], 4]},
        {"prompt": []},
        {"tokens": {}},
    ):
        bounds.check_counts(shape, limits)


def test_a_fault_in_a_later_piece_is_where_it_is() -> None:
    good: list[dict[str, Any]] = [USER] * (2 * PIECE + 10)
    for place in (0, PIECE - 1, PIECE, 2 * PIECE + 3):
        for wrong, where, said in (
            ({"role": "user", "content": 3}, ".content", "valid"),
            ({"role": "user", "content": "a", "nme": "b"}, ".nme", "unknown parameter 'nme'"),
            ({"content": "a"}, ".role", "is missing"),
            ({**USER, "audio": {}}, ".audio", "not supported"),
            (
                {"role": "user", "content": [PART] * place + [{"type": "text", "text": 1}]},
                None,
                "valid string",
            ),
        ):
            messages = [*good[:place], wrong, *good[place:]]
            with pytest.raises(RequestError, match=said) as caught:
                parse_body(json.dumps({"messages": messages}).encode(), ChatBody)
            where = f".content[{place}].text" if where is None else where
            assert caught.value.param == f"messages[{place}]{where}"
    read = parse_body(json.dumps({"messages": good}).encode(), ChatBody)
    assert [message.content for message in read.messages] == ["a"] * len(good)


def test_one_check_gets_a_piece_at_most() -> None:
    """Which other threads wait for: pydantic keeps the GIL."""
    sizes: list[int] = []

    def check(part: list[int]) -> list[int]:
        sizes.append(len(part))
        return part

    assert in_pieces(list(range(10_000)), check) == list(range(10_000))
    assert max(sizes) <= PIECE <= 1000
    (validator,) = ChatBody.model_fields["messages"].metadata
    assert validator.func is in_pieces


def test_half_a_surrogate_is_found_wherever_it_is() -> None:
    for body in ('{"messages":[{"role":"user","content":"\\ud800"}]}', '{"a\\udfff":1}'):
        with pytest.raises(RequestError, match="not valid JSON: it holds a lone surrogate"):
            parse_body(body.encode(), ChatBody)
    whole = parse_body(b'{"messages":[{"role":"user","content":"\\ud83d\\ude00"}]}', ChatBody)
    assert whole.messages[0].content == "\U0001f600"
