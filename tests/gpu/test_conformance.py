"""Every attention backend of this device against the specification, which runs on the CPU.

Every case has NaN wherever no row owns a place, and runs twice.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.serving import serving

from pallas_kernels import Device
from pallas_kernels.attention import query_tiles
from pallas_kernels.batch import fill_tiles
from pallas_kernels.cases import Step, StepCase, attend, build, specified, vector_error

BASE = StepCase(
    heads=8, kv_heads=2, width=128, page_size=16, table_width=20, decode_rows=8, chunk_tokens=160,
    chunk_rows=4, dtype="bfloat16",
)  # fmt: skip
DECODE = dataclasses.replace(BASE, chunk_tokens=0, chunk_rows=0)
CHUNKS = dataclasses.replace(BASE, decode_rows=0)
LONG = dataclasses.replace(BASE, table_width=160)
"""2560 keys: kernels cut a row into several parts, and read more blocks than they have slots for."""
ERROR = 8e-3
"""Of |out - reference| / |reference| for each token and head, as in pallas_kernels.bench."""

ROWS = ((1, 16, 0, 320, 17, 31, 33, 300), ((0, 40), (7, 2), (250, 70), (31, 33)))
"""For BASE: decodes and chunks."""


@functools.cache
def expected(case: StepCase, decodes: tuple, chunks: tuple, holes: float, seed: int) -> np.ndarray:
    """What the specification gives without poison, in float32 of the same rounded inputs, on the CPU."""
    with jax.default_device(jax.devices("cpu")[0]):
        clean = build(case, decodes, chunks, poison=0.0, holes=holes, seed=seed, tight=True)
        return specified(clean, case)


def check(device: Device, case: StepCase, decodes: tuple = (), chunks: tuple = (), **options: Any) -> None:
    """At least xla serves each case: a device on which nothing does would pass for nothing. `plant` changes
    the step that backends are given."""
    plant = options.get("plant", lambda step: step)
    holes, seed = options.get("holes", 0.0), options.get("seed", 0)
    poison = options.get("poison", np.nan)
    want = expected(case, decodes, chunks, holes, seed)
    backends = serving(device, case.geometry)
    assert "xla" in [backend.name for backend in backends]
    problems = []
    for backend in backends:
        tiles = query_tiles(backend, case.geometry)
        step = plant(
            build(case, decodes, chunks, poison=poison, holes=holes, seed=seed, tiles=tiles, tight=True)
        )
        got, again = attend(step, case, backend), attend(step, case, backend)
        name = f"{backend.name} {case}"
        if not np.isfinite(got).all():
            problems.append(f"{name}: poison leaked")
            continue
        error = vector_error(got, want)
        if error.max() > ERROR:
            place = np.unravel_index(error.argmax(), error.shape)
            problems.append(f"{name}: error {error.max():.2g} at token and head {place}")
        if got[~step.real].any():
            problems.append(f"{name}: padding gave something")
        if not np.array_equal(got, again):
            problems.append(f"{name}: two runs of the same inputs differ")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    "decodes",
    [
        (1, 2, 15, 16, 17, 31, 32, 33),
        (63, 64, 65, 127, 128, 129, 191, 193),
        (255, 256, 257, 320, 319, 305, 304, 1),
        (1, 0, 0, 0, 0, 0, 0, 0),
        (0, 0, 0, 0, 0, 0, 0, 0),
        (0, 320, 0, 17, 0, 1, 0, 0),
    ],
    ids=str,
)
def test_decode_lengths(device: Device, decodes: tuple[int, ...]) -> None:
    check(device, DECODE, decodes)


@pytest.mark.parametrize(
    "chunks",
    [
        ((0, 160),),
        ((0, 2), (0, 31), (5, 32), (31, 33)),
        ((0, 64), (64, 64)),
        ((1, 65), (318, 2)),
        ((160, 160),),
        ((15, 2), (16, 16), (0, 17), (256, 60)),
        (),
    ],
    ids=str,
)
def test_chunk_lengths(device: Device, chunks: tuple[tuple[int, int], ...]) -> None:
    check(device, CHUNKS, (), chunks)


@pytest.mark.parametrize("seed", range(3))
def test_mixed_steps(device: Device, seed: int) -> None:
    generator = np.random.default_rng(seed)
    decodes = tuple(int(n) for n in generator.integers(0, BASE.most_keys + 1, 8))
    counts = generator.integers(2, 41, 4)
    chunks = tuple((int(generator.integers(0, BASE.most_keys - c + 1)), int(c)) for c in counts)
    check(device, BASE, decodes, chunks, seed=seed)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 16])
def test_groups(device: Device, group: int) -> None:
    check(device, dataclasses.replace(BASE, heads=2 * group), *ROWS)


@pytest.mark.parametrize("width", [64, 80, 96, 128, 256])
def test_widths(device: Device, width: int) -> None:
    check(device, dataclasses.replace(BASE, width=width), *ROWS)


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_page_sizes(device: Device, page_size: int) -> None:
    check(device, dataclasses.replace(BASE, page_size=page_size, table_width=-(-320 // page_size)), *ROWS)


@pytest.mark.parametrize(
    ("window", "sinks"), [(1, 0), (16, 0), (40, 0), (4096, 0), (9, 4), (40, 17), (128, 130)]
)
def test_windows_and_sinks(device: Device, window: int, sinks: int) -> None:
    check(device, dataclasses.replace(BASE, window=window, sinks=sinks), *ROWS)


def test_soft_caps(device: Device) -> None:
    check(device, dataclasses.replace(BASE, soft_cap=0.5, window=60), *ROWS)
    check(device, dataclasses.replace(BASE, soft_cap=30.0), *ROWS)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("holes", [0.3, 1.0])
def test_holes(device: Device, holes: float, window: int | None) -> None:
    check(device, dataclasses.replace(BASE, window=window), *ROWS, holes=holes)


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("page_size", [16, 64])
def test_narrow_pages(device: Device, kv_dtype: str, page_size: int) -> None:
    case = dataclasses.replace(BASE, kv_dtype=kv_dtype, page_size=page_size, table_width=-(-320 // page_size))
    check(device, case, *ROWS)
    check(device, dataclasses.replace(case, window=40, sinks=4), *ROWS)


def test_float16(device: Device) -> None:
    check(device, dataclasses.replace(BASE, dtype="float16"), *ROWS)


@pytest.mark.parametrize("poison", [np.inf, -np.inf, 1e30])
def test_other_poison(device: Device, poison: float) -> None:
    check(device, BASE, *ROWS, poison=poison)


LONG_ROWS = (2560, 2559, 0, 2049, 1, 1023, 2304, 17)
LONG_CHUNKS = ((2460, 100), (0, 17), (2047, 2), (1000, 41))


@pytest.mark.parametrize("decode_rows", [8, 66])
def test_long_decodes(device: Device, decode_rows: int) -> None:
    """Few rows make many short parts of a row, many rows (here padding) few long ones."""
    case = dataclasses.replace(LONG, decode_rows=decode_rows, chunk_tokens=0, chunk_rows=0)
    check(device, case, LONG_ROWS)


def test_long_chunks(device: Device) -> None:
    check(device, dataclasses.replace(LONG, decode_rows=0), (), LONG_CHUNKS)


def test_long_mixed_steps(device: Device) -> None:
    check(device, LONG, LONG_ROWS, LONG_CHUNKS)
    check(device, LONG, LONG_ROWS, LONG_CHUNKS, holes=0.2)


@pytest.mark.parametrize(("window", "sinks"), [(700, 0), (1500, 20), (2000, 0)])
def test_long_windows(device: Device, window: int, sinks: int) -> None:
    check(device, dataclasses.replace(LONG, window=window, sinks=sinks), LONG_ROWS, LONG_CHUNKS)


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
def test_long_narrow_pages(device: Device, kv_dtype: str) -> None:
    check(device, dataclasses.replace(LONG, kv_dtype=kv_dtype), LONG_ROWS, LONG_CHUNKS)


def cut_again(step: Step, cuts: tuple[int, ...]) -> tuple[Step, list[int]]:
    """The first chunk of a step in pieces of `cuts` tokens (one of them may be 1 token), each a row of its
    own with the same pages, packed from the last to the first; and where each of its tokens now is."""
    batch = jax.tree.map(np.array, step.batch)
    starts = np.cumsum((0, *cuts))
    token_row, positions = np.full_like(batch.token_row, -1), np.zeros_like(batch.positions)
    table, kv_len = np.zeros_like(batch.page_table), np.zeros_like(batch.kv_len)
    q, place, pieces = np.zeros_like(step.q), 0, []
    where = np.zeros(sum(cuts), int)
    for row, piece in enumerate(reversed(range(len(cuts)))):
        start, count = starts[piece], cuts[piece]
        token_row[place : place + count] = row
        positions[place : place + count] = batch.positions[start : start + count]
        q[place : place + count] = step.q[start : start + count]
        where[start : start + count] = np.arange(place, place + count)
        table[row], kv_len[row] = batch.page_table[0], positions[place + count - 1] + 1
        pieces.append((row, place, count))
        place += count
    capacity = tuple(len(tiles) for tiles in batch.tiles)
    tiles, num_tiles = fill_tiles(pieces, capacity, batch.tile_sizes)
    changed = dataclasses.replace(
        batch, token_row=token_row, positions=positions, page_table=table, kv_len=kv_len, tiles=tiles,
        num_tiles=num_tiles,
    )  # fmt: skip
    return step._replace(q=jnp.asarray(q), batch=jax.tree.map(jnp.asarray, changed)), where.tolist()


@pytest.mark.parametrize("window", [None, 700])
def test_a_query_does_not_depend_on_its_chunk(device: Device, window: int | None) -> None:
    """What batch_invariant asks of every backend: in one shape, with tiles of one size and one-token slices
    as chunks, a query's output has the same bits however the tokens around it are cut."""
    case = dataclasses.replace(LONG, decode_rows=0, window=window)
    problems = []
    for backend in serving(device, case.geometry):
        tiles = query_tiles(backend, case.geometry)[-1:]
        step = build(case, (), ((2400, 100),), tiles=tiles, tight=True)
        whole = attend(step, case, backend)[:100]
        for cuts in ((1, 37, 62), (33, 1, 1, 65), (50, 50)):
            again, where = cut_again(step, cuts)
            if not np.array_equal(attend(again, case, backend)[where], whole):
                problems.append(f"{backend.name} {case}: in pieces of {cuts} other bits than in one")
    assert not problems, "\n".join(problems)


def wrong_page(step: Step) -> Step:
    """The first row's page 70 is one of the second's."""
    table = step.batch.page_table
    return step._replace(batch=dataclasses.replace(step.batch, page_table=table.at[0, 70].set(table[1, 70])))


@pytest.mark.parametrize("kind", ["decode", "chunk"])
def test_a_planted_fault_is_seen(device: Device, kind: str) -> None:
    """No backend passes that reads one page of 160 in a wrong place."""
    if kind == "decode":
        case, rows = dataclasses.replace(LONG, chunk_tokens=0, chunk_rows=0), (LONG_ROWS, ())
    else:
        case, rows = dataclasses.replace(LONG, decode_rows=0), ((), ((2460, 100), (2000, 40)))
    check(device, case, *rows)
    with pytest.raises(AssertionError) as seen:
        check(device, case, *rows, plant=wrong_page)
    for backend in serving(device, case.geometry):
        assert f"{backend.name} {case}: error" in str(seen.value)
