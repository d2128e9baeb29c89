"""Prompts that come back: echo, their logprobs, and token ids; as lm_eval and vLLM's clients ask for them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient
from scripted import ScriptedLLM
from test_server_openai_sdk import fake_llm

from jaxinfer.server.answers import _offsets
from jaxinfer.server.app import create_app

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}


def ask(path: str = COMPLETIONS, **body: Any) -> dict:
    with TestClient(create_app(ScriptedLLM())) as client:  # pyright: ignore[reportArgumentType]
        answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def chunks(path: str = COMPLETIONS, **body: Any) -> list[dict]:
    with TestClient(create_app(ScriptedLLM())) as client:  # pyright: ignore[reportArgumentType]
        text = client.post(path, json={**body, "stream": True}).text
    return [json.loads(event[6:]) for event in text.split("\n\n")[:-2]]


def joined(parts: list[dict], index: int = 0) -> dict[str, Any]:
    """The choice that a stream's chunks make."""
    mine = [c for part in parts for c in part["choices"] if c["index"] == index]
    whole: dict[str, Any] = {"text": "".join(c["text"] for c in mine)}
    whole["finish_reason"] = mine[-1]["finish_reason"]
    logprobs = [c["logprobs"] for c in mine if c["logprobs"]]
    whole["logprobs"] = (
        {key: [e for part in logprobs for e in part[key]] for key in logprobs[0]} if logprobs else None
    )
    if "token_ids" in mine[0]:
        whole["token_ids"] = [i for c in mine for i in c["token_ids"]]
        whole["prompt_token_ids"] = mine[0]["prompt_token_ids"]
    return whole


@pytest.mark.parametrize("prompt", ["a☃c", list("a☃c".encode())])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("most", [0, 1, 3])
def test_an_echo_starts_with_the_prompt(prompt: Any, logprobs: int | None, most: int):
    body = {"prompt": prompt, "echo": True, "max_tokens": most, "logprobs": logprobs}
    answer = ask(**body)
    (choice,) = answer["choices"]
    data = "a☃c".encode()
    assert choice["text"] == "a☃c" + "".join(chr(b) for b in data.upper()[:most])
    assert answer["usage"]["completion_tokens"] == most
    assert choice["finish_reason"] == "length"
    parts = chunks(**body)
    assert all("prompt_logprobs" not in c for part in parts for c in part["choices"])
    stream = joined(parts)
    assert {name: choice[name] for name in stream} == stream
    if logprobs is None:
        assert choice["logprobs"] is None
        return
    known = choice["logprobs"]
    assert {len(values) for values in known.values()} == {len(data) + most}
    assert known["tokens"][0] == "a"
    assert (known["token_logprobs"][0], known["top_logprobs"][0]) == (None, None)
    assert known["token_logprobs"][1:] == [-1.0] * (len(data) + most - 1)
    assert [len(top) for top in known["top_logprobs"][1:]] == [max(logprobs, 1)] * (len(data) + most - 1)
    assert known["text_offset"][: len(data) + 1] == [0, 1, 1, 1, 2, 3][: len(data) + bool(most)]


def test_echo_and_prompt_logprobs_may_want_different_numbers():
    (choice,) = ask(prompt="abc", echo=True, max_tokens=1, logprobs=1, prompt_logprobs=4)["choices"]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"][1:3]] == [2, 2], (
        "the likeliest, and its own"
    )
    assert [len(entries) for entries in choice["prompt_logprobs"][1:]] == [4, 4]
    (other,) = ask(prompt="abc", echo=True, max_tokens=1, logprobs=4, prompt_logprobs=1)["choices"]
    assert [len(top) for top in other["logprobs"]["top_logprobs"][1:3]] == [4, 4]
    assert [len(entries) for entries in other["prompt_logprobs"][1:]] == [2, 2]


