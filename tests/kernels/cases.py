"""Steps to attend in: shapes and lengths, and the arrays of each with every unowned place poisoned."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import RaggedBatch, paged_attention
from pallas_kernels.batch import fill_tiles, tile_capacity


@dataclass(frozen=True)
class Geometry:
    """What a program is compiled for: decode_rows one-query rows, then chunk_tokens tokens of chunk_rows."""

    heads: int = 6
    kv_heads: int = 2
    width: int = 64
    page_size: int = 16
    table_width: int = 8
    decode_rows: int = 0
    chunk_tokens: int = 0
    chunk_rows: int = 0
    window: int | None = None

    @property
    def rows(self) -> int:
        return self.decode_rows + self.chunk_rows

    @property
    def most_keys(self) -> int:
        return self.page_size * self.table_width

    def __str__(self) -> str:
        step = f"D{self.decode_rows}-T{self.chunk_tokens}-C{self.chunk_rows}"
        step += f"-W{self.window}" if self.window else ""
        return f"N{self.heads}-K{self.kv_heads}-H{self.width}-Z{self.page_size}-P{self.table_width}-{step}"


class Step(NamedTuple):
    """The arguments of `paged_attention`, and which packed tokens are real."""

    q: jax.Array
    k_pages: jax.Array
    v_pages: jax.Array
    batch: RaggedBatch
    real: np.ndarray


def build(
    geometry: Geometry,
    decodes: tuple[int, ...] = (),
    chunks: tuple[tuple[int, int], ...] = (),
    *,
    poison: float = np.nan,
    dtype: str = "float32",
    seed: int = 0,
) -> Step:
    """decodes: keys of each one-query row, 0 for a padding row; chunks: (start, count).

    Pages are dealt out in random order from a pool with pages to spare. `poison` fills what no row owns:
    page 0, the spare pages, and the places of each last page beyond the row's keys. With a window, pages
    behind that of a row's first query have gone: their entries in the table are 0.
    """
    g = geometry
    assert len(decodes) <= g.decode_rows
    assert len(chunks) <= g.chunk_rows
    assert sum(c for _, c in chunks) <= g.chunk_tokens
    generator = np.random.default_rng(seed)
    num_pages = g.rows * g.table_width + 4
    free = generator.permutation(np.arange(1, num_pages)).tolist()
    tokens = g.decode_rows + g.chunk_tokens
    token_row, positions = np.full(tokens, -1, np.int32), np.zeros(tokens, np.int32)
    table, kv_len = np.zeros((g.rows, g.table_width), np.int32), np.zeros(g.rows, np.int32)
    pages = np.full((2, num_pages, g.kv_heads, g.page_size, g.width), poison, np.float32)

    def own(row: int, keys: int, first_query: int) -> None:
        kv_len[row] = keys
        seen = 0 if g.window is None else max(0, first_query - g.window + 1)
        for number in range(seen // g.page_size, -(-keys // g.page_size)):
            page = table[row, number] = free.pop()
            held = min(g.page_size, keys - number * g.page_size)
            pages[:, page, :, :held] = generator.standard_normal((2, g.kv_heads, held, g.width))

    for row, keys in enumerate(decodes):
        if keys:
            token_row[row], positions[row] = row, keys - 1
            own(row, keys, keys - 1)
    place, cut = g.decode_rows, []
    for row, (start, count) in enumerate(chunks, start=g.decode_rows):
        token_row[place : place + count] = row
        positions[place : place + count] = np.arange(start, start + count)
        cut.append((row, place, count))
        own(row, start + count, start)
        place += count
    tiles, num_tiles = fill_tiles(cut, tile_capacity(g.chunk_tokens, g.chunk_rows))
    q = generator.standard_normal((tokens, g.heads, g.width))
    batch = RaggedBatch(token_row, positions, table, kv_len, tiles, num_tiles)
    return Step(
        jnp.asarray(q, dtype), jnp.asarray(pages[0], dtype), jnp.asarray(pages[1], dtype),
        jax.tree.map(jnp.asarray, batch), token_row >= 0,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("decode_rows", "window", "backend"))
def _attend(q, k_pages, v_pages, batch, *, decode_rows, window, backend):
    return paged_attention(
        q, k_pages, v_pages, batch, decode_rows=decode_rows,
        scale=q.shape[-1] ** -0.5, window=window, backend=backend,
    )  # fmt: skip


def attend(step: Step, geometry: Geometry, backend: str) -> np.ndarray:
    """[T, N, H] float32 of one backend."""
    out = _attend(*step[:4], decode_rows=geometry.decode_rows, window=geometry.window, backend=backend)
    assert out.dtype == step.q.dtype
    return np.asarray(out, np.float32)


def plain(step: Step, window: int | None = None) -> np.ndarray:
    """Attention token by token in float64, with none of the code under test: the reference of `reference`."""
    q, k_pages, v_pages = (np.asarray(x, np.float64) for x in step[:3])
    batch = jax.tree.map(np.asarray, step.batch)
    heads, kv_heads = q.shape[1], k_pages.shape[1]
    out = np.zeros_like(q)
    for token in np.flatnonzero(step.real):
        keys = batch.positions[token] + 1
        first = 0 if window is None else max(0, keys - window)
        ids = batch.page_table[batch.token_row[token]]
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            k = np.concatenate([k_pages[page, kv_head] for page in ids])[first:keys]
            v = np.concatenate([v_pages[page, kv_head] for page in ids])[first:keys]
            scores = k @ q[token, head] / np.sqrt(q.shape[-1])
            weights = np.exp(scores - scores.max())
            out[token, head] = weights @ v / weights.sum()
    return out
