from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from gguf_writing import random_weights, write_gguf

import checkpoints
from checkpoints.gguf_config import llama3_rope_factors


def test_config_is_translated(tmp_path: Path) -> None:
    fields = {
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 3,
        "llama.rope.freq_base": 500000.0,
    }
    path = write_gguf(tmp_path / "tiny.gguf", random_weights(), fields=fields)
    config = checkpoints.open_checkpoint(path).config
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 96,
        "vocab_size": 40,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
    }
    assert {key: config[key] for key in expected} == expected
    assert checkpoints.open_checkpoint(path).generation_config["eos_token_id"] == [2, 3]


def test_untied_head_and_biases_show_in_the_config(tmp_path: Path) -> None:
    weights = random_weights()
    weights["lm_head.weight"] = np.ones((40, 64), np.float32)
    bias = np.arange(64, dtype=np.float32)
    for layer in range(2):
        weights[f"model.layers.{layer}.self_attn.q_proj.bias"] = bias
    opened = checkpoints.open_checkpoint(write_gguf(tmp_path / "tiny.gguf", weights))
    assert not opened.config["tie_word_embeddings"]
    assert opened.config["attention_bias"]
    assert opened.read("model.layers.1.self_attn.q_proj.bias").tolist() == bias.tolist()


def reads_back(opened: checkpoints.Checkpoint, weights: dict[str, np.ndarray]) -> None:
    assert opened.names() == tuple(sorted(weights))
    for name, expected in weights.items():
        assert opened.shape(name) == expected.shape
        assert opened.dtype(name) == opened.read(name).dtype == expected.dtype
        np.testing.assert_array_equal(opened.read(name), expected, err_msg=name)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize(
    ("architecture", "class_name"),
    [("llama", "LlamaForCausalLM"), ("smollm3", "SmolLM3ForCausalLM"), ("qwen2", "Qwen2ForCausalLM")],
)
def test_weights_and_biases_with_8_query_and_2_kv_heads(
    tmp_path: Path, architecture: str, class_name: str, version: int
) -> None:
    weights = random_weights(biases=True)
    path = write_gguf(tmp_path / "tiny.gguf", weights, architecture=architecture)
    raw = path.read_bytes()
    path.write_bytes(raw[:4] + version.to_bytes(4, "little") + raw[8:])
    opened = checkpoints.open_checkpoint(path)
    reads_back(opened, weights)
    assert opened.config["architectures"] == [class_name]
    assert opened.config["model_type"] == architecture
    assert opened.config.get("attention_bias") == (None if architecture == "qwen2" else True)


def test_qwen3_has_norms_and_straight_rows(tmp_path: Path) -> None:
    weights = random_weights(norms=True)
    opened = checkpoints.open_checkpoint(write_gguf(tmp_path / "q.gguf", weights, architecture="qwen3"))
    reads_back(opened, weights)
    assert opened.config["attention_bias"] is False


def test_each_layer_has_its_own_kv_heads(tmp_path: Path) -> None:
    weights = random_weights(kv_heads=[2, 4, 1], layers=3, biases=True)
    path = write_gguf(tmp_path / "tiny.gguf", weights, kv_heads=[2, 4, 1], layers=3)
    opened = checkpoints.open_checkpoint(path)
    assert opened.config["num_key_value_heads"] == [2, 4, 1]
    reads_back(opened, weights)
    same = write_gguf(tmp_path / "same.gguf", random_weights(), kv_heads=[2, 2])
    assert checkpoints.open_checkpoint(same).config["num_key_value_heads"] == 2


def test_smollm3_says_which_layers_rotate(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "s.gguf", random_weights(layers=9), architecture="smollm3", layers=9)
    config = checkpoints.open_checkpoint(path).config
    assert config["no_rope_layer_interval"] == 4
    assert config["no_rope_layers"] == [1, 1, 1, 0, 1, 1, 1, 0, 1]


