"""GGUF block formats to numpy: the plain types as they are, quantised blocks as float32.

The three block formats that small models use most (Q8_0, Q4_0, Q4_1) are written out here, in the same order
of float32 operations as `gguf.quants` and so bit-equal to it, but about three times faster. Everything else
goes through `gguf.quants.dequantize`, which makes some ten temporaries of the size of its result: it is given
one slice of blocks at a time, so that reading a tensor takes little more memory than the tensor.

Block layouts (ggml): 32 values per block; `d` scale and `m` minimum are float16.

    Q8_0  d, 32 x int8                 value = d * q
    Q4_0  d, 16 bytes of two nibbles   value = d * (q - 8)     low nibbles are values 0-15, high 16-31
    Q4_1  d, m, 16 bytes               value = d * q + m
"""

from __future__ import annotations

from math import prod

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from checkpoints.parts import Index, covering, is_whole, length

_PLAIN: dict[GGMLQuantizationType, np.dtype] = {
    GGMLQuantizationType.F64: np.dtype("<f8"),
    GGMLQuantizationType.F32: np.dtype("<f4"),
    GGMLQuantizationType.F16: np.dtype("<f2"),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
_Q8_0 = np.dtype([("scale", "<f2"), ("values", "i1", 32)])
_Q4_0 = np.dtype([("scale", "<f2"), ("nibbles", "u1", 16)])
_Q4_1 = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("nibbles", "u1", 16)])
_FAST = {
    GGMLQuantizationType.Q8_0: _Q8_0,
    GGMLQuantizationType.Q4_0: _Q4_0,
    GGMLQuantizationType.Q4_1: _Q4_1,
}
# 256 KiB of float32: the slice stays in the core's cache through all its passes.
VALUES_PER_SLICE = 65536


def can_read(block_type: GGMLQuantizationType) -> bool:
    """Whether `read_blocks` knows this type."""
    if block_type in _PLAIN or block_type in _FAST:
        return True
    _, block_bytes = GGML_QUANT_SIZES[block_type]
    try:
        dequantize(np.zeros((1, block_bytes), np.uint8), block_type)
    except NotImplementedError:
        return False
    return True


def value_type(block_type: GGMLQuantizationType) -> np.dtype:
    """The type of the array that `read_blocks` gives."""
    return _PLAIN.get(block_type, np.dtype(np.float32))


def read_blocks(
    data: np.ndarray, block_type: GGMLQuantizationType, shape: tuple[int, ...], index: Index = ()
) -> np.ndarray:
    """The values stored in `data`, or the part `values[index]`.

    data: uint8[bytes], blocks along the last axis of `shape`. `index` is empty or has one slice for each
    axis.
    Returns F64, F32, F16 and BF16 in their own type (a read-only view of `data`), every other type as new
    float32. A part of a tensor of two or more axes costs the memory of the part and of one slice of rows.
    """
    if block_type in _PLAIN:
        values = data.view(_PLAIN[block_type]).reshape(shape)
        # Devices want aligned memory, and a file may place a tensor anywhere.
        return np.require(values[index], requirements="A")
    if len(shape) < 2 or all(map(is_whole, index, shape)):
        result = np.empty(shape, np.float32)
        _decode(data, block_type, result.reshape(-1))
        return result[index]
    start, stop, then = covering(index[0], shape[0])
    row_values, row_bytes = prod(shape[1:]), len(data) // shape[0]
    inner = index[1:]
    result = np.empty((stop - start, *map(length, inner, shape[1:])), np.float32)
    rows_per_slice = max(1, VALUES_PER_SLICE // row_values)
    buffer = None
    if not all(map(is_whole, inner, shape[1:])):
        buffer = np.empty((min(rows_per_slice, stop - start), *shape[1:]), np.float32)
    for row in range(start, stop, rows_per_slice):
        end = min(row + rows_per_slice, stop)
        target = result[row - start : end - start]
        whole = target if buffer is None else buffer[: end - row]
        _decode(data[row * row_bytes : end * row_bytes], block_type, whole.reshape(-1))
        if buffer is not None:
            target[...] = whole[(slice(None), *inner)]
    return result[then]


def _decode(data: np.ndarray, block_type: GGMLQuantizationType, result: np.ndarray) -> None:
    """Whole blocks, uint8[bytes], into the float32[values] of `result`, a slice at a time."""
    block_items, block_bytes = GGML_QUANT_SIZES[block_type]
    step = max(1, VALUES_PER_SLICE // block_items)
    with np.errstate(over="ignore", invalid="ignore"):  # a scale may be inf or NaN: values, no fault of ours
        for block in range(0, len(data) // block_bytes, step):
            raw = data[block * block_bytes : (block + step) * block_bytes]
            values = result[block * block_items : (block + step) * block_items]
            if block_type in _FAST:
                _decode_fast(raw.view(_FAST[block_type]), values.reshape(-1, 32))
            else:
                # One row: gguf would take many rows in groups of sixteen, and join the groups by a copy.
                values[:] = dequantize(raw.reshape(1, -1), block_type).reshape(-1)


def _decode_fast(blocks: np.ndarray, values: np.ndarray) -> None:
    """Structured blocks [n] of one of the three fast layouts into float32[n, 32]."""
    scale = blocks["scale"].astype(np.float32)[:, None]
    if blocks.dtype == _Q8_0:
        np.multiply(blocks["values"], scale, out=values)
        return
    np.bitwise_and(blocks["nibbles"], 15, out=values[:, :16])
    np.right_shift(blocks["nibbles"], 4, out=values[:, 16:])
    if blocks.dtype == _Q4_0:
        values -= 8
        values *= scale
    else:
        values *= scale
        values += blocks["minimum"].astype(np.float32)[:, None]
