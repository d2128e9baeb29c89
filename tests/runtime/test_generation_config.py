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
from jaxinfer.runtime.generation_config import check_ids, default_sampling
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
        ({"min_p": 0.05, "max_new_tokens": 64, "max_length": 20}, {"min_p": 0.05, "max_tokens": 64}),
        ({"stop_strings": ["END", "\n\n"]}, {"stop": ("END", "\n\n")}),
        ({"stop_strings": "END", "presence_penalty": 0, "num_return_sequences": 1}, {"stop": ("END",)}),
        (
            {
                "_from_model_config": True,
                "transformers_version": "4.51",
                "pad_token_id": 0,
                "use_cache": False,
            },
            {},
        ),
        ({"cache_implementation": "static", "bos_token_id": 1, "renormalize_logits": True}, {}),
        ({"top_k": 0, "repetition_penalty": 1.0}, {}),
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
        ("stop_strings", 7, "g.json: stop_strings must be a string or a list of strings, got 7"),
        ("stop_strings", [""], "g.json: stop_strings holds an empty string"),
        ("temperature", ["x" * 100000], "g.json: temperature .{,300}$"),
    ],
)
def test_wrong_values_are_refused_by_file_and_key(key: str, value: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        default_sampling({key: value}, "g.json")
    assert str(caught.value).endswith('; generation_config="none" (--generation-config none) goes without')


def test_what_is_not_served_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    sampling = default_sampling({"temperature": 0.5, "num_beams": 4, "no_repeat_ngram_size": 3}, "g.json")
    assert sampling == SamplingParams(temperature=0.5)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "g.json" in record.message
    assert "num_beams 4" in record.message
    assert "no_repeat_ngram_size 3" in record.message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_length", 4096), ("min_length", 5), ("num_return_sequences", 2),
        ("encoder_repetition_penalty", 1.5), ("exponential_decay_length_penalty", [5, 1.1]),
        ("guidance_scale", 1.5), ("max_time", 3.0), ("watermarking_config", {}), ("dola_layers", "low"),
        ("a key of tomorrow", True), ("forced_eos_token_id", 0), ("bad_words_ids", [[1]]),
    ],
)  # fmt: skip
def test_every_other_key_is_named(key: str, value: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert default_sampling({key: value, "top_k": 3}, "g.json") == SamplingParams(top_k=3)
    (record,) = caplog.records
    assert f"default sampling: {key} {value!r}" in record.message
    caplog.clear()
    default_sampling({key: None}, "g.json")
    assert not caplog.records


@pytest.mark.parametrize("key", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_penalties_are_taken(key: str, caplog: pytest.LogCaptureFixture) -> None:
    assert default_sampling({key: 1.2}, "g.json") == SamplingParams(**{key: 1.2})
    assert not caplog.records
    with pytest.raises(ConfigError, match=f"g.json: {key}"):
        default_sampling({key: "much"}, "g.json")


def test_stop_strings_need_a_tokenizer(folder: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    path = folder({"stop_strings": ["END"], "max_new_tokens": 2})
    assert LLM(str(path), **SMALL).default_sampling.stop == ("END",)
    (path / "tokenizer.json").unlink()
    llm = LLM(str(path), **SMALL)
    assert "stop_strings" in caplog.records[-1].message
    assert len(llm.generate([5, 6])[0].outputs[0].token_ids) == 2


def test_ids_lie_in_the_vocabulary() -> None:
    check_ids("eos_token_id", (0, 9), 10, "g")
    for outside in (10, -1):
        with pytest.raises(ConfigError, match=rf"g: eos_token_id {outside} is outside the vocabulary of 10"):
            check_ids("eos_token_id", (3, outside), 10, "g")


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
