"""The programs of a step as pure functions, and how they are compiled.

    forward(leaves, kv, buffer, previous tokens) -> (emitted [R, D], hidden, kv')    one per StepShape
    choose(output leaves, emitted, buffer, mask) -> (packed, tokens [R])             one per SampleShape
    score(output leaves, hidden, buffer)         -> packed                           one
    copy(kv, pairs)                              -> kv'                              one

Tokens that one step samples are an array that the next step's forward pass takes: they need not come to the
host in between.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator
from collections.abc import Sequence as Seq
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

import pallas_kernels
from jaxinfer.config import SampleShape, StepShape
from jaxinfer.core import MAX_LOGPROBS, Sampled
from jaxinfer.model.kv import KVState
from jaxinfer.runtime import draws as step_draws
from jaxinfer.runtime import inputs as step_inputs
from jaxinfer.runtime.sample import Mask, SamplingOutputs, report, sample
from pallas_kernels import Pages

SCORE_ROWS = 64
"""Rows of logits that the score program makes at a time: a prompt's whole [T, V] may be gigabytes."""

COLUMNS = 3 + 2 * MAX_LOGPROBS
"""Of a packed output row: token, rank, logprob, ids and logprobs of the alternatives."""


def forward(
    graph: nnx.GraphDef,
    shape: StepShape,
    table_width: int,
    most_emitting: int,
    most_tokens: int,
    state: Any,
    kv: KVState,
    buffer: jax.Array,
    previous: jax.Array,
) -> tuple[jax.Array, jax.Array, KVState]:
    """Run one packed step: (emitted [R, D], hidden [Tmax, D], the next KVState), before the last norm.

    `buffer` is `inputs.pack`'s; previous int32 [R] the tokens of the step before. Row i of `emitted` belongs
    to the i-th emitting slice; R is `most_emitting`, Tmax `most_tokens`. A bucket of decode rows alone, which
    nobody can want scored, gives hidden [0, D].
    """
    layout = step_inputs.layout(shape, table_width, most_emitting, has_states=bool(kv.states))
    given = step_inputs.unpack(layout.split(buffer), shape)
    tokens = jnp.where(given.source >= 0, previous[jnp.maximum(given.source, 0)], given.tokens)
    model = nnx.merge(graph, state)
    hidden, kv = model(
        tokens, kv, given.batch, given.slots, given.num_prompt, given.text_positions,
        decode_rows=shape.decode_rows,
    )  # fmt: skip
    emitted = hidden[given.emit]
    padding = most_tokens - shape.tokens
    hidden = jnp.pad(hidden, ((0, padding), (0, 0))) if shape.chunk_rows else hidden[:0]
    return emitted, hidden, kv


