"""Models some of whose layers read the K/V of an earlier one (cross-layer attention), against the plain
forward pass in float64; what they hold, and what is refused."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense import chunk_logits, dense_logits, paged_logits
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import TINY, TRAINED, Tensors, random_tensors, tiny_build, tiny_params

from jaxinfer.config import Favor, LayerConfig, ModelConfig, TopPages, TopPagesSpan, WindowSpan
from jaxinfer.core import ConfigError
from jaxinfer.model import weights
from jaxinfer.model.kv import create_kv, page_bytes
from jaxinfer.planner import ModelCosts
from jaxinfer.planner.memory import plan_memory

TEXT = np.random.default_rng(0).integers(0, TINY.vocab_size, 41).tolist()


def sharing(*owners: int | None, **changes) -> ModelConfig:
    """A model of these layers: whose K/V each reads, None: its own."""
    layers = tuple(LayerConfig(2, kv_from=owner) for owner in owners)
    return dataclasses.replace(TINY, **{"layers": layers, **changes})


MODELS = {
    "pairs": sharing(None, 0, None, 2),
    "all read the first": sharing(None, 0, 0),
    "not the last one": sharing(None, None, 0, 1),
    "head norms and biases": sharing(None, 0, qk_norm=True, qkv_bias=True),
    "a window": sharing(None, 0, None).spanned(WindowSpan(window=9)),
    "windows of their own": dataclasses.replace(
        TINY,
        layers=(LayerConfig(2, window=5), LayerConfig(2, window=12, kv_from=0), LayerConfig(4, window=7)),
    ),
    "not rotated, beside linear attention": dataclasses.replace(
        TINY,
        layers=(
            LayerConfig(4, favor=Favor(32)), LayerConfig(1, rotary=False),
            LayerConfig(1, rotary=False, kv_from=1),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_whole_texts_pages_and_the_definition_agree(name: str) -> None:
    config = MODELS[name]
    tensors = random_tensors(config)
    graph, state = tiny_params(config, tensors)
    model = nnx.merge(*tiny_params(config, tensors, TRAINED))
    hidden, taps = jax.jit(lambda ids: model.dense(ids, tapped=True))(jnp.asarray([TEXT, TEXT[::-1]]))
    untapped, none = jax.jit(lambda ids: model.dense(ids, remat=True))(jnp.asarray([TEXT, TEXT[::-1]]))
    np.testing.assert_allclose(untapped, hidden, atol=1e-4)
    assert none == ()
    dense = np.asarray(model.logits(hidden[0]))
    expected = dense_logits(config, tensors, TEXT)
    close = 2e-3 if config.linear_layers else 1e-5 * np.abs(expected).max()
    np.testing.assert_allclose(dense, expected, atol=close)
    np.testing.assert_allclose(chunk_logits(config, graph, state, TEXT), expected, atol=close)
    counts = [3, 1, 1, 17, 1, 12, 1, 5]
    np.testing.assert_allclose(paged_logits(config, graph, state, TEXT, counts), expected, atol=close)
    for layer, tap in zip(config.layers, taps, strict=True):
        assert tap.k.shape == (82, layer.num_kv_heads, 16)
        if layer.kv_from is not None:
            np.testing.assert_array_equal(tap.k, taps[layer.kv_from].k)
            np.testing.assert_array_equal(tap.v, taps[layer.kv_from].v)


@settings(max_examples=6, deadline=None)
@given(st.data())
def test_any_layers_may_share(data: st.DataObject) -> None:
    """Whoever reads whose: the weights that there are, the memory, and the pass over whole texts."""
    owners: list[int | None] = [None]
    for index in range(1, data.draw(st.integers(2, 5), label="layers")):
        own = [each for each in range(index) if owners[each] is None]
        owners.append(data.draw(st.sampled_from([None, *own])))
    config = sharing(*owners, qk_norm=data.draw(st.booleans()), qkv_bias=data.draw(st.booleans()))
    tensors, text = random_tensors(config), TEXT[:12]
    made = sum(owner is None for owner in owners)
    assert sum("k_proj.weight" in name for name in tensors) == made
    assert sum(tensor.size for tensor in tensors.values()) == config.num_params
    assert config.kv_bytes_per_token(4) == made * 2 * 2 * 16 * 4
    assert page_bytes(config, 8, jnp.dtype("float32")) == 8 * config.kv_bytes_per_token(4)
    model = nnx.merge(*tiny_params(config, tensors))
    hidden, _ = model.dense(jnp.asarray([text]))
    expected = dense_logits(config, tensors, text)
    np.testing.assert_allclose(model.logits(hidden[0]), expected, atol=1e-5 * np.abs(expected).max())


def test_equal_projections_read_twice_are_those_of_a_model_with_its_own() -> None:
    """Layers that add nothing give the next one their own input: there a layer with its own K/V, made by the
    weights of the one before, is one that shares."""
    config = sharing(None, 0)
    tensors = random_tensors(config)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"model.layers.0.{name}.weight"][:] = 0
    own = dict(tensors)
    for name in ("input_layernorm", "self_attn.k_proj", "self_attn.v_proj"):
        own[f"model.layers.1.{name}.weight"] = tensors[f"model.layers.0.{name}.weight"]
    tensors["model.layers.1.input_layernorm.weight"] = tensors["model.layers.0.input_layernorm.weight"]
    shared, apart = (chunk_logits(c, *tiny_params(c, t), TEXT) for c, t in ((config, tensors), (TINY, own)))
    np.testing.assert_allclose(shared, apart, atol=1e-5 * np.abs(apart).max())


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8", "fp8_e4m3"])
def test_memory_is_half_and_the_largest_batch_twice(kv_dtype: str) -> None:
    """The arrays that there are, and what the planner says of them."""
    whole, halved = sharing(None, None, None, None), sharing(None, 0, None, 2)
    dtype = jnp.dtype({"fp8_e4m3": "float8_e4m3fn"}.get(kv_dtype, kv_dtype))
    sizes, batches = [], []
    for config in (whole, halved):
        kv = create_kv(config, 33, 16, dtype)
        sizes.append(sum(x.nbytes for x in jax.tree.leaves(kv)))
        costs = ModelCosts(config, kv_dtype=kv_dtype)
        assert sizes[-1] == 33 * 16 * costs.kv_bytes_per_token == 33 * costs.page_bytes
        assert sizes[-1] == 33 * page_bytes(config, 16, dtype)
        room = round(costs.weight_bytes + 2**24)
        batches.append(plan_memory(costs, room, max_model_len=512, max_num_seqs=10**6).largest_batch)
    assert sizes[0] == 2 * sizes[1]
    assert abs(batches[1] - 2 * batches[0]) <= 1 < batches[0]


def test_it_can_be_trained() -> None:
    """Gradients reach every weight, those of shared K/V from all their readers."""
    config = MODELS["pairs"]
    graph, state = tiny_params(config, build=TRAINED)
    ids = jnp.asarray(np.random.default_rng(3).integers(0, 40, (2, 24)))

    def loss(state, remat):
        model = nnx.merge(graph, state)
        hidden, _ = model.dense(ids, remat=remat)
        logits = jax.nn.log_softmax(model.logits(hidden[:, :-1].reshape(-1, TINY.hidden_size)))
        return -jnp.take_along_axis(logits, ids[:, 1:].reshape(-1, 1), axis=1).mean()

    slope = jax.jit(jax.grad(loss), static_argnums=1)
    plain, again = slope(state, False), slope(state, True)
    for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(again), strict=True):
        assert np.isfinite(one).all()
        assert np.any(one)
        np.testing.assert_allclose(one, other, atol=1e-5 * np.abs(one).max())
    direction = jax.tree.map(lambda x: x / jnp.linalg.norm(x), plain)
    moved = [jax.tree.map(lambda x, d, s=s: x + s * 1e-3 * d, state, direction) for s in (-1, 1)]
    low, high = (float(loss(each, False)) for each in moved)
    slopes = zip(jax.tree.leaves(plain), jax.tree.leaves(direction), strict=True)
    assert (high - low) / 2e-3 == pytest.approx(sum(float(jnp.vdot(g, d)) for g, d in slopes), rel=0.02)


# ---------------------------------------------------------------------------------------------- config.json

KEYS = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}  # fmt: skip


def read(**keys) -> ModelConfig:
    return ModelConfig.from_hf({**KEYS, **keys})


def test_config_json_says_whose_kv_is_read() -> None:
    config = read(kv_from=[None, 0, None, 2])
    assert [layer.kv_from for layer in config.layers] == [None, 0, None, 2]
    assert config.sharing_layers == (1, 3)
    assert read(kv_from=None) == read(kv_from=[None] * 4) == read()


@pytest.mark.parametrize(
    "value", [True, 2, "2", [0], [None] * 3, [None, 0, None, "2"], [None, False, None, 2], {"share": 2}]
)
def test_what_lists_no_layers_is_refused_by_name(value) -> None:
    with pytest.raises(ConfigError, match="kv_from"):
        read(kv_from=value)


SMOL = {"model_type": "smollm3", "no_rope_layers": [1, 1, 0, 1]}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"kv_from": [0, None, None, None]}, r"layer 0 .* layer 0: only an earlier"),
        ({"kv_from": [None, 1, None, None]}, r"layer 1 .* layer 1: only an earlier"),
        ({"kv_from": [None, 2, None, None]}, r"layer 1 .* layer 2: only an earlier"),
        ({"kv_from": [None, -1, None, None]}, r"layer 1 .* layer -1: only an earlier"),
        ({"kv_from": [None, 0, 1, None]}, r"layer 2 .* layer 1: that layer reads those of layer 0"),
        (
            {"kv_from": [None, 0, None, None], "num_key_value_heads": [4, 2, 2, 2]},
            r"layer 1 .* layer 0: it has 2 KV heads, and that layer 4",
        ),
        (
            {"kv_from": [None, 0, None, None], "linear_attention": {"layers": [0]}},
            r"layer 1 .* layer 0: layer 0 has linear attention",
        ),
        (
            {"kv_from": [None, 0, None, None], "linear_attention": {"layers": [1]}},
            r"layer 1 .* layer 0: layer 1 has linear attention",
        ),
        (
            {"kv_from": [None, None, 1, None], **SMOL},
            r"layer 2 .* layer 1: its queries are not rotated, and the keys of that layer are rotated",
        ),
        (
            {"kv_from": [None, None, None, 2], **SMOL},
            r"layer 3 .* layer 2: its queries are rotated, and the keys of that layer are not rotated",
        ),
    ],
)
def test_layers_that_cannot_share_are_named(keys, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(**keys)


def test_queries_that_choose_need_what_their_owner_keeps() -> None:
    config = sharing(None, 0, None, 2)
    pages = TopPages(2)
    assert config.spanned(TopPagesSpan(pages, skip=2)).layers[3].top_pages == pages
    for skip, layer in ((1, 1), (3, 3)):
        with pytest.raises(
            ConfigError, match=rf"layer {layer} would choose among the pages of layer {layer - 1}"
        ):
            config.spanned(TopPagesSpan(pages, skip=skip))


@pytest.mark.parametrize("name", ["k_proj.weight", "v_proj.weight", "k_norm.weight", "k_proj.bias"])
def test_a_checkpoint_with_kv_that_nobody_reads_is_refused(name: str) -> None:
    config = MODELS["head norms and biases"]
    tensors = random_tensors(config)
    extra = f"model.layers.1.self_attn.{name}"
    tensors[extra] = tensors[extra.replace("layers.1", "layers.0")]
    with pytest.raises(ConfigError, match=rf"does not use: {extra}"):
        weights.check_names(config, Tensors(tensors))


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_weights_cost_what_there_is(quantization: str | None) -> None:
    from jaxinfer.config import EngineConfig
    from jaxinfer.runtime import backends

    config = sharing(None, 0, hidden_size=128, intermediate_size=256, qkv_bias=True, qk_norm=True)
    engine = EngineConfig(quantization=quantization).on("cpu")  # type: ignore[arg-type]
    build = dataclasses.replace(tiny_build(), quantization=backends.choose_quantization(engine, config))
    costs = ModelCosts(config, dtype="float32", quantization=quantization)
    assert costs.weight_bytes == weights.param_bytes(config, build)


def test_attention_reads_what_is_shared_as_often_as_it_is_seen() -> None:
    """A decode moves the K/V of every layer, shared or not, and the projections are fewer."""
    whole, halved = (ModelCosts(config) for config in (sharing(None, None), sharing(None, 0)))
    assert halved.attention([(99, 1), (0, 40)]) == whole.attention([(99, 1), (0, 40)])
    assert whole.layer_params - halved.layer_params == 2 * 2 * 16 * 64
    assert halved.kv_bytes_per_token == whole.kv_bytes_per_token / 2
    chosen = TopPagesSpan(TopPages(2))
    one, other = (ModelCosts(costs.config.spanned(chosen)) for costs in (whole, halved))
    assert one.decode_work([200]).decode_kv_bytes == other.decode_work([200]).decode_kv_bytes
    assert other.page_bytes == one.page_bytes / 2
