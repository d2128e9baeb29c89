"""Weights of few bits: how they are rounded, how they lie in memory, and what they stand for.

    "int8"   values int8 [out, in]            scales float32 [out]               value * scale
    "fp8"    values float8_e4m3fn [out, in]   scales float32 [out]               value * scale
    "int4"   values uint8 [out, in / 2]       scales float32 [in / group, out]   (nibble - 8) * scale

Two numbers to a byte in int4: byte j of a group's group / 2 bytes holds input j in its low nibble and input
j + group / 2 in its high one, so that the low nibbles of a stretch of bytes are a stretch of inputs, the high
ones another, and all share their scales. A group of 8 inputs a .. h:

    inputs   a b c d e f g h        bytes   a|e<<4  b|f<<4  c|g<<4  d|h<<4

There are no zero points: int4 counts from -8 to 7, and a group's scale may be negative, so that the input of
largest magnitude always falls on -8 and all 16 levels are used (as GGUF's Q4_0 does).

Blocked, as XLA's CPU products want weights, `block` outputs come last: values [out / block, in (or in / 2),
block], scales of int4 [out / block, in / group, block]; those of int8 and fp8 stay [out].
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

Format = Literal["int8", "int4", "fp8"]
FORMATS: tuple[Format, ...] = get_args(Format)
GROUPS = (64, 32)
"""Inputs that share a scale in int4: the first of these that divides a weight's inputs."""

_LARGEST_FP8 = 448.0


class QuantizedWeight(NamedTuple):
    """A weight [out, in] as the module tells; of jax or of numpy arrays."""

    values: Any
    scales: Any

    @property
    def format(self) -> Format:
        names: dict[str, Format] = {"int8": "int8", "uint8": "int4", "float8_e4m3fn": "fp8"}
        return names[self.values.dtype.name]

    @property
    def block(self) -> int | None:
        """Outputs of a block, None for rows as the checkpoint has them."""
        return self.values.shape[2] if self.values.ndim == 3 else None

    @property
    def outputs(self) -> int:
        return self.values.shape[0] * (self.block or 1)

    @property
    def inputs(self) -> int:
        return self.values.shape[1] * (2 if self.format == "int4" else 1)

    @property
    def group(self) -> int:
        """Inputs that share a scale: all of them, but in int4."""
        return self.inputs // self.scales.shape[-2] if self.format == "int4" else self.inputs


def int4_group(inputs: int) -> int | None:
    """The group of an int4 weight with this many inputs; None where none of GROUPS divides them."""
    return next((group for group in GROUPS if inputs % group == 0), None)


def quantize_int8(weight: np.ndarray) -> QuantizedWeight:
    """Rows float32 [n, in], each with the scale max|row| / 127; to nearest, ties to even.

    A value is off by half a scale at most. A row with a number that is not finite gets a scale that is not
    either: it stays visible in every product, as without quantization. Rows are rounded each by itself.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        scales = np.abs(weight).max(axis=1, initial=0.0).astype(np.float32) / np.float32(127)
        values = np.rint(weight / _divisor(scales)[:, None])
        return QuantizedWeight(np.clip(values, -127, 127).astype(np.int8), scales)


def quantize_fp8(weight: np.ndarray) -> QuantizedWeight:
    """Rows float32 [n, in], each with the scale max|row| / 448, as float8_e4m3fn (4 significant bits). A
    value is off by 1 / 16 of itself at most, or by 2^-10 scales where that is more."""
    with np.errstate(invalid="ignore", over="ignore"):
        scales = np.abs(weight).max(axis=1, initial=0.0).astype(np.float32) / np.float32(_LARGEST_FP8)
        values = np.clip(weight / _divisor(scales)[:, None], -_LARGEST_FP8, _LARGEST_FP8)
        return QuantizedWeight(values.astype(ml_dtypes.float8_e4m3fn), scales)


def quantize_int4(weight: np.ndarray, group: int) -> QuantizedWeight:
    """Rows float32 [n, in], `group` inputs of a row together: the scale makes the input of largest magnitude
    -8, the others are rounded to nearest. A value is off by half a scale at most, and by a whole one next to
    +8, where the numbers end at 7."""
    rows, inputs = weight.shape
    assert inputs % group == group % 2 == 0, f"groups of {group} do not divide {inputs} inputs"
    grouped = weight.reshape(rows, -1, group)
    with np.errstate(invalid="ignore", over="ignore"):
        largest = np.take_along_axis(grouped, np.abs(grouped).argmax(axis=2, keepdims=True), axis=2)
        scales = largest.astype(np.float32) / np.float32(-8)
        values = np.clip(np.rint(grouped / _divisor(scales)), -8, 7)
        nibbles = (values + 8).astype(np.uint8).reshape(rows, -1, 2, group // 2)
    packed = nibbles[:, :, 0] | nibbles[:, :, 1] << 4
    return QuantizedWeight(packed.reshape(rows, inputs // 2), np.ascontiguousarray(scales[..., 0].T))


def _divisor(scales: np.ndarray) -> np.ndarray:
    return np.where(scales == 0, np.ones_like(scales), scales)


def quantize(weight: np.ndarray, format: Format) -> QuantizedWeight:
    """Rows float32 [n, in] in a format. Every row is rounded by itself: a weight may come in parts."""
    if format == "int4":
        group = int4_group(weight.shape[1])
        assert group is not None, f"no group of {GROUPS} divides {weight.shape[1]} inputs"
        return quantize_int4(weight, group)
    return quantize_int8(weight) if format == "int8" else quantize_fp8(weight)


def unpack_int4(packed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(low nibbles - 8, high nibbles - 8) of uint8, as int8."""
    return (packed & 15).astype(jnp.int8) - 8, (packed >> 4).astype(jnp.int8) - 8


def dequantize(weight: QuantizedWeight) -> jax.Array:
    """What the numbers stand for: float32 [out, in], whatever the layout."""
    values, scales = jnp.asarray(weight.values), jnp.asarray(weight.scales)
    outputs, inputs, group = weight.outputs, weight.inputs, weight.group
    if weight.block is not None:
        values = values.transpose(0, 2, 1).reshape(outputs, -1)
        scales = scales if scales.ndim == 1 else scales.transpose(1, 0, 2).reshape(-1, outputs)
    if weight.format != "int4":
        return values.astype(jnp.float32) * scales[:, None]
    low, high = unpack_int4(values.reshape(outputs, -1, group // 2))
    whole = jnp.stack([low, high], axis=2).reshape(outputs, -1, group).astype(jnp.float32)
    return (whole * scales.T[:, :, None]).reshape(outputs, inputs)
