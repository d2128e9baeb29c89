"""Which ids and words an answer may hold: `allowed_token_ids` and `bad_words`, through a real tiny model."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from test_llm_structures import EOS, over
from tiny import tiny_runner

from jaxinfer.core import RequestError, SamplingParams
from jaxinfer.engine.changes import SequenceChanges
from jaxinfer.llm import LLM
from jaxinfer.server.app import create_app

VOWELS = tuple(b"aeiou")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return over(tiny_runner())


@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
def test_only_allowed_ids_are_chosen(llm: LLM, temperature: float) -> None:
    sampling = SamplingParams(allowed_token_ids=VOWELS, temperature=temperature, max_tokens=12, n=2, seed=3)
    for part in llm.generate("Say", sampling)[0].outputs:
        assert set(part.token_ids) <= set(VOWELS), part
        assert part.finish_reason == "length"
    one = SamplingParams(allowed_token_ids=[7], max_tokens=3, logprobs=2)
    (out,) = llm.generate("Say", one)[0].outputs
    assert out.token_ids == (7, 7, 7)
    assert out.logprobs is not None
    assert all(len(known) == 3 and known[7].logprob < -1 for known in out.logprobs), "of the raw distribution"


def test_an_end_may_be_allowed_and_held_back(llm: LLM) -> None:
    (out,) = llm.generate("Say", SamplingParams(allowed_token_ids=[EOS]))[0].outputs
    assert (out.finish_reason, out.token_ids) == ("stop", (EOS,))
    sampling = SamplingParams(allowed_token_ids=[EOS, 65], min_tokens=3, max_tokens=4)
    assert llm.generate("Say", sampling)[0].outputs[0].text[:3] == "AAA"
    with pytest.raises(RequestError, match="held back") as caught:
        llm.generate("Say", SamplingParams(allowed_token_ids=[EOS], min_tokens=1))
    assert caught.value.param == "min_tokens"


def test_bad_words_never_come(llm: LLM) -> None:
    """A random model says little else than a few bytes: whatever runs it likes are forbidden one by one."""
    sampling: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "allowed_token_ids": tuple(b"abc d")}
    words: list[str] = []
    for _ in range(4):
        (out,) = llm.generate("Say", SamplingParams(bad_words=words, **sampling))[0].outputs
        assert not any(word in out.text for word in words), (words, out.text)
        words.append(out.text.strip()[4:7].strip())
    assert len(set(words)) == len(words)


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple), max_size=4),
    st.lists(st.integers(0, 3), max_size=8),
    st.sets(st.integers(0, 3), max_size=2),
    st.lists(st.booleans(), min_size=9, max_size=9),
)
def test_what_would_complete_a_bad_word_is_out(
    banned: list[tuple[int, ...]], output: list[int], ends: set[int], holds: list[bool]
) -> None:
    changes = SequenceChanges(SamplingParams(), [1], ends, banned=banned)
    for length in range(len(output) + 1):
        said, hold = tuple(output[:length]), holds[length]
        expected = {run[-1] for run in banned if (*said, run[-1])[-len(run) :] == run}
        expected |= ends if hold else set()
        current = changes.current(hold_ends=hold)
        found = {} if current is None else dict(zip(current.ids, current.addends, strict=True))
        assert found == dict.fromkeys(expected, -math.inf)
        again = SequenceChanges(SamplingParams(), [1], ends, said, banned)
        assert (again.current(hold_ends=hold) is None) == (current is None)
        if length < len(output):
            changes.append(output[length])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("allowed_token_ids", []),
        ("allowed_token_ids", 5),
        ("allowed_token_ids", [True]),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", [259]),  # a row of the matrix that no token has
        ("bad_words", "word"),
        ("bad_words", [" "]),
        ("bad_words", [5]),
        ("bad_words", ["x"] * 129),
    ],
)
def test_wrong_values_are_refused_by_name(llm: LLM, name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        llm.generate("Say", {name: value})
    assert caught.value.param == name


def test_what_cannot_be_had_together_is_refused() -> None:
    with pytest.raises(RequestError, match="allowed_token_ids and regex exclude each other"):
        SamplingParams(allowed_token_ids=[1], regex="a")
    assert SamplingParams(bad_words=[]) == SamplingParams()


@pytest.mark.parametrize(("stop", "expected"), [({"stop": ["AA"]}, "AA"), ({"stop_token_ids": [65]}, 65)])
def test_what_stopped_an_answer_is_told_over_http(
    llm: LLM, stop: dict[str, Any], expected: str | int
) -> None:
    body = {"prompt": "Say", "allowed_token_ids": [65], "max_tokens": 9, **stop}
    with TestClient(create_app(llm)) as client:
        (choice,) = client.post("/v1/completions", json=body).json()["choices"]
        lines = client.post("/v1/completions", json={**body, "stream": True}).text.split("\n\n")
    chunks = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", expected)
    assert chunks[-1]["stop_reason"] == expected
    assert all("stop_reason" not in chunk for chunk in chunks[:-1])
