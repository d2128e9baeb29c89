"""The device state of the engine: K and V pages of every layer, as a pytree that each step replaces.

This file alone knows the page layout, [M, K, Z, H] (HND): the K/V of one head and page are one slab, which
is what GPU kernels load and what the CPU path copies.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

import pallas_kernels
from jaxinfer.config import ModelConfig


class KVState(NamedTuple):
    """k[l], v[l]: [M, K, Z, H] of layer l, which has a K of its own. A tuple over layers, so that donated
    pages are updated in place (a scan over a stacked array would copy the pool) and layers may differ."""

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]

    @property
    def page_size(self) -> int:
        return self.k[0].shape[2]

    @property
    def num_pages(self) -> int:
        return self.k[0].shape[0]


class WriteSlots(NamedTuple):
    """Where this step's K/V go: page_ids [T] and offsets [T], int32; padding tokens point into page 0."""

    page_ids: jax.Array
    offsets: jax.Array


def create_kv(config: ModelConfig, num_pages: int, page_size: int, dtype: jnp.dtype) -> KVState:
    """A pool of zeros (zeros, not empty: uninitialised memory could hold NaN)."""

    def pages() -> tuple[jax.Array, ...]:
        shapes = [(num_pages, layer.num_kv_heads, page_size, config.head_dim) for layer in config.layers]
        return tuple(jnp.zeros(shape, dtype) for shape in shapes)

    return KVState(pages(), pages())


def write_layer(pages: jax.Array, new: jax.Array, slots: WriteSlots) -> jax.Array:
    """Put K or V vectors [T, K, H] of one layer into its pages."""
    return pallas_kernels.write_kv(pages, new, slots.page_ids, slots.offsets)
