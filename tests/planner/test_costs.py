"""The planner's arithmetic of a model against the arrays that the engine really allocates."""

from __future__ import annotations

import dataclasses

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import TINY, tiny_config

from jaxinfer.config import Favor, LayerConfig, ModelConfig
from jaxinfer.core import ConfigError
from jaxinfer.model import kv, weights
from jaxinfer.model.llama import Build
from jaxinfer.planner import ModelCosts
from jaxinfer.planner.memory import plan_memory
from jaxinfer.presets import PRESETS
from pallas_kernels import Backend

KV_DTYPES = {"fp8_e4m3": "float8_e4m3fn"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_weight_bytes_are_those_of_the_arrays(dtype: str, bias: bool, tied: bool) -> None:
    config = dataclasses.replace(
        TINY, qkv_bias=bias, output_bias=bias, mlp_bias=bias, qk_norm=bias, tie_word_embeddings=tied,
        layers=(LayerConfig(2), LayerConfig(4), LayerConfig(8)),
    )  # fmt: skip
    costs = ModelCosts(config, dtype=dtype)
    build = Build(jax.numpy.dtype(dtype), "cpu", Backend("xla"))
    assert costs.weight_bytes == weights.param_bytes(config, build)
    assert costs.weight_bytes == config.num_params * jax.numpy.dtype(dtype).itemsize


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_quantised_weights_count_with_their_scales(quantization: str) -> None:
    from jaxinfer.config import EngineConfig
    from jaxinfer.runtime import backends

    config = tiny_config(hidden_size=128, intermediate_size=256, num_heads=8, head_dim=16)
    engine = EngineConfig(quantization=quantization).on("cpu")  # type: ignore[arg-type]
    chosen = backends.choose_quantization(engine, config)
    attention = backends.choose_attention(engine, config)
    build = Build(jax.numpy.dtype("float32"), "cpu", attention.backend, chosen)
    costs = ModelCosts(config, dtype="float32", quantization=quantization)
    assert costs.weight_bytes == weights.param_bytes(config, build)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8", "fp8_e4m3"])
def test_kv_bytes_are_those_of_the_pages(kv_dtype: str) -> None:
    config = dataclasses.replace(TINY, layers=(LayerConfig(1), LayerConfig(4)))
    page = kv.page_bytes(config, 16, jax.numpy.dtype(KV_DTYPES.get(kv_dtype, kv_dtype)))
    assert ModelCosts(config, kv_dtype=kv_dtype).kv_bytes_per_token * 16 == page


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 40)), min_size=1, max_size=5))
def test_linear_attention_costs_its_states_and_nothing_for_what_came_before(
    spans: list[tuple[int, int]],
) -> None:
    softmax = dataclasses.replace(TINY, layers=(LayerConfig(2),))
    both = dataclasses.replace(TINY, layers=(LayerConfig(2), LayerConfig(4, favor=Favor(32))))
    linear = dataclasses.replace(TINY, layers=both.layers[1:])
    costs = [ModelCosts(config, kv_dtype="float32") for config in (softmax, linear, both)]
    states = jax.eval_shape(lambda: kv.create_kv(both, 9, 16, jax.numpy.dtype("float32"), 5)).states
    assert (
        6 * costs[2].state_bytes == 6 * both.state_bytes == sum(x.size * 4 for x in jax.tree.leaves(states))
    )
    assert [c.kv_bytes_per_token for c in costs] == [c.config.kv_bytes_per_token(4) for c in costs]
    moved, operations = zip(*(c.attention(spans) for c in costs), strict=True)
    assert moved[2] == moved[0] + moved[1]
    assert operations[2] == operations[0] + operations[1]
    tokens = sum(count for _, count in spans)
    assert moved[1] == 2 * len(spans) * linear.state_bytes
    assert operations[1] == 4 * 32 * 16 * (8 + 4) * tokens  # r H (N + K), whatever the positions
    assert ModelCosts(both, tensor_parallel=2).state_bytes * 2 == both.state_bytes


def test_memory_is_planned_with_states() -> None:
    both = dataclasses.replace(TINY, layers=(LayerConfig(2), LayerConfig(4, favor=Favor(32))))
    linear = dataclasses.replace(TINY, layers=both.layers[1:])
    plans = [
        plan_memory(ModelCosts(config), 10**9, max_model_len=256, max_num_seqs=8) for config in (both, linear)
    ]
    assert [plan.state_bytes for plan in plans] == [9 * both.state_bytes] * 2
    assert plans[1].pool_bytes == plans[1].page_bytes == 0
    assert all(plan.fits and plan.largest_batch == 8 for plan in plans)


@pytest.mark.parametrize("name", PRESETS)
def test_every_built_in_shape_is_split_without_loss(name: str) -> None:
    config = ModelConfig.from_hf(PRESETS[name])
    whole = ModelCosts(config)
    assert whole.weight_bytes == 2 * config.num_params
    if config.num_heads % 8 or whole.config.layers[0].num_kv_heads % 8:
        return
    part = ModelCosts(config, tensor_parallel=8)
    assert part.layer_params * 8 == whole.layer_params
    assert part.kv_bytes_per_token * 8 == whole.kv_bytes_per_token
    assert part.attention([(100, 50)])[1] * 8 == whole.attention([(100, 50)])[1]


def test_kv_heads_that_cannot_be_split_further_are_repeated() -> None:
    config = dataclasses.replace(TINY, layers=(LayerConfig(2),))
    assert ModelCosts(config, tensor_parallel=4).kv_bytes_per_token == 2 * 16 * 2
    with pytest.raises(ConfigError, match="3 devices"):
        ModelCosts(config, tensor_parallel=3)
    with pytest.raises(ConfigError, match="KV heads"):
        ModelCosts(dataclasses.replace(config, num_heads=24, layers=(LayerConfig(8),)), tensor_parallel=3)


@pytest.mark.parametrize(
    ("field", "value"), [("dtype", "int8"), ("kv_dtype", "int4"), ("quantization", "q4")]
)
def test_unknown_dtypes_are_refused(field: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} '{value}'"):
        ModelCosts(TINY, **{field: value})  # pyright: ignore[reportArgumentType]


@given(st.lists(st.integers(1, 200), min_size=1, max_size=6), st.sampled_from([None, 3, 50]))
def test_a_prompt_costs_the_same_however_it_is_chunked(chunks: list[int], window: int | None) -> None:
    """Operations do; bytes do not: each chunk reads what is before it again."""
    config = dataclasses.replace(TINY, layers=(LayerConfig(2, window), LayerConfig(4)))
    costs = ModelCosts(config)
    spans, start = [], 0
    for count in chunks:
        spans.append((start, count))
        start += count
    whole_bytes, whole_operations = costs.attention([(0, start)])
    moved, operations = costs.attention(spans)
    assert operations == whole_operations
    assert moved >= whole_bytes
    linear, attention = costs.prefill_operations(start)
    steps = [costs.work([span], rows=span == spans[-1]) for span in spans]
    assert sum(costs.operations(step) for step in steps) == linear + attention


def test_attention_equals_the_layers_at_the_even_length() -> None:
    costs = ModelCosts(ModelConfig.from_hf(PRESETS["llama2-7b"]))
    length = costs.even_length
    assert length is not None
    attention, linear = costs.attention([(0, length)])[1], 2 * costs.layer_params * length
    assert attention == pytest.approx(linear, rel=1e-4)
    windowed = ModelCosts(dataclasses.replace(TINY, layers=(LayerConfig(2, 4),)))
    assert windowed.even_length is None
