"""Configurations that cannot run are refused by name, never half-read (LD) and never with a Python error."""

from __future__ import annotations

from typing import Any

import pytest

from jaxinfer import ConfigError, EngineConfig, ModelConfig, RequestError, SamplingParams

GOOD = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
}  # fmt: skip


def test_defaults_are_hugging_faces() -> None:
    config = ModelConfig.from_hf(GOOD)
    assert (config.head_dim, config.group, config.rope.theta, config.max_position) == (8, 2, 10000.0, 2048)
    assert ModelConfig.from_hf({**GOOD, "num_key_value_heads": None}).num_kv_heads == 4


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", ["GPT2LMHeadModel"]),
        ("architectures", "LlamaForCausalLM"),
        ("vocab_size", None),
        ("num_attention_heads", 0),
        ("num_attention_heads", "4"),
        ("num_hidden_layers", True),
        ("num_key_value_heads", 3),
        ("head_dim", 7),
        ("rms_norm_eps", "x"),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", "high"),
        ("rope_scaling", "x"),
        ("rope_scaling", {"type": "yarn", "factor": 2.0}),
        ("rope_scaling", {"type": "linear", "factor": 0}),
        ("rope_scaling", {"type": "linear", "factor": 2.0, "surprise": 1}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": None}),
        ("partial_rotary_factor", 0.5),
        ("sliding_window", 128),
        ("hidden_act", "gelu"),
        ("mlp_bias", "false"),
        ("tie_word_embeddings", 1),
        ("eos_token_id", [2, "x"]),
    ],
)
def test_a_broken_model_config_is_refused_by_key(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="rope" if key.startswith("rope") else key.removesuffix("s")):
        ModelConfig.from_hf({**GOOD, key: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "float16"),
        ("max_num_seqs", 0),
        ("max_num_seqs", 1.5),
        ("page_size", 12),
        ("num_pages", 1),
        ("memory_utilization", "x"),
        ("memory_utilization", 0),
        ("seed", "a"),
        ("compile_cache_dir", 3),
        ("warmup", "some"),
        ("enable_prefix_caching", True),
        ("async_scheduling", True),
        ("quantization", "int8"),
        ("scheduling_policy", "priority"),
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
        ("repetition_penalty", 1.1),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("logit_bias", {5: 1.0}),
        ("prompt_logprobs", 1),
        ("json_schema", {"type": "object"}),
        ("regex", "a+"),
        ("choice", ["yes"]),
        ("grammar", "start: x"),
    ],
)
def test_what_is_not_served_yet_is_refused_and_its_neutral_value_taken(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}.get(name)
    assert SamplingParams(**{name: neutral}) == SamplingParams()


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
