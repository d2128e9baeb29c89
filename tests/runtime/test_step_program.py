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

from jaxinfer.config import ModelConfig, SampleShape, StepShape, shape_ladder
from jaxinfer.model.kv import KVState, create_kv
from jaxinfer.model.llama import abstract_model
from jaxinfer.presets import PRESETS
from jaxinfer.runtime import steps
from jaxinfer.runtime.programs import COPY, SCORE, Bucket, Programs

pytestmark = pytest.mark.usefixtures("compile_cache")

TABLE_WIDTH, NUM_PAGES, PAGE_SIZE = 16, PLENTY, 8
LADDER = shape_ladder(4, 32)


def abstract_kv(config: ModelConfig, num_pages: int, page_size: int, dtype: Any = jnp.float32) -> KVState:
    """Shapes only: nothing is allocated."""
    return jax.eval_shape(lambda: create_kv(config, num_pages, page_size, dtype))


TINY_KV = abstract_kv(TINY, NUM_PAGES, PAGE_SIZE)


@functools.cache
def tiny_programs() -> Programs:
    return Programs(
        TINY, *tiny_params(), TINY_KV, LADDER, table_width=TABLE_WIDTH, platform="cpu", most_changes=600
    )


def compiled(programs: Programs, bucket: Bucket) -> jax.stages.Compiled:
    source = programs.source(bucket)
    return steps.compile_program("test", source.function, source.arguments, "cpu", donate=source.donate)


@pytest.mark.parametrize("bucket", [*LADDER, StepShape(32, 0, 4, True), COPY], ids=str)
def test_every_bucket_updates_its_pages_in_place(bucket: Bucket) -> None:
    assert pool_problems(compiled(tiny_programs(), bucket), TINY_KV) == []


@pytest.mark.parametrize("bucket", [SampleShape(4, 1200), SCORE], ids=str)
def test_samplers_and_scores_never_see_the_pages(bucket: Bucket) -> None:
    """Nor a second set of parameters: what they take is the last norm, the head and a few rows."""
    source = tiny_programs().source(bucket)
    assert source.donate == ()
    assert len(jax.tree.leaves(source.arguments[0])) == 2
    pool = jax.tree.leaves(TINY_KV)[0].size
    assert all(leaf.size < pool for leaf in jax.tree.leaves(source.arguments))


@pytest.mark.parametrize("bucket", [StepShape(32, 32, 0), StepShape(144, 16, 16), COPY], ids=str)
def test_a_real_model_updates_its_pages_in_place(bucket: Bucket) -> None:
    """SmolLM2-135M's shape, 30 layers, 8209 pages of 16 (101 MB a layer for K, as much for V)."""
    config = ModelConfig.from_hf(PRESETS["smollm2-135m"])
    kv = abstract_kv(config, 8209, 16)
    ladder = (StepShape(32, 32, 0), StepShape(144, 16, 16))
    graph, state = abstract_model(config, tiny_build())
    programs = Programs(config, graph, state, kv, ladder, table_width=512, platform="cpu", most_changes=600)
    program = compiled(programs, bucket)
    assert pool_problems(program, kv) == []
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < memory.alias_size_in_bytes / 10


def test_bfloat16_pages_are_updated_in_place() -> None:
    graph, state = abstract_model(TINY, tiny_build("bfloat16"))
    kv = abstract_kv(TINY, NUM_PAGES, PAGE_SIZE, jnp.bfloat16)
    programs = Programs(
        TINY, graph, state, kv, LADDER, table_width=TABLE_WIDTH, platform="cpu", most_changes=600
    )
    for bucket in (StepShape(4, 4, 0), COPY):
        assert pool_problems(compiled(programs, bucket), kv) == []


def test_scores_of_a_long_step_need_a_block_of_logits_alone() -> None:
    """2048 rows of 49152 logits would be 400 MB."""
    config = ModelConfig.from_hf(PRESETS["smollm2-135m"])
    graph, state = abstract_model(config, tiny_build())
    ladder = (StepShape(2048, 0, 8),)
    kv = abstract_kv(config, 9, 16)
    programs = Programs(config, graph, state, kv, ladder, table_width=512, platform="cpu", most_changes=600)
    memory = compiled(programs, SCORE).memory_analysis()
    assert memory is not None
    block = steps.SCORE_ROWS * config.vocab_size * 4
    assert memory.temp_size_in_bytes < 5 * block


# ------------------------------------------------------------------------------------------ planted faults

Step = Callable[..., tuple[jax.Array, jax.Array, KVState]]


def compiled_with(change: Callable[[Step], Step], *, donate: bool = True) -> jax.stages.Compiled:
    """A decode step of four rows, changed."""
    source = tiny_programs().source(StepShape(4, 4, 0))
    function = change(source.function)
    return steps.compile_program(
        "test", function, source.arguments, "cpu", donate=source.donate if donate else ()
    )


def test_a_step_that_does_not_donate_is_caught() -> None:
    problems = pool_problems(compiled_with(lambda step: step, donate=False), TINY_KV)
    assert any("bytes are aliased" in p for p in problems)
    assert sum("is not aliased" in p for p in problems) == 4
    assert any(p.startswith("copy") for p in problems)


def test_a_step_that_keeps_the_old_pages_is_caught() -> None:
    """Reading the pages of before after the step has written: XLA must copy them first."""

    def change(step: Step) -> Step:
        def changed(state, kv, buffer, previous):
            out, hidden, after = step(state, kv, buffer, previous)
            before = jax.lax.optimization_barrier((kv.k[0], out))[0]
            row = out[:, 0].astype(jnp.int32) % 7
            return out + before[row, 0, 0, 0].astype(jnp.float32)[:, None], hidden, after

        return changed

    problems = pool_problems(compiled_with(change), TINY_KV)
    assert any(p.startswith("copy gives something as large as a pool") for p in problems)


@pytest.mark.parametrize("kind", ["add", "scan"])
def test_a_step_that_moves_a_whole_pool_is_caught(kind: str) -> None:
    """Adding to every page, and layers as the xs and ys of a scan: still aliased, still copied."""

    def change(step: Step) -> Step:
        def add(state, kv, buffer, previous):
            out, hidden, after = step(state, kv, buffer, previous)
            return out, hidden, KVState((after.k[0] + 1.0, *after.k[1:]), after.v)

        def scan(state, kv, buffer, previous):
            out, hidden, after = step(state, kv, buffer, previous)
            _, k = jax.lax.scan(lambda carry, pages: (carry, pages * 2.0), 0, jnp.stack(after.k))
            return out, hidden, KVState(tuple(k), after.v)

        return add if kind == "add" else scan

    assert any("as large as a pool" in p for p in pool_problems(compiled_with(change), TINY_KV))
