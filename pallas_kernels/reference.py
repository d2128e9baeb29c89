"""The specification of paged attention: short, dense, slow, and right."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.batch import RaggedBatch


def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    batch: RaggedBatch,
    *,
    scale: float,
    window: int | None = None,
) -> jax.Array:
    """softmax(q k^T * scale) v over the keys 0 .. positions[t] of each token's row, in float32; with a
    `window` W over positions[t] - W + 1 .. positions[t].

    q [T, N, H]; k_pages, v_pages [M, K, Z, H]; returns [T, N, H] in q's dtype. Query head n reads KV head
    n // G (G = N / K: repeated, not tiled). Padding tokens give zeros. Keys that a token may not see are
    selected away, never multiplied by zero: an unused page may hold NaN.
    """
    tokens, heads, width = q.shape
    kv_heads, page_size = k_pages.shape[1:3]
    keys = batch.page_table.shape[1] * page_size
    row = jnp.maximum(batch.token_row, 0)

    def dense(pages: jax.Array) -> jax.Array:  # [T, S, K, H]
        gathered = pages[batch.page_table[row]].astype(jnp.float32)  # [T, P, K, Z, H]
        return gathered.transpose(0, 1, 3, 2, 4).reshape(tokens, keys, kv_heads, width)

    visible = jnp.arange(keys, dtype=jnp.int32)[None, :] <= batch.positions[:, None]
    if window is not None:
        visible &= jnp.arange(keys, dtype=jnp.int32)[None, :] > batch.positions[:, None] - window
    visible &= (batch.token_row >= 0)[:, None]
    k = jnp.where(visible[:, :, None, None], dense(k_pages), 0.0)
    v = jnp.where(visible[:, :, None, None], dense(v_pages), 0.0)
    grouped = q.astype(jnp.float32).reshape(tokens, kv_heads, heads // kv_heads, width)
    scores = jnp.einsum("tkgh,tskh->tkgs", grouped, k, precision="highest") * scale
    scores = jnp.where(visible[:, None, None, :], scores, -jnp.inf)
    largest = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(largest), largest, 0.0))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1.0)
    out = jnp.einsum("tkgs,tskh->tkgh", weights, v, precision="highest")
    return out.reshape(tokens, heads, width).astype(q.dtype)
