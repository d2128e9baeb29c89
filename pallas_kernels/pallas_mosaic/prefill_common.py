"""What the two prefill kernels share: how a tile is laid out, what it must read, and its online softmax."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.rule import Rule

ROWS = 64
"""Rows of scores of a warpgroup: M of one wgmma, and four warps of 16 rows of mma.sync."""

LOWEST = -1e30
"""The largest score of a row that has seen no key: below any, and finite so that no difference is NaN."""

_LOG2_E = math.log2(math.e)
_COLUMNS = 9  # of `Work.tiles`


@dataclass(frozen=True)
class Layout:
    """How `ROWS` rows of a warpgroup hold queries: row r is token r % tokens of query head r // tokens.

    With up to 8 query heads per KV head (G), a warpgroup holds all of them, and the warpgroups of a tile take
    tokens one after the other. With more they take the same tokens, and `heads` heads each. The queries of a
    head are then a plain box of q [T, N * H], brought by one copy and with no transposed q in memory.

        G 4, two warpgroups:  tokens 16, heads 4, tile 32       G 12: tokens 8, heads 6, tile 8
    """

    group: int
    warpgroups: int

    @property
    def splits_heads(self) -> bool:
        return self.group > 8

    @property
    def heads(self) -> int:
        return -(-self.group // 2) if self.splits_heads else self.group

    @property
    def tokens(self) -> int:
        return 8 if self.splits_heads else 1 << ((ROWS // self.group).bit_length() - 1)

    @property
    def tile(self) -> int:
        """Tokens of a query tile."""
        return self.tokens if self.splits_heads else self.tokens * self.warpgroups


@dataclass(frozen=True)
class Blocks:
    """How keys are visited: `keys` at a time (whole pages, or a part of one), `stages` of them in SMEM."""

    keys: int
    page_size: int
    stages: int

    @property
    def pages(self) -> int:
        """Copies of a block, each within one page."""
        return max(1, self.keys // self.page_size)

    @property
    def copied(self) -> int:
        """Keys of one copy."""
        return min(self.keys, self.page_size)

    @property
    def all_held(self) -> int:
        return (1 << self.pages) - 1


class Work(NamedTuple):
    """What the kernel reads instead of the RaggedBatch: a few int32 of each tile, so that a block of threads
    starts after two dependent reads, and tables padded to whole blocks.

    tiles  [C, 9]   see `Tile`; the most keys first; length 0 past the last
    table  [B, P']  page ids
    held   [B, S / keys]  bit j of a block: its j-th page is not a hole (id 0)
    """

    tiles: jax.Array
    table: jax.Array
    held: jax.Array


class Tile(NamedTuple):
    """int32 scalars of one query tile.

    row; start: the first token that is loaded, at most T - tile so that the load stays inside q; skipped:
    loaded tokens that precede the tile's own; length: the tile's own tokens; base: position of token `start`
    if it were of this row (a chunk's positions are consecutive); keys: kv_len of the row; visits: blocks to
    visit; first_block: the first of them past those of the sinks; end: position of the last token.
    """

    row: jax.Array
    start: jax.Array
    skipped: jax.Array
    length: jax.Array
    base: jax.Array
    keys: jax.Array
    visits: jax.Array
    first_block: jax.Array
    end: jax.Array

    @classmethod
    def read(cls, ref, number: jax.Array) -> Tile:
        return cls(*(ref[number, column] for column in range(_COLUMNS)))

    def block(self, visit: jax.Array, sink_blocks: int) -> jax.Array:
        """The block of keys that is visited as number `visit`: those of the sinks, then the window's."""
        if not sink_blocks:
            return self.first_block + visit
        return jnp.where(visit < sink_blocks, visit, self.first_block + visit - sink_blocks)


def sink_blocks(rule: Rule, blocks: Blocks) -> int:
    return -(-rule.sinks // blocks.keys)


def plan_work(
    tiles: jax.Array, num_tiles: jax.Array, positions: jax.Array, kv_len: jax.Array, page_table: jax.Array,
    *, rule: Rule, layout: Layout, blocks: Blocks,
) -> Work:  # fmt: skip
    """The kernel's description of its tiles. All layers of a step compute it from the same arrays, so XLA
    keeps one copy per step and rule."""
    tokens = max(positions.shape[0], layout.tile)  # q is padded to one tile
    row, first, count = tiles[:, 0], tiles[:, 1], tiles[:, 2]
    count = jnp.where(jnp.arange(tiles.shape[0], dtype=jnp.int32) < num_tiles[0], count, 0)
    start = jnp.clip(first, 0, tokens - layout.tile)
    skipped = first - start
    begin = positions[first]
    end = begin + count - 1
    last_block = end // blocks.keys
    sinks = sink_blocks(rule, blocks)
    if rule.window is None:
        first_block = jnp.zeros_like(row)
        visits = last_block + 1
    else:
        first_block = jnp.maximum(jnp.maximum(begin - rule.window + 1, 0) // blocks.keys, sinks)
        visits = jnp.minimum(sinks, last_block + 1) + jnp.maximum(last_block - first_block + 1, 0)
    visits = jnp.where(count > 0, visits, 0)
    columns = (row, start, skipped, count, begin - skipped, kv_len[row], visits, first_block, end)
    order = jnp.argsort(-visits)  # the longest work first: what is left at the end is short
    described = jnp.stack([column.astype(jnp.int32) for column in columns], axis=1)[order]
    if blocks.page_size > blocks.keys:
        parts = blocks.page_size // blocks.keys
        return Work(described, page_table, jnp.repeat((page_table != 0).astype(jnp.int32), parts, axis=1))
    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % blocks.pages)))
    bits = (table != 0).astype(jnp.int32).reshape(table.shape[0], -1, blocks.pages)
    held = jnp.sum(bits << jnp.arange(blocks.pages, dtype=jnp.int32), axis=-1, dtype=jnp.int32)
    return Work(described, table, held)


def page_of(table_ref, row: jax.Array, block: jax.Array, part: int, blocks: Blocks) -> jax.Array:
    """The page of copy `part` of a block of keys."""
    if blocks.page_size <= blocks.keys:
        return table_ref[row, block * blocks.pages + part]
    return table_ref[row, block // (blocks.page_size // blocks.keys)]


def places_in_page(block: jax.Array, blocks: Blocks) -> Any:
    """The places of a page that a copy of `block` takes."""
    if blocks.page_size <= blocks.keys:
        return pl.ds(0, blocks.page_size)
    part = block % (blocks.page_size // blocks.keys)
    return pl.ds(pl.multiple_of(part * blocks.keys, blocks.keys), blocks.keys)


def gather_rows(rows: jax.Array, work: Work, tokens: int, layout: Layout, kv_heads: int) -> jax.Array:
    """[T, N, H] of rows [C, K * parts, 64, H] as a kernel stores them; zeros for tokens of no tile."""
    width = rows.shape[-1]
    used = layout.heads * layout.tokens
    described = Tile(*work.tiles.T)
    place = jnp.arange(layout.tile, dtype=jnp.int32)
    mine = (place >= described.skipped[:, None]) & (place < (described.skipped + described.length)[:, None])
    token = jnp.where(mine, described.start[:, None] + place, tokens)  # [C, tile]
    number = jnp.arange(token.size, dtype=jnp.int32).reshape(token.shape)
    source = jnp.full((tokens,), -1, jnp.int32).at[token].set(number, mode="drop", unique_indices=False)
    by_token = rows[:, :, :used].reshape(rows.shape[0], kv_heads, -1, layout.tokens, width)
    by_token = by_token.transpose(0, 3, 1, 2, 4)[:, :, :, : layout.group]  # [C, tokens, K, G, H]
    found = by_token.reshape(-1, kv_heads * layout.group, width)[jnp.maximum(source, 0)]
    return jnp.where((source >= 0)[:, None, None], found, jnp.zeros_like(found))


def piece_of(width: int) -> int:
    """Columns that are loaded, or multiplied, at once: those of a tile of 8 rows at the widest swizzle."""
    return plgpu.find_swizzle(width * 16) // 2


def rows_layout(rows: int, width: int, dtype: Any, *, tile_bytes: int = 128) -> Any:
    """Registers that pass 16-bit rows between GMEM and SMEM, `swizzled` or not, without bank conflicts."""
    swizzle = min(plgpu.find_swizzle(width * 16), tile_bytes)
    return plgpu.Layout.SMEM_GMEM_COPY((rows, width), dtype, swizzle)


# ----------------------------------------------------------------------------------------------- visibility


def is_masked(tile: Tile, block: jax.Array, held: jax.Array, base: jax.Array, rule: Rule, blocks: Blocks):
    """Whether some query from position `base` on must not see some key of a block."""
    first = block * blocks.keys
    masked = (first + (blocks.keys - 1) > base) | (held != blocks.all_held)
    if rule.window is not None:
        masked |= first <= tile.end - rule.window
    return masked


def mask(scores, positions, block, held, *, rule: Rule, blocks: Blocks, layout) -> jax.Array:
    """scores [ROWS, keys] of a block with -inf for keys that the row must not see; positions int32 [ROWS], of
    each row's query."""
    offset = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=layout)
    position = lax.broadcast_in_dim(positions, scores.shape, (0,))
    key = offset + block * blocks.keys
    visible = key <= position
    if rule.window is not None:
        near = key > position - rule.window
        visible &= (near | (key < rule.sinks)) if rule.sinks else near
    visible &= ((held >> _page_in_block(offset, blocks)) & 1) != 0
    return jnp.where(visible, scores, -jnp.inf)


def _page_in_block(offset: jax.Array, blocks: Blocks) -> jax.Array:
    """offset is of a block: its page is a shift, page sizes being powers of two."""
    return offset >> (blocks.copied.bit_length() - 1)


def holds_strangers(tile: Tile, block: jax.Array, held: jax.Array, rule: Rule, blocks: Blocks):
    """Whether a block has places that nobody may see: their values may be NaN, which 0 * NaN is too."""
    first = block * blocks.keys
    strange = (first + blocks.keys > tile.keys) | (held != blocks.all_held)
    if rule.window is not None:
        strange |= first < _window_page(tile, rule, blocks)
    return strange


def owned(tile: Tile, offset: jax.Array, block: jax.Array, held: jax.Array, rule: Rule, blocks: Blocks):
    """bool like offset (places in a block): what is really of this row."""
    key = offset + block * blocks.keys
    keep = (key < tile.keys) & (((held >> _page_in_block(offset, blocks)) & 1) != 0)
    if rule.window is not None:
        keep &= (key >= _window_page(tile, rule, blocks)) | (key < rule.sinks)
    return keep


def _window_page(tile: Tile, rule: Rule, blocks: Blocks) -> jax.Array:
    """The first key of the page where the window of the tile's first token begins."""
    assert rule.window is not None
    seen = jnp.maximum(tile.base + tile.skipped - rule.window + 1, 0)
    return seen & -blocks.page_size


# -------------------------------------------------------------------------------------------------- softmax


def capped(scores: jax.Array, rule: Rule) -> tuple[jax.Array, float]:
    """Scores, and the factor that makes them exponents of 2: it holds the scale where that is the same."""
    if rule.soft_cap is not None:
        # tanh by exp2: exact to float32 where the instruction tanh.approx has 11 bits, times the cap.
        grown = jnp.exp2(scores * (2 * _LOG2_E * rule.scale / rule.soft_cap))
        return rule.soft_cap - (2 * rule.soft_cap) / (grown + 1), _LOG2_E
    if rule.scale <= 0:
        return scores * rule.scale, _LOG2_E
    return scores, rule.scale * _LOG2_E
