"""The specification of paged attention: short, dense, slow, and right."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.batch import TILE_SIZES, RaggedBatch
from pallas_kernels.device import Backend, Device, Geometry
from pallas_kernels.pages import Pages, QuantizedPages, dequantize
from pallas_kernels.rule import Rule


def unsupported(device: Device, geometry: Geometry, interpret: bool) -> str:
    """The specification runs everywhere; the interpreter is for GPU kernels."""
    del device, geometry
    return "there is no kernel in it to interpret" if interpret else ""


def query_tiles(device: Device, geometry: Geometry) -> tuple[int, ...]:
    """It needs none, and takes whatever there is."""
    del device, geometry
    return TILE_SIZES


def paged_attention(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    batch: RaggedBatch,
    *,
    rule: Rule,
    decode_rows: int = 0,
    backend: Backend | None = None,
) -> jax.Array:
    """Attention as `Rule` defines it, token by token, in float32.

    q [T, N, H]; k_pages, v_pages [M, K, Z, H]; returns [T, N, H] in q's dtype. Query head n reads KV head
    n // G (G = N / K: repeated, not tiled). Keys in a page 0 of the table are seen by nobody. Padding tokens,
    and tokens that see no key, give zeros. Keys that a token may not see are selected away, never multiplied
    by zero: an unused page may hold NaN.
    """
    del decode_rows, backend  # the specification needs no hint about the shape of the batch
    tokens, heads, width = q.shape
    kv_heads, page_size = k_pages.shape[1:3]
    keys = batch.page_table.shape[1] * page_size
    row = jnp.maximum(batch.token_row, 0)
    table = batch.page_table[row]  # [T, P]

    def dense(pages: Pages) -> jax.Array:  # [T, S, K, H]
        if isinstance(pages, QuantizedPages):
            gathered = dequantize(pages.values[table], pages.scales[table])
        else:
            gathered = pages[table].astype(jnp.float32)  # [T, P, K, Z, H]
        return gathered.transpose(0, 1, 3, 2, 4).reshape(tokens, keys, kv_heads, width)

    visible = _visible(rule, batch.positions, keys)
    visible &= jnp.repeat(table != 0, page_size, axis=1)
    visible &= (batch.token_row >= 0)[:, None]
    k = jnp.where(visible[:, :, None, None], dense(k_pages), 0.0)
    v = jnp.where(visible[:, :, None, None], dense(v_pages), 0.0)
    grouped = q.astype(jnp.float32).reshape(tokens, kv_heads, heads // kv_heads, width)
    scores = jnp.einsum("tkgh,tskh->tkgs", grouped, k, precision="highest") * rule.scale
    if rule.soft_cap is not None:
        scores = rule.soft_cap * jnp.tanh(scores / rule.soft_cap)
    scores = jnp.where(visible[:, None, None, :], scores, -jnp.inf)
    largest = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(largest), largest, 0.0))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1.0)
    out = jnp.einsum("tkgs,tskh->tkgh", weights, v, precision="highest")
    return out.reshape(tokens, heads, width).astype(q.dtype)


def _visible(rule: Rule, positions: jax.Array, keys: int) -> jax.Array:
    """bool [T, S]: which key positions a query at each of `positions` [T] sees."""
    key, query = jnp.arange(keys, dtype=jnp.int32)[None, :], positions[:, None]
    if rule.window is None:
        return key <= query
    return (key <= query) & ((key > query - rule.window) | (key < rule.sinks))
