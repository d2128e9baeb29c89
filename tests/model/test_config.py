"""Configurations that cannot run are refused by name, never half-read (LD) and never with a Python error."""

from __future__ import annotations

from typing import Any

import pytest

from jaxinfer import ConfigError, ModelConfig
from jaxinfer.config import LayerConfig, Llama3Rope

GOOD = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
}  # fmt: skip


def test_defaults_are_hugging_faces() -> None:
    config = ModelConfig.from_hf(GOOD)
    assert (config.head_dim, config.rope.theta, config.max_position) == (8, 10000.0, 2048)
    assert config.layers == (LayerConfig(2),) * 2
    assert ModelConfig.from_hf({**GOOD, "num_key_value_heads": None}).layers[0].num_kv_heads == 4


def of(model_type: str, **keys: Any) -> ModelConfig:
    """GOOD as another family, with some keys changed; a key set to ... is left out."""
    changed = {**GOOD, "num_hidden_layers": 4, "model_type": model_type, **keys}
    del changed["architectures"]
    return ModelConfig.from_hf({key: value for key, value in changed.items() if value is not ...})


def windows(config: ModelConfig) -> list[int | None]:
    return [layer.window for layer in config.layers]


def test_what_each_family_fixes() -> None:
    """As the configuration and modeling files of transformers 5.24 have it."""
    llama, mistral, qwen2, qwen3, smollm3 = map(of, ("llama", "mistral", "qwen2", "qwen3", "smollm3"))
    assert [c.qkv_bias for c in (llama, mistral, qwen2, qwen3, smollm3)] == [False, False, True, False, False]
    assert not any(c.output_bias or c.mlp_bias for c in (llama, mistral, qwen2, qwen3, smollm3))
    assert [c.qk_norm for c in (llama, mistral, qwen2, qwen3, smollm3)] == [False, False, False, True, False]
    assert [c.tie_word_embeddings for c in (llama, mistral, qwen2, qwen3, smollm3)] == [False] * 4 + [True]
    assert [c.head_dim for c in (llama, mistral, qwen2, qwen3, smollm3)] == [8, 8, 8, 128, 8]
    assert smollm3.rope.theta == 2e6
    biased = of("llama", attention_bias=True, mlp_bias=True)
    assert (biased.qkv_bias, biased.output_bias, biased.mlp_bias) == (True, True, True)
    assert of("qwen3", attention_bias=True).output_bias
    heads = {"num_key_value_heads": ...}
    assert of("llama", **heads).layers[0].num_kv_heads == 4
    wide = {**heads, "num_attention_heads": 32, "hidden_size": 256}
    assert of("mistral", **wide).layers[0].num_kv_heads == 8
    assert of("smollm3", **wide).layers[0].num_kv_heads == 4
    assert of("qwen2", **wide).layers[0].num_kv_heads == 32


def test_windows_of_each_family() -> None:
    assert windows(of("mistral")) == [4096] * 4
    assert windows(of("mistral", sliding_window=None)) == [None] * 4
    assert of("mistral", sliding_window=16).window == 16
    mixed = of("ministral", sliding_window=16, layer_types=["sliding_attention", "full_attention"] * 2)
    assert windows(mixed) == [16, None, 16, None]
    assert windows(of("ministral")) == [4096] * 4
    for family in ("qwen2", "qwen3"):
        assert windows(of(family, sliding_window=16, max_window_layers=2)) == [None] * 4
        on = {"use_sliding_window": True, "sliding_window": 16}
        assert windows(of(family, **on)) == [None] * 4  # from layer 28 on
        assert windows(of(family, **on, max_window_layers=2)) == [None, None, 16, 16]
        mixed = of(family, **on, layer_types=["sliding_attention", "full_attention"] * 2)
        assert windows(mixed) == [16, None, 16, None]
        assert mixed.window is None
    on = {"use_sliding_window": True, "sliding_window": 16, "no_rope_layer_interval": 2}
    assert windows(of("smollm3", **on)) == [None, 16, None, 16]
    assert windows(of("smollm3", **{**on, "use_sliding_window": False})) == [None] * 4


def test_layers_without_rope() -> None:
    """1 is a layer with rotary embeddings; by default every fourth has none."""

    def rotary(**keys: Any) -> list[bool]:
        return [layer.rotary for layer in of("smollm3", **keys).layers]

    assert rotary() == [True, True, True, False]
    assert rotary(no_rope_layer_interval=2) == [True, False, True, False]
    assert rotary(no_rope_layers=[0, 0, 1, 1], no_rope_layer_interval=2) == [False, False, True, True]


def test_kv_heads_by_layer() -> None:
    for key in ("num_key_value_heads", "num_key_value_heads_per_layer"):
        assert [layer.num_kv_heads for layer in of("llama", **{key: [4, 2, 1, 2]}).layers] == [4, 2, 1, 2]
        for wrong in ([4, 2, 1], [4, 3, 1, 2], [4, "2", 1, 2], [0, 1, 1, 1]):
            with pytest.raises(ConfigError, match="num_key_value_heads"):
                of("llama", **{key: wrong})


