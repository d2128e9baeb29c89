"""Options of the engine and of a request, refused by name where they cannot run."""

from __future__ import annotations

from typing import Any

import pytest

from jaxinfer import ConfigError, EngineConfig, RequestError, SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "float8"),
        ("max_num_seqs", 0),
        ("max_num_seqs", 1.5),
        ("page_size", 12),
        ("num_pages", 1),
        ("memory_utilization", "x"),
        ("memory_utilization", 0),
        ("seed", "a"),
        ("compile_cache_dir", 3),
        ("warmup", "some"),
        ("enable_prefix_caching", "yes"),
        ("async_scheduling", 1),
        ("batch_invariant", None),
        ("strict_compiles", True),  # with warmup "lazy" nothing could ever be compiled
        ("generation_config", "vllm"),
        ("trace", 7),
        ("seed", 2**63),
        ("quantization", "int3"),
        ("scheduling_policy", "sjf"),
        ("tensor_parallel_size", 2),
        ("speculative", "ngram"),
        ("surprise", 1),
    ],
)
def test_engine_options_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        EngineConfig.from_kwargs(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_penalty", 0),
        ("repetition_penalty", "1"),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3),
        ("frequency_penalty", True),
        ("logit_bias", {5: 101.0}),
        ("logit_bias", {"x": 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1.5: 1.0}),
        ("logit_bias", {5: "much"}),
        ("logit_bias", [5]),
        ("logit_bias", dict.fromkeys(range(2000), 1.0)),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", True),
        ("json_schema", 7),
        ("regex", 7),
        ("choice", []),
        ("choice", ["a", ""]),
        ("choice", "ab"),
        ("choice", ["x"] * 5000),
        ("grammar", ["start: x"]),
    ],
)
def test_sampling_parameters_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert len(str(caught.value)) < 300


def test_structures_exclude_each_other() -> None:
    with pytest.raises(RequestError, match="json_schema and regex exclude each other"):
        SamplingParams(json_schema={}, regex="a+")


def test_neutral_values_change_nothing() -> None:
    neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0, "logit_bias": {}}
    assert SamplingParams(**neutral) == SamplingParams()
    assert not SamplingParams(**neutral).adjusts_logits
    assert SamplingParams(logit_bias={"5": 1}).logit_bias == {5: 1.0}, "JSON has no integer keys"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 10**400),
        ("temperature", float("inf")),
        ("temperature", float("nan")),
        ("top_p", 10**400),
        ("n", 10**400),
        ("stop", ["x"] * 65),
        ("stop", "x" * 20000),
        ("stop_token_ids", [1] * 5000),
    ],
)
def test_absurd_parameters_are_refused_in_one_short_line(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert len(str(caught.value)) < 300
