"""Pages of K or V, plain or quantised: writing this step's vectors into them, and copies of whole pages."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

FLOAT8 = "float8_e4m3fn"


class QuantizedPages(NamedTuple):
    """int8 pages: the vector of a token and head is values * scale.

    values int8 [M, K, Z, H]; scales float32 [M, K, Z], one for each token and head, its largest magnitude
    over 127.
    """

    values: jax.Array
    scales: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> jnp.dtype:
        return self.values.dtype


Pages = jax.Array | QuantizedPages
"""[M, K, Z, H], of a float type or quantised."""


def create_pages(
    num_pages: int, kv_heads: int, page_size: int, width: int, kv_dtype: str | jnp.dtype
) -> Pages:
    """Zeros [M, K, Z, H] of one of `device.KV_DTYPES` (not empty: uninitialised memory can hold NaN)."""
    shape = (num_pages, kv_heads, page_size, width)
    if jnp.dtype(kv_dtype) == jnp.int8:
        return QuantizedPages(jnp.zeros(shape, jnp.int8), jnp.zeros(shape[:-1], jnp.float32))
    return jnp.zeros(shape, kv_dtype)


def quantize(new: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Vectors [..., H] as (int8 [..., H], float32 scales [...]): rounded to nearest, symmetric, so that the
    element of largest magnitude is 127 or -127. A zero vector has scale 0; NaN and infinity give a scale that
    is not finite, so that they stay what they are for whoever reads them."""
    wide = new.astype(jnp.float32)
    scales = jnp.max(jnp.abs(wide), axis=-1) / 127.0
    usable = (scales > 0) & jnp.isfinite(scales)
    values = jnp.round(wide / jnp.where(usable, scales, 1.0)[..., None])
    values = jnp.clip(jnp.where(usable[..., None], values, 1.0), -127, 127)
    return values.astype(jnp.int8), scales


def dequantize(values: jax.Array, scales: jax.Array) -> jax.Array:
    """float32 [..., H]."""
    return values.astype(jnp.float32) * scales[..., None]


def write_kv(pages: Pages, new: jax.Array, page_ids: jax.Array, offsets: jax.Array) -> Pages:
    """Scatter one K or V vector per token into its page; in place when `pages` is donated.

    pages [M, K, Z, H]; new [T, K, H], cast to the dtype of pages (what is beyond its range becomes
    its largest number, where a cast makes infinity or NaN) or quantised; page_ids,
    offsets int32 [T], which the host has checked: 0 <= page_ids < M and 0 <= offsets < Z. Padding tokens go
    to page 0, which nobody owns, so two tokens may meet there and nowhere else. Page and offset stay separate
    indexes: a flat one leaves int32 on large pools.

        pages [3, 1, 2, H], page_ids [2, 0], offsets [1, 0]:  token 0 -> pages[2, :, 1], token 1 -> padding
    """
    heads = jnp.arange(pages.shape[1], dtype=jnp.int32)
    where = (page_ids[:, None], heads[None, :], offsets[:, None])
    if isinstance(pages, QuantizedPages):
        values, scales = quantize(new)
        return QuantizedPages(
            pages.values.at[where].set(values, mode="promise_in_bounds"),
            pages.scales.at[where].set(scales, mode="promise_in_bounds"),
        )
    largest = float(jnp.finfo(pages.dtype).max)
    if largest < float(jnp.finfo(new.dtype).max):
        new = jnp.clip(new.astype(jnp.float32), -largest, largest)
    return pages.at[where].set(new.astype(pages.dtype), mode="promise_in_bounds")


def copy_pages(pages: Pages, sources: jax.Array, targets: jax.Array) -> Pages:
    """Give page targets[i] the content of page sources[i]: all are read before any is written, and in place
    when `pages` is donated.

    pages [M, K, Z, H]; sources, targets int32 [n], which the host has checked: 0 <= id < M, and no target
    twice but page 0. Pairs (0, 0) are padding: page 0 belongs to nobody.

        pages [A B C D], sources [1 2 0], targets [2 3 0] -> [A B B C]
    """

    def copied(array: jax.Array) -> jax.Array:
        held = array.at[sources].get(mode="promise_in_bounds")
        return array.at[targets].set(held, mode="promise_in_bounds")

    return jax.tree.map(copied, pages)
