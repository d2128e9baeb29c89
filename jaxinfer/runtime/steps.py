"""The step: a pure function of (parameters, KV state, one packed buffer), compiled once per bucket."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxinfer.config import StepShape
from jaxinfer.core import MAX_LOGPROBS, Sampled
from jaxinfer.model.kv import KVState
from jaxinfer.runtime import inputs as step_inputs
from jaxinfer.runtime.sample import SamplingOutputs, sample


def step(
    graph: nnx.GraphDef,
    shape: StepShape,
    table_width: int,
    state: Any,
    kv: KVState,
    buffer: jax.Array,
    sampled_vocab: int | None = None,
) -> tuple[jax.Array, KVState]:
    """Run one packed step: (what was sampled int32 [B, 3 + 2 * MAX_LOGPROBS], the next KVState).

    `buffer` is `inputs.pack`'s; `read_outputs` takes the result apart on the host. `sampled_vocab` is
    `sample`'s.
    """
    named = step_inputs.layout(shape, table_width).split(buffer)
    given = step_inputs.unpack(named)
    model = nnx.merge(graph, state)
    hidden, kv = model(
        given.tokens, kv, given.batch, given.slots, given.num_prompt, decode_rows=shape.decode_rows
    )
    logits = model.logits(hidden[given.emit])
    return _pack_outputs(sample(logits, given.sampling, sampled_vocab)), kv


def _pack_outputs(sampled: SamplingOutputs) -> jax.Array:
    """One int32 array, floats by their bits: one transfer back."""

    def bits(x: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(x, jnp.int32) if x.dtype == jnp.float32 else x

    columns = [sampled.token, sampled.rank, sampled.logprob, sampled.top_ids, sampled.top_logprobs]
    return jnp.concatenate([bits(c).reshape(c.shape[0], -1) for c in columns], axis=1)


def read_outputs(packed: Any, rows: list[int], wanted: list[int]) -> list[Sampled]:
    """Take the host copy of `step`'s output apart: row rows[i] with its wanted[i] best alternatives."""
    floats = packed.view("float32")
    sampled = []
    for row, count in zip(rows, wanted, strict=True):
        ids = packed[row, 3 : 3 + count].tolist()
        logprobs = floats[row, 3 + MAX_LOGPROBS : 3 + MAX_LOGPROBS + count].tolist()
        top = tuple(zip(ids, logprobs, strict=True))
        sampled.append(Sampled(int(packed[row, 0]), float(floats[row, 2]), int(packed[row, 1]), top))
    return sampled


@functools.cache
def compile_options(platform: str) -> dict[str, Any]:
    """Options of XLA that the step is written for.

    On CPU, products take their inputs' broadcasts in (see model.linear.Blocked). An XLA that does not know
    the option compiles the same program without it, slower for few rows.
    """
    if platform != "cpu":
        return {}
    options = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_DOT"}
    try:
        jax.jit(lambda x: x + 1, compiler_options=options).lower(jnp.float32(0)).compile()
    except Exception:
        return {}
    return options


def compile_step(
    graph: nnx.GraphDef,
    shape: StepShape,
    table_width: int,
    state: Any,
    kv: KVState,
    platform: str,
    sampled_vocab: int | None = None,
) -> jax.stages.Compiled:
    """The program of one bucket, with KV donated; call it as `program(leaves, kv, buffer)`.

    `leaves` is `jax.tree.leaves(state)`: a flat list, because taking an NNX state apart costs a millisecond
    of Python a call. `state` and `kv` may be arrays or ShapeDtypeStructs.
    """
    leaves, structure = jax.tree.flatten(state)

    def flat_step(leaves: list[jax.Array], kv: KVState, buffer: jax.Array) -> tuple[jax.Array, KVState]:
        state = jax.tree.unflatten(structure, leaves)
        return step(graph, shape, table_width, state, kv, buffer, sampled_vocab)

    function = jax.jit(flat_step, donate_argnums=(1,), compiler_options=compile_options(platform) or None)
    size = step_inputs.layout(shape, table_width).size
    with _without_source_lines():
        return function.lower(leaves, kv, jax.ShapeDtypeStruct((size,), jnp.int32)).compile()


@contextlib.contextmanager
def _without_source_lines() -> Generator[None]:
    """Leave Python's call stacks out of the program: they are a fifth of what a compiled program keeps in
    memory. The names of layers (`jax.named_scope`) stay."""
    before = jax.config.jax_traceback_in_locations_limit
    jax.config.update("jax_traceback_in_locations_limit", 0)
    try:
        yield
    finally:
        jax.config.update("jax_traceback_in_locations_limit", before)
