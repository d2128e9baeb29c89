"""Paged attention: the reference against plain numpy, and every other backend against the reference.

Every case runs with NaN in all places that no row owns, so each of them is also a leak test.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from plain import plain

import pallas_kernels
from pallas_kernels import CPU, Backend, Device, Geometry
from pallas_kernels.cases import StepCase, attend, build, vector_error

pytestmark = pytest.mark.usefixtures("compile_cache")

FLOAT32_ERROR = 1e-5  # of each element
BFLOAT16_ERROR = 8e-3  # of |out - reference| / |reference| for each token and head

DECODE = StepCase(page_size=16, table_width=41, decode_rows=8)
CHUNKS = StepCase(width=8, page_size=16, table_width=41, chunk_tokens=320, chunk_rows=4)
MIXED = StepCase(width=8, page_size=8, table_width=16, decode_rows=4, chunk_tokens=64, chunk_rows=4)

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


REFERENCE, XLA = Backend("reference"), Backend("xla")


def check(case: StepCase, decodes=(), chunks=(), *, seed=0, poison=np.nan, holes=0.0) -> None:
    step = build(case, decodes, chunks, seed=seed, poison=poison, holes=holes)
    clean = build(case, decodes, chunks, seed=seed, poison=0.0, holes=holes)
    expected = attend(clean, case, REFERENCE)
    for backend in (REFERENCE, XLA):
        got, name = attend(step, case, backend), f"{backend.name} {case} {decodes} {chunks}"
        assert np.isfinite(got).all(), f"{name}: poison leaked"
        assert not got[~step.real].any(), f"{name}: padding gave something"
        if case.dtype == "float32":
            error, bound = np.abs(got - expected), FLOAT32_ERROR
        else:
            error, bound = vector_error(got, expected), BFLOAT16_ERROR
        assert error.max() <= bound, f"{name}: error {error.max()}"


# ---------------------------------------------------------------------------------------- the specification


def test_the_reference_is_attention() -> None:
    step = build(MIXED, (1, 8, 0, 128), ((0, 9), (7, 2), (30, 40)))
    assert np.abs(attend(step, MIXED, REFERENCE) - plain(step, MIXED)).max() <= FLOAT32_ERROR


def test_the_worked_example_of_ragged_batch() -> None:
    """decode_rows 2, one row at position 6, a chunk of 3 from position 4, Z 4."""
    case = StepCase(page_size=4, table_width=2, decode_rows=2, chunk_tokens=3, chunk_rows=1)
    batch = build(case, (7,), ((4, 3),)).batch
    assert batch.token_row.tolist() == [0, -1, 2, 2, 2]
    assert batch.positions.tolist() == [6, 0, 4, 5, 6]
    assert batch.kv_len.tolist() == [7, 0, 7]
    assert [t[:n].tolist() for t, n in zip(batch.tiles, batch.num_tiles, strict=True)] == [[], [[2, 2, 3]]]


def test_query_heads_read_the_kv_head_of_their_group() -> None:
    """Query head i reads KV head i // G: with one constant V per KV head, each output names its KV head."""
    step = build(MIXED, (5, 9))
    v_pages = np.zeros(step.v_pages.shape, np.float32) + np.arange(1, 3)[None, :, None, None]
    step = step._replace(v_pages=v_pages)
    for backend in (REFERENCE, XLA):
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
    case = StepCase(
        heads, kv_heads, width, page_size, 4, decode_rows=4, chunk_tokens=48, chunk_rows=3, dtype=dtype
    )
    chunks = ((0, 2), (page_size - 1, 2), (page_size + 1, 2 * page_size - 23 if page_size > 16 else 13))
    check(case, (1, page_size, 0, 4 * page_size), chunks)


