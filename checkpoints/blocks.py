"""GGUF block formats to numpy: the plain types as they are, quantised blocks as float32.

The three block formats that small models use most (Q8_0, Q4_0, Q4_1) are written out here, in the same order
of float32 operations as `gguf.quants` and so bit-equal to it, but about three times faster and with no second
copy of the tensor. Everything else goes through `gguf.quants.dequantize`.

Block layouts (ggml): 32 values per block; `d` scale and `m` minimum are float16.

    Q8_0  d, 32 x int8                 value = d * q
    Q4_0  d, 16 bytes of two nibbles   value = d * (q - 8)     low nibbles are values 0-15, high 16-31
    Q4_1  d, m, 16 bytes               value = d * q + m
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

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
# 2048 blocks are 256 KiB of float32: the slice stays in the core's cache through all its passes.
_BLOCKS_PER_SLICE = 2048


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


def read_blocks(data: np.ndarray, block_type: GGMLQuantizationType, shape: tuple[int, ...]) -> np.ndarray:
    """The values stored in `data`.

    data: uint8[bytes], blocks along the last axis of `shape`. Returns an array of `shape`: F64, F32, F16 and
    BF16 in their own type (a read-only view of `data`), every other type as new float32.
    """
    if block_type in _PLAIN:
        return data.view(_PLAIN[block_type]).reshape(shape)
    if block_type in _FAST:
        return _read_fast(data.view(_FAST[block_type])).reshape(shape)
    block_items, block_bytes = GGML_QUANT_SIZES[block_type]
    rows = data.reshape(-1, shape[-1] // block_items * block_bytes)
    return dequantize(rows, block_type).reshape(shape)


def _read_fast(blocks: np.ndarray) -> np.ndarray:
    """Structured blocks [n] of one of the three fast layouts to float32[n, 32]."""
    result = np.empty((len(blocks), 32), np.float32)
    for start in range(0, len(blocks), _BLOCKS_PER_SLICE):
        part = blocks[start : start + _BLOCKS_PER_SLICE]
        values = result[start : start + _BLOCKS_PER_SLICE]
        scale = part["scale"].astype(np.float32)[:, None]
        if blocks.dtype == _Q8_0:
            np.multiply(part["values"], scale, out=values)
            continue
        np.bitwise_and(part["nibbles"], 15, out=values[:, :16])
        np.right_shift(part["nibbles"], 4, out=values[:, 16:])
        if blocks.dtype == _Q4_0:
            values -= 8
            values *= scale
        else:
            values *= scale
            values += part["minimum"].astype(np.float32)[:, None]
    return result
