"""The description of one step that every attention backend reads."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import numpy as np

TILE_SIZES = (256, 32)
"""Query tiles of the xla backend, largest first: a chunk is cut into whole large tiles, then small ones."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["token_row", "positions", "page_table", "kv_len", "tiles", "num_tiles"],
    meta_fields=["tile_sizes"],
)
@dataclass(frozen=True)
class RaggedBatch:
    """Which query belongs to which row, and where each row's keys live. All int32.

    Shapes in the alphabet of docs/shapes.md: T packed tokens, B rows, P pages per row.

    token_row   [T]     row of each token, -1 for padding
    positions   [T]     position of each token in its sequence, 0 for padding
    page_table  [B, P]  page ids; page i of a row holds positions i * Z .. (i + 1) * Z - 1; unused are 0
    kv_len      [B]     keys of each row that are written, this step's own included; 0 for padding rows
    tiles       one [C, 3] per tile size: (row, first packed token, tokens) of each query tile, in order
    num_tiles   [len(tiles)]  how many entries of each `tiles` are real
    tile_sizes  most tokens of the entries of each `tiles`, largest first; static: a kernel is built for it

    Token t attends to the keys at positions 0 .. positions[t] of its row, as far as its Rule lets it; page 0
    in the table holds no keys. Tokens of a tile have consecutive positions, a one-query row's is kv_len - 1,
    and `tiles` past `num_tiles` are zeros: kernels rely on each of these. The first `decode_rows` tokens (a
    static number, passed beside this) are rows of one query each: token i is row i. Worked example with
    decode_rows 2, one decoding row at position 6 and one chunk of 3 tokens from position 4, Z 4:

        token_row  [ 0, -1,  2,  2,  2]     token 1 pads the decode rows; tokens 2..4 are the chunk
        positions  [ 6,  0,  4,  5,  6]
        page_table [[7, 3], [0, 0], [5, 9]]
        kv_len     [ 7,  0,  7]
        tiles      256: none   32: [[2, 2, 3]]
    """

    token_row: jax.Array
    positions: jax.Array
    page_table: jax.Array
    kv_len: jax.Array
    tiles: tuple[jax.Array, ...]
    num_tiles: jax.Array
    tile_sizes: tuple[int, ...]

    def check_tiles(self, *most: int) -> None:
        """Assert that there are as many tile sizes as a backend takes, none larger than it can."""
        assert len(self.tile_sizes) == len(self.tiles) <= len(most), (self.tile_sizes, most)
        fits = all(size <= limit for size, limit in zip(self.tile_sizes, most, strict=False))
        assert fits, f"query tiles of {self.tile_sizes} tokens for a backend of at most {most}"


def tile_capacity(chunk_tokens: int, chunk_rows: int, sizes: tuple[int, ...] = TILE_SIZES) -> tuple[int, ...]:
    """Entries of each `tiles` array that any `chunk_rows` chunks of `chunk_tokens` tokens can need.

    >>> tile_capacity(512, 4)    # two of 256 at most; 4 rows leave at most 512 // 32 + 4 small ones
    (2, 20)
    """
    *large, small = sizes
    most_small = max(chunk_tokens // small + chunk_rows, 1)
    return (*(max(chunk_tokens // size, 1) for size in large), most_small)


def cut_tiles(
    rows: list[tuple[int, int, int]], sizes: tuple[int, ...] = TILE_SIZES
) -> list[list[tuple[int, int, int]]]:
    """Cut chunks (row, first packed token, tokens) into tiles of each of `sizes`.

    >>> cut_tiles([(0, 0, 300)])    # 300 = 256 + 32 + 12
    [[(0, 0, 256)], [(0, 256, 32), (0, 288, 12)]]
    """
    cut: list[list[tuple[int, int, int]]] = [[] for _ in sizes]
    for row, start, count in rows:
        end = start + count
        for size, tiles in zip(sizes, cut, strict=True):
            while end - start >= size:
                tiles.append((row, start, size))
                start += size
        if start < end:
            cut[-1].append((row, start, end - start))
    return cut


def fill_tiles(
    rows: list[tuple[int, int, int]], capacity: tuple[int, ...], sizes: tuple[int, ...] = TILE_SIZES
) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """`cut_tiles` as the padded arrays of a RaggedBatch: (tiles, num_tiles), numpy int32."""
    arrays, counts = [], []
    for tiles, room in zip(cut_tiles(rows, sizes), capacity, strict=True):
        assert len(tiles) <= room, f"{len(tiles)} tiles for {room} places"
        array = np.zeros((room, 3), np.int32)
        if tiles:
            array[: len(tiles)] = tiles
        arrays.append(array)
        counts.append(len(tiles))
    return tuple(arrays), np.asarray(counts, np.int32)
