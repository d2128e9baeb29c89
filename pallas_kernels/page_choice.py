"""Queries that choose which pages they see, by a bound on the scores of each page's keys (Quest, 2406.10774).

Of every full page there is the least and the largest key in each channel (`PageBounds`). The score of a query
q with any key of the page is at most the sum over channels of max(q * low, q * high). Each KV head takes the
`count` pages of highest bound before the query's own, the largest bound of its query heads counting, and
attends to them and the own page: attention over compact tables, by the kernels that serve whole ones.

Kernels know one table a row, and here each KV head has its own. So a row becomes K rows of one KV head, in a
pool seen as [M * K, 1, Z, H]: page p of head h is page p * K + h there, in the same memory.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention import paged_attention
from pallas_kernels.batch import RaggedBatch
from pallas_kernels.device import Backend
from pallas_kernels.pages import Pages, QuantizedPages, dequantize
from pallas_kernels.rule import Rule

_BLOCK_BYTES = 2 << 20
"""Of the bounds that are gathered at a time."""


class PageBounds(NamedTuple):
    """The least and the largest key of each page in each channel: low, high [M, K, H] of one layer, as read
    from the pages. Those of pages that are not full mean nothing."""

    low: jax.Array
    high: jax.Array


def create_bounds(k_pages: Pages) -> PageBounds:
    """Zeros for a pool [M, K, Z, H], in its dtype; float32 where it is quantised."""
    pages, heads, _, width = k_pages.shape
    dtype = jnp.float32 if isinstance(k_pages, QuantizedPages) else k_pages.dtype
    return PageBounds(jnp.zeros((pages, heads, width), dtype), jnp.zeros((pages, heads, width), dtype))


@functools.partial(jax.tree_util.register_dataclass, data_fields=["filled", "chooses"], meta_fields=["count"])
@dataclass(frozen=True)
class PageChoice:
    """Of one step, for all layers. filled int32 [n]: pages that this step fills up, 0 for padding; chooses
    bool [T]: whether a token's query chooses, where others see all; `count` pages each."""

    filled: jax.Array
    chooses: jax.Array
    count: int


