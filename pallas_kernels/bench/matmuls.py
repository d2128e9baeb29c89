"""Rows of `quant_matmul`: products of Llama 3 8B with weights of few bits, beside the same in bfloat16."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import matmul
from pallas_kernels.bench.rows import CACHE_BYTES, WORST_ERROR, Options, Row, timing_fields, worst_error
from pallas_kernels.bench.timing import measure
from pallas_kernels.device import Backend, Device
from pallas_kernels.quantized import GROUPS, QuantizedWeight

PLAIN = "bfloat16"
"""The backend that is beside ours: XLA's product with the weight in bfloat16."""
BACKENDS = ("pallas_triton", "xla", PLAIN)


@dataclass(frozen=True)
class Matmul:
    """x [rows, inputs] times a weight [outputs, inputs] of a format, transposed."""

    weight: str
    rows: int
    outputs: int
    inputs: int
    format: str

    @property
    def shape(self) -> str:
        return f"matmul {self.weight} x{self.rows}"

    @property
    def name(self) -> str:
        return f"{self.shape} {self.format}"

    def bytes_moved(self, plain: bool) -> int:
        bits = 16 if plain else {"int8": 8, "fp8": 8, "int4": 4}[self.format]
        weight = self.outputs * self.inputs * bits // 8
        if not plain:
            weight += 4 * self.outputs * (self.inputs // GROUPS[0] if self.format == "int4" else 1)
        return weight + 2 * self.rows * (self.inputs + self.outputs)


_WEIGHTS = {"gate_up": (28672, 4096), "down": (4096, 14336)}

MATMULS: tuple[Matmul, ...] = tuple(
    Matmul(weight, rows, *size, format)
    for weight, size in _WEIGHTS.items()
    for format in ("int8", "int4", "fp8")
    for rows in (1, 16, 64, 2048)
)
TINY_MATMULS: tuple[Matmul, ...] = tuple(
    Matmul("tiny", rows, 192, 128, format) for format in ("int8", "int4", "fp8") for rows in (1, 40)
)


def matmul_row(case: Matmul, name: str, device: Device, options: Options) -> Row:
    """The row of one backend, or of PLAIN; right first, timed then."""
    plain = name == PLAIN
    row: Row = {"case": case.name, "shape": case.shape, "backend": name}
    row |= {"bytes": case.bytes_moved(plain), "operations": 2 * case.rows * case.outputs * case.inputs}
    if reason := _refusal(case, name, device, options):
        return row | {"status": "refused", "reason": reason}
    # At least two, at most 16, and together more than a cache holds: one program multiplies with all of them.
    count = max(2, min(-(-CACHE_BYTES // row["bytes"]), 16)) if device.platform == "gpu" else 2
    keys = jax.random.split(jax.random.key(0), count)
    xs = tuple(jax.random.normal(key, (case.rows, case.inputs), jnp.bfloat16) for key in keys)
    weights = tuple(_weight(key, PLAIN if plain else case.format, case.outputs, case.inputs) for key in keys)
    interpret = options.interpret and not plain and name.startswith("pallas")
    multiply = (
        _plain if plain else functools.partial(matmul.quant_matmul, backend=Backend(name, device, interpret))
    )

    @jax.jit
    def program(xs: tuple, weights: tuple) -> list[jax.Array]:
        products: list[jax.Array] = []
        for x, weight in zip(xs, weights, strict=True):
            if products:  # one after the other, as in a model
                x, products[-1] = lax.optimization_barrier((x, products[-1]))
            products.append(multiply(x, weight))
        return products

    got = np.asarray(program(xs, weights)[0], np.float32)
    expected = np.asarray(_plain_float32(xs[0], weights[0]) if plain else _specified(xs[0], weights[0]))
    error = worst_error(got, expected)
    if not error <= WORST_ERROR:
        return row | {
            "status": "wrong",
            "error": error,
            "reason": f"error {error:.2g} is above {WORST_ERROR:g}",
        }
    timing = measure(lambda _: program(xs, weights), calls_each=count, budget=options.budget)
    return row | {"status": "ok", "error": error, **timing_fields(timing)}


def _refusal(case: Matmul, name: str, device: Device, options: Options) -> str:
    if name == PLAIN:
        return ""
    format: Any = case.format
    if reason := matmul.matmul_unsupported(format, device):
        return reason
    return matmul.kernel_unsupported(Backend(name, device, options.interpret), format)


@functools.partial(jax.jit, static_argnames=("format", "outputs", "inputs"))
def _weight(key: jax.Array, format: str, outputs: int, inputs: int) -> Any:
    """A random weight, drawn in its format: what it stands for is of no matter here."""
    if format == PLAIN:
        return jax.random.normal(key, (outputs, inputs), jnp.bfloat16)
    if format == "int8":
        values = jax.random.randint(key, (outputs, inputs), -127, 128, jnp.int8)
    elif format == "fp8":
        values = jax.random.normal(key, (outputs, inputs), jnp.bfloat16).astype(jnp.float8_e4m3fn)
    else:
        values = jax.random.bits(key, (outputs, inputs // 2), jnp.uint8)
    groups = (inputs // GROUPS[0],) if format == "int4" else ()
    scales = jax.random.uniform(key, (*groups, outputs), jnp.float32, 0.5, 1.5)
    return QuantizedWeight(values, scales)


_BY_ROWS = (((1,), (1,)), ((), ()))


def _plain(x: jax.Array, weight: jax.Array) -> jax.Array:
    return lax.dot_general(x, weight, _BY_ROWS)


@jax.jit
def _plain_float32(x: jax.Array, weight: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32), weight.astype(jnp.float32)
    return lax.dot_general(*wide, _BY_ROWS, precision=lax.Precision.HIGHEST)


_specified = jax.jit(matmul.reference)