def test_a_window_makes_it_mistral(tmp_path: Path) -> None:
    weights, window = random_weights(), {"llama.attention.sliding_window": 32}
    opened = checkpoints.open_checkpoint(write_gguf(tmp_path / "m.gguf", weights, fields=window))
    reads_back(opened, weights)  # still permuted
    assert opened.config["architectures"] == ["MistralForCausalLM"]
    assert (opened.config["model_type"], opened.config["sliding_window"]) == ("mistral", 32)
    none = {"llama.attention.sliding_window": 0}
    opened = checkpoints.open_checkpoint(write_gguf(tmp_path / "m.gguf", weights, fields=none))
    assert opened.config["model_type"] == "llama"
    assert "sliding_window" not in opened.config


def test_rope_scaling(tmp_path: Path) -> None:
    def scaling(fields: dict[str, object], extra: dict[str, np.ndarray] | None = None) -> object:
        path = write_gguf(tmp_path / "rope.gguf", random_weights(), fields=fields, extra=extra)
        return checkpoints.open_checkpoint(path).config["rope_scaling"]

    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert scaling(linear) == {"rope_type": "linear", "factor": 4.0}
    yarn = linear | {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.original_context_length": 64}
    assert scaling(yarn) == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    betas = {"llama.rope.scaling.yarn_beta_fast": 16.0, "llama.rope.scaling.yarn_beta_slow": 2.0}
    translated = scaling(yarn | betas)
    assert isinstance(translated, dict)
    assert (translated["beta_fast"], translated["beta_slow"]) == (16.0, 2.0)
    factors = llama3_rope_factors(10000.0, 8, 32.0, 1.0, 4.0, 8192).astype(np.float32)
    assert scaling({}, {"rope_freqs.weight": factors}) == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    with pytest.raises(checkpoints.CheckpointError, match=r"rope_freqs\.weight"):
        scaling({}, {"rope_freqs.weight": factors * 1.5})
    with pytest.raises(checkpoints.CheckpointError, match="longrope"):
        scaling(linear | {"llama.rope.scaling.type": "longrope"})
    # "none" is llama.cpp's word for no scaling whatever the factor; no word at all means linear.
    assert scaling(linear | {"llama.rope.scaling.type": "none"}) is None
    for key in ("llama.rope.scaling.factor", "llama.rope.scale_linear"):
        assert scaling({key: 4.0}) == {"rope_type": "linear", "factor": 4.0}
        assert scaling({key: 1.0}) is scaling({key: 0.0}) is None
        with pytest.raises(checkpoints.CheckpointError, match=r"both rope_freqs\.weight and .*'linear'"):
            scaling({key: 4.0}, {"rope_freqs.weight": factors})


def test_attention_factor_of_yarn_is_the_final_one(tmp_path: Path) -> None:
    """Hugging Face's attention_factor multiplies cos and sin as it is; llama.cpp's attn_factor is one of two.

    ggml's rope_yarn multiplies what it is given by 1 + 0.1 ln(1 / freq_scale), whatever the file says, and
    llama.cpp takes care that this term is in it once: `rope.scaling.attn_factor` is a further factor, and a
    file without the key means the term alone, which is Hugging Face's default too.
    """

    def translated(fields: dict[str, float]) -> dict[str, float]:
        yarn = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
        path = write_gguf(tmp_path / "rope.gguf", random_weights(), fields=yarn | fields)
        return checkpoints.open_checkpoint(path).config["rope_scaling"]

    further, final = "llama.rope.scaling.attn_factor", "llama.rope.scaling.yarn_attn_factor"
    usual = 1.0 + 0.1 * math.log(4.0)
    assert "attention_factor" not in translated({})
    assert translated({further: 1.0})["attention_factor"] == pytest.approx(usual)
    assert translated({further: 0.5})["attention_factor"] == pytest.approx(usual / 2)
    # Written by the converter: the model's own attention_factor, as it is.
    assert translated({final: 1.25})["attention_factor"] == 1.25
    small = {"llama.rope.scaling.factor": 0.5, further: 3.0}
    assert translated(small)["attention_factor"] == 3.0  # no term below a factor of 1
    with pytest.raises(checkpoints.CheckpointError, match=r"attn_factor and .*yarn_attn_factor"):
        translated({further: 1.0, final: 1.0})
    with pytest.raises(checkpoints.CheckpointError, match=r"rope\.scaling\.attn_factor: got 2\.0"):
        translated({further: 2.0, "llama.rope.scaling.type": "linear"})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope.scaling.yarn_log_multiplier", 0.1),
        ("rope.scaling.yarn_ext_factor", 0.5),
        ("logit_scale", 0.5),
        ("embedding_scale", 12.0),
        ("residual_scale", 0.2),
        ("attention.scale", 0.1),
        ("attention.causal", False),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("attention.temperature_scale", 0.1),
        ("nextn_predict_layers", 1),
        ("expert_count", 8),
        ("expert_used_count", 2),
        ("attention.sliding_window_pattern", 2),
        ("attention.sliding_window_pattern", [True, False]),
        ("attention.key_length_swa", 8),
        ("attention.value_length_swa", 8),
        ("attention.value_scale", 0.5),
        ("rope.freq_base_swa", 10000.0),
        ("rope.dimension_sections", [2, 2]),
        ("use_parallel_residual", True),
    ],
)
def test_other_arithmetic_is_refused_by_name(tmp_path: Path, key: str, value: object) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", random_weights(), fields={f"llama.{key}": value})
    with pytest.raises(checkpoints.CheckpointError, match=rf"key llama\.{key}: got .*not supported"):
        checkpoints.open_checkpoint(path)


