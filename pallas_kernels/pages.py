"""Writing into pages: this step's K/V, and copies of whole pages."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def write_kv(pages: jax.Array, new: jax.Array, page_ids: jax.Array, offsets: jax.Array) -> jax.Array:
    """Scatter one K or V vector per token into its page; in place when `pages` is donated.

    pages [M, K, Z, H]; new [T, K, H] (cast to the dtype of pages); page_ids, offsets int32 [T], which the
    host has checked: 0 <= page_ids < M and 0 <= offsets < Z. Padding tokens go to page 0, which nobody
    owns, so two tokens may meet there and nowhere else. Page and offset stay separate indexes: a flat one
    leaves int32 on large pools.

        pages [3, 1, 2, H], page_ids [2, 0], offsets [1, 0]:  token 0 -> pages[2, :, 1], token 1 -> padding
    """
    heads = jnp.arange(pages.shape[1], dtype=jnp.int32)
    where = (page_ids[:, None], heads[None, :], offsets[:, None])
    return pages.at[where].set(new.astype(pages.dtype), mode="promise_in_bounds")


def copy_pages(pages: jax.Array, sources: jax.Array, targets: jax.Array) -> jax.Array:
    """Give page targets[i] the content of page sources[i]: all are read before any is written, and in place
    when `pages` is donated.

    pages [M, K, Z, H]; sources, targets int32 [n], which the host has checked: 0 <= id < M, and no target
    twice but page 0. Pairs (0, 0) are padding: page 0 belongs to nobody.

        pages [A B C D], sources [1 2 0], targets [2 3 0] -> [A B B C]
    """
    held = pages.at[sources].get(mode="promise_in_bounds")
    return pages.at[targets].set(held, mode="promise_in_bounds")