@pytest.mark.parametrize(
    ("model_type", "keys", "named"),
    [
        ("llama", {"architectures": ["MistralForCausalLM"]}, "contradict"),
        ("gemma2", {}, "model_type 'gemma2'"),
        (7, {}, "model_type 7"),
        ("llama", {"num_experts": 8}, "num_experts"),
        ("llama", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen2", {"no_rope_layers": [1, 0, 1, 0]}, "no_rope_layers"),
        ("qwen2", {"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config"),
        ("llama", {"use_rope": False}, "use_rope"),
        ("llama", {"rope_ratio": 8}, "rope_ratio"),
        ("llama", {"rotary_dim": 4}, r"rotary_dim = 4 .* allowed: 8"),
        ("llama", {"qk_norm": True}, r"qk_norm = True .*LlamaForCausalLM"),
        ("qwen3", {"qk_norm": False}, "qk_norm = False"),
        ("llama", {"qkv_bias": True}, "qkv_bias"),
        ("qwen2", {"qkv_bias": False}, "qkv_bias"),
        ("llama", {"n_shared_experts": 1}, "n_shared_experts"),
        ("llama", {"attention_scale": 0.1}, "attention_scale"),
        ("qwen3", {"sliding_window_pattern": 4}, "sliding_window_pattern"),
        ("llama", {"pruned_heads": {"0": [1]}}, "pruned_heads"),
        ("llama", {"compression_config": {"quant_method": "x"}}, "compression_config"),
        ("llama", {"num_key_value_heads_per_layer": 2}, "num_key_value_heads_per_layer"),
        ("llama", {"num_hidden_layers": 10**12}, "num_hidden_layers"),
        ("llama", {"vocab_size": 2**40}, "vocab_size"),
        ("llama", {"hidden_size": 33}, "head_dim"),
        ("llama", {"layer_types": ["linear_attention"] * 4}, "layer_types"),
        ("llama", {"attention_multiplier": 0.1}, "attention_multiplier"),
        ("mistral", {"sliding_window": 0}, "sliding_window"),
        ("mistral", {"sliding_window": "16"}, "sliding_window"),
        ("qwen2", {"layer_types": ["full_attention"] * 3}, "layer_types"),
        ("qwen3", {"use_sliding_window": 1}, "use_sliding_window"),
        ("smollm3", {"no_rope_layers": [1, 0, 1]}, "no_rope_layers"),
        ("smollm3", {"no_rope_layers": [1, 0, 1, 2]}, "no_rope_layers"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval"),
    ],
)
def test_families_refuse_by_key(model_type: Any, keys: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        ModelConfig.from_hf(
            {**GOOD, "architectures": None, "num_hidden_layers": 4, "model_type": model_type, **keys}
        )
    assert len(str(caught.value)) < 400


def test_keys_of_relatives_that_say_what_is_done_anyway() -> None:
    harmless = {
        "use_rope": True, "rope_ratio": 1, "rotary_dim": 8, "qk_norm": False, "qkv_bias": False,
        "n_shared_experts": 0, "pruned_heads": {}, "compression_config": None, "attention_scale": None,
    }  # fmt: skip
    assert of("llama", **harmless) == of("llama") == of("llama", pruned_heads=[])
    assert of("llama", attention_bias=True, qkv_bias=True).qkv_bias
    assert of("qwen2", qkv_bias=True) == of("qwen2")
    assert of("qwen3", qk_norm=True) == of("qwen3")


def test_llama3_without_its_original_length_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = of("llama", rope_scaling=scaling, max_position_embeddings=4096).rope
    assert isinstance(rope, Llama3Rope)
    assert rope.original_max_position == 4096
    (record,) = caplog.records
    assert "states no original_max_position_embeddings: max_position_embeddings 4096" in record.message
    caplog.clear()
    of("llama", rope_scaling=scaling | {"original_max_position_embeddings": 8192})
    of("llama", rope_scaling=scaling, original_max_position_embeddings=8192)
    assert not caplog.records


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
        ("rope_theta", 1.0),
        ("rope_theta", 1e60),
        ("rope_scaling", "x"),
        ("rope_scaling", {"type": "longrope", "factor": 2.0}),
        ("rope_scaling", {"type": "yarn", "factor": 0.5}),
        ("rope_scaling", {"type": "yarn", "rope_type": "linear", "factor": 2.0}),
        ("rope_scaling", {"rope_type": 7, "factor": 2.0}),
        ("rope_parameters", {"full_attention": {"rope_type": "default"}}),
        ("rope_scaling", {"type": "linear", "factor": 0}),
        ("rope_scaling", {"type": "linear", "factor": 2.0, "surprise": 1}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": "x"}),
        ("rope_parameters", {"rope_type": "default", "factor": 4.0}),
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