def test_no_experts_and_a_model_are_what_files_say(tmp_path: Path) -> None:
    fields = {"llama.expert_count": 0, "llama.expert_used_count": 0, "general.type": "model"}
    reads_back(
        checkpoints.open_checkpoint(write_gguf(tmp_path / "tiny.gguf", random_weights(), fields=fields)),
        random_weights(),
    )
    path = write_gguf(tmp_path / "tiny.gguf", random_weights(), fields={"general.type": "adapter"})
    with pytest.raises(
        checkpoints.CheckpointError, match=r"key general\.type: got 'adapter', expected 'model'"
    ):
        checkpoints.open_checkpoint(path)


@pytest.mark.parametrize("name", ["bos", "eos", "eot", "eom", "unknown", "padding"])
def test_special_ids_lie_in_the_vocabulary(tmp_path: Path, name: str) -> None:
    key = f"tokenizer.ggml.{name}_token_id"
    checkpoints.open_checkpoint(write_gguf(tmp_path / "tiny.gguf", random_weights(), fields={key: 39}))
    path = write_gguf(tmp_path / "tiny.gguf", random_weights(), fields={key: 40})
    with pytest.raises(checkpoints.CheckpointError, match=rf"{key}: got 40, outside the vocabulary of 40"):
        checkpoints.open_checkpoint(path)


@pytest.mark.parametrize("architecture", ["qwen2moe", "qwen3moe", "llama4", "mistral3", "gemma3", "granite"])
def test_relatives_are_refused_by_name(tmp_path: Path, architecture: str) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", random_weights(), architecture=architecture)
    with pytest.raises(checkpoints.CheckpointError, match=f"architecture '{architecture}' is not supported"):
        checkpoints.open_checkpoint(path)


def test_tokenizer_source(tmp_path: Path) -> None:
    tokens = [f"t{index}" for index in range(40)]
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.merges": ["t 1", "t 2"],
        "tokenizer.ggml.token_type": [1] * 39 + [3],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages }}",
        "tokenizer.ggml.eos_token_id": 39,
    }
    path = write_gguf(tmp_path / "tiny.gguf", random_weights(), fields=fields, tokens=tokens)
    source = checkpoints.open_checkpoint(path).tokenizer_source()
    assert isinstance(source, checkpoints.GGUFTokenizerSource)
    assert source.tokens == tuple(tokens)
    assert source.merges == ("t 1", "t 2")
    assert source.token_types is not None
    assert source.token_types.tolist() == [1] * 39 + [3]
    assert (source.model, source.pre, source.add_bos, source.add_eos) == ("gpt2", "smollm", False, None)
    assert (source.eos_token_ids, source.chat_template, source.scores) == ((39,), "{{ messages }}", None)
