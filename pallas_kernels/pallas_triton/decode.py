"""Rows of one query: one program per row, KV head and part of the row's keys (flash decoding, 2311.01282).

A step of few rows has too few (row, head) pairs to keep a GPU's memory busy, so a row's blocks of keys are
cut into `splits` equal parts. Each gives an unnormalised float32 sum and its logarithmic weight, which XLA
merges.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.pages import Pages
from pallas_kernels.pallas_triton import common
from pallas_kernels.pallas_triton.common import Blocking, PagesRef, Ref
from pallas_kernels.rule import Rule

PROGRAMS_PER_CORE = 4  # one or two run at a time on a core; more of them even out rows of unequal length
MOST_SPLITS = 64


def splits_of(programs: int, most_keys: int, block_keys: int, num_cores: int) -> int:
    """Parts that each row's keys are cut into, where one part each makes `programs`.

    >>> splits_of(8, 8192, 64, 132), splits_of(512, 8192, 64, 132)    # Llama 3 8B on an H200, 1 and 64 rows
    (64, 2)
    """
    wanted = -(-PROGRAMS_PER_CORE * num_cores // programs)
    return max(1, min(wanted, -(-most_keys // block_keys), MOST_SPLITS))


def attend(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    page_table: jax.Array,
    kv_len: jax.Array,
    *,
    rule: Rule,
    blocking: Blocking,
    num_cores: int,
    interpret: bool,
) -> jax.Array:
    """q [B, N, H] of rows of one query, the last of kv_len [B] keys each; returns [B, N, H].

    page_table [>= B, P]; a row of no keys gives zeros.
    """
    rows, heads, width = q.shape
    kv_heads, page_size = k_pages.shape[1:3]
    group = heads // kv_heads
    parts = -(-group // blocking.rows)  # a group larger than a program's rows is shared out among several
    most_keys = page_table.shape[1] * page_size
    if rule.window is not None:
        most_keys = min(most_keys, rule.window + rule.sinks)
    splits = splits_of(rows * kv_heads * parts, most_keys, blocking.keys, num_cores)
    lanes = common.lanes_of(width)
    if splits == 1:
        outputs = jax.ShapeDtypeStruct((rows, heads, width), q.dtype)
    else:
        outputs = (
            jax.ShapeDtypeStruct((rows, heads, splits, width), jnp.float32),
            jax.ShapeDtypeStruct((rows, heads, splits), jnp.float32),
            jax.ShapeDtypeStruct((rows, heads, splits), jnp.float32),
        )
    kernel = functools.partial(
        _kernel, rule=rule, blocking=blocking, group=group, parts=parts, splits=splits, lanes=lanes
    )
    result = pl.pallas_call(
        kernel,
        out_shape=outputs,
        grid=(kv_heads * parts, splits, rows),
        compiler_params=plt.CompilerParams(num_warps=blocking.warps, num_stages=blocking.stages),
        interpret=interpret,
        name="paged_decode",
    )(q, k_pages, v_pages, page_table, kv_len)
    return result if splits == 1 else _merge(*result).astype(q.dtype)


def _kernel(
    q_ref: Ref, k_ref: PagesRef, v_ref: PagesRef, table_ref: Ref, kv_len_ref: Ref, *out_refs: Ref,
    rule: Rule, blocking: Blocking, group: int, parts: int, splits: int, lanes: int,
) -> None:  # fmt: skip
    kv_head, part = lax.div(pl.program_id(0), parts), lax.rem(pl.program_id(0), parts)
    split, row = pl.program_id(1), pl.program_id(2)
    page_size, width = k_ref.shape[2], q_ref.shape[2]
    num_keys = kv_len_ref[row]
    position = num_keys - 1

    # Rows of the dot product are the group's query heads, at least 16 of them: the rest is masked.
    member = part * blocking.rows + jnp.arange(blocking.rows, dtype=jnp.int32)
    head, exists = kv_head * group + member, member < group
    where, mask = common.vectors(exists, lanes, width, row, head)
    q = plt.load(q_ref.at[*where], mask=mask, other=0.0)

    blocks = common.blocks_of(position, num_keys, blocking.keys, rule)
    share = lax.div(blocks.visits + (splits - 1), splits)

    def block(visit, state):
        keys = blocks.number(visit) * blocking.keys + jnp.arange(blocking.keys, dtype=jnp.int32)
        found = common.find(table_ref, row, keys, common.seen_by(position, keys, rule), page_size)
        return common.absorb(state, q, k_ref, v_ref, kv_head, found, found.held[None, :], rule)

    begin = jnp.minimum(split * share, blocks.visits)
    end = jnp.minimum(begin + share, blocks.visits)
    state = lax.fori_loop(begin, end, block, common.start(blocking.rows, lanes))

    if splits == 1:
        plt.store(out_refs[0].at[*where], common.normalized(state).astype(q.dtype), mask=mask)
        return
    out_ref, largest_ref, total_ref = out_refs
    where, mask = common.vectors(exists, lanes, width, row, head, split)
    plt.store(out_ref.at[*where], state.out, mask=mask)
    plt.store(largest_ref.at[row, head, split], state.largest, mask=exists)
    plt.store(total_ref.at[row, head, split], state.total, mask=exists)


def _merge(out: jax.Array, largest: jax.Array, total: jax.Array) -> jax.Array:
    """Sums of the parts [B, N, splits, H], relative to their largest scores [B, N, splits] -> [B, N, H]."""
    weights = jnp.exp2(largest - jnp.max(largest, axis=-1, keepdims=True))
    total = jnp.sum(total * weights, axis=-1)
    out = jnp.sum(out * weights[..., None], axis=2)
    return out / jnp.where(total > 0, total, 1.0)[..., None]
