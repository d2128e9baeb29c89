"""Paged attention: the reference against plain numpy, and every other backend against the reference.

Every case runs with NaN in all places that no row owns, so each of them is also a leak test.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from cases import Geometry, attend, build, plain

import pallas_kernels

pytestmark = pytest.mark.usefixtures("compile_cache")

FLOAT32_ERROR = 1e-5
BFLOAT16_ERROR = 1e-2

DECODE = Geometry(page_size=16, table_width=41, decode_rows=8)
CHUNKS = Geometry(width=8, page_size=16, table_width=41, chunk_tokens=320, chunk_rows=4)
MIXED = Geometry(width=8, page_size=8, table_width=16, decode_rows=4, chunk_tokens=64, chunk_rows=4)

DECODE_LENGTHS = [
    (1, 2, 15, 16, 17, 31, 32, 33),  # around pages
    (63, 64, 65, 127, 128, 129, 192, 191),  # around small blocks
    (447, 448, 449, 511, 512, 513, 575, 576),  # around a large block, and small ones after it
    (656, 640, 641, 577, 1, 600, 300, 639),  # the whole table, next to one key
    (1, 0, 0, 0, 0, 0, 0, 0),
    (0, 0, 0, 0, 0, 0, 0, 0),
    (0, 656, 0, 17, 0, 1, 0, 0),  # padding between rows
]
CHUNK_LENGTHS = [
    ((0, 320),),
    ((0, 2), (0, 31), (5, 32), (31, 33)),  # around small tiles
    ((0, 255), (300, 2), (17, 63)),  # around a large tile
    ((0, 256), (0, 64)),
    ((1, 257), (639, 2)),
    ((336, 320),),  # to the end of the table
    ((15, 2), (16, 16), (0, 17), (512, 100)),
    ((256, 288),),
    (),
]


def check(
    geometry: Geometry, decodes=(), chunks=(), *, backend="xla", dtype="float32", seed=0, poison=np.nan
) -> None:
    step = build(geometry, decodes, chunks, dtype=dtype, seed=seed, poison=poison)
    clean = build(geometry, decodes, chunks, dtype=dtype, seed=seed, poison=0.0)
    expected = attend(clean, geometry, "reference")
    for name in ("reference", backend):
        got = attend(step, geometry, name)
        assert np.isfinite(got).all(), f"{name} {decodes} {chunks}: poison leaked"
        assert not got[~step.real].any(), f"{name} {decodes} {chunks}: padding gave something"
        bound = FLOAT32_ERROR if dtype == "float32" else BFLOAT16_ERROR * np.maximum(1, np.abs(expected))
        error = np.abs(got - expected)
        assert (error <= bound).all(), f"{name} {decodes} {chunks}: error {error.max()}"


# ---------------------------------------------------------------------------------------- the specification


def test_the_reference_is_attention() -> None:
    step = build(MIXED, (1, 8, 0, 128), ((0, 9), (7, 2), (30, 40)))
    assert np.abs(attend(step, MIXED, "reference") - plain(step)).max() <= FLOAT32_ERROR


def test_the_worked_example_of_ragged_batch() -> None:
    """decode_rows 2, one row at position 6, a chunk of 3 from position 4, Z 4."""
    geometry = Geometry(page_size=4, table_width=2, decode_rows=2, chunk_tokens=3, chunk_rows=1)
    batch = build(geometry, (7,), ((4, 3),)).batch
    assert batch.token_row.tolist() == [0, -1, 2, 2, 2]
    assert batch.positions.tolist() == [6, 0, 4, 5, 6]
    assert batch.kv_len.tolist() == [7, 0, 7]
    assert [t[:n].tolist() for t, n in zip(batch.tiles, batch.num_tiles, strict=True)] == [[], [[2, 2, 3]]]


def test_query_heads_read_the_kv_head_of_their_group() -> None:
    """Query head i reads KV head i // G: with one constant V per KV head, each output names its KV head."""
    step = build(MIXED, (5, 9))
    v_pages = np.zeros(step.v_pages.shape, np.float32) + np.arange(1, 3)[None, :, None, None]
    step = step._replace(v_pages=v_pages)
    for backend in pallas_kernels.backends("cpu"):
        out = attend(step, MIXED, backend)
        assert np.abs(out[:2, :, 0] - [1, 1, 1, 2, 2, 2]).max() < 1e-6, backend


# ----------------------------------------------------------------------------------------- the xla backend


@pytest.mark.parametrize("decodes", DECODE_LENGTHS, ids=str)
def test_decode_lengths(decodes: tuple[int, ...]) -> None:
    check(DECODE, decodes)


@pytest.mark.parametrize("chunks", CHUNK_LENGTHS, ids=str)
def test_chunk_lengths(chunks: tuple[tuple[int, int], ...]) -> None:
    check(CHUNKS, (), chunks)


