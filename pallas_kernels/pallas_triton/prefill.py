"""Rows of many queries, in tiles: one program per query tile and KV head.

The rows of a tile's dot products are its tokens times the query heads of the group. Blocks of keys that every
token of the tile sees need no comparison of positions: they are visited by a loop of their own.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.batch import RaggedBatch
from pallas_kernels.pages import Pages
from pallas_kernels.pallas_triton import common
from pallas_kernels.pallas_triton.common import Blocking, PagesRef, Ref
from pallas_kernels.rule import Rule


def tile_tokens(group: int, blocking: Blocking) -> int:
    """Most tokens of a query tile.

    >>> tile_tokens(4, Blocking(rows=128, keys=64, warps=8, stages=3))
    32
    """
    return max(1, blocking.rows // group)


def attend(
    out: jax.Array,
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    batch: RaggedBatch,
    *,
    rule: Rule,
    blocking: Blocking,
    interpret: bool,
) -> jax.Array:
    """`out` [T, N, H] with the attention of the tokens of `batch.tiles[0]` in their places, and the others as
    they were: a program writes the tokens of its tile and nothing else.

    q [T, N, H]. A tile has at most `tile_tokens` tokens, at consecutive positions of one row; one of 0 tokens
    is padding.
    """
    heads, width = q.shape[1:]
    kv_heads = k_pages.shape[1]
    group = heads // kv_heads
    members = min(group, blocking.rows)  # query heads of a program: a larger group is shared out
    parts = -(-group // members)
    (tiles,) = batch.tiles
    kernel = functools.partial(
        _kernel, rule=rule, blocking=blocking, group=group, members=members, lanes=common.lanes_of(width)
    )
    operands = (out, q, k_pages, v_pages, batch.page_table, batch.positions, tiles)
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
        grid=(tiles.shape[0], kv_heads, parts),
        input_output_aliases={0: 0},
        compiler_params=plt.CompilerParams(num_warps=blocking.warps, num_stages=blocking.stages),
        interpret=interpret,
        name="paged_prefill",
    )(*operands)


def _kernel(
    _: Ref, q_ref: Ref, k_ref: PagesRef, v_ref: PagesRef, table_ref: Ref, positions_ref: Ref, tiles_ref: Ref,
    out_ref: Ref, *, rule: Rule, blocking: Blocking, group: int, members: int, lanes: int,
) -> None:  # fmt: skip
    # The last tiles have the most keys before them: they start first, so that no long one is left at the end.
    tile = tiles_ref.shape[0] - 1 - pl.program_id(0)
    kv_head, part = pl.program_id(1), pl.program_id(2)
    page_size, width = k_ref.shape[2], q_ref.shape[2]
    row, first_token, count = tiles_ref[tile, 0], tiles_ref[tile, 1], tiles_ref[tile, 2]

    # Rows of the dot products are (token, query head of the group), the head fastest.
    place = jnp.arange(blocking.rows, dtype=jnp.int32)
    token, member = lax.div(place, members), part * members + lax.rem(place, members)
    exists = (token < count) & (member < group)
    where, mask = common.vectors(exists, lanes, width, first_token + token, kv_head * group + member)
    q = plt.load(q_ref.at[*where], mask=mask, other=0.0)
    position = plt.load(positions_ref.at[first_token + token], mask=exists, other=-1)
    first = positions_ref[first_token]
    last = positions_ref[first_token + jnp.maximum(count - 1, 0)]

    blocks = common.blocks_of(first, jnp.where(count > 0, last + 1, 0), blocking.keys, rule)

    def block(visit, state, *, by_all: bool):
        keys = blocks.number(visit) * blocking.keys + jnp.arange(blocking.keys, dtype=jnp.int32)
        wanted = (keys <= last) & common.behind(first, keys, rule)
        found = common.find(table_ref, row, keys, wanted, page_size)
        seen = found.held[None, :]
        if not by_all:
            seen &= common.seen_by(position[:, None], keys[None, :], rule)
        return common.absorb(state, q, k_ref, v_ref, kv_head, found, seen, rule)

    state = common.start(blocking.rows, lanes)
    seen_by_all = 0
    if rule.window is None:
        seen_by_all = jnp.minimum(lax.div(first + 1, blocking.keys), blocks.visits)
        state = lax.fori_loop(0, seen_by_all, functools.partial(block, by_all=True), state)
    state = lax.fori_loop(seen_by_all, blocks.visits, functools.partial(block, by_all=False), state)
    plt.store(out_ref.at[*where], common.normalized(state).astype(q.dtype), mask=mask)
