"""What is run: steps of real models at full size, drawn on the device, with their bytes and operations
counted."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.batch import RaggedBatch, fill_tiles, tile_capacity
from pallas_kernels.device import Geometry
from pallas_kernels.pages import Pages, QuantizedPages, quantize
from pallas_kernels.rule import Rule


@dataclass(frozen=True)
class Workload:
    """One step of one layer. `decodes` has the keys of each row of one query, `chunks` (start, count) of each
    row of more. The defaults are Llama 3 8B's: groups of 4."""

    shape: str
    decodes: tuple[int, ...] = ()
    chunks: tuple[tuple[int, int], ...] = ()
    page_size: int = 16
    kv_dtype: str = "bfloat16"
    heads: int = 32
    kv_heads: int = 8
    width: int = 128
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        return f"{self.shape} Z{self.page_size} {self.kv_dtype}"

    @property
    def operation(self) -> str:
        return "mixed" if self.decodes and self.chunks else "decode" if self.decodes else "prefill"

    @property
    def geometry(self) -> Geometry:
        return Geometry(self.heads, self.kv_heads, self.width, self.page_size, self.dtype, self.kv_dtype)

    @property
    def rule(self) -> Rule:
        return Rule(self.width**-0.5)

    @property
    def keys(self) -> tuple[int, ...]:
        """Of each row."""
        return (*self.decodes, *(start + count for start, count in self.chunks))

    @property
    def tokens(self) -> int:
        return len(self.decodes) + sum(count for _, count in self.chunks)

    @property
    def bytes_moved(self) -> int:
        """The fewest that a call can move: each key and value read once, queries once, outputs written
        once."""
        vector = self.width * jnp.dtype(self.kv_dtype).itemsize + (4 if self.kv_dtype == "int8" else 0)
        query = self.heads * self.width * jnp.dtype(self.dtype).itemsize
        return 2 * sum(self.keys) * self.kv_heads * vector + 2 * self.tokens * query

    @property
    def operations(self) -> int:
        """Multiplications and additions of both products, over the keys that a query sees."""
        seen = sum(self.decodes)
        seen += sum(count * start + count * (count + 1) // 2 for start, count in self.chunks)
        return 4 * self.heads * self.width * seen


def _over_pages(shape: Workload, *kv_dtypes: str) -> tuple[Workload, ...]:
    return tuple(
        replace(shape, page_size=page_size, kv_dtype=kv_dtype)
        for page_size in (16, 64)
        for kv_dtype in kv_dtypes
    )


_KV = ("bfloat16", "int8", "float8_e4m3fn")

WORKLOADS: tuple[Workload, ...] = (
    *_over_pages(Workload("decode 64x8k", (8192,) * 64), *_KV),
    *_over_pages(Workload("decode 64x2k", (2048,) * 64), *_KV),
    *_over_pages(Workload("decode 8x20k", (20480,) * 8), *_KV),
    *_over_pages(Workload("decode 1x128k", (131072,)), *_KV),
    *_over_pages(Workload("prefill 2k", chunks=((0, 2048),)), "bfloat16"),
    *_over_pages(Workload("prefill 8k", chunks=((0, 8192),)), "bfloat16"),
    *_over_pages(Workload("prefill 32k", chunks=((0, 32768),)), "bfloat16"),
    *_over_pages(Workload("mixed 64x2k+512", (2048,) * 64, ((2048, 512),)), "bfloat16"),
)

_small = functools.partial(Workload, heads=8, kv_heads=2, width=64)

TINY_WORKLOADS: tuple[Workload, ...] = (
    *(_small("decode 3x64", (64, 33, 1), kv_dtype=kv_dtype) for kv_dtype in _KV),
    _small("decode 1x256", (256,), page_size=64),
    _small("prefill 64", chunks=((0, 64),)),
    _small("mixed 2x32+40", (32, 30), ((16, 40),)),
)
"""The same kinds in sizes for which any machine will do: they prove the bench, not the kernels."""


class Inputs(NamedTuple):
    """Arguments of `paged_attention` but for the tiles, which each backend wants its own of."""

    q: jax.Array
    k_pages: Pages
    v_pages: Pages
    token_row: np.ndarray
    positions: np.ndarray
    page_table: np.ndarray
    kv_len: np.ndarray


def draw(workload: Workload, seed: int = 0) -> Inputs:
    """Random inputs on the device. Pages are dealt out in random order; page 0, and the places of last pages
    that no key has, hold NaN: what reads them shows."""
    generator = np.random.default_rng(seed)
    needed = [-(-keys // workload.page_size) for keys in workload.keys]
    num_pages = 1 + sum(needed)
    free = 1 + generator.permutation(num_pages - 1)
    table = np.zeros((len(needed), max(needed)), np.int32)
    unused = np.zeros((num_pages, workload.page_size), bool)
    unused[0] = True
    taken = 0
    for row, (count, keys) in enumerate(zip(needed, workload.keys, strict=True)):
        table[row, :count] = free[taken : taken + count]
        taken += count
        if keys % workload.page_size:
            unused[table[row, count - 1], keys % workload.page_size :] = True
    token_row = [np.arange(len(workload.decodes))]
    positions = [np.asarray(workload.decodes, int) - 1]
    for row, (start, count) in enumerate(workload.chunks, start=len(workload.decodes)):
        token_row.append(np.full(count, row))
        positions.append(np.arange(start, start + count))
    keys = jax.random.split(jax.random.key(seed), 3)
    shape = (num_pages, workload.kv_heads, workload.page_size, workload.width)
    k_pages, v_pages = (_draw_pages(key, jnp.asarray(unused), shape, workload.kv_dtype) for key in keys[1:])
    q = _draw(keys[0], (workload.tokens, workload.heads, workload.width), workload.dtype)
    return Inputs(
        q, k_pages, v_pages, np.concatenate(token_row).astype(np.int32),
        np.concatenate(positions).astype(np.int32), table, np.asarray(workload.keys, np.int32),
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _draw(key: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    return jax.random.normal(key, shape, dtype)


@functools.partial(jax.jit, static_argnames=("shape", "kv_dtype"))
def _draw_pages(key: jax.Array, unused: jax.Array, shape: tuple[int, ...], kv_dtype: str) -> Pages:
    drawn = jax.random.normal(key, shape, jnp.bfloat16)
    drawn = jnp.where(unused[:, None, :, None], jnp.nan, drawn)
    if kv_dtype == "int8":
        return QuantizedPages(*quantize(drawn))
    return drawn.astype(kv_dtype)


def batch_of(workload: Workload, inputs: Inputs, tiles: tuple[int, ...]) -> RaggedBatch:
    """The step's description for a backend that wants query tiles of these sizes."""
    place, cut = len(workload.decodes), []
    for row, (_, count) in enumerate(workload.chunks, start=len(workload.decodes)):
        cut.append((row, place, count))
        place += count
    chunk_tokens = workload.tokens - len(workload.decodes)
    filled, num_tiles = fill_tiles(cut, tile_capacity(chunk_tokens, len(workload.chunks), tiles), tiles)
    batch = RaggedBatch(*inputs[3:], filled, num_tiles, tiles)  # type: ignore[arg-type]
    return jax.tree.map(jnp.asarray, batch)


def dense(inputs: Inputs, pages: Pages, width: int) -> jax.Array:
    """The keys or values of every row in one stretch of memory, [B, S, K, H]: what a dense attention
    takes."""
    assert not isinstance(pages, QuantizedPages), "dense attention takes plain keys and values"
    rows, count = inputs.page_table.shape
    gathered = pages[jnp.asarray(inputs.page_table)]  # [B, P, K, Z, H]
    kv_heads, page_size = gathered.shape[2:4]
    return gathered.transpose(0, 1, 3, 2, 4).reshape(rows, count * page_size, kv_heads, width)
