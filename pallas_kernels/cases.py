"""Steps to attend in, for the conformance tests and the bench: shapes and lengths, and the arrays of each,
with every place that nobody may see poisoned."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import reference
from pallas_kernels.attention import paged_attention
from pallas_kernels.batch import TILE_SIZES, RaggedBatch, fill_tiles, tile_capacity
from pallas_kernels.device import Backend, Geometry
from pallas_kernels.pages import Pages, QuantizedPages, quantize
from pallas_kernels.rule import Rule


@dataclass(frozen=True)
class StepCase:
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
    sinks: int = 0
    soft_cap: float | None = None
    dtype: str = "float32"
    kv_dtype: str = ""
    """"" is `dtype`."""

    @property
    def rows(self) -> int:
        return self.decode_rows + self.chunk_rows

    @property
    def most_keys(self) -> int:
        return self.page_size * self.table_width

    @property
    def rule(self) -> Rule:
        return Rule(self.width**-0.5, self.window, self.sinks, self.soft_cap)

    @property
    def geometry(self) -> Geometry:
        kv_dtype = self.kv_dtype or self.dtype
        return Geometry(self.heads, self.kv_heads, self.width, self.page_size, self.dtype, kv_dtype)

    def __str__(self) -> str:
        step = f"D{self.decode_rows}-T{self.chunk_tokens}-C{self.chunk_rows}"
        step += f"-W{self.window}" if self.window else ""
        step += f"-S{self.sinks}" if self.sinks else ""
        step += f"-cap{self.soft_cap}" if self.soft_cap else ""
        step += f"-{self.dtype}" + (f"-kv-{self.kv_dtype}" if self.kv_dtype else "")
        return f"N{self.heads}-K{self.kv_heads}-H{self.width}-Z{self.page_size}-P{self.table_width}-{step}"


class Step(NamedTuple):
    """The arguments of `paged_attention`, and which packed tokens are real."""

    q: jax.Array
    k_pages: Pages
    v_pages: Pages
    batch: RaggedBatch
    real: np.ndarray


def build(
    case: StepCase,
    decodes: tuple[int, ...] = (),
    chunks: tuple[tuple[int, int], ...] = (),
    *,
    poison: float = np.nan,
    holes: float = 0.0,
    tiles: tuple[int, ...] = TILE_SIZES,
    seed: int = 0,
    tight: bool = False,
) -> Step:
    """decodes: keys of each one-query row, 0 for a padding row; chunks: (start, count).

    Pages are dealt out in random order from a pool with pages to spare, of which every row could have all of
    its table; a `tight` one only what these rows need and 4 more. `poison` fills what no row owns:
    page 0, the spare pages, and the places of each last page beyond the row's keys. With a window, pages
    behind that of a row's first query have gone, those of the sinks excepted: their entries in the table are
    0. A share `holes` of each row's other pages has gone too. `tiles` are those of the backend.
    """
    assert len(decodes) <= case.decode_rows
    assert len(chunks) <= case.chunk_rows
    assert sum(count for _, count in chunks) <= case.chunk_tokens
    generator = np.random.default_rng(seed)
    all_keys = (*decodes, *(start + count for start, count in chunks))
    needed = sum(-(-keys // case.page_size) for keys in all_keys)
    num_pages = (needed + 1 if tight else case.rows * case.table_width) + 4
    free = generator.permutation(np.arange(1, num_pages)).tolist()
    tokens = case.decode_rows + case.chunk_tokens
    token_row, positions = np.full(tokens, -1, np.int32), np.zeros(tokens, np.int32)
    table, kv_len = np.zeros((case.rows, case.table_width), np.int32), np.zeros(case.rows, np.int32)
    pages = np.full((2, num_pages, case.kv_heads, case.page_size, case.width), poison, np.float32)

    def own(row: int, keys: int, first_query: int) -> None:
        kv_len[row] = keys
        seen = 0 if case.window is None else max(0, first_query - case.window + 1)
        for number in range(-(-keys // case.page_size)):
            start = number * case.page_size
            behind = start + case.page_size <= seen and start >= case.sinks
            if behind or generator.random() < holes:
                continue
            page = table[row, number] = free.pop()
            held = min(case.page_size, keys - start)
            pages[:, page, :, :held] = generator.standard_normal((2, case.kv_heads, held, case.width))

    for row, keys in enumerate(decodes):
        if keys:
            token_row[row], positions[row] = row, keys - 1
            own(row, keys, keys - 1)
    place, cut = case.decode_rows, []
    for row, (start, count) in enumerate(chunks, start=case.decode_rows):
        token_row[place : place + count] = row
        positions[place : place + count] = np.arange(start, start + count)
        cut.append((row, place, count))
        own(row, start + count, start)
        place += count
    filled, num_tiles = fill_tiles(cut, tile_capacity(case.chunk_tokens, case.chunk_rows, tiles), tiles)
    q = generator.standard_normal((tokens, case.heads, case.width))
    batch = RaggedBatch(token_row, positions, table, kv_len, filled, num_tiles, tiles)  # type: ignore[arg-type]
    kv_dtype = case.kv_dtype or case.dtype
    return Step(
        jnp.asarray(q, case.dtype), _pages(pages[0], kv_dtype), _pages(pages[1], kv_dtype),
        jax.tree.map(jnp.asarray, batch), token_row >= 0,
    )  # fmt: skip


def _pages(pages: np.ndarray, kv_dtype: str) -> Pages:
    """float32 pages in another type. int8 has no NaN: the scales of poisoned vectors carry it."""
    if kv_dtype == "int8":
        return QuantizedPages(*quantize(jnp.asarray(pages)))
    return jnp.asarray(pages).astype(kv_dtype)


@functools.partial(jax.jit, static_argnames=("decode_rows", "rule", "backend"))
def _attend(q, k_pages, v_pages, batch, *, decode_rows, rule, backend):
    return paged_attention(q, k_pages, v_pages, batch, decode_rows=decode_rows, rule=rule, backend=backend)


def attend(step: Step, case: StepCase, backend: Backend) -> np.ndarray:
    """[T, N, H] float32 of one backend."""
    out = _attend(*step[:4], decode_rows=case.decode_rows, rule=case.rule, backend=backend)
    assert out.dtype == step.q.dtype, f"queries of {step.q.dtype} gave {out.dtype}"
    return np.asarray(out, np.float32)


def specified(step: Step, case: StepCase) -> np.ndarray:
    """[T, N, H] float32 of the specification for the same rounded inputs, one token after the other: it
    gathers all keys of a token, and those of a long step's tokens together would be gigabytes."""
    return np.asarray(_specified(*step[:4], rule=case.rule))


@functools.partial(jax.jit, static_argnames=("rule",))
def _specified(q, k_pages, v_pages, batch, *, rule):
    def one(token):
        query, row, position = token
        alone = replace(batch, token_row=row[None], positions=position[None])
        return reference.paged_attention(query[None], k_pages, v_pages, alone, rule=rule)[0]

    return lax.map(one, (q.astype(jnp.float32), batch.token_row, batch.positions))


def vector_error(got: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """|got - expected| / |expected| over vectors of the last axis; over 1 where a vector is nothing."""
    size = np.linalg.norm(expected, axis=-1)
    return np.linalg.norm(got - expected, axis=-1) / np.where(size > 0, size, 1.0)
