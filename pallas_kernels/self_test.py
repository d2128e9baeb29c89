"""Whether a backend computes attention on the device that is here: a few seconds, before a model is served.

A kernel that compiles may still be wrong on a GPU, a driver or a jax that nobody has run it on. The engine
asks before it believes: what is chosen by "auto" and fails is passed over with a warning.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pallas_kernels.attention import query_tiles
from pallas_kernels.cases import StepCase, attend, build
from pallas_kernels.device import Backend, Geometry

TOLERANCE = {"float32": 5e-3, "bfloat16": 2e-2, "float16": 4e-3}
"""Largest error of an output element, relative to 1 or to itself. float32 leaves room for TF32."""


def failures(backend: Backend, geometries: Iterable[Geometry], windows: Iterable[int | None]) -> str:
    """The first `failure` over every geometry and window of a model's layers, or ""."""
    tests = (failure(backend, geometry, window) for geometry in geometries for window in windows)
    return next(filter(None, tests), "")


def failure(backend: Backend, geometry: Geometry, window: int | None = None) -> str:
    """Run decoding rows, chunks and padding of this geometry (NaN wherever nobody may look) and compare with
    the reference: what is wrong in one line, or "".

    The case has 4 rows of up to 8 pages, or 64 keys, and 48 tokens of chunks.
    """
    size = geometry.page_size
    pages = max(8, 64 // size)
    case = StepCase(
        geometry.heads, geometry.kv_heads, geometry.width, size, pages, decode_rows=4, chunk_tokens=48,
        chunk_rows=2, window=window, dtype=geometry.dtype, kv_dtype=geometry.kv_dtype,
    )  # fmt: skip
    most = case.most_keys
    decodes, chunks = (1, most, 0, size + 1), ((0, 21), (most - 30, 19))
    try:
        step = build(case, decodes, chunks, tiles=query_tiles(backend, geometry))
        got = attend(step, case, backend)
    except Exception as error:  # the compiler's or the driver's own, of any type
        return f"does not run: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    expected = attend(build(case, decodes, chunks, poison=0.0), case, Backend("reference", backend.device))
    if not np.isfinite(got).all():
        return "gives numbers that are not finite"
    if got[~step.real].any():
        return "writes where padding is"
    error = float((np.abs(got - expected) / np.maximum(1, np.abs(expected))).max())
    if error > TOLERANCE[geometry.dtype]:
        return f"is off by {error:.2g}, allowed {TOLERANCE[geometry.dtype]:.2g}"
    return ""
