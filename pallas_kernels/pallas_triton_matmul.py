"""int4 weights times rows in Pallas Triton: the packed weight is read once, nibbles come apart in registers.

XLA converts int8 and fp8 inside the kernel of its own product, so those need no kernel of ours. With int4 it
does not: scales that change along the sum keep the two apart, and a converted copy of the weight is written
out at every call (112 MiB for [14336, 4096] in bfloat16).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.device import Device
from pallas_kernels.quantized import Format, QuantizedWeight

_OUTPUTS = 64  # of a tile
_FEW, _MANY = 16, 64  # rows of a tile: the least that the tensor cores take, and for prompts
_MOST_SPLITS = 8


def unsupported(format: Format, device: Device, interpret: bool) -> str:
    """Why this kernel does not serve; "" when it does."""
    if format != "int4":
        return f"XLA's own product converts {format} on the way: there is nothing to gain"
    if interpret:
        return ""
    if device.platform != "gpu" or device.capability is None:
        return f"runs on NVIDIA GPUs, not on {device.kind or device.platform}"
    if device.capability < (8, 0):
        return f"needs compute capability 8.0 or above, not {device.capability[0]}.{device.capability[1]}"
    return ""


def int4_matmul(
    x: jax.Array, weight: QuantizedWeight, *, device: Device, interpret: bool = False
) -> jax.Array:
    """x [T, in] times the weight transposed -> [T, out] in x's dtype; rows as the checkpoint has them.

    A program multiplies 64 outputs with 16 or 64 rows, one group after the other; with few rows the groups
    are dealt out to several programs, whose partial sums are added at the end, so that every multiprocessor
    has something to read. A group's numbers are exact in x's type; its scale is applied to its float32 sum.
    """
    assert weight.format == "int4", f"a weight of {weight.format}"
    assert weight.block is None, "this kernel takes rows, not blocks"
    rows, outputs = x.shape[0], weight.outputs
    groups = weight.scales.shape[0]
    tile = _FEW if rows <= 2 * _FEW else _MANY
    tiles = pl.cdiv(rows, tile), pl.cdiv(outputs, _OUTPUTS)
    wanted = device.num_cores * (4 if tile == _FEW else 1)  # programs: partial sums of many rows are large
    splits = min(_MOST_SPLITS, groups, max(1, wanted // (tiles[0] * tiles[1])))
    kernel = functools.partial(_kernel, group=weight.group, groups=groups, splits=splits, tile=tile)
    partial = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((splits, rows, outputs), x.dtype if splits == 1 else jnp.float32),
        grid=(tiles[1], tiles[0], splits),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=4),
        interpret=interpret,
        name="int4_matmul",
    )(x, weight.values, weight.scales)
    return jnp.sum(partial, axis=0).astype(x.dtype) if splits > 1 else partial[0]


def _kernel(
    x_ref: Any,
    values_ref: Any,
    scales_ref: Any,
    out_ref: Any,
    *,
    group: int,
    groups: int,
    splits: int,
    tile: int,
) -> None:
    half = group // 2
    rows, outputs = x_ref.shape[0], values_ref.shape[0]
    first_output, first_row, split = pl.program_id(0) * _OUTPUTS, pl.program_id(1) * tile, pl.program_id(2)
    # What lies past the last row or output is masked: read as 0 and not written.
    at_outputs, at_rows = pl.ds(first_output, _OUTPUTS), pl.ds(first_row, tile)
    has_output = first_output + jnp.arange(_OUTPUTS) < outputs
    has_row = first_row + jnp.arange(tile) < rows

    def one(index: jax.Array, total: jax.Array) -> jax.Array:
        at_bytes = pl.ds(index * half, half)
        packed = plt.load(values_ref.at[at_outputs, at_bytes], mask=has_output[:, None], other=0)

        def part(nibbles: jax.Array, which: int) -> jax.Array:  # [outputs, rows]
            at_inputs = pl.ds(index * group + which * half, half)
            x = plt.load(x_ref.at[at_rows, at_inputs], mask=has_row[:, None], other=0)
            signed = (nibbles.astype(jnp.int32) - 8).astype(x.dtype)
            return plt.dot(signed, x.T)

        scale = plt.load(scales_ref.at[index, at_outputs], mask=has_output, other=0)
        return total + (part(packed & 15, 0) + part(packed >> 4, 1)) * scale[:, None]

    begin, end = split * groups // splits, (split + 1) * groups // splits
    total = lax.fori_loop(begin, end, one, jnp.zeros((_OUTPUTS, tile), jnp.float32))
    mask = has_row[:, None] & has_output[None, :]
    plt.store(out_ref.at[split, at_rows, at_outputs], total.T.astype(out_ref.dtype), mask=mask)
