"""Every attention backend of this device against the specification, which runs on the CPU.

Every case has NaN wherever no row owns a place, and runs twice.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from gpu.serving import serving

from pallas_kernels import Backend, Device
from pallas_kernels.attention import query_tiles
from pallas_kernels.cases import StepCase, attend, build

BASE = StepCase(
    heads=8, kv_heads=2, width=128, page_size=16, table_width=20, decode_rows=8, chunk_tokens=160,
    chunk_rows=4, dtype="bfloat16",
)  # fmt: skip
DECODE = dataclasses.replace(BASE, chunk_tokens=0, chunk_rows=0)
CHUNKS = dataclasses.replace(BASE, decode_rows=0)
ERROR = 8e-3
"""Of |out - reference| / |reference| for each token and head, as in pallas_kernels.bench."""

ROWS = ((1, 16, 0, 320, 17, 31, 33, 300), ((0, 40), (7, 2), (250, 70), (31, 33)))
"""For BASE: decodes and chunks."""


@functools.cache
def expected(case: StepCase, decodes: tuple, chunks: tuple, holes: float, seed: int) -> np.ndarray:
    """What the specification gives without poison, in float32 of the same rounded inputs, on the CPU."""
    with jax.default_device(jax.devices("cpu")[0]):
        clean = build(case, decodes, chunks, poison=0.0, holes=holes, seed=seed)
        wide = clean._replace(q=clean.q.astype("float32"))
        return attend(wide, dataclasses.replace(case, dtype="float32"), Backend("reference"))


def check(device: Device, case: StepCase, decodes: tuple = (), chunks: tuple = (), **options: Any) -> None:
    """At least xla serves each case: a device on which nothing does would pass for nothing."""
    holes, seed = options.get("holes", 0.0), options.get("seed", 0)
    poison = options.get("poison", np.nan)
    want = expected(case, decodes, chunks, holes, seed)
    backends = serving(device, case.geometry)
    assert "xla" in [backend.name for backend in backends]
    problems = []
    for backend in backends:
        tiles = query_tiles(backend, case.geometry)
        step = build(case, decodes, chunks, poison=poison, holes=holes, seed=seed, tiles=tiles)
        got, again = attend(step, case, backend), attend(step, case, backend)
        name = f"{backend.name} {case}"
        if not np.isfinite(got).all():
            problems.append(f"{name}: poison leaked")
            continue
        size = np.linalg.norm(want, axis=-1)
        error = np.linalg.norm(got - want, axis=-1) / np.where(size > 0, size, 1.0)
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


def test_a_planted_fault_is_seen(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that leaves out the last key of every row does not pass."""
    from pallas_kernels import xla

    whole = xla.paged_attention

    def short(q: Any, k_pages: Any, v_pages: Any, batch: Any, **options: Any) -> Any:
        return whole(q, k_pages, v_pages, dataclasses.replace(batch, kv_len=batch.kv_len - 1), **options)

    jax.clear_caches()
    monkeypatch.setattr(xla, "paged_attention", short)
    with pytest.raises(AssertionError, match="xla"):
        check(device, DECODE, (64, 33, 17, 5, 0, 9, 10, 11))
    monkeypatch.undo()
    jax.clear_caches()