def page_choice(
    batch: RaggedBatch,
    num_prompt: jax.Array,
    page_size: int,
    *,
    decode_rows: int,
    count: int,
    start: int | None = None,
) -> PageChoice:
    """Queries at num_prompt int32 [B] of their row and later choose; with `start`, at `start` and later
    too."""
    tokens, rows = batch.positions.shape[0], batch.kv_len.shape[0]
    real, row = batch.token_row >= 0, jnp.maximum(batch.token_row, 0)
    first = num_prompt[row] if start is None else jnp.minimum(num_prompt[row], start)
    ends = real & (batch.positions % page_size == page_size - 1)
    chunk_rows = rows - decode_rows
    most = min(tokens, decode_rows + (tokens - decode_rows) // page_size + chunk_rows)
    (where,) = jnp.nonzero(ends, size=most, fill_value=tokens)
    at = jnp.minimum(where, tokens - 1)
    pages = batch.page_table[row[at], batch.positions[at] // page_size]
    return PageChoice(jnp.where(where < tokens, pages, 0), real & (batch.positions >= first), count)


def update_bounds(bounds: PageBounds, k_pages: Pages, choice: PageChoice) -> PageBounds:
    """The bounds once this step's keys are written; in place when `bounds` is donated."""
    if isinstance(k_pages, QuantizedPages):
        keys = dequantize(k_pages.values[choice.filled], k_pages.scales[choice.filled])
    else:
        keys = k_pages[choice.filled].astype(jnp.float32)  # [n, K, Z, H]

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[choice.filled].set(new.astype(old.dtype), mode="promise_in_bounds")

    return PageBounds(put(bounds.low, jnp.min(keys, axis=2)), put(bounds.high, jnp.max(keys, axis=2)))


def attend_chosen(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    bounds: PageBounds,
    batch: RaggedBatch,
    choice: PageChoice,
    *,
    decode_rows: int,
    rule: Rule,
    backend: Backend,
) -> jax.Array:
    """`paged_attention` [T, N, H] where the queries that choose see the chosen pages and their own alone.

    Each of the three kinds (all that see everything; decode rows that choose; tokens of chunks that choose)
    is computed only in a step that has such. A token of a chunk that chooses is a row of its own: slow, and
    rare while queries of prompts do not choose (an answer that is computed again after a preemption).
    """
    real = batch.token_row >= 0

    def everything() -> jax.Array:
        return paged_attention(
            q, k_pages, v_pages, batch, decode_rows=decode_rows, rule=rule, backend=backend
        )

    def part(first: int, end: int) -> jax.Array:
        def chosen() -> jax.Array:
            return _attend_rows(
                q[first:end], k_pages, v_pages, bounds, batch, choice, first, rule=rule, backend=backend
            )

        return lax.cond(jnp.any(choice.chooses[first:end]), chosen, lambda: jnp.zeros_like(q[first:end]))

    whole = lax.cond(jnp.any(real & ~choice.chooses), everything, lambda: jnp.zeros_like(q))
    borders = sorted({0, decode_rows, q.shape[0]})
    parts = [part(*border) for border in itertools.pairwise(borders)]
    return jnp.where(choice.chooses[:, None, None], jnp.concatenate(parts), whole)


def _attend_rows(q, k_pages, v_pages, bounds, batch, choice, first, *, rule, backend):
    """Tokens first .. first + R - 1 of a step, each a row: q [R, N, H] -> [R, N, H]; zeros where one does not
    choose."""
    rows, heads, width = q.shape
    kv_heads, page_size = k_pages.shape[1:3]
    row = jnp.maximum(batch.token_row[first : first + rows], 0)
    position = batch.positions[first : first + rows]
    chooses = choice.chooses[first : first + rows]
    own = position // page_size
    table = batch.page_table[row]  # [R, P]
    grouped = q.reshape(rows, kv_heads, heads // kv_heads, width)
    chosen = choose_pages(grouped, bounds, table, jnp.where(chooses, own, 0), choice.count)  # [R, K, k]

    # The chosen pages in order, the own one behind them, and holes.
    count = jnp.minimum(own, chosen.shape[-1])[:, None, None]
    place = jnp.arange(chosen.shape[-1] + 1, dtype=jnp.int32)
    index = jnp.pad(chosen, ((0, 0), (0, 0), (0, 1)))
    index = jnp.where(place == count, own[:, None, None], jnp.where(place < count, index, 0))
    pages = jnp.take_along_axis(table[:, None, :], index, axis=2)
    head = jnp.arange(kv_heads, dtype=jnp.int32)[None, :, None]
    pages = jnp.where((place <= count) & chooses[:, None, None], pages * kv_heads + head, 0)
    kv_len = jnp.where(chooses, count[:, 0, 0] * page_size + position % page_size + 1, 0)

    each = rows * kv_heads
    kv_len = jnp.repeat(kv_len, kv_heads)
    compact = RaggedBatch(
        token_row=jnp.where(kv_len > 0, jnp.arange(each, dtype=jnp.int32), -1),
        positions=jnp.maximum(kv_len - 1, 0),
        page_table=pages.reshape(each, -1),
        kv_len=kv_len,
        tiles=tuple(jnp.zeros((1, 3), jnp.int32) for _ in batch.tile_sizes),
        num_tiles=jnp.zeros_like(batch.num_tiles),
        tile_sizes=batch.tile_sizes,
    )
    attended = paged_attention(
        grouped.reshape(each, -1, width), _by_head(k_pages), _by_head(v_pages), compact,
        decode_rows=each, rule=rule, backend=backend,
    )  # fmt: skip
    return attended.reshape(rows, heads, width)


def _by_head(pages: Pages) -> Pages:
    """A pool [M, K, Z, H] as [M * K, 1, Z, H], without moving it."""

    def apart(array: jax.Array) -> jax.Array:
        return array.reshape(-1, 1, *array.shape[2:])

    return jax.tree.map(apart, pages)


def choose_pages(q: jax.Array, bounds: PageBounds, table: jax.Array, own: jax.Array, count: int) -> jax.Array:
    """q [R, K, G, H], table int32 [R, P], own int32 [R] -> int32 [R, K, min(count, P)]: of the places 0 ..
    own - 1 in a row's table those whose pages have the highest bounds, in order; places past those mean
    nothing. Of equal bounds the first is taken."""
    scores = page_scores(q, bounds, table, own)
    width = scores.shape[-1]
    _, chosen = lax.top_k(scores, min(count, table.shape[1]))
    return jnp.sort(jnp.where(chosen < own[:, None, None], chosen, width), axis=-1)


def page_scores(q: jax.Array, bounds: PageBounds, table: jax.Array, own: jax.Array) -> jax.Array:
    """The bound of each place in a row's table: float32 [R, K, P rounded up], -inf from `own` on. Blocks of
    pages up to the longest row's end are looked at, so that a short batch does not pay for P."""
    rows, kv_heads, _, width = q.shape
    fit = max(1, _BLOCK_BYTES // (2 * rows * kv_heads * width * 4))
    block = 1 << (min(fit, 64, table.shape[1]).bit_length() - 1)
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % block)))
    q = q.astype(jnp.float32)
    above, below = jnp.maximum(q, 0.0), jnp.minimum(q, 0.0)

    def body(number: jax.Array, scores: jax.Array) -> jax.Array:
        ids = lax.dynamic_slice_in_dim(table, number * block, block, axis=1)
        # low <= high: a channel's maximum is q * high for a positive q, and q * low for a negative one.
        high, low = (bound[ids].astype(jnp.float32) for bound in (bounds.high, bounds.low))  # [R, C, K, H]
        bound = jnp.einsum("rkgh,rckh->rkgc", above, high) + jnp.einsum("rkgh,rckh->rkgc", below, low)
        place = number * block + jnp.arange(block, dtype=jnp.int32)
        bound = jnp.where((place < own[:, None])[:, None, :], jnp.max(bound, axis=2), -jnp.inf)
        return lax.dynamic_update_slice_in_dim(scores, bound, number * block, axis=2)

    start = jnp.full((rows, kv_heads, table.shape[1]), -jnp.inf)
    return lax.fori_loop(0, (jnp.max(own) + block - 1) // block, body, start)
