"""What the decode and the prefill kernel share: masked loads from pages, and the online softmax.

Everything here runs inside a kernel. Arrays have sizes that are powers of two (Triton knows no others):
`rows` of queries, S keys of a block, `lanes` of a head's width rounded up. What does not exist is masked, and
a masked load touches no memory: a place that no query sees may hold NaN, and costs no bandwidth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt

from pallas_kernels.pages import QuantizedPages
from pallas_kernels.rule import Rule

LOG2E = math.log2(math.e)
NOTHING = -1e30  # largest score of a query that saw no key yet: finite, for -inf less -inf is NaN

Ref = Any  # a reference to an operand in the GPU's memory; Pallas has no public name for it
PagesRef = Any  # the same, or QuantizedPages of two


@dataclass(frozen=True)
class Blocking:
    """Static sizes of one kernel: `rows` of queries and `keys` of a block, both powers of two, `warps` of a
    program, and the `stages` into which Triton cuts the loop over blocks to load ahead."""

    rows: int
    keys: int
    warps: int
    stages: int


def power_of_two(number: int) -> int:
    """The next power of two: 80 -> 128."""
    return 1 << (number - 1).bit_length()


def lanes_of(width: int) -> int:
    """Elements of a padded head: a dot product wants at least 16."""
    return max(16, power_of_two(width))


def vectors(
    exists: jax.Array, lanes: int, width: int, *indices: jax.Array
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Places of whole vectors and which of them there are, as loads and stores want them: (indices, mask).

    `indices` of all axes but the last, arrays [n] or scalars; `exists` [n]; the vectors are `width` long, and
    padded to `lanes`. Indices are separate for every axis: Pallas sums them in 64 bits where a pool needs it.
    """
    shape = (exists.shape[0], lanes)
    lane = jnp.broadcast_to(jnp.arange(lanes, dtype=jnp.int32)[None, :], shape)
    mask = jnp.broadcast_to(exists[:, None], shape)
    if lanes != width:
        mask &= lane < width
    spread = (jnp.broadcast_to(index[:, None], shape) if index.ndim else index for index in indices)
    return (*spread, lane), mask


class Blocks(NamedTuple):
    """The blocks that hold keys which some query sees: those of the sinks, then `begin` .. `end` - 1."""

    sinks: jax.Array
    begin: jax.Array
    end: jax.Array

    @property
    def visits(self) -> jax.Array:
        return self.sinks + self.end - self.begin

    def number(self, visit: jax.Array) -> jax.Array:
        """The block of a visit: 0 1 | 7 8 9 with two blocks of sinks and begin 7."""
        return jnp.where(visit < self.sinks, visit, visit - self.sinks + self.begin)


