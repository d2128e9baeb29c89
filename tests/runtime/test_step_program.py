"""The compiled step of every bucket: pages are updated in place, and the checker can tell when not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from programs import pool_problems
from tiny import PLENTY, TINY, tiny_build, tiny_params

from jaxinfer.config import ModelConfig, StepShape, shape_ladder
from jaxinfer.model.kv import KVState, create_kv
from jaxinfer.model.llama import abstract_model
from jaxinfer.presets import PRESETS
from jaxinfer.runtime import inputs, steps

pytestmark = pytest.mark.usefixtures("compile_cache")

TABLE_WIDTH, NUM_PAGES, PAGE_SIZE = 16, PLENTY, 8
LADDER = shape_ladder(4, 32)


def abstract_kv(config: ModelConfig, num_pages: int, page_size: int, dtype: Any = jnp.float32) -> KVState:
    """Shapes only: nothing is allocated."""
    return jax.eval_shape(lambda: create_kv(config, num_pages, page_size, dtype))


TINY_KV = abstract_kv(TINY, NUM_PAGES, PAGE_SIZE)


@functools.cache
def tiny_program(shape: StepShape) -> jax.stages.Compiled:
    graph, state = tiny_params()
    return steps.compile_step(graph, shape, TABLE_WIDTH, state, TINY_KV, "cpu")


@pytest.mark.parametrize("shape", LADDER, ids=str)
def test_every_bucket_updates_its_pages_in_place(shape: StepShape) -> None:
    assert pool_problems(tiny_program(shape), TINY_KV) == []


@pytest.mark.parametrize("shape", [StepShape(32, 32, 0), StepShape(144, 16, 16)], ids=str)
def test_a_real_model_updates_its_pages_in_place(shape: StepShape) -> None:
    """SmolLM2-135M's shape, 30 layers, 4096 pages of 16 (94 MB a layer for K, as much for V)."""
    config = ModelConfig.from_hf(PRESETS["smollm2-135m"])
    graph, state = abstract_model(config, tiny_build())
    kv = abstract_kv(config, 8209, 16)
    program = steps.compile_step(graph, shape, 512, state, kv, "cpu")
    assert pool_problems(program, kv) == []
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < memory.alias_size_in_bytes / 10


def test_bfloat16_pages_are_updated_in_place() -> None:
    build = tiny_build("bfloat16")
    graph, state = abstract_model(TINY, build)
    kv = abstract_kv(TINY, NUM_PAGES, PAGE_SIZE, jnp.bfloat16)
    program = steps.compile_step(graph, StepShape(4, 4, 0), TABLE_WIDTH, state, kv, "cpu")
    assert pool_problems(program, kv) == []


# ------------------------------------------------------------------------------------------ planted faults

Step = Callable[..., tuple[jax.Array, KVState]]


def compiled_with(change: Callable[[Step], Step], *, donate: bool = True) -> jax.stages.Compiled:
    """A decode step of four rows, changed."""
    shape = StepShape(4, 4, 0)
    graph, state = tiny_params()
    function = change(functools.partial(steps.step, graph, shape, TABLE_WIDTH))
    jitted = jax.jit(
        function,
        donate_argnums=(1,) if donate else (),
        compiler_options=steps.compile_options("cpu") or None,
    )
    size = inputs.layout(shape, TABLE_WIDTH).size
    return jitted.lower(state, TINY_KV, jax.ShapeDtypeStruct((size,), jnp.int32)).compile()


def test_a_step_that_does_not_donate_is_caught() -> None:
    problems = pool_problems(compiled_with(lambda step: step, donate=False), TINY_KV)
    assert any("bytes are aliased" in p for p in problems)
    assert sum("is not aliased" in p for p in problems) == 4
    assert any(p.startswith("copy") for p in problems)


def test_a_step_that_keeps_the_old_pages_is_caught() -> None:
    """Reading the pages of before after the step has written: XLA must copy them first."""

    def change(step: Step) -> Step:
        def changed(state, kv, buffer):
            out, after = step(state, kv, buffer)
            before = jax.lax.optimization_barrier((kv.k[0], out))[0]
            return out + before[out[:, 0] % 7, 0, 0, 0].astype(jnp.int32)[:, None], after

        return changed

    problems = pool_problems(compiled_with(change), TINY_KV)
    assert any(p.startswith("copy gives something as large as a pool") for p in problems)


@pytest.mark.parametrize("kind", ["add", "scan"])
def test_a_step_that_moves_a_whole_pool_is_caught(kind: str) -> None:
    """Adding to every page, and layers as the xs and ys of a scan: still aliased, still copied."""

    def change(step: Step) -> Step:
        def add(state, kv, buffer):
            out, after = step(state, kv, buffer)
            return out, KVState((after.k[0] + 1.0, *after.k[1:]), after.v)

        def scan(state, kv, buffer):
            out, after = step(state, kv, buffer)
            _, k = jax.lax.scan(lambda carry, pages: (carry, pages * 2.0), 0, jnp.stack(after.k))
            return out, KVState(tuple(k), after.v)

        return add if kind == "add" else scan

    assert any("as large as a pool" in p for p in pool_problems(compiled_with(change), TINY_KV))
