"""Log-probabilities of ids that a request names, in the sampler, in Python and over HTTP."""

from __future__ import annotations

import json
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from fastapi.testclient import TestClient
from tiny import tiny_runner

from jaxinfer.core import MAX_LOGPROBS, Limits, RequestError, SamplingParams
from jaxinfer.llm import LLM
from jaxinfer.runtime.sample import SamplingInputs, sample
from jaxinfer.server.app import create_app
from jaxinfer.text import ByteTokenizer, ChatTemplate

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def llm() -> LLM:
    runner, tokenizer = tiny_runner(), ByteTokenizer()
    limits = Limits(
        num_pages=runner.num_pages, page_size=runner.page_size, max_num_seqs=4, max_num_batched_tokens=32,
        max_model_len=64, vocab_size=runner.config.vocab_size, eos_token_ids=frozenset({257}),
    )  # fmt: skip
    chat = ChatTemplate("{{ messages[0].content }}", tokenizer.bos_token, tokenizer.eos_token)
    return LLM.from_parts(runner, limits, tokenizer=tokenizer, chat_template=chat, model_name="tiny")


def test_the_sampler_reports_ranks_and_logprobs_of_the_ids() -> None:
    logits = np.random.default_rng(3).normal(size=(3, 40)).astype(np.float32)
    told = np.full((3, MAX_LOGPROBS), -1, np.int32)
    told[0, :3] = [7, 39, 0]
    told[2, :1] = [5]
    none = jnp.zeros(3, jnp.int32)
    given = SamplingInputs(
        temperature=jnp.zeros(3), min_p=jnp.zeros(3), top_p=jnp.ones(3), top_k=none, sample_position=none,
        seed=jnp.zeros((3, 2), jnp.int32), top_logprobs=jnp.array([0, 4, 0]), told=jnp.asarray(told),
    )  # fmt: skip
    out = sample(jnp.asarray(logits), given)
    plain = sample(jnp.asarray(logits), given._replace(told=None))
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for row, ids in ((0, [7, 39, 0]), (2, [5])):
        count = len(ids)
        assert np.allclose(np.asarray(out.top_logprobs)[row, :count], logprobs[row, ids], atol=1e-5)
        ranks = [1 + int((logits[row] > logits[row, i]).sum()) for i in ids]
        assert np.asarray(out.top_ids)[row, :count].tolist() == ranks
    assert np.array_equal(out.top_ids[1], plain.top_ids[1])
    assert np.array_equal(out.top_logprobs[1], plain.top_logprobs[1])
    assert np.array_equal(out.token, plain.token)


def test_the_ids_stand_in_the_place_of_the_likeliest(llm: LLM) -> None:
    greedy = {"temperature": 0.0, "max_tokens": 3, "ignore_eos": True}
    usual, named = llm.generate(["abc", "abc"], [{**greedy, "logprobs": 20}, {**greedy, "logprobs": 0}])
    likely = [*usual.outputs[0].logprobs[0]][:6]  # type: ignore[index]
    ids = [likely[4], likely[1], 0, 255, likely[1]]
    together = llm.generate(["abc", "x"], [{**greedy, "logprob_token_ids": ids}, {**greedy, "logprobs": 2}])
    output = together[0].outputs[0]
    assert output.token_ids == usual.outputs[0].token_ids == named.outputs[0].token_ids
    assert output.logprobs is not None
    assert usual.outputs[0].logprobs is not None
    for token, known, other in zip(output.token_ids, output.logprobs, usual.outputs[0].logprobs, strict=True):
        assert set(known) == {token, *ids}
        for i in set(known) & set(other):
            assert known[i].rank == other[i].rank
            assert known[i].logprob == pytest.approx(other[i].logprob, abs=1e-5)
    known = output.logprobs[0]
    scored = llm.generate([[*b"abc", 255]], {"max_tokens": 1, "prompt_logprobs": 0})[0].prompt_logprobs
    assert scored is not None
    assert scored[3] is not None
    assert known[255].rank == scored[3][255].rank
    assert known[255].logprob == pytest.approx(scored[3][255].logprob, abs=1e-4)
    assert all(len(entries) == 3 or len(entries) == 2 for entries in together[1].outputs[0].logprobs or ())


@pytest.mark.parametrize(
    "wrong",
    [
        {"logprob_token_ids": []},
        {"logprob_token_ids": [1.5]},
        {"logprob_token_ids": "12"},
        {"logprob_token_ids": list(range(MAX_LOGPROBS + 1))},
        {"logprob_token_ids": [3], "logprobs": 2},
    ],
)
def test_what_cannot_be_told_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**wrong)
    assert caught.value.param == "logprob_token_ids"


def test_ids_outside_of_the_vocabulary_are_refused(llm: LLM) -> None:
    for token in (-1, llm.limits.vocab_size):
        with pytest.raises(RequestError, match="logprob_token_ids"):
            llm.generate("a", {"logprob_token_ids": [token]})


def test_over_http(llm: LLM) -> None:
    named = {
        "max_tokens": 1, "temperature": 0, "logprob_token_ids": [100, 200], "allowed_token_ids": [42],
        "return_tokens_as_token_ids": True,
    }  # fmt: skip
    expected = {"token_id:42", "token_id:100", "token_id:200"}
    with TestClient(create_app(llm)) as client:
        for more in ({}, {"stream": True}):
            answer = client.post(COMPLETIONS, json={"prompt": "a", "logprobs": 5, **named, **more})
            assert answer.status_code == 200, answer.text
            body = json.loads(answer.text.removeprefix("data: ").split("\n\n")[0])
            (top,) = body["choices"][0]["logprobs"]["top_logprobs"]
            assert set(top) == expected
            assert all(math.isfinite(value) for value in top.values())
        for top_logprobs in (5, 0, None):
            asked = {"messages": MESSAGES, "logprobs": True, "top_logprobs": top_logprobs, **named}
            answer = client.post(CHAT, json=asked)
            assert answer.status_code == 200, answer.text
            (entry,) = answer.json()["choices"][0]["logprobs"]["content"]
            assert entry["token"] == "token_id:42"
            assert {one["token"] for one in entry["top_logprobs"]} == expected
            assert len(entry["top_logprobs"]) == 3
        for body in (
            {"prompt": "a", "logprob_token_ids": [1]},
            {"prompt": "a", "logprob_token_ids": [999], "logprobs": 1},
            {"prompt": "a", "logprob_token_ids": [1], "logprobs": 1, "use_beam_search": True},
            {"prompt": "a", "logprob_token_ids": [1], "logprobs": 1, "echo": True, "max_tokens": 0},
        ):
            refused = client.post(COMPLETIONS, json=body)
            assert refused.status_code == 400, refused.text
            assert refused.json()["error"]["param"] == "logprob_token_ids"
        none = client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1, "logprob_token_ids": []})
        assert none.status_code == 200
