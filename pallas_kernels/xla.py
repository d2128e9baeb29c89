"""Paged attention in plain XLA: blockwise online softmax, with nothing of size T x S.

Tuned for the CPU, where the cost is memory traffic and page faults, not arithmetic:

* Keys are visited in blocks by a loop with a dynamic trip count, so one program serves every context
  length and a short batch pays for its own length alone.
* A block is a few pages of every row, gathered as [rows * K, Z * H] slabs. The barrier after the gather
  matters: fused with the reshape that follows, XLA computes a gather index per element, 4x slower.
* V is gathered only after the scores are done, and blocks are sized so that gathered K or V stays near
  `_BLOCK_BYTES`: larger temporaries leave the cache and come back from the allocator as fresh pages.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.batch import TILE_SIZES, RaggedBatch
from pallas_kernels.device import Backend, Device, Geometry
from pallas_kernels.pages import Pages, QuantizedPages
from pallas_kernels.rule import Rule

_BLOCK_BYTES = 3 << 20
_BLOCK_KEYS = 128  # most keys of a decoding row in a block; a short row pays for a whole one
_MASKED = -1e30  # finite: exp(_MASKED - _MASKED) is 1 and is selected away, where -inf would give NaN


def unsupported(device: Device, geometry: Geometry, interpret: bool) -> str:
    """It runs wherever XLA does; the interpreter is for GPU kernels."""
    del device, geometry
    return "there is no kernel in it to interpret" if interpret else ""


def query_tiles(device: Device, geometry: Geometry) -> tuple[int, ...]:
    del device, geometry
    return TILE_SIZES


@functools.partial(jax.jit, static_argnames=("decode_rows", "rule", "backend"))
def paged_attention(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    batch: RaggedBatch,
    *,
    decode_rows: int,
    rule: Rule,
    backend: Backend | None = None,
) -> jax.Array:
    """See `pallas_kernels.attention.paged_attention`. Jitted so that equal layers are traced once."""
    del backend
    dtype = q.dtype
    q = q.astype(jnp.float32) * rule.scale
    parts = []
    if decode_rows:
        parts.append(_decode(q[:decode_rows], k_pages, v_pages, batch, rule))
    if decode_rows < q.shape[0]:
        parts.append(_chunks(q, k_pages, v_pages, batch, rule)[decode_rows:])
    return (jnp.concatenate(parts) if len(parts) > 1 else parts[0]).astype(dtype)


def _block_pages(rows: int, pages: Pages, table_width: int, most_keys: int) -> int:
    """Pages of each row in a block, a power of two.

    SmolLM2 (12 KiB a page of 16), 128 keys: 8 pages for up to 32 rows, 4 for 64, 2 for 128.
    """
    _, kv_heads, page_size, width = pages.shape
    within_cache = _BLOCK_BYTES // (rows * kv_heads * page_size * width * 4)
    count = max(1, min(within_cache, most_keys // page_size, table_width))
    return 1 << (count.bit_length() - 1)


def _gather(pages: jax.Array, page_ids: jax.Array) -> jax.Array:
    """pages [M, K, Z, ...], page_ids [R, C] -> [R, K, C * Z, ...] float32."""
    num_pages, kv_heads, page_size, *rest = pages.shape
    rows, count = page_ids.shape
    # The slab of page p, head k is row p * K + k of the flat view (below 2^31 by the size of any memory).
    heads = jnp.arange(kv_heads, dtype=jnp.int32)
    slabs = (page_ids[:, None, :] * kv_heads + heads[None, :, None]).reshape(-1)
    slabs = lax.optimization_barrier(slabs)
    flat = pages.reshape(num_pages * kv_heads, -1)
    block = lax.optimization_barrier(flat.at[slabs].get(mode="promise_in_bounds"))
    return block.reshape(rows, kv_heads, count * page_size, *rest).astype(jnp.float32)


def _largest(scores: jax.Array) -> jax.Array:
    """max over the last axis. Halves are compared first: XLA's CPU reduction along rows does not use vector
    instructions, the comparison of two arrays does (8x faster at 256 keys)."""
    while scores.shape[-1] > 32 and scores.shape[-1] % 2 == 0:
        scores = jnp.maximum(*jnp.split(scores, 2, axis=-1))
    return jnp.max(scores, axis=-1)


def _online_softmax(q, k_pages, v_pages, page_table, first, kv_len, last, block_pages, rule):
    """Attention of q [R, K, Q, H] over each row's pages, block by block: those of the sinks, then from the
    block where the first row's keys begin to the one where the last row's end.

    first, kv_len int32 [R]: a row's keys are first .. kv_len - 1, and the sinks. last int32 [R | 1, Q | 1]:
    the last key position that a query sees. A query that sees no key gets zeros.
    """
    rows, kv_heads, queries, width = q.shape
    page_size = k_pages.shape[2]
    block_keys = block_pages * page_size
    # A block must not start beyond the table's end: dynamic_slice would clamp and repeat keys.
    page_table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % block_pages)))
    window, sinks = rule.window, rule.sinks
    sink_blocks = -(-sinks // block_keys)
    end = (jnp.max(kv_len) + block_keys - 1) // block_keys
    begin = 0
    if window is not None:
        begin = jnp.min(jnp.where(kv_len > 0, first, jnp.max(kv_len))) // block_keys
        begin = jnp.maximum(begin, sink_blocks)

    def body(count, carry):
        largest, total, out = carry
        index = count
        if sink_blocks:
            index = jnp.where(count < sink_blocks, count, count - sink_blocks + begin)
        ids = lax.dynamic_slice_in_dim(page_table, index * block_pages, block_pages, axis=1)
        keys = index * block_keys + jnp.arange(block_keys, dtype=jnp.int32)
        held = jnp.repeat(ids != 0, page_size, axis=1) & (keys < kv_len[:, None])
        seen = keys <= last[:, None, :, None]
        if window is not None:
            inside = keys > last[:, None, :, None] - window
            seen &= inside | (keys < sinks) if sinks else inside
            held &= (keys >= first[:, None]) | (keys < sinks)
        seen &= held[:, None, None, :]
        scores = jnp.einsum("rkqh,rksh->rkqs", q, _gather(_values(k_pages), ids))
        if isinstance(k_pages, QuantizedPages):
            scores *= _gather(k_pages.scales, ids)[:, :, None, :]
        if rule.soft_cap is not None:
            scores = rule.soft_cap * jnp.tanh(scores / rule.soft_cap)
        scores = jnp.where(seen, scores, _MASKED)
        peak = jnp.maximum(largest, _largest(scores))
        # Once a query has seen a key, `peak` is a real score and a masked one gives 0. What blocks before
        # that added (each masked score weighs 1) is finite, and the first real score decays it to 0.
        weights = jnp.exp(scores - peak[..., None])
        decay = jnp.exp(largest - peak)
        total = total * decay + jnp.sum(weights, axis=-1)
        ids, weights = lax.optimization_barrier((ids, weights))
        # A page outside of the row's keys may hold NaN, and 0 * NaN is NaN: select before the product.
        if isinstance(v_pages, QuantizedPages):
            weights *= jnp.where(held[:, None, :], _gather(v_pages.scales, ids), 0.0)[:, :, None, :]
        v = jnp.where(held[:, None, :, None], _gather(_values(v_pages), ids), 0.0)
        out = out * decay[..., None] + jnp.einsum("rkqs,rksh->rkqh", weights, v)
        return peak, total, out

    shape = (rows, kv_heads, queries)
    start = (jnp.full(shape, _MASKED), jnp.zeros(shape), jnp.zeros((*shape, width)))
    counts = (begin, end)
    if sink_blocks:  # those of the sinks come first, whatever their numbers
        counts = (0, jnp.minimum(sink_blocks, end) + jnp.maximum(end - begin, 0))
    largest, total, out = lax.fori_loop(*counts, body, start)
    # NaN among a row's own keys must show, and a maximum may pass it over: the sum does not.
    unseen = (largest <= _MASKED) & ~jnp.isnan(total)
    return jnp.where(unseen[..., None], 0.0, out / total[..., None])


def _values(pages: Pages) -> jax.Array:
    return pages.values if isinstance(pages, QuantizedPages) else pages


def _first_key(position: jax.Array, rule: Rule) -> jax.Array:
    """The first key that a query at `position` sees, sinks apart."""
    return jnp.zeros_like(position) if rule.window is None else jnp.maximum(position - rule.window + 1, 0)


def _decode(q: jax.Array, k_pages: Pages, v_pages: Pages, batch: RaggedBatch, rule: Rule) -> jax.Array:
    """Rows of one query: q [D, N, H], row i of the table for token i."""
    rows, heads, width = q.shape
    kv_heads = k_pages.shape[1]
    table, kv_len = batch.page_table[:rows], batch.kv_len[:rows]
    block_pages = _block_pages(rows, k_pages, table.shape[1], _BLOCK_KEYS)
    grouped = q.reshape(rows, kv_heads, heads // kv_heads, width)
    first, last = _first_key(kv_len - 1, rule), kv_len[:, None] - 1
    out = _online_softmax(grouped, k_pages, v_pages, table, first, kv_len, last, block_pages, rule)
    return out.reshape(rows, heads, width)


def _chunks(q: jax.Array, k_pages: Pages, v_pages: Pages, batch: RaggedBatch, rule: Rule) -> jax.Array:
    """Rows of many queries, one tile at a time: q [T, N, H] -> [T, N, H]; other tokens keep zeros."""
    tokens, heads, width = q.shape
    kv_heads = k_pages.shape[1]
    group = heads // kv_heads
    sizes = batch.tile_sizes
    out = jnp.zeros((tokens + sizes[0], heads, width), q.dtype)
    padded = jnp.pad(q, ((0, sizes[0]), (0, 0), (0, 0)))  # a tile may reach past the last token
    positions = jnp.pad(batch.positions, (0, sizes[0]))

    for index, size in enumerate(sizes):
        if size > tokens and size != sizes[-1]:
            continue
        # Scores are [K, G * Q, keys]: as many keys as queries keeps them in cache, and a causal tile full.
        block_pages = _block_pages(1, k_pages, batch.page_table.shape[1], max(size, 128))
        place = jnp.arange(size, dtype=jnp.int32)

        def tile(number, out, size=size, place=place, block_pages=block_pages, index=index):
            row, start, count = batch.tiles[index][number]
            queries = lax.dynamic_slice_in_dim(padded, start, size)  # [Q, N, H]
            queries = queries.reshape(size, kv_heads, group, width)
            queries = queries.transpose(1, 2, 0, 3).reshape(1, kv_heads, group * size, width)
            position = lax.dynamic_slice_in_dim(positions, start, size)
            # Rows of `queries` are g * Q + i; what lies past the tile's own tokens is dropped below.
            last = jnp.tile(jnp.where(place < count, position, 0), group)[None]
            table = lax.dynamic_slice_in_dim(batch.page_table, row, 1)
            first, kv_len = _first_key(position[:1], rule), position[count - 1][None] + 1
            result = _online_softmax(queries, k_pages, v_pages, table, first, kv_len, last, block_pages, rule)
            result = result.reshape(kv_heads, group, size, width).transpose(2, 0, 1, 3)
            result = result.reshape(size, heads, width)
            # Tokens past the tile belong to another row, perhaps already done: keep what is there.
            old = lax.dynamic_slice_in_dim(out, start, size)
            result = jnp.where((place < count)[:, None, None], result, old)
            return lax.dynamic_update_slice_in_dim(out, result, start, axis=0)

        out = lax.fori_loop(0, batch.num_tiles[index], tile, out)
    return out[:tokens]
