"""Conversions that meet: of quantised, untied, windowed and converted models, once and again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from folder_writing import write_safetensors
from head_models import KEYS, assert_close, drawn, heads_of, logits_of, model_folder, opened, tensors_of

from jaxinfer.config import Favor, ModelConfig
from jaxinfer.convert import convert
from jaxinfer.heads import HeadPlan

pytestmark = pytest.mark.usefixtures("compile_cache")

MODELS: dict[str, dict[str, Any]] = {
    "tied": {},
    "not tied": {"tie_word_embeddings": False},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "head norms": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "one layer slides": {
        "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 5,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "counts by layer": {"num_key_value_heads": [8, 4]},
    "one linear layer": {"linear_attention": {"layers": [0], "features": 16, "seed": 1}},
}  # fmt: skip


def mean_of(tensors: dict[str, np.ndarray], counts: tuple[int, ...]) -> dict[str, np.ndarray]:
    """K and V of each layer as means of neighbours, `counts` of them."""
    found = dict(tensors)
    for layer, count in enumerate(counts):
        for kind in "kv":
            heads = heads_of(tensors, layer, kind, 16)
            means = heads.reshape(count, -1, *heads.shape[1:]).astype(np.float64).mean(axis=1)
            name = f"model.layers.{layer}.self_attn.{kind}_proj"
            found[f"{name}.weight"] = means.reshape(-1, heads.shape[-1]).astype(np.float32)
            if f"{name}.bias" in tensors:
                bias = tensors[f"{name}.bias"].reshape(count, -1, 16).astype(np.float64).mean(axis=1)
                found[f"{name}.bias"] = bias.reshape(-1).astype(np.float32)
    return found


def converted(source: Path, name: str, **options: Any) -> Path:
    return convert(source, source.parent / name, to="safetensors", progress=False, **options)


@pytest.mark.parametrize("name", MODELS)
def test_twice_by_lists_is_once_and_what_it_is_by_definition(tmp_path: Path, name: str) -> None:
    """Means of equally many are means of all; repeated, it is the same model again."""
    keys = KEYS | MODELS[name]
    tensors = drawn(keys)
    folder = model_folder(tmp_path / "model", keys, tensors)
    first = converted(folder, "first", heads=HeadPlan(kv_heads=(4, 2)))
    second = converted(first, "second", heads=HeadPlan(kv_heads=(1, 2)))
    assert opened(second).config["num_key_value_heads"] == [1, 2]
    reference = model_folder(
        tmp_path / "reference", keys | {"num_key_value_heads": [1, 2]}, mean_of(tensors, (1, 2))
    )
    expected = logits_of(opened(reference))
    assert np.abs(logits_of(opened(folder)) - expected).max() > 0.1
    assert_close(logits_of(opened(second)), expected)
    again = converted(second, "again", heads=HeadPlan(kv_heads=(8, 4), method="repeat"))
    assert_close(logits_of(opened(again)), expected)
    before, after = (ModelConfig.from_hf(opened(path).config) for path in (folder, again))
    assert [x.favor for x in after.layers] == [x.favor for x in before.layers]
    assert [x.window for x in after.layers] == [x.window for x in before.layers]


def test_query_heads_of_zeros_are_converted_again(tmp_path: Path) -> None:
    """Three groups of unequal size under 12 query heads, four of which are zeros, become one and eight."""
    keys = KEYS | {"num_key_value_heads": 4}
    tensors = drawn(keys)
    folder = model_folder(tmp_path / "model", keys, tensors)
    padded = converted(folder, "padded", heads=HeadPlan(kv_heads=3, unequal_groups=True))
    assert opened(padded).config["num_attention_heads"] == 12
    heads = {kind: [heads_of(tensors, layer, kind, 16) for layer in range(2)] for kind in "kv"}
    one = converted(padded, "one", heads=HeadPlan(kv_heads=1))
    by_hand = dict(tensors)
    for kind, layers in heads.items():
        for layer, old in enumerate(layers):  # the first group has two heads: a mean of means
            mean = ((old[0] + old[1]) / 2 + old[2] + old[3]) / 3
            by_hand[f"model.layers.{layer}.self_attn.{kind}_proj.weight"] = mean
    reference = model_folder(tmp_path / "reference", keys | {"num_key_value_heads": 1}, by_hand)
    assert_close(logits_of(opened(one)), logits_of(opened(reference)))
    copied = converted(padded, "copied", heads=HeadPlan(kv_heads=6, method="repeat"))
    assert_close(logits_of(opened(copied)), logits_of(opened(padded)))


def test_orbax_and_back_and_all_flags_at_once(tmp_path: Path) -> None:
    """A list, zeros, linear layers and another type, by way of the other format."""
    keys = KEYS | {"tie_word_embeddings": False}
    folder = model_folder(tmp_path / "model", keys, drawn(keys))
    plan = HeadPlan(kv_heads=(5, 2), unequal_groups=True, method="svd", measure="weights")
    options: Any = {"heads": plan, "linear_layers": [1], "favor": Favor(8, 2), "progress": False}
    orbax = convert(folder, tmp_path / "orbax", to="orbax", **options)
    back = converted(orbax, "back")
    direct = converted(folder, "direct", **{k: v for k, v in options.items() if k != "progress"})
    assert opened(back).config == opened(direct).config
    assert opened(direct).config["linear_attention"] == {"layers": [1], "features": 8, "seed": 2}
    for name, tensor in tensors_of(opened(direct)).items():
        np.testing.assert_array_equal(opened(back).read(name), tensor)
    half = converted(folder, "half", dtype="bfloat16", heads=plan)
    name = "model.layers.0.self_attn.k_proj.weight"
    np.testing.assert_array_equal(
        opened(half).read(name), opened(direct).read(name).astype(ml_dtypes.bfloat16)
    )


@pytest.mark.parametrize("scaled", [False, True])
def test_float8_sources_are_read_as_what_they_stand_for(tmp_path: Path, scaled: bool) -> None:
    """Of a folder in float8, alone or with a scale a tensor, as of the folder of the same values."""
    plain, held = drawn(KEYS), {}
    for name, tensor in plain.items():
        if "proj" not in name:
            held[name] = tensor
            continue
        scale = np.float32(np.abs(tensor).max() / 400 if scaled else 1.0)
        held[name] = (tensor / scale).astype(ml_dtypes.float8_e4m3fn)
        plain[name] = held[name].astype(np.float32) * scale
        if scaled:
            held[f"{name}_scale"] = np.asarray(scale)
    quantization = {"quant_method": "fp8", "activation_scheme": "static"}
    keys = KEYS | ({"quantization_config": quantization} if scaled else {})
    eight = model_folder(tmp_path / "eight", keys, {"model.norm.weight": plain["model.norm.weight"]})
    write_safetensors(eight / "model.safetensors", held)
    wide = model_folder(tmp_path / "wide", KEYS, plain)
    options: Any = {"heads": HeadPlan(kv_heads=2, method="align", measure="weights"), "linear_layers": [0]}
    found = opened(converted(eight, "from eight", dtype="float32", **options))
    expected = opened(converted(wide, "from wide", dtype="float32", **options))
    assert found.config == expected.config
    for name, tensor in tensors_of(expected).items():
        np.testing.assert_allclose(found.read(name), tensor, rtol=1e-6, atol=1e-7)
    kept = opened(converted(eight, "kept", **options))
    assert kept.dtype("model.layers.0.self_attn.k_proj.weight").name == ("float32" if scaled else "bfloat16")
