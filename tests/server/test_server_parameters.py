"""What bodies ask for beyond the basics: how it reaches the engine, and how it comes back."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient
from scripted import ScriptedLLM

from jaxinfer.core import Request, SamplingParams
from jaxinfer.server.app import create_app

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


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
            {"json_schema": SCHEMA},
        ),
        ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": SCHEMA}),
        ({"structured_outputs": {"json": "{}", "regex": None}}, {"json_schema": "{}"}),
        ({"structured_outputs": {"regex": "[0-9]+"}}, {"regex": "[0-9]+"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ("a", "b")}),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, {"grammar": 'start: "a"'}),
        (
            {"response_format": {"type": "text"}, "structured_outputs": {"regex": "a"}},
            {"regex": "a"},
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
