"""What bodies ask for beyond the basics: how it reaches the engine, and how it comes back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient
from scripted import ScriptedLLM

from jaxinfer.core import Request, SamplingParams
from jaxinfer.server.app import create_app

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAG = {"begin": "<a>", "schema": SCHEMA, "end": "</a>"}
TAGGED = {"type": "structural_tag"}


def asked(path: str, **body: Any) -> Request:
    """The request that the engine gets for a body."""
    llm = ScriptedLLM()
    start = {"prompt": "a"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}
    with TestClient(create_app(llm)) as client:  # pyright: ignore[reportArgumentType]
        answer = client.post(path, json={**start, **body})
        assert answer.status_code == 200, answer.text
    (request,) = llm.engine.requests.values()
    return request


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_penalties_bias_and_options_reach_the_engine(path: str):
    request = asked(
        path,
        presence_penalty=0.5,
        frequency_penalty=-1,
        repetition_penalty=1.1,
        logit_bias={"7": -100, "8": 2.5},
        allowed_token_ids=[7, 9],
        bad_words=["no"],
        priority=-3,
        cache_salt="mine",
    )
    assert request.sampling == SamplingParams(
        presence_penalty=0.5, frequency_penalty=-1, repetition_penalty=1.1, logit_bias={7: -100.0, 8: 2.5},
        allowed_token_ids=(7, 9), bad_words=("no",),
    )  # fmt: skip
    assert (request.priority, request.cache_salt) == (-3, "mine")
    plain = asked(
        path, logit_bias={}, bad_words=[], priority=None, cache_salt=None, response_format={"type": "text"}
    )
    assert plain.sampling == SamplingParams()
    assert (plain.priority, plain.cache_salt) == (0, None)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_schema": {"type": "object"}}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            {"json_schema": SCHEMA},
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "description": "y", "strict": True, "schema": SCHEMA},
                }
            },
            {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}},
        ),
        (
            {"response_format": {"type": "structural_tag", "triggers": ["<a"], "structures": [TAG]}},
            {"structured_outputs": {"structural_tag": {**TAGGED, "triggers": ["<a"], "structures": [TAG]}}},
        ),
        *(
            ({"structured_outputs": asked}, {"structured_outputs": asked})
            for asked in (
                {"json": SCHEMA, "disable_any_whitespace": True},
                {"json": "{}", "regex": None},
                {"json_object": True},
                {"regex": "[0-9]+"},
                {"choice": ["a", "b"]},
                {"grammar": 'start: "a"'},
            )
        ),
        (
            {"response_format": {"type": "text"}, "structured_outputs": {"regex": "a"}},
            {"structured_outputs": {"regex": "a"}},
        ),
    ],
)
def test_structures_reach_the_engine(path: str, body: dict, expected: dict):
    assert asked(path, **body).sampling == SamplingParams(**expected)


def test_logprobs_of_the_prompt_come_with_every_choice_of_it():
    body = {"prompt": ["abc", "de"], "n": 2, "max_tokens": 2, "prompt_logprobs": 2}
    with TestClient(create_app(ScriptedLLM())) as client:  # pyright: ignore[reportArgumentType]
        choices = client.post(COMPLETIONS, json=body).json()["choices"]
        plain = client.post(COMPLETIONS, json={"prompt": "abc"}).json()["choices"][0]
    first, second = choices[0]["prompt_logprobs"], choices[2]["prompt_logprobs"]
    assert choices[1]["prompt_logprobs"] == first
    assert choices[3]["prompt_logprobs"] == second
    assert [first[0], len(first), second[0], len(second)] == [None, 3, None, 2]
    assert first[1] == {
        "97": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
        "98": {"logprob": -1.0, "rank": 2, "decoded_token": "b"},
    }
    assert "101" in second[1]
    assert plain["prompt_logprobs"] is None


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_how_a_prompt_is_made_reaches_the_front_door(path: str):
    llm, seen = ScriptedLLM(), []
    prepare = llm.prepare
    llm.prepare = lambda prompt, sampling=None, **options: seen.append(options) or prepare("a", sampling)
    llm.prepare_chat = llm.prepare  # pyright: ignore[reportAttributeAccessIssue]
    start = {"prompt": "a"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}
    asked_for = {"truncate_prompt_tokens": 7, "truncation_side": "right", "add_special_tokens": False}
    with TestClient(create_app(llm)) as client:  # pyright: ignore[reportArgumentType]
        assert client.post(path, json={**start, **asked_for}).status_code == 200
        assert client.post(path, json={**start, **dict.fromkeys(asked_for)}).status_code == 200
        wrong = client.post(path, json={**start, "truncation_side": "middle"})
    assert {name: seen[0][name] for name in asked_for} == asked_for
    assert not set(asked_for) & set(seen[1])
    assert wrong.json()["error"]["param"] == "truncation_side"


def test_a_chat_echoes_the_answer_that_it_goes_on_with():
    open_answer = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "Well, "}]
    go_on = {"add_generation_prompt": False, "continue_final_message": True, "max_tokens": 2}
    with TestClient(create_app(ScriptedLLM())) as client:  # pyright: ignore[reportArgumentType]

        def said(messages: list[dict[str, Any]], **body: Any) -> str:
            answer = client.post(CHAT, json={"messages": messages, **body})
            assert answer.status_code == 200, answer.text
            lines = client.post(CHAT, json={"messages": messages, "stream": True, **body}).text.split("\n\n")
            chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            streamed = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
            whole = answer.json()["choices"][0]["message"]["content"]
            assert streamed == whole
            return whole

        assert said(open_answer, echo=True, **go_on) == "Well, U:"
        assert said(open_answer, echo=False, **go_on) == "U:"
        parts = [{"type": "text", "text": "Well"}, {"type": "text", "text": "!"}]
        assert (
            said([*open_answer[:1], {"role": "assistant", "content": parts}], echo=True, **go_on) == "Well!U:"
        )
        assert said(open_answer[:1], echo=True, max_tokens=2) == "U:"


def test_roles_that_openai_does_not_have_are_the_templates_to_write():
    request = asked(CHAT, messages=[{"role": "ipython", "content": "a"}])
    assert bytes(request.prompt_token_ids).startswith(b"i:a")