def blocks_of(first_position: jax.Array, num_keys: jax.Array, block_keys: int, rule: Rule) -> Blocks:
    """Blocks that queries from `first_position` to position `num_keys` - 1 need; none if `num_keys` is 0."""
    end = lax.div(num_keys + (block_keys - 1), block_keys)
    sinks = jnp.minimum(-(-rule.sinks // block_keys), end)
    if rule.window is None:
        return Blocks(sinks, sinks, end)
    first_key = jnp.maximum(first_position - rule.window + 1, 0)
    return Blocks(sinks, jnp.clip(lax.div(first_key, block_keys), sinks, end), end)


def seen_by(position: jax.Array, keys: jax.Array, rule: Rule) -> jax.Array:
    """Which `keys` a query at `position` sees, by the rule alone."""
    return (keys <= position) & behind(position, keys, rule)


def behind(position: jax.Array, keys: jax.Array, rule: Rule) -> jax.Array:
    """Which `keys` are not too far behind `position`: inside of its window, or sinks."""
    if rule.window is None:
        return jnp.full(jnp.broadcast_shapes(position.shape, keys.shape), True)
    near = keys > position - rule.window
    return (near | (keys < rule.sinks)) if rule.sinks else near


class Keys(NamedTuple):
    """Where the keys of a block lie, [S] each: page and offset; `held` is false for those that no query of
    the program sees and for holes: they are not loaded."""

    page_ids: jax.Array
    offsets: jax.Array
    held: jax.Array


def find(table_ref: Ref, row: jax.Array, keys: jax.Array, wanted: jax.Array, page_size: int) -> Keys:
    """The places of key positions [S] of a row; those not `wanted` are not looked up."""
    page_ids = plt.load(table_ref.at[row, lax.div(keys, page_size)], mask=wanted, other=0)
    return Keys(page_ids, lax.rem(keys, page_size), wanted & (page_ids != 0))


class State(NamedTuple):
    """The online softmax of queries, float32: largest score [rows] (base 2), and relative to it the sum of
    weights [rows] and the weighted sum of values [rows, lanes]."""

    largest: jax.Array
    total: jax.Array
    out: jax.Array


def start(rows: int, lanes: int) -> State:
    return State(
        jnp.full((rows,), NOTHING, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        jnp.zeros((rows, lanes), jnp.float32),
    )


def absorb(
    state: State,
    q: jax.Array,
    k_ref: PagesRef,
    v_ref: PagesRef,
    kv_head: jax.Array,
    keys: Keys,
    seen: jax.Array,
    rule: Rule,
) -> State:
    """The softmax `state` of q [rows, lanes] after one more block of keys; `seen` [rows | 1, S]: which query
    sees which. The scale of a quantised key multiplies its score and that of a value its weight: no vector is
    ever scaled.
    """
    lanes = q.shape[-1]
    k, k_scales = _load(k_ref, kv_head, keys, lanes)
    scores = _dot(q, k.astype(q.dtype), transposed=True)
    if k_scales is not None:
        scores *= k_scales[None, :]
    if rule.soft_cap is None:
        scores *= rule.scale * LOG2E
    else:
        scores = jnp.tanh(scores * (rule.scale / rule.soft_cap)) * (rule.soft_cap * LOG2E)
    scores = jnp.where(jnp.broadcast_to(seen, scores.shape), scores, -jnp.inf)
    largest = jnp.maximum(state.largest, jnp.max(scores, axis=1))
    weights = jnp.exp2(scores - largest[:, None])
    decay = jnp.exp2(state.largest - largest)
    total = state.total * decay + jnp.sum(weights, axis=1)
    v, v_scales = _load(v_ref, kv_head, keys, lanes)
    if v_scales is not None:
        weights *= v_scales[None, :]
    out = state.out * decay[:, None] + _dot(weights.astype(q.dtype), v.astype(q.dtype))
    return State(largest, total, out)


def normalized(state: State) -> jax.Array:
    """[rows, lanes]; zeros for a query that saw no key."""
    return state.out / jnp.where(state.total > 0, state.total, 1.0)[:, None]


def _load(
    pages_ref: PagesRef, kv_head: jax.Array, keys: Keys, lanes: int
) -> tuple[jax.Array, jax.Array | None]:
    """Vectors [S, lanes] in the dtype of the pages, zeros where not held; float32 scales [S], or None."""
    values_ref: Ref = pages_ref
    scales = None
    if isinstance(pages_ref, QuantizedPages):
        values_ref, scales_ref = pages_ref
        places: Ref = scales_ref.at[keys.page_ids, kv_head, keys.offsets]
        scales = plt.load(places, mask=keys.held, other=0.0)
    where, mask = vectors(keys.held, lanes, values_ref.shape[-1], keys.page_ids, kv_head, keys.offsets)
    nothing = 0 if jnp.issubdtype(values_ref.dtype, jnp.integer) else 0.0
    values: Ref = values_ref.at[*where]
    return plt.load(values, mask=mask, other=nothing), scales


def _dot(a: jax.Array, b: jax.Array, transposed: bool = False) -> jax.Array:
    """a b or a b^T with float32 sums; float32 operands keep their bits (TF32 would round them to 10)."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return plt.dot(a, b, trans_b=transposed, precision=precision)