@pytest.mark.parametrize("seed", range(6))
def test_mixed_steps(seed: int) -> None:
    """Random rows of both kinds, with padding rows and padding tokens among them."""
    generator = np.random.default_rng(seed)
    decodes = tuple(int(n) for n in generator.integers(0, MIXED.most_keys + 1, 4))
    counts = generator.integers(2, 17, generator.integers(0, 5))
    chunks = tuple((int(generator.integers(0, MIXED.most_keys - c + 1)), int(c)) for c in counts)
    check(MIXED, decodes, chunks, seed=seed)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "page_size", "dtype"),
    [
        (2, 2, 64, 16, "float32"),
        (3, 3, 8, 8, "bfloat16"),
        (6, 2, 80, 8, "float32"),
        (9, 3, 64, 32, "bfloat16"),
        (8, 2, 8, 16, "float32"),
        (8, 2, 80, 32, "float32"),
        (5, 1, 64, 8, "float32"),
        (4, 1, 80, 16, "bfloat16"),
        (4, 1, 8, 32, "float32"),
    ],
)
def test_head_counts_widths_and_page_sizes(
    heads: int, kv_heads: int, width: int, page_size: int, dtype: str
) -> None:
    """MHA, groups of 3 and 4, MQA, over every width and page size."""
    geometry = Geometry(heads, kv_heads, width, page_size, 4, decode_rows=4, chunk_tokens=48, chunk_rows=3)
    chunks = ((0, 2), (page_size - 1, 2), (page_size + 1, 2 * page_size - 23 if page_size > 16 else 13))
    check(geometry, (1, page_size, 0, 4 * page_size), chunks, dtype=dtype)


@pytest.mark.parametrize("table_width", range(1, 10))
def test_table_widths(table_width: int) -> None:
    """Widths that are no multiple of the pages of a block (B013)."""
    geometry = Geometry(4, 2, 8, 8, table_width, decode_rows=3, chunk_tokens=16, chunk_rows=2)
    most = geometry.most_keys
    check(geometry, (most, most - 7, 1), ((max(0, most - 9), min(9, most)), (0, 3)))


@pytest.mark.parametrize("window", [1, 2, 7, 8, 9, 16, 33, 128, 4096])
def test_sliding_windows(window: int) -> None:
    """Around pages and blocks, with the pages behind every window gone; one window larger than any row."""
    mixed = dataclasses.replace(MIXED, window=window)
    check(mixed, (1, 8, 0, 128), ((0, 9), (7, 2), (88, 40)))
    check(mixed, (min(128, window), min(128, window + 1), 100, 63), ((100, 5), (0, 40)), seed=window)
    step = build(mixed, (128, 0, 9), ((60, 30), (3, 4)))
    assert np.abs(attend(step, mixed, "reference") - plain(step, window)).max() <= FLOAT32_ERROR


@pytest.mark.parametrize("window", [16, 100, 300])
def test_sliding_windows_over_many_blocks(window: int) -> None:
    check(dataclasses.replace(DECODE, window=window), (656, 640, 17, 577, 1, 0, 300, 639))
    check(dataclasses.replace(CHUNKS, window=window), (), ((336, 310), (600, 2), (0, 8)))


def test_positions_beyond_int16() -> None:
    """A row of 37 500 keys (B149)."""
    geometry = Geometry(2, 1, 8, 32, 1200, decode_rows=1)
    check(geometry, (37_500,))


def test_a_fully_poisoned_page_zero_is_what_padding_reads() -> None:
    """Infinity and large numbers must not leak either (B002, B156)."""
    for poison in (np.inf, -np.inf, 1e30):
        check(MIXED, (9, 0, 33), ((3, 5),), poison=poison)


def test_a_rows_own_nan_stays_in_that_row() -> None:
    """One poisoned row or chunk leaves the others of the step bit for bit as they were (B159)."""
    chunks = ((0, 9), (3, 30), (0, 2))
    clean = build(MIXED, (5, 17, 128), chunks)
    expected = attend(clean, MIXED, "xla")
    for row in (1, MIXED.decode_rows + 1):
        page = int(clean.batch.page_table[row, 0])
        step = clean._replace(
            k_pages=clean.k_pages.at[page].set(np.nan), v_pages=clean.v_pages.at[page].set(np.nan)
        )
        got = attend(step, MIXED, "xla")
        mine = np.asarray(step.batch.token_row) == row
        assert np.isnan(got[mine]).all()
        np.testing.assert_array_equal(got[~mine], expected[~mine])


def test_twice_is_equal_bit_for_bit() -> None:
    for geometry, decodes, chunks in ((DECODE, DECODE_LENGTHS[3], ()), (CHUNKS, (), CHUNK_LENGTHS[1])):
        step = build(geometry, decodes, chunks)
        np.testing.assert_array_equal(attend(step, geometry, "xla"), attend(step, geometry, "xla"))


# --------------------------------------------------------------------------------------------- the choice


def test_backends_are_resolved_by_name() -> None:
    assert set(pallas_kernels.backends("cpu")) >= {"xla", "reference"}
    assert pallas_kernels.resolve_backend("auto", "cpu") == "xla"
    assert pallas_kernels.resolve_backend("reference", "cpu") == "reference"
    with pytest.raises(NotImplementedError, match="'nonsense' does not exist; there are"):
        pallas_kernels.resolve_backend("nonsense", "cpu")
