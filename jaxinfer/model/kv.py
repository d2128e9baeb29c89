"""The device state of the engine: K and V pages of every layer (of linear attention: a state for each
sequence), as a pytree that each step replaces.

This file alone knows the page layout, [M, K, Z, H] (HND): the K/V of one head and page are one slab, which
is what GPU kernels load and what the CPU path copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

import pallas_kernels
from jaxinfer.config import ModelConfig
from jaxinfer.model import favor
from jaxinfer.model.favor import FavorState
from pallas_kernels import PageBounds, Pages


class KVState(NamedTuple):
    """k[l], v[l]: [M, K, Z, H] of layer l, which has a K of its own; int8 pages bring their scales. A tuple
    over layers, so that donated pages are updated in place (a scan over a stacked array would copy the pool)
    and layers may differ. bounds[l]: what layers whose queries choose pages keep of each; None elsewhere, ()
    where no layer does. states[l]: what layers of linear attention keep in place of pages, which have K = 0
    there and take no bytes; None elsewhere, () where there are none. Layers that read the K/V of an earlier
    one have K = 0 in their own place, too."""

    k: tuple[Pages, ...]
    v: tuple[Pages, ...]
    bounds: tuple[PageBounds | None, ...] = ()
    states: tuple[FavorState | None, ...] = ()

    @property
    def page_size(self) -> int:
        return self.k[0].shape[2]

    @property
    def num_pages(self) -> int:
        return self.k[0].shape[0]

    @property
    def is_deleted(self) -> bool:
        """Whether the pages were given to a program that has not given them back."""
        return jax.tree.leaves(self)[0].is_deleted()


class LayerKV(NamedTuple):
    """What a KVState holds of one layer."""

    k: Pages
    v: Pages
    bounds: PageBounds | None = None
    state: FavorState | None = None


def by_layer(kv: KVState) -> list[LayerKV]:
    none = (None,) * len(kv.k)
    return list(map(LayerKV, kv.k, kv.v, kv.bounds or none, kv.states or none))


def from_layers(layers: Sequence[LayerKV]) -> KVState:
    bounds = tuple(layer.bounds for layer in layers)
    states = tuple(layer.state for layer in layers)
    return KVState(
        tuple(layer.k for layer in layers), tuple(layer.v for layer in layers),
        bounds if any(bound is not None for bound in bounds) else (),
        states if any(state is not None for state in states) else (),
    )  # fmt: skip


class WriteSlots(NamedTuple):
    """Where this step's K/V go: page_ids [T] and offsets [T], int32; padding tokens point into page 0. Where
    each row's state lies in layers of linear attention: state_places [B], 0 for padding rows; None where
    there are none.
    """

    page_ids: jax.Array
    offsets: jax.Array
    state_places: jax.Array | None = None


def create_kv(
    config: ModelConfig, num_pages: int, page_size: int, dtype: jnp.dtype, num_states: int = 0
) -> KVState:
    """A pool of zeros, of one of `pallas_kernels.KV_DTYPES`. `num_states`: sequences that may have a state in
    layers of linear attention at a time."""

    def pages() -> tuple[Pages, ...]:
        return tuple(
            pallas_kernels.create_pages(num_pages, layer.paged_kv_heads, page_size, config.head_dim, dtype)
            for layer in config.layers
        )

    k, v = pages(), pages()
    bounds = [
        pallas_kernels.create_bounds(of) if layer.top_pages is not None and layer.kv_from is None else None
        for layer, of in zip(config.layers, k, strict=True)
    ]
    states = [
        None
        if layer.favor is None
        else favor.nothing((num_states + 1, layer.num_kv_heads, layer.favor.features), config.head_dim)
        for layer in config.layers
    ]
    return from_layers(list(map(LayerKV, k, v, bounds, states)))


def page_bytes(config: ModelConfig, page_size: int, dtype: jnp.dtype) -> int:
    """Bytes that one page takes in all layers, K and V, scales and bounds included. 0 where every layer has
    linear attention."""
    shapes = jax.eval_shape(lambda: create_kv(config, 1, page_size, dtype)._replace(states=()))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def write_layer(pages: Pages, new: jax.Array, slots: WriteSlots) -> Pages:
    """Put K or V vectors [T, K, H] of one layer into its pages."""
    return pallas_kernels.write_kv(pages, new, slots.page_ids, slots.offsets)
