"""The whole model in one chunk, against a dense forward pass written for these tests."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from dense import chunk_logits, dense_logits, paged_logits
from tiny import TINY, prompts, random_tensors, tiny_build, tiny_config, tiny_params

from jaxinfer.config import DynamicRope, LayerConfig, LinearRope, ModelConfig, YarnRope
from jaxinfer.model.kv import create_kv

pytestmark = pytest.mark.usefixtures("compile_cache")

TOKENS = prompts([41])[0]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "every bias": {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "bias of q, k and v": {"qkv_bias": True},
    "norms of q and k": {"qk_norm": True},
    "no layout in blocks": {"hidden_size": 56, "intermediate_size": 40, "head_dim": 10, "num_heads": 6},
    "eps and rope": {"rms_norm_eps": 0.1, "rope": LinearRope(1000.0, 3.0), "num_layers": 1},
    "one head": {"num_heads": 1, "num_kv_heads": 1, "num_layers": 1},
    "yarn": {"rope": YarnRope(1000.0, 4.0, 16, 1.2, 8.0, 2.0), "num_layers": 1},
    "dynamic": {"rope": DynamicRope(1000.0, 2.0, 24), "num_layers": 1},
    "window": {"window": 9},
    "window of one": {"window": 1, "num_layers": 1},
    "no rope": {"rotary": False, "num_layers": 1},
    "every layer another": {
        "layers": (LayerConfig(8), LayerConfig(1, window=5), LayerConfig(2, rotary=False), LayerConfig(4))
    },
}


def both(config: ModelConfig, tensors: dict[str, np.ndarray], **options: Any) -> float:
    """The largest difference between the model's logits and the dense ones."""
    graph, state = tiny_params(config, tensors, options.pop("build", None))
    return np.abs(chunk_logits(config, graph, state, TOKENS) - dense_logits(config, tensors, TOKENS)).max()


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_the_dense_ones(name: str) -> None:
    """In one chunk, and in chunks and single tokens over pages."""
    config = tiny_config(**VARIANTS[name])
    tensors = random_tensors(config)
    assert both(config, tensors) < 2e-4
    expected = dense_logits(config, tensors, TOKENS)
    got = paged_logits(config, *tiny_params(config, tensors), TOKENS, [16, 1, 7, 1, 1, 15])
    assert np.abs(got - expected).max() < 2e-4


def test_pages_cost_what_each_layer_needs() -> None:
    """Layers of 8, 1 and 2 KV heads: 11 heads in all, and not 3 times 8."""
    config = tiny_config(layers=(LayerConfig(8), LayerConfig(1), LayerConfig(2)))
    assert config.kv_bytes_per_token(4) == 2 * 11 * 16 * 4
    kv = create_kv(config, 5, 8, np.dtype(np.float32))
    assert [k.shape[1] for k in kv.k] == [v.shape[1] for v in kv.v] == [8, 1, 2]
    assert sum(x.nbytes for x in (*kv.k, *kv.v)) == 5 * 8 * config.kv_bytes_per_token(4)


def test_every_tensor_matters() -> None:
    """Each tensor of the checkpoint moves the logits by more than the tolerance above (B135)."""
    config = tiny_config(qkv_bias=True, output_bias=True, mlp_bias=True, qk_norm=True, num_layers=1)
    tensors = random_tensors(config)
    base = dense_logits(config, tensors, TOKENS)
    for name, tensor in tensors.items():
        if name.endswith("k_proj.bias"):
            continue  # adds the same to all scores of a query, up to the rotation: small by nature
        moved = dense_logits(config, {**tensors, name: tensor * 0.9}, TOKENS)
        assert np.abs(moved - base).max() > 2e-3, name


def test_shared_kv_heads_are_an_mha_model_with_repeated_heads() -> None:
    """Query head i reads KV head i // G: repeating each KV head G times changes nothing."""
    tensors = random_tensors(TINY)
    twin = tiny_config(num_kv_heads=TINY.num_heads)
    kv_heads, group = TINY.layers[0].num_kv_heads, TINY.num_heads // TINY.layers[0].num_kv_heads
    repeated = dict(tensors)
    for name in tensors:
        if "k_proj" in name or "v_proj" in name:
            heads = tensors[name].reshape(kv_heads, TINY.head_dim, -1)
            repeated[name] = heads.repeat(group, axis=0).reshape(-1, TINY.hidden_size)
    shared = chunk_logits(TINY, *tiny_params(TINY, tensors), TOKENS)
    np.testing.assert_allclose(shared, chunk_logits(twin, *tiny_params(twin, repeated), TOKENS), atol=2e-4)


def test_the_two_layouts_of_a_platform_give_the_same_model() -> None:
    """A GPU's parameters (as stored) run on this device too."""
    assert both(TINY, random_tensors(TINY), build=tiny_build(platform="gpu")) < 2e-4


def test_the_reference_backend_gives_the_same_model() -> None:
    assert both(TINY, random_tensors(TINY), build=tiny_build(backend="reference")) < 2e-4


def test_bfloat16_is_near() -> None:
    """A bound on carelessness, not on rounding: logits have a standard deviation of 3."""
    graph, state = tiny_params(TINY, None, tiny_build("bfloat16"))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state)} == {"bfloat16"}
    got = chunk_logits(TINY, graph, state, TOKENS)
    assert got.dtype == np.float32
    error = np.abs(got - dense_logits(TINY, random_tensors(TINY), TOKENS))
    assert error.mean() < 0.1
    assert error.max() < 1.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_type_is_promoted_unasked(dtype: str) -> None:
    """float32 beside bfloat16 appears only where the code says so."""
    graph, state = tiny_params(TINY, None, tiny_build(dtype))
    with jax.numpy_dtype_promotion("strict"):
        chunk_logits(TINY, graph, state, TOKENS[:3])
