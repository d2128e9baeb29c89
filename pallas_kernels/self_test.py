"""Whether a backend computes on the device that is here: some seconds, before a model is served by it.

A kernel that compiles may still be wrong on a GPU, a driver or a jax that nobody has run it on. The engine
asks before it believes: what is chosen by "auto" and fails is passed over with a warning.
"""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import matmul
from pallas_kernels.attention import query_tiles
from pallas_kernels.cases import StepCase, attend, build, specified, vector_error
from pallas_kernels.device import Backend, Geometry
from pallas_kernels.quantized import GROUPS, Format, QuantizedWeight, quantize

TOLERANCE = {"float32": 5e-3, "bfloat16": 1.6e-2, "float16": 4e-3}
"""Most of |output - reference| / |reference| for each token and head: a lost page of 128 makes 6e-2 or more,
a right kernel with bfloat16 some 2e-3 (its tests allow 8e-3). float32 leaves room for TF32."""

LEAST_KEYS = 2048
"""Of the longest row: several parts to be merged, and each of more blocks than are under way at a time."""


def failures(
    backend: Backend, geometries: Iterable[Geometry], windows: Iterable[int | None], sinks: int = 0
) -> str:
    """The first `failure` over every geometry and window of a model's layers, or ""."""
    windows = tuple(windows)
    tests = (failure(backend, geometry, window, sinks) for geometry in geometries for window in windows)
    return next(filter(None, tests), "")


def failure(backend: Backend, geometry: Geometry, window: int | None = None, sinks: int = 0) -> str:
    """Run decoding rows, chunks and padding of this geometry (NaN wherever nobody may look) and compare with
    the reference: what is wrong in one line, or "".

    Rows have up to 2048 keys, or 8 pages, and chunks 48 tokens. There are as many decode rows as make a row's
    keys several long parts where parts are for busy multiprocessors; most rows are padding. A window that
    would hide nothing is a smaller one here, and has `sinks` beside it, or as many.
    """
    size = geometry.page_size
    pages = max(8, -(-LEAST_KEYS // size))
    most = pages * size
    decode_rows = max(5, -(-backend.device.num_cores // geometry.kv_heads))
    case = StepCase(
        geometry.heads, geometry.kv_heads, geometry.width, size, pages, decode_rows, chunk_tokens=48,
        chunk_rows=2, window=None if window is None else min(window, most // 3), dtype=geometry.dtype,
        kv_dtype=geometry.kv_dtype, sinks=0 if window is None else min(sinks, most // 3),
    )  # fmt: skip
    decodes, chunks = (1, most, 0, size + 1, most - size // 2), ((0, 21), (most - 30, 19))
    try:
        step = build(case, decodes, chunks, tiles=query_tiles(backend, geometry), tight=True)
        got = attend(step, case, backend)
    except Exception as error:  # the compiler's or the driver's own, of any type
        return _raised(error)
    if not np.isfinite(got).all():
        return "gives numbers that are not finite"
    if got[~step.real].any():
        return "writes where padding is"
    error = float(vector_error(got, specified(step, case)).max())
    if error > TOLERANCE[geometry.dtype]:
        return f"is off by {error:.2g}, allowed {TOLERANCE[geometry.dtype]:.2g}"
    return ""


def matmul_failure(backend: Backend, format: Format, dtype: str) -> str:
    """Multiply few and many rows of `dtype` with small weights of `format` (int4: of each group) and compare
    with the reference: what is wrong in one line, or "".

    There are so many outputs that each multiprocessor has some, and one more than its tiles hold.
    """
    generator = np.random.default_rng(0)
    outputs = 64 * backend.device.num_cores + 1
    multiply = jax.jit(matmul.quant_matmul, static_argnames=("backend",))
    for group in GROUPS if format == "int4" else GROUPS[:1]:
        inputs = 5 * group
        drawn = quantize(generator.standard_normal((outputs, inputs), np.float32), format)
        weight = QuantizedWeight(*map(jnp.asarray, drawn))
        for rows in (3, 70):
            x = jnp.asarray(generator.standard_normal((rows, inputs)), dtype)
            try:
                got = np.asarray(multiply(x, weight, backend=backend), np.float32)
            except Exception as error:
                return _raised(error)
            if not np.isfinite(got).all():
                return "gives numbers that are not finite"
            expected = np.asarray(matmul.reference(x, weight))
            typical = np.sqrt(np.mean(expected**2))
            error = float((np.abs(got - expected) / np.maximum(typical, np.abs(expected))).max())
            if error > TOLERANCE[dtype]:
                return f"is off by {error:.2g}, allowed {TOLERANCE[dtype]:.2g}"
    return ""


def _raised(error: Exception) -> str:
    return f"does not run: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
