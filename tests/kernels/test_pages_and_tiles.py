"""Writing K/V into pages, and cutting chunks into tiles."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import copy_pages, write_kv
from pallas_kernels.batch import TILE_SIZES, cut_tiles, fill_tiles, tile_capacity

LARGE, SMALL = TILE_SIZES


def write(pages: np.ndarray, new: np.ndarray, page_ids: list[int], offsets: list[int]) -> np.ndarray:
    ids, places = jnp.asarray(page_ids, jnp.int32), jnp.asarray(offsets, jnp.int32)
    return np.asarray(jax.jit(write_kv)(jnp.asarray(pages), jnp.asarray(new), ids, places))


def test_the_worked_example() -> None:
    """pages [3, 1, 2, H], page_ids [2, 0], offsets [1, 0]: token 0 -> pages[2, :, 1], token 1 -> padding."""
    got = write(np.zeros((3, 1, 2, 1)), np.asarray([[[7.0]], [[9.0]]]), [2, 0], [1, 0])
    assert got[..., 0].tolist() == [[[9.0, 0.0]], [[0.0, 0.0]], [[0.0, 7.0]]]


@pytest.mark.parametrize("seed", range(3))
def test_only_the_named_places_change(seed: int) -> None:
    """The rest of the pool keeps its bits, NaN included; the last page above all (B146)."""
    generator = np.random.default_rng(seed)
    pages = generator.standard_normal((6, 2, 4, 3)).astype(np.float32)
    pages[generator.integers(1, 6)] = np.nan
    new = generator.standard_normal((7, 2, 3)).astype(np.float32)
    places = generator.permutation(4 * 4)[:4]  # of pages 1..4: page 5, the last, is nobody's
    page_ids = [*(1 + places // 4).tolist(), 0, 0, 0]
    offsets = [*(places % 4).tolist(), 0, 0, 0]
    got = write(pages, new, page_ids, offsets)
    expected = pages.copy()
    for token in range(4):
        expected[page_ids[token], :, offsets[token]] = new[token]
    np.testing.assert_array_equal(got[1:], expected[1:])
    np.testing.assert_array_equal(got[0, :, 1:], pages[0, :, 1:])  # padding met at (0, 0) only


def test_values_are_cast_to_the_pages() -> None:
    pages = jnp.zeros((2, 1, 2, 1), jnp.bfloat16)
    got = write_kv(pages, jnp.full((1, 1, 1), 1.001, jnp.float32), jnp.asarray([1]), jnp.asarray([0]))
    assert got.dtype == jnp.bfloat16
    assert float(got[1, 0, 0, 0]) == 1.0


# -------------------------------------------------------------------------------------------------- copies


def copied(pages: np.ndarray, pairs: list[tuple[int, int]]) -> np.ndarray:
    sources, targets = (jnp.asarray(column, jnp.int32) for column in zip(*pairs, strict=True))
    return np.asarray(jax.jit(copy_pages)(jnp.asarray(pages), sources, targets))


def test_copies_are_all_read_before_any_is_written() -> None:
    """The worked example, a swap, and a chain against its direction."""
    pages = np.arange(5, dtype=np.float32).reshape(5, 1, 1, 1)
    assert copied(pages, [(1, 2), (2, 3), (0, 0)]).ravel().tolist() == [0, 1, 1, 2, 4]
    assert copied(pages, [(1, 2), (2, 1)]).ravel().tolist() == [0, 2, 1, 3, 4]
    assert copied(pages, [(1, 2), (1, 3), (1, 4)]).ravel().tolist() == [0, 1, 1, 1, 1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", range(3))
def test_copies_are_those_of_numpy(seed: int, dtype: str) -> None:
    """Bits, NaN included; whatever is no target stays."""
    generator = np.random.default_rng(seed)
    pages = np.array(jnp.asarray(generator.standard_normal((12, 2, 4, 3)), dtype))
    pages[generator.integers(1, 12)] = np.nan
    sources = generator.integers(1, 12, 6)
    targets = generator.permutation(np.arange(1, 12))[:6]
    expected = pages.copy()
    expected[targets] = pages[sources]
    pairs = [*zip(sources.tolist(), targets.tolist(), strict=True), (0, 0), (0, 0)]
    np.testing.assert_array_equal(copied(pages, pairs).view(np.uint8), expected.view(np.uint8))


# --------------------------------------------------------------------------------------------------- tiles

chunks = st.lists(st.integers(2, 700), max_size=8)


def laid_out(counts: list[int], first: int = 3) -> list[tuple[int, int, int]]:
    """Chunks one after the other from packed place `first`, in rows `first`, `first` + 1, ..."""
    starts = np.cumsum([first, *counts]).tolist()
    return [(first + i, starts[i], count) for i, count in enumerate(counts)]


def test_cut_examples() -> None:
    assert cut_tiles([(0, 0, 300)]) == [[(0, 0, 256)], [(0, 256, 32), (0, 288, 12)]]
    assert cut_tiles([(0, 0, 256), (1, 256, 32)]) == [[(0, 0, 256)], [(1, 256, 32)]]
    assert cut_tiles([(4, 8, 2)]) == [[], [(4, 8, 2)]]
    assert cut_tiles([]) == [[], []]
    assert tile_capacity(512, 4) == (2, 20)
    assert cut_tiles([(0, 0, 65), (1, 65, 1)], (SMALL,)) == [
        [(0, 0, 32), (0, 32, 32), (0, 64, 1), (1, 65, 1)]
    ]
    assert tile_capacity(512, 4, (SMALL,)) == (20,)


@given(chunks)
def test_tiles_cover_each_token_once(counts: list[int]) -> None:
    rows = laid_out(counts)
    large, small = cut_tiles(rows)
    assert all(count == LARGE for _, _, count in large)
    assert all(1 <= count <= SMALL for _, _, count in small)
    covered = [(row, token) for row, start, n in (*large, *small) for token in range(start, start + n)]
    assert sorted(covered) == [(row, token) for row, start, n in rows for token in range(start, start + n)]
    for row, start, count in rows:  # whole large tiles first: no more than one ragged end, in a small tile
        mine = [n for r, _, n in small if r == row]
        assert sum(mine) == count % LARGE
        assert all(n == SMALL for n in mine[:-1])
        assert start in [s for r, s, _ in (*large, *small) if r == row]


@given(chunks, st.integers(0, 300), st.integers(0, 3))
def test_capacity_holds_whatever_fits_the_bucket(counts: list[int], spare: int, rows: int) -> None:
    capacity = tile_capacity(sum(counts) + spare, len(counts) + rows)
    cut = cut_tiles(laid_out(counts))
    tiles, num_tiles = fill_tiles(laid_out(counts), capacity)
    assert num_tiles.dtype == np.int32
    assert num_tiles.tolist() == [len(c) for c in cut]
    for array, room, entries in zip(tiles, capacity, cut, strict=True):
        assert array.dtype == np.int32
        assert array.shape == (room, 3)
        assert array[: len(entries)].tolist() == [list(e) for e in entries]
        assert not array[len(entries) :].any()


def test_too_many_tiles_are_refused() -> None:
    with pytest.raises(AssertionError, match="3 tiles for 2 places"):
        fill_tiles([(0, 0, 2), (1, 2, 2), (2, 4, 2)], (1, 2))


@given(st.lists(st.integers(1, 700), max_size=8), st.integers(0, 300), st.integers(0, 3))
def test_tiles_of_one_size(counts: list[int], spare: int, rows: int) -> None:
    """Every token once, in small tiles that start at multiples of their size from the chunk's first token."""
    capacity = tile_capacity(sum(counts) + spare, len(counts) + rows, (SMALL,))
    (tiles,), num_tiles = fill_tiles(laid_out(counts), capacity, (SMALL,))
    real = tiles[: num_tiles[0]].tolist()
    covered = [(row, token) for row, start, n in real for token in range(start, start + n)]
    expected = [(row, token) for row, start, n in laid_out(counts) for token in range(start, start + n)]
    assert sorted(covered) == sorted(expected)
    assert all(n <= SMALL for _, _, n in real)