def choose(
    graph: nnx.GraphDef,
    shape: SampleShape,
    sampled_vocab: int | None,
    state: Any,
    emitted: jax.Array,
    buffer: jax.Array,
    mask: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Sample the first B emitted rows: (packed int32 [B, COLUMNS], tokens int32 [R], 0 beyond B).

    graph, state: those of `Llama.output()`. `buffer` is `draws.pack`'s; mask int32 [B, ceil(V / 32)].
    """
    inputs, changes, masked = step_draws.unpack(step_draws.layout(shape).split(buffer))
    # The barrier keeps the head's product the same operation in every one of these programs.
    logits = lax.optimization_barrier(nnx.merge(graph, state)(emitted[: shape.rows]))
    sampled = sample(logits, inputs, changes, Mask(masked, mask), sampled_vocab)
    tokens = jnp.zeros((emitted.shape[0],), jnp.int32).at[: shape.rows].set(sampled.token)
    return pack_outputs(sampled), tokens


def score_rows(most_tokens: int) -> int:
    """Rows of logits in a block of the score program."""
    return min(SCORE_ROWS, most_tokens)


@functools.cache
def score_layout(most_tokens: int) -> step_inputs.Layout:
    """place: the packed places whose next token is scored; target: that token; both int32 [Tmax] rounded up
    to whole blocks. count, with_top int32 [1]."""
    rows = score_rows(most_tokens)
    room = -(-most_tokens // rows) * rows
    return step_inputs.Layout.of({"place": (room,), "target": (room,), "count": (1,), "with_top": (1,)})


def score(
    graph: nnx.GraphDef, most_tokens: int, state: Any, hidden: jax.Array, buffer: jax.Array
) -> jax.Array:
    """How likely given tokens are after given places of a step: int32 [Tmax rounded up, COLUMNS], packed as
    `choose` does; rows past the count are zeros. A block of SCORE_ROWS logits exists at a time."""
    named = score_layout(most_tokens).split(buffer)
    model, rows = nnx.merge(graph, state), score_rows(most_tokens)
    hidden = lax.optimization_barrier(hidden)

    def block(index: jax.Array, out: jax.Array) -> jax.Array:
        place = lax.dynamic_slice_in_dim(named["place"], index * rows, rows)
        target = lax.dynamic_slice_in_dim(named["target"], index * rows, rows)
        logits = lax.optimization_barrier(model(hidden[place]))
        packed = pack_outputs(report(logits, target, named["with_top"][0] > 0))
        return lax.dynamic_update_slice_in_dim(out, packed, index * rows, axis=0)

    blocks = (named["count"][0] + rows - 1) // rows
    return lax.fori_loop(0, blocks, block, jnp.zeros((named["place"].shape[0], COLUMNS), jnp.int32))


def copy(kv: KVState, pairs: jax.Array) -> KVState:
    """Copy pages pairs[i] = (from, to), int32 [n, 2], in every layer; all are read before any is written."""

    def copied(pages: Pages) -> Pages:
        return pallas_kernels.copy_pages(pages, pairs[:, 0], pairs[:, 1])

    return jax.tree.map(copied, kv._replace(states=()))._replace(states=kv.states)


def pack_outputs(sampled: SamplingOutputs) -> jax.Array:
    """One int32 array [B, COLUMNS], floats by their bits: one transfer back."""

    def bits(x: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(x, jnp.int32) if x.dtype == jnp.float32 else x

    columns = [sampled.token, sampled.rank, sampled.logprob, sampled.top_ids, sampled.top_logprobs]
    return jnp.concatenate([bits(c).reshape(c.shape[0], -1) for c in columns], axis=1)


Wanted = int | tuple[int, ...]
"""How many of the likeliest alternatives a row wants, or which ids."""


def read_outputs(packed: np.ndarray, rows: list[int], wanted: Seq[Wanted]) -> list[Sampled]:
    """Take the host copy of a packed output apart: row rows[i] with the alternatives wanted[i]."""
    tokens, ranks = packed[:, 0].tolist(), packed[:, 1].tolist()
    floats = packed.view(np.float32)
    logprobs = floats[:, 2].tolist()
    sampled = []
    for row, asked in zip(rows, wanted, strict=True):
        top: tuple[tuple[int, float], ...] = ()
        told: tuple[tuple[int, float, int], ...] = ()
        if asked:
            count = asked if isinstance(asked, int) else len(asked)
            ids = packed[row, 3 : 3 + count].tolist()
            values = floats[row, 3 + MAX_LOGPROBS : 3 + MAX_LOGPROBS + count].tolist()
            if isinstance(asked, int):
                top = tuple(zip(ids, values, strict=True))
            else:  # the ids' place holds their ranks (`SamplingOutputs`)
                told = tuple(zip(asked, values, ids, strict=True))
        sampled.append(Sampled(tokens[row], logprobs[row], ranks[row], top, told))
    return sampled


@functools.cache
def compile_options(platform: str) -> dict[str, Any]:
    """Options of XLA that the programs are written for.

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


def compile_program(
    name: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    platform: str,
    *,
    donate: tuple[int, ...] = (),
) -> jax.stages.Compiled:
    """`function` compiled for arguments like `arguments` (arrays or ShapeDtypeStructs); profiles show `name`.

    A State among them is taken, and must be given at each call, as the flat list of its leaves: taking an
    NNX state apart costs a millisecond of Python a call.
    """
    structures = [jax.tree.structure(x) if isinstance(x, nnx.State) else None for x in arguments]

    def flat(*given: Any) -> Any:
        whole = [
            x if structure is None else jax.tree.unflatten(structure, x)
            for x, structure in zip(given, structures, strict=True)
        ]
        return function(*whole)

    flat.__name__ = name
    flat_arguments = [jax.tree.leaves(x) if isinstance(x, nnx.State) else x for x in arguments]
    jitted = jax.jit(flat, donate_argnums=donate, compiler_options=compile_options(platform) or None)
    with _without_source_lines():
        return jitted.lower(*flat_arguments).compile()


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
