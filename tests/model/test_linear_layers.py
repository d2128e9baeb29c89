"""Models some or all of whose layers have linear attention, against the plain forward pass in float64."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense import chunk_logits, dense_logits, paged_logits
from flax import nnx
from tiny import TINY, TRAINED, random_tensors, tiny_params

from jaxinfer.config import Favor, LayerConfig, WindowSpan
from jaxinfer.core import ConfigError
from jaxinfer.model.kv import create_kv, page_bytes

FAVOR = Favor(features=48, seed=1)
MIXED = dataclasses.replace(TINY, layers=(LayerConfig(2), LayerConfig(4, favor=FAVOR)))
MODELS = {
    "one of two layers": MIXED,
    "all layers": dataclasses.replace(
        TINY, layers=(LayerConfig(1, favor=FAVOR), LayerConfig(8, favor=FAVOR))
    ),
    "beside a window": MIXED.spanned(WindowSpan(window=6, sinks=0)),
    "not rotated, with head norms": dataclasses.replace(
        TINY, layers=(LayerConfig(2, rotary=False, favor=FAVOR), LayerConfig(2)), qk_norm=True
    ),
}
TEXT = np.random.default_rng(0).integers(0, TINY.vocab_size, 41).tolist()


@pytest.mark.parametrize("name", MODELS)
def test_whole_texts_pages_and_the_definition_agree(name: str) -> None:
    config = MODELS[name]
    tensors = random_tensors(config)
    graph, state = tiny_params(config, tensors)
    model = nnx.merge(*tiny_params(config, tensors, TRAINED))
    hidden, taps = jax.jit(lambda ids: model.dense(ids, tapped=True))(jnp.asarray([TEXT, TEXT[::-1]]))
    dense = np.asarray(model.logits(hidden[0]))
    np.testing.assert_allclose(chunk_logits(config, graph, state, TEXT), dense, atol=2e-3)
    counts = [3, 1, 1, 17, 1, 12, 1, 5]
    np.testing.assert_allclose(paged_logits(config, graph, state, TEXT, counts), dense, atol=2e-3)
    assert [tap.k.shape for tap in taps] == [(82, layer.num_kv_heads, 16) for layer in config.layers]
    np.testing.assert_allclose(dense, dense_logits(config, tensors, TEXT), atol=2e-3)


def test_more_features_come_nearer_to_softmax() -> None:
    """Of a model whose queries and keys are short enough: logits of the same weights."""
    tensors = random_tensors(TINY)
    for name in tensors:
        if "q_proj" in name or "k_proj" in name:
            tensors[name] = 0.3 * tensors[name]
    exact, distances = dense_logits(TINY, tensors, TEXT), []
    for features in (8, 64, 512):
        layers = tuple(dataclasses.replace(layer, favor=Favor(features)) for layer in TINY.layers)
        got = dense_logits(dataclasses.replace(TINY, layers=layers), tensors, TEXT)
        distances.append(float(np.abs(got - exact).mean()))
    assert distances[2] < 0.5 * distances[1] < 0.25 * distances[0] * 1.5, distances


def test_memory_is_what_the_layers_need_and_no_more() -> None:
    """Pages are those of softmax layers; a state has the same size however long texts are."""
    dtype = jnp.dtype("float32")
    paged = dataclasses.replace(TINY, layers=(LayerConfig(2),))
    assert page_bytes(MIXED, 8, dtype) == page_bytes(paged, 8, dtype) == 8 * MIXED.kv_bytes_per_token(4)
    assert page_bytes(MODELS["all layers"], 8, dtype) == MODELS["all layers"].kv_bytes_per_token(4) == 0
    for config in MODELS.values():
        kv = create_kv(config, 7, 8, dtype, num_states=4)
        assert sum(x.nbytes for x in jax.tree.leaves(kv.states)) == 5 * config.state_bytes
        assert sum(x.nbytes for x in jax.tree.leaves(kv._replace(states=()))) == 7 * page_bytes(
            config, 8, dtype
        )
        assert (kv.num_pages, kv.page_size) == (7, 8)
    assert MIXED.state_bytes == 4 * 48 * (16 + 2) * 4
    assert TINY.state_bytes == 0


def test_it_can_be_trained() -> None:
    """Gradients reach every weight, and a few steps down them lower the loss."""
    config = MODELS["all layers"]
    graph, state = tiny_params(config, build=TRAINED)
    ids = jnp.asarray(np.random.default_rng(3).integers(0, 40, (2, 24)))

    def loss(state):
        model = nnx.merge(graph, state)
        hidden, _ = model.dense(ids, remat=True)
        logits = jax.nn.log_softmax(model.logits(hidden[:, :-1].reshape(-1, TINY.hidden_size)))
        return -jnp.take_along_axis(logits, ids[:, 1:].reshape(-1, 1), axis=1).mean()

    slope = jax.jit(jax.value_and_grad(loss))
    first, gradient = slope(state)
    assert all(np.isfinite(x).all() and np.any(x) for x in jax.tree.leaves(gradient))
    for _ in range(8):
        _, gradient = slope(state)
        norm = jnp.sqrt(sum(jnp.vdot(x, x) for x in jax.tree.leaves(gradient)))
        state = jax.tree.map(lambda x, g, n=norm: x - 0.5 * g / n, state, gradient)
    assert float(slope(state)[0]) < 0.8 * float(first)


KEYS = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}  # fmt: skip


def read(**keys):
    from jaxinfer.config import ModelConfig

    return ModelConfig.from_hf({**KEYS, **keys})


def test_config_json_says_which_layers() -> None:
    config = read(linear_attention={"layers": [3, 0], "features": 64, "seed": 7})
    assert [layer.favor for layer in config.layers] == [Favor(64, 7), None, None, Favor(64, 7)]
    assert config.linear_layers == (0, 3)
    assert read(linear_attention={"layers": [1]}).layers[1].favor == Favor(128, 0)
    assert read(linear_attention=None) == read(linear_attention={"layers": []}) == read()


@pytest.mark.parametrize(
    "value",
    [
        True, [1], "1", {}, {"layers": None}, {"layers": 1}, {"layers": [4]}, {"layers": [-1]},
        {"layers": [1, 1]}, {"layers": [True]}, {"layers": ["1"]}, {"layers": [1], "kind": "favor"},
        {"layers": [1], "features": 0}, {"layers": [1], "features": None}, {"layers": [1], "features": 5000},
        {"layers": [1], "seed": -1}, {"layers": [1], "seed": 0.5},
    ],
)  # fmt: skip
def test_what_it_cannot_mean_is_refused_by_name(value) -> None:
    with pytest.raises(ConfigError, match="linear_attention"):
        read(linear_attention=value)


def test_windows_and_spans_beside_it() -> None:
    with pytest.raises(ConfigError, match=r"layer 2 has a sliding window of 8.*linear_attention"):
        read(model_type="mistral", sliding_window=8, linear_attention={"layers": [2]})
    spanned = read(linear_attention={"layers": [1]}).spanned(WindowSpan(window=8, sinks=4))
    assert [layer.window for layer in spanned.layers] == [8, None, 8, 8]
    assert (spanned.window, spanned.sinks) == (8, 4)  # pages behind it go, though layer 1 sees all
    with pytest.raises(ConfigError, match="attention_span: layers 0, 1, 2, 3 have linear attention"):
        read(linear_attention={"layers": [0, 1, 2, 3]}).spanned(WindowSpan(window=8, sinks=0))