@pytest.mark.parametrize("table_width", range(1, 10))
def test_table_widths(table_width: int) -> None:
    """Widths that are no multiple of the pages of a block (B013)."""
    case = StepCase(4, 2, 8, 8, table_width, decode_rows=3, chunk_tokens=16, chunk_rows=2)
    most = case.most_keys
    check(case, (most, most - 7, 1), ((max(0, most - 9), min(9, most)), (0, 3)))


@pytest.mark.parametrize("window", [1, 2, 7, 8, 9, 16, 33, 128, 4096])
def test_sliding_windows(window: int) -> None:
    """Around pages and blocks, with the pages behind every window gone; one window larger than any row."""
    mixed = dataclasses.replace(MIXED, window=window)
    check(mixed, (1, 8, 0, 128), ((0, 9), (7, 2), (88, 40)))
    check(mixed, (min(128, window), min(128, window + 1), 100, 63), ((100, 5), (0, 40)), seed=window)
    step = build(mixed, (128, 0, 9), ((60, 30), (3, 4)))
    assert np.abs(attend(step, mixed, REFERENCE) - plain(step, mixed)).max() <= FLOAT32_ERROR


@pytest.mark.parametrize("window", [16, 100, 300])
def test_sliding_windows_over_many_blocks(window: int) -> None:
    check(dataclasses.replace(DECODE, window=window), (656, 640, 17, 577, 1, 0, 300, 639))
    check(dataclasses.replace(CHUNKS, window=window), (), ((336, 310), (600, 2), (0, 8)))


def test_positions_beyond_int16() -> None:
    """A row of 37 500 keys (B149)."""
    case = StepCase(2, 1, 8, 32, 1200, decode_rows=1)
    check(case, (37_500,))


def test_a_fully_poisoned_page_zero_is_what_padding_reads() -> None:
    """Infinity and large numbers must not leak either (B002, B156)."""
    for poison in (np.inf, -np.inf, 1e30):
        check(MIXED, (9, 0, 33), ((3, 5),), poison=poison)


def test_a_rows_own_nan_stays_in_that_row() -> None:
    """One poisoned row or chunk leaves the others of the step bit for bit as they were (B159)."""
    chunks = ((0, 9), (3, 30), (0, 2))
    clean = build(MIXED, (5, 17, 128), chunks)
    expected = attend(clean, MIXED, XLA)
    for row in (1, MIXED.decode_rows + 1):
        page = int(clean.batch.page_table[row, 0])
        step = clean._replace(
            k_pages=clean.k_pages.at[page].set(np.nan), v_pages=clean.v_pages.at[page].set(np.nan)
        )
        got = attend(step, MIXED, XLA)
        mine = np.asarray(step.batch.token_row) == row
        assert np.isnan(got[mine]).all()
        np.testing.assert_array_equal(got[~mine], expected[~mine])


def test_twice_is_equal_bit_for_bit() -> None:
    for case, decodes, chunks in ((DECODE, DECODE_LENGTHS[3], ()), (CHUNKS, (), CHUNK_LENGTHS[1])):
        step = build(case, decodes, chunks)
        np.testing.assert_array_equal(attend(step, case, XLA), attend(step, case, XLA))


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("holes", [0.3, 1.0])
def test_holes_in_the_page_table(holes: float, window: int | None) -> None:
    """Pages that are 0 in the table are seen by nobody; a row without any gives zeros."""
    mixed = dataclasses.replace(MIXED, window=window)
    rows = (1, 8, 0, 128), ((0, 9), (7, 2), (88, 40))
    for seed in range(3):
        check(mixed, *rows, holes=holes, seed=seed)
    step = build(mixed, *rows, holes=holes)
    assert np.abs(attend(step, mixed, REFERENCE) - plain(step, mixed)).max() <= FLOAT32_ERROR
    check(dataclasses.replace(DECODE, window=window), DECODE_LENGTHS[3], holes=holes)
    check(dataclasses.replace(CHUNKS, window=window), (), CHUNK_LENGTHS[4], holes=holes)


