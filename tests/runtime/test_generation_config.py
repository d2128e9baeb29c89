"""generation_config.json: the model's own sampling, its end ids, and what is wrong with either."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tiny import GOLDEN

from jaxinfer.core import ConfigError, RequestError, SamplingParams
from jaxinfer.llm import LLM
from jaxinfer.runtime.generation_config import default_sampling, end_ids
from jaxinfer.server.app import create_app

SMALL: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "num_pages": 33, "progress": False}
QWEN = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "eos_token_id": [2, 5]}


@pytest.fixture(scope="module", autouse=True)
def _cache(compile_cache: None) -> None:
    pass


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """stories260k with a generation_config.json of the test's own."""

    def write(generation_config: dict[str, Any], **config: Any) -> Path:
        path = tmp_path / "model"
        if not path.exists():
            shutil.copytree(GOLDEN / "stories260k", path)
        (path / "generation_config.json").write_text(json.dumps(generation_config))
        if config:
            own = json.loads((path / "config.json").read_text())
            (path / "config.json").write_text(json.dumps(own | config))
        return path

    return write


@pytest.mark.parametrize(
    ("stated", "fields"),
    [
        ({}, {}),
        ({"temperature": None, "do_sample": None, "eos_token_id": 2}, {}),
        ({"temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}),  # do_sample says nothing
        (QWEN, {"temperature": 0.7, "top_k": 20, "top_p": 0.8}),
        ({"do_sample": True}, {}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0, "top_p": 0.9}),
        ({"min_p": 0.05, "max_new_tokens": 64, "max_length": 4096}, {"min_p": 0.05, "max_tokens": 64}),
        ({"top_k": 0, "repetition_penalty": 1.0}, {}),
        ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
    ],
)
def test_rules(stated: dict[str, Any], fields: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    assert default_sampling(stated, "g.json") == SamplingParams(**fields)
    assert not caplog.records


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("temperature", "hot", "g.json: temperature must be .* got 'hot'"),
        ("temperature", -1, "g.json: temperature"),
        ("top_p", 7, "g.json: top_p must be a number from 0 to 1, got 7"),
        ("top_k", 1.5, "g.json: top_k"),
        ("top_k", True, "g.json: top_k"),
        ("min_p", "0.1", "g.json: min_p"),
        ("max_new_tokens", 0, "g.json: max_new_tokens must be"),
        ("do_sample", "no", "g.json: do_sample must be true or false"),
        ("repetition_penalty", "much", "g.json: repetition_penalty must be a number from 0.01 to 100"),
        ("repetition_penalty", 0, "g.json: repetition_penalty"),
        ("temperature", ["x" * 100000], "g.json: temperature .{,200}$"),
    ],
)
def test_wrong_values_are_refused_by_file_and_key(key: str, value: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        default_sampling({key: value}, "g.json")


def test_what_is_not_served_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    sampling = default_sampling({"temperature": 0.5, "num_beams": 4, "no_repeat_ngram_size": 3}, "g.json")
    assert sampling == SamplingParams(temperature=0.5)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "g.json" in record.message
    assert "num_beams 4" in record.message
    assert "no_repeat_ngram_size 3" in record.message


def test_end_ids() -> None:
    assert end_ids(None, 10, "g") == ()
    assert end_ids(3, 10, "g") == (3,)
    assert end_ids([3, 4], 10, "g") == (3, 4)
    for wrong in ("3", [3, "4"], True, 1.5, {}):
        with pytest.raises(ConfigError, match="g: eos_token_id must be"):
            end_ids(wrong, 10, "g")
    for outside in (10, [3, 10], -1):
        with pytest.raises(ConfigError, match=r"g: eos_token_id (10|-1) is outside the vocabulary of 10"):
            end_ids(outside, 10, "g")


# ------------------------------------------------------------------------------------- through the doors


def test_a_request_without_sampling_takes_the_models_own(folder: Callable[..., Path]) -> None:
    llm = LLM(str(folder(QWEN | {"max_new_tokens": 6})), **SMALL)
    own = SamplingParams(temperature=0.7, top_k=20, top_p=0.8, max_tokens=6)
    assert llm.default_sampling == own
    assert (
        llm.prepare("Once").sampling == llm.prepare_chat([{"role": "user", "content": "a"}]).sampling == own
    )
    assert llm.prepare("Once", {"top_k": 3}).sampling == dataclasses.replace(own, top_k=3)
    assert llm.prepare("Once", {"max_tokens": None}).sampling == dataclasses.replace(own, max_tokens=None)
    assert llm.prepare("Once", SamplingParams()).sampling == SamplingParams()
    assert llm.limits.eos_token_ids == {2, 5}
    (output,) = llm.generate("Once upon a time")
    assert len(output.outputs[0].token_ids) == 6
    assert [len(o.outputs[0].token_ids) for o in llm.generate(["a", "b"], [None, {"max_tokens": 2}])] == [
        6,
        2,
    ]
    assert sum(len(e.token_ids) for e in llm.stream("Once upon")) == 6

    with TestClient(create_app(llm)) as client:
        seen: list[SamplingParams] = []
        real = llm.prepare

        def prepare(prompt: Any, sampling_params: Any = None) -> Any:
            seen.append(real(prompt, sampling_params).sampling)
            return real(prompt, sampling_params)

        llm.prepare = prepare  # type: ignore[method-assign]
        for body in ({}, {"temperature": None, "top_p": 1.0}, {"temperature": 0, "max_tokens": 2}):
            answer = client.post("/v1/completions", json={"prompt": "Once", **body})
            assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 2
        body = {"messages": [{"role": "user", "content": "Once"}], "n": 2}
        assert client.post("/v1/chat/completions", json=body).json()["usage"]["completion_tokens"] == 12
    changes = ({}, {"top_p": 1.0}, {"temperature": 0, "max_tokens": 2})
    assert seen == [dataclasses.replace(own, **change) for change in changes]


def test_do_sample_false_is_greedy_until_a_request_brings_a_temperature(folder: Callable[..., Path]) -> None:
    llm = LLM(str(folder({"do_sample": False, "temperature": 0.9, "max_new_tokens": 8})), **SMALL)
    greedy = llm.generate("Once", SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].token_ids
    assert llm.generate("Once")[0].outputs[0].token_ids == greedy
    drawn = [
        o.outputs[0].token_ids
        for o in llm.generate(["Once"] * 4, [{"temperature": 3.0, "seed": i} for i in range(4)])
    ]
    assert len(set(drawn)) > 1


def test_the_models_own_max_tokens_gives_way_to_what_fits(folder: Callable[..., Path]) -> None:
    """A model's max_new_tokens may be as long as its context: a prompt of any length must still be served."""
    llm = LLM(str(folder({"max_new_tokens": 4096})), max_model_len=16, **SMALL)
    assert llm.prepare([5] * 10).sampling.max_tokens == 6
    with pytest.raises(RequestError, match="max_tokens 4096"):
        llm.prepare([5] * 10, {"max_tokens": 4096})
    with pytest.raises(RequestError, match="max_tokens 4096"):
        llm.prepare([5] * 10, llm.default_sampling)
    llm = LLM(str(folder({"max_new_tokens": 4})), max_model_len=16, **SMALL)
    with pytest.raises(RequestError, match=r"min_tokens 5 is more than the model's own max_tokens 4"):
        llm.prepare([5], {"min_tokens": 5})
    with pytest.raises(RequestError, match="unknown sampling parameter 'heat'") as caught:
        llm.prepare([5], {"heat": 5})
    assert caught.value.param == "heat"
    with pytest.raises(RequestError, match="sampling_params must be"):
        llm.prepare([5], 5)  # type: ignore[arg-type]


def test_generation_config_none_is_a_switch(folder: Callable[..., Path]) -> None:
    llm = LLM(str(folder(QWEN | {"temperature": "hot"})), generation_config="none", **SMALL)
    assert llm.default_sampling == SamplingParams()
    assert llm.limits.eos_token_ids == {2, 5}, "ends are no sampling"


def test_a_wrong_file_is_refused_at_load(folder: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r"model/generation_config\.json: top_p must be .* got 7"):
        LLM(str(folder({"top_p": 7})), **SMALL)
    with pytest.raises(ConfigError, match=r"eos_token_id 999999 is outside the vocabulary of 512"):
        LLM(str(folder({"eos_token_id": [2, 999999]})), **SMALL)
    path = folder({"eos_token_id": 512})
    (path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"eos_token_id 512 is outside the vocabulary of 512"):
        LLM(str(path), **SMALL)
    path = folder({}, eos_token_id=600)
    with pytest.raises(ConfigError, match=r"eos_token_id 600 is outside the vocabulary of 512"):
        LLM(str(path), **SMALL)