def test_each_choice_of_each_prompt_has_its_own_echo():
    answer = ask(prompt=["ab", "cd"], n=2, echo=True, max_tokens=2, logprobs=0)
    assert [c["text"] for c in answer["choices"]] == ["abAB", "abAB", "cdCD", "cdCD"]
    assert [c["logprobs"]["tokens"][0] for c in answer["choices"]] == ["a", "a", "c", "c"]
    parts = chunks(prompt=["ab", "cd"], n=2, echo=True, max_tokens=2)
    assert [joined(parts, i)["text"] for i in range(4)] == ["abAB", "abAB", "cdCD", "cdCD"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"echo": 1}, "echo"),
        ({"echo": True, "max_tokens": -1}, "max_tokens"),
        ({"echo": True, "max_tokens": 0, "min_tokens": 1}, "min_tokens"),
        ({"echo": True, "logprobs": 1, "n": 2, "stream": True}, "echo"),
        ({"echo": True, "logprobs": 21}, "logprobs"),
        ({"return_token_ids": "yes"}, "return_token_ids"),
    ],
)
def test_echoes_that_cannot_be_are_refused(body: dict, param: str):
    with TestClient(create_app(ScriptedLLM())) as client:  # pyright: ignore[reportArgumentType]
        answer = client.post(COMPLETIONS, json={"prompt": "a", **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_token_ids_beside_the_text():
    body = {"prompt": "abc", "max_tokens": 2, "return_token_ids": True}
    (choice,) = ask(**body)["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([97, 98, 99], [65, 66])
    for echo in (False, True):
        stream = joined(chunks(**body, echo=echo))
        assert (stream["prompt_token_ids"], stream["token_ids"]) == ([97, 98, 99], [65, 66])
    nothing = ask(**{**body, "max_tokens": 0}, echo=True)["choices"][0]
    assert (nothing["text"], nothing["token_ids"]) == ("abc", [])
    assert joined(chunks(**{**body, "max_tokens": 0}, echo=True))["token_ids"] == []
    chat = {"messages": [USER], "max_tokens": 2, "return_token_ids": True}
    whole = ask(CHAT, **chat)
    assert bytes(whole["prompt_token_ids"]) == b"u:hi\na:"
    assert whole["choices"][0]["token_ids"] == list(b"U:")
    parts = chunks(CHAT, **chat)
    assert [bytes(part["prompt_token_ids"]) for part in parts if "prompt_token_ids" in part] == [b"u:hi\na:"]
    assert [i for part in parts for c in part["choices"] for i in c["token_ids"]] == list(b"U:")


def test_tokens_may_be_named_by_their_ids():
    body = {"prompt": "ab", "max_tokens": 1, "logprobs": 2, "echo": True}
    known = ask(**body, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    assert known["tokens"] == ["token_id:97", "token_id:98", "token_id:65"]
    assert known["top_logprobs"][2] == {"token_id:64": -0.5, "token_id:65": -1.0}
    chat = ask(
        CHAT, messages=[USER], max_tokens=1, logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True
    )
    entry = chat["choices"][0]["logprobs"]["content"][0]
    assert (entry["token"], entry["bytes"]) == ("token_id:85", [85])
    assert entry["top_logprobs"][0]["token"] == "token_id:84"


def test_logprobs_of_a_chats_prompt():
    answer = ask(CHAT, messages=[USER], max_tokens=1, prompt_logprobs=1)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert answer["prompt_logprobs"][0] is None
    assert answer["prompt_logprobs"][1]["58"]["rank"] == 2


@pytest.mark.parametrize(
    ("text", "pieces", "expected"),
    [
        ("ab", [b"<s>", b"a", b"b"], [0, 0, 1]),  # a BOS that the text has not
        ("ab c", [b"<s>", b" ab", b" c"], [0, 0, 2]),  # SentencePiece's space before the first word
        ("<s>a", [b"<s>", b"a"], [0, 3]),
        ("é☃", ["é".encode(), "☃".encode()[:1], "☃".encode()[1:]], [0, 1, 1]),
        ("", [], []),
    ],
)
def test_offsets_of_a_prompt(text: str, pieces: list[bytes], expected: list[int]):
    assert _offsets(text, pieces) == expected


def test_what_lm_eval_sends_is_scored_as_the_engine_scores_it():
    """Its request, as recorded: ids that no BOS is added to, two prompts of different length."""
    prompts = [[17, 42, 216, 34, 123, 216, 34, 46, 198, 21, 42, 216], [1, 50, 151, 44]]
    recorded = {
        "temperature": 0,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
        "model": "fake",
        "prompt": prompts,
    }
    llm = fake_llm()
    scores = llm.score(prompts)
    with TestClient(create_app(llm)) as client:
        for most in (0, 1):
            answer = client.post(COMPLETIONS, json={**recorded, "max_tokens": most}).json()
            for choice, score in zip(answer["choices"], scores, strict=True):
                known = choice["logprobs"]
                end = len(score.token_ids)
                assert tuple(known["token_logprobs"][:end]) == score.logprobs
                assert len(known["token_logprobs"]) == end + most
                assert [len(top) in (1, 2) for top in known["top_logprobs"][1:]] == [True] * (end + most - 1)
                for chosen, top in zip(known["token_logprobs"][1:], known["top_logprobs"][1:], strict=True):
                    assert chosen in top.values(), "lm_eval compares floats to see whether a token was greedy"