@pytest.mark.parametrize(("window", "sinks"), [(1, 1), (9, 4), (16, 16), (40, 17), (128, 130)])
def test_sinks_stay_in_sight(window: int, sinks: int) -> None:
    mixed = dataclasses.replace(MIXED, window=window, sinks=sinks)
    rows = (1, 8, 0, 128), ((0, 9), (7, 2), (88, 40))
    check(mixed, *rows)
    step = build(mixed, *rows)
    assert np.abs(attend(step, mixed, REFERENCE) - plain(step, mixed)).max() <= FLOAT32_ERROR
    check(dataclasses.replace(DECODE, window=window, sinks=sinks), DECODE_LENGTHS[3])
    check(dataclasses.replace(CHUNKS, window=window, sinks=sinks), (), ((336, 310), (600, 2), (0, 8)))


def test_soft_caps() -> None:
    mixed = dataclasses.replace(MIXED, soft_cap=0.5, window=60)
    rows = (1, 8, 0, 128), ((0, 9), (7, 2), (88, 40))
    check(mixed, *rows)
    step = build(mixed, *rows)
    assert np.abs(attend(step, mixed, REFERENCE) - plain(step, mixed)).max() <= FLOAT32_ERROR


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn", "bfloat16"])
def test_pages_of_other_types(kv_dtype: str) -> None:
    """The same numbers, read from narrower pages; what quantising itself costs is test_quantized_pages'."""
    for case, decodes, chunks in (
        (MIXED, (1, 8, 0, 128), ((0, 9), (7, 2), (88, 40))),
        (dataclasses.replace(MIXED, window=40, sinks=4), (1, 8, 0, 128), ((0, 9), (7, 2), (88, 40))),
        (DECODE, DECODE_LENGTHS[3], ()),
    ):
        check(dataclasses.replace(case, kv_dtype=kv_dtype), decodes, chunks)


# --------------------------------------------------------------------------------------------- the choice

H100 = Device("gpu", (9, 0), "NVIDIA H100", 132)
LLAMA = Geometry(32, 8, 128, 16)


def test_backends_are_resolved_by_name() -> None:
    float32 = dataclasses.replace(LLAMA, dtype="float32", kv_dtype="float32")
    assert pallas_kernels.resolve_backend("auto", CPU, float32) == XLA
    assert pallas_kernels.resolve_backend("reference", CPU, LLAMA) == REFERENCE
    with pytest.raises(NotImplementedError, match="'nonsense' does not exist; there are"):
        pallas_kernels.resolve_backend("nonsense", CPU, LLAMA)


def test_a_backend_refuses_with_its_reason() -> None:
    with pytest.raises(NotImplementedError, match=r"'cudnn' does not serve NVIDIA H100: .* dense keys"):
        pallas_kernels.resolve_backend("cudnn", H100, LLAMA)
    with pytest.raises(NotImplementedError, match=r"'xla' does not serve cpu: .*interpret"):
        pallas_kernels.resolve_backend("xla", CPU, LLAMA, interpret=True)
    reasons = pallas_kernels.backends(CPU, LLAMA)
    assert set(reasons) == {"pallas_mosaic", "pallas_triton", "cudnn", "xla", "reference"}
    assert all("\n" not in reason for reason in reasons.values())


def test_one_layer_that_is_not_served_refuses_for_all() -> None:
    """Layers may differ in their KV heads: a backend must serve each."""
    odd = dataclasses.replace(LLAMA, width=72)
    served = pallas_kernels.backends(H100, LLAMA)
    both = pallas_kernels.backends(H100, LLAMA, odd)
    assert both["xla"] == served["xla"] == ""
    assert served["pallas_mosaic"] == ""
    assert "width" in both["pallas_mosaic"]
    assert pallas_kernels.resolve_backend("auto", H100, LLAMA).name == "pallas_mosaic"
    assert pallas_kernels.resolve_backend("auto", H100, LLAMA, odd).name != "pallas_mosaic"
