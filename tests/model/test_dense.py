"""The pass over whole texts, which trains and taps, against the one over pages, which serves."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense import chunk_logits
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import TINY, TRAINED, random_tensors, tiny_build, tiny_config, tiny_params

from jaxinfer.config import LayerConfig

VARIANTS = {
    "plain": TINY,
    "a KV count of its own in each layer": dataclasses.replace(TINY, layers=tuple(map(LayerConfig, (8, 1)))),
    "windows": dataclasses.replace(TINY, layers=(LayerConfig(2, 5), LayerConfig(2))),
    "no rotation": tiny_config(rotary=False),
    "biases and head norms": dataclasses.replace(TINY, qkv_bias=True, qk_norm=True, mlp_bias=True),
}
TEXTS = np.random.default_rng(3).integers(0, TINY.vocab_size, (3, 21))


def training_params(config=TINY, tensors=None):
    return tiny_params(config, tensors, TRAINED)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("row_major", [False, True])
def test_whole_texts_give_the_logits_that_pages_give(name: str, row_major: bool) -> None:
    config = VARIANTS[name]
    tensors = random_tensors(config)
    graph, state = tiny_params(config, tensors)
    dense = tiny_params(config, tensors, dataclasses.replace(tiny_build(), row_major=row_major))
    hidden, taps = nnx.merge(*dense).dense(jnp.asarray(TEXTS))
    logits = nnx.merge(*dense).logits(hidden.reshape(-1, config.hidden_size)).reshape(*TEXTS.shape, -1)
    assert taps == ()
    for text, found in zip(TEXTS, logits, strict=True):
        np.testing.assert_allclose(found, chunk_logits(config, graph, state, text.tolist()), atol=2e-4)


@settings(max_examples=5, deadline=None)
@given(st.integers(1, 20))
def test_later_tokens_change_nothing_before_them(cut: int) -> None:
    graph, state = training_params()
    changed = TEXTS.copy()
    changed[:, cut:] = (changed[:, cut:] + 1) % TINY.vocab_size
    run = jax.jit(lambda ids: nnx.merge(graph, state).dense(ids)[0])
    np.testing.assert_array_equal(run(jnp.asarray(TEXTS))[:, :cut], run(jnp.asarray(changed))[:, :cut])


def test_taps_hold_what_attention_takes() -> None:
    config = VARIANTS["a KV count of its own in each layer"]
    model = nnx.merge(*training_params(config))
    plain, _ = model.dense(jnp.asarray(TEXTS))
    hidden, taps = model.dense(jnp.asarray(TEXTS), tapped=True)
    np.testing.assert_array_equal(plain, hidden)
    tokens = TEXTS.size
    for tap, layer in zip(taps, config.layers, strict=True):
        assert tap.q.shape == (tokens, config.num_heads, config.head_dim)
        assert tap.k.shape == tap.v.shape == (tokens, layer.num_kv_heads, config.head_dim)
    # the first layer's values are a product of the normed embedding, which can be had by hand
    first = model.layers[0]
    normed = first.attention_norm(model.embedding(jnp.asarray(TEXTS).reshape(-1)))
    values = first.attention.qkv(normed)[:, -8 * config.head_dim :].reshape(tokens, 8, config.head_dim)
    np.testing.assert_allclose(taps[0].v, values, rtol=1e-6)


def test_gradients_are_those_of_finite_differences_with_and_without_remat() -> None:
    graph, state = training_params()
    ids = jnp.asarray(TEXTS)

    def loss(state, remat):
        model = nnx.merge(graph, state)
        hidden, _ = model.dense(ids, remat=remat)
        logits = model.logits(hidden[:, :-1].reshape(-1, TINY.hidden_size))
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), ids[:, 1:].reshape(-1, 1), axis=1)
        return -chosen.mean()

    held, again = (jax.jit(jax.grad(loss), static_argnums=1)(state, remat) for remat in (False, True))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), held, again)
    draw = np.random.default_rng(0)
    direction = jax.tree.map(lambda x: jnp.asarray(draw.standard_normal(x.shape), x.dtype), state)
    step = 1e-3
    moved = [loss(jax.tree.map(lambda x, d, s=s: x + s * step * d, state, direction), False) for s in (1, -1)]
    slope = sum(float(jnp.vdot(g, d)) for g, d in zip(*map(jax.tree.leaves, (held, direction)), strict=True))
    assert float(moved[0] - moved[1]) / (2 * step) == pytest.approx(slope, rel=0.02)
