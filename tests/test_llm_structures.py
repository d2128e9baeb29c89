"""Structures, penalties and scores through a real model: tiny, random, one byte a token."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tiny import GOLDEN, tiny_runner

from jaxinfer.config import EngineConfig
from jaxinfer.core import Limits, RequestError, SamplingParams
from jaxinfer.llm import LLM
from jaxinfer.runtime import JaxRunner
from jaxinfer.server.app import create_app
from jaxinfer.text import ByteTokenizer

EOS = 257
COMPACT = {9: -100, 10: -100, 13: -100, 32: -100}
"""Biases against white space: what a schema allows of it, a random model takes."""
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["a", "b"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def runner() -> JaxRunner:
    return tiny_runner()


def over(runner: JaxRunner, **options: Any) -> LLM:
    limits = Limits(
        num_pages=runner.num_pages, page_size=runner.page_size, max_num_seqs=4, max_num_batched_tokens=32,
        max_model_len=128, vocab_size=runner.config.vocab_size, eos_token_ids=frozenset({EOS}),
        sampled_vocab=259,
    )  # fmt: skip
    return LLM.from_parts(
        runner, limits, tokenizer=ByteTokenizer(), model_name="tiny", engine_config=EngineConfig(**options)
    )


@pytest.fixture(scope="module")
def llm(runner: JaxRunner) -> LLM:
    return over(runner)


def follows_schema(text: str) -> bool:
    value = json.loads(text)
    assert set(value) == {"name", "size", "kind"}
    assert isinstance(value["name"], str)
    assert isinstance(value["size"], int)
    return len(value["name"]) <= 5 and 0 <= value["size"] <= 99 and value["kind"] in ("a", "b")


STRUCTURES: list[tuple[dict[str, Any], Callable[[str], Any]]] = [
    ({"json_schema": SCHEMA}, follows_schema),
    ({"json_schema": json.dumps(SCHEMA)}, follows_schema),
    ({"regex": "[a-c]{2,6}x|[0-9]{3}"}, lambda text: re.fullmatch("[a-c]{2,6}x|[0-9]{3}", text)),
    ({"choice": ["red", "green", "reddish"]}, lambda text: text in ("red", "green", "reddish")),
    ({"grammar": 'start: "<" /[a-z]{1,4}/ ">"'}, lambda text: re.fullmatch("<[a-z]{1,4}>", text)),
    (
        {"structured_outputs": {"grammar": 'root ::= "<" ("x" | "y") ">"'}},
        lambda text: text in ("<x>", "<y>"),
    ),
]
NAMES = ["schema", "schema as text", "regex", "choice", "grammar", "structured_outputs"]


# -------------------------------------------------------------------------------------- structures


@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
@pytest.mark.parametrize(("structure", "follows"), STRUCTURES, ids=NAMES)
def test_answers_follow_their_structure(
    llm: LLM, structure: dict[str, Any], follows: Callable[[str], Any], temperature: float
) -> None:
    sampling = SamplingParams(temperature=temperature, n=3, seed=5, logit_bias=COMPACT, **structure)
    for output in llm.generate(["Say", "Tell me"], sampling):
        for part in output.outputs:
            assert part.finish_reason == "stop", part
            assert follows(part.text), part.text


@pytest.mark.parametrize(("structure", "follows"), STRUCTURES, ids=NAMES)
def test_a_streamed_answer_is_the_whole_one(
    llm: LLM, structure: dict[str, Any], follows: Callable[[str], Any]
) -> None:
    sampling = SamplingParams(temperature=1.0, seed=7, logprobs=1, logit_bias=COMPACT, **structure)
    whole = llm.generate("Say", sampling)[0].outputs[0]
    assert follows(whole.text)
    events = list(llm.stream("Say", sampling))
    assert "".join(event.text for event in events) == whole.text
    assert tuple(token for event in events for token in event.token_ids) == whole.token_ids
    assert events[-1].finish_reason == whole.finish_reason


def test_structures_beside_others_and_without_overlap_of_steps_are_the_same(
    llm: LLM, runner: JaxRunner
) -> None:
    each = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=60, **s) for i, (s, _) in enumerate(STRUCTURES)
    ]
    each.append(SamplingParams(temperature=1.0, seed=9, max_tokens=20, ignore_eos=True))
    together = llm.generate(["Say"] * len(each), each)
    plain = over(runner, async_scheduling=False, enable_prefix_caching=False)
    for sampling, output in zip(each, together, strict=True):
        assert plain.generate("Say", sampling)[0].outputs[0].token_ids == output.outputs[0].token_ids


@pytest.mark.parametrize(
    "bad",
    [
        {"json_schema": "{"},
        {"json_schema": {"type": "wizard"}},
        {"json_schema": {"typ": "object"}},
        {"regex": "("},
        {"regex": "a(?=b)"},
        {"grammar": "start: nothing"},
    ],
)
def test_a_bad_structure_is_refused_before_anything_is_scheduled(llm: LLM, bad: dict[str, Any]) -> None:
    before = llm.stats()["requests"]
    for call in (lambda: llm.prepare("a", SamplingParams(**bad)), lambda: llm.generate(["a", "b"], bad)):
        with pytest.raises(RequestError) as caught:
            call()
        assert caught.value.param == next(iter(bad))
    assert llm.stats()["requests"] == before


def test_a_structure_needs_a_tokenizer(runner: JaxRunner, llm: LLM) -> None:
    without = LLM.from_parts(runner, llm.limits)
    with pytest.raises(RequestError, match="tokenizer") as caught:
        without.prepare([1], SamplingParams(regex="a"))
    assert caught.value.param == "regex"


# ------------------------------------------------------------------------------- penalties and bias


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **changes})


def ids_of(llm: LLM, sampling: SamplingParams, prompt: list[int] | None = None) -> tuple[int, ...]:
    return llm.generate(prompt or [5, 6, 7, 8], sampling)[0].outputs[0].token_ids


def test_penalties_and_bias_change_what_is_chosen(llm: LLM) -> None:
    plain = ids_of(llm, greedy())
    favourite = Counter(plain).most_common(1)[0][0]
    assert favourite not in ids_of(llm, greedy(logit_bias={favourite: -100}))
    assert set(ids_of(llm, greedy(logit_bias={11: 100}))) == {11}
    # With 100 on one id only a penalty on it can make room for another.
    forced = greedy(logit_bias={11: 20.0}, frequency_penalty=2.0, max_tokens=100)
    assert len(set(ids_of(llm, forced))) > 1
    assert ids_of(llm, greedy(logit_bias={5: 0.0}, repetition_penalty=1.0)) == plain
    strong = ids_of(llm, greedy(repetition_penalty=100.0))
    assert len(set(strong)) == len(strong)
    assert not set(strong) & {5, 6, 7, 8}


def test_penalties_are_those_of_the_definition(llm: LLM) -> None:
    """Each token is the argmax of the raw logprobs with the rule applied by hand. (Logprobs are logits but
    for a constant, which the repetition penalty does not forgive: see the test above.)"""
    sampling = greedy(presence_penalty=0.75, frequency_penalty=0.5, logit_bias={3: 0.25}, logprobs=20)
    output = llm.generate([5, 6, 7, 8], sampling)[0].outputs[0]
    said: Counter[int] = Counter()
    assert output.logprobs is not None
    for token, known in zip(output.token_ids, output.logprobs, strict=True):
        adjusted = {
            i: entry.logprob - 0.75 * (said[i] > 0) - 0.5 * said[i] + 0.25 * (i == 3)
            for i, entry in known.items()
        }
        assert adjusted[token] == pytest.approx(max(adjusted.values()), abs=1e-4)
        said[token] += 1
    assert output.token_ids != ids_of(llm, greedy())


@pytest.mark.parametrize("stated", [1.5, None])
def test_a_models_own_repetition_penalty_is_the_default(tmp_path: Path, stated: float | None) -> None:
    """From generation_config.json to the tokens."""
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN / "grid" / "llama_gqa", folder)
    (folder / "generation_config.json").write_text(json.dumps({"repetition_penalty": stated}))
    llm = LLM(
        str(folder), max_num_seqs=1, max_num_batched_tokens=32, max_model_len=64, num_pages=8, progress=False
    )
    assert llm.default_sampling == SamplingParams(repetition_penalty=stated or 1.0)
    fields = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
    default = llm.generate([5, 6, 7], fields)[0].outputs[0].token_ids
    assert default == ids_of(llm, greedy(max_tokens=16, repetition_penalty=stated or 1.0), [5, 6, 7])
    assert (default == ids_of(llm, greedy(max_tokens=16), [5, 6, 7])) == (stated is None)


# --------------------------------------------------------------------------------- scores of prompts


@pytest.mark.parametrize("caching", [True, False])
def test_logprobs_of_a_prompt_are_those_of_the_same_tokens_generated(
    runner: JaxRunner, caching: bool
) -> None:
    """Teacher forcing: what was generated greedily is scored as a prompt, of two chunks and more."""
    llm = over(runner, enable_prefix_caching=caching)
    prompt = [5, 6, 7, 8]
    said = llm.generate(prompt, greedy(max_tokens=60, logprobs=3))[0].outputs[0]
    scored = llm.generate([*prompt, *said.token_ids], greedy(max_tokens=1, prompt_logprobs=3))[0]
    assert scored.prompt_logprobs is not None
    assert scored.prompt_logprobs[0] is None
    assert said.logprobs is not None
    for token, generated, known in zip(
        said.token_ids, said.logprobs, scored.prompt_logprobs[4:], strict=True
    ):
        assert known is not None
        assert known[token].logprob == pytest.approx(generated[token].logprob, abs=2e-4)
        assert known[token].rank == generated[token].rank == 1
        assert len(known) == 3


def test_score_is_the_sum(llm: LLM) -> None:
    texts = ["a text of some length, longer than a step", "short", [1, 2]]
    scores = llm.score(texts)
    for text, score in zip(texts, scores, strict=True):
        (output,) = llm.generate(text, greedy(max_tokens=1, prompt_logprobs=0))
        known = output.prompt_logprobs or ()
        values = [k[i].logprob for k, i in zip(known, output.prompt_token_ids, strict=True) if k is not None]
        assert score.nll == pytest.approx(-sum(values), abs=1e-3)
        assert score.perplexity == pytest.approx(math.exp(score.nll / len(values)))
        assert score.nll > 0


# ----------------------------------------------------------------------------------------- over HTTP


@pytest.fixture
def client(runner: JaxRunner) -> Generator[TestClient]:
    with TestClient(create_app(over(runner))) as client:
        yield client


def test_a_schema_over_http_whole_and_streamed(client: TestClient) -> None:
    body = {
        "prompt": "Say", "seed": 3, "temperature": 1.0, "logit_bias": {str(i): b for i, b in COMPACT.items()},
        "response_format": {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}},
    }  # fmt: skip
    answer = client.post("/v1/completions", json=body).json()
    text = answer["choices"][0]["text"]
    assert follows_schema(text)
    lines = client.post("/v1/completions", json={**body, "stream": True}).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
    json_object = {**body, "response_format": {"type": "json_object"}, "max_tokens": 100}
    choice = client.post("/v1/completions", json=json_object).json()["choices"][0]
    assert choice["text"].lstrip().startswith("{")
    assert choice["finish_reason"] == "length" or isinstance(json.loads(choice["text"]), dict)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "y"}},
                }
            },
            "response_format",
        ),
        ({"structured_outputs": {"json": {"type": "y"}}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs.grammar"),
        ({"priority": 1}, "priority"),
        ({"logit_bias": {"300": 1}}, "logit_bias"),
    ],
)
def test_what_cannot_be_served_is_a_400_and_the_engine_goes_on(
    client: TestClient, body: dict[str, Any], param: str
) -> None:
    answer = client.post("/v1/completions", json={"prompt": "Say", **body})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    good = client.post("/v1/completions", json={"prompt": "Say", "structured_outputs": {"choice": ["yes"]}})
    assert good.json()["choices"][0]["text"] == "yes"


def test_cached_tokens_and_logprobs_of_the_prompt_over_http(client: TestClient) -> None:
    body = {"prompt": "a prompt that fills several pages of eight tokens", "max_tokens": 2, "cache_salt": "x"}
    cached = [
        client.post("/v1/completions", json=body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        for _ in range(2)
    ]
    assert cached[0] == 0
    assert 40 <= cached[1] < len(body["prompt"])
    answer = client.post("/v1/completions", json={**body, "prompt_logprobs": 1}).json()
    known = answer["choices"][0]["prompt_logprobs"]
    assert (known[0], len(known)) == (None, len(body["prompt"]))
    assert str(ord(" ")) in known[1]
