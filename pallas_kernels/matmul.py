"""Products with weights of few bits (see `pallas_kernels.quantized`): the operation, and who serves it where.

reference       the specification: dequantise, multiply in float32
xla             int8 and fp8: the numbers go into XLA's own product, and scales are applied to its result.
                Compiled for an H200 the conversion is part of the product's kernel: no converted copy.
                int4: nothing converts it inside of a product, so few rows multiply group by group, and
                many rows (any on CPU) walk over dequantised blocks of outputs.
pallas_triton   int4 on NVIDIA GPUs: nibbles come apart in registers
"""

from __future__ import annotations

import functools
import importlib
import math
from types import ModuleType

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.device import Backend, Device
from pallas_kernels.quantized import Format, QuantizedWeight, dequantize, unpack_int4

_BLOCK_BYTES = 4 << 20
"""Of a dequantised block of outputs in the xla backend's walk: it should stay in a cache."""

_GROUPWISE_ROWS = 16
"""Most rows that multiply group by group: the partial products of each group are rows * out float32."""


def matmul_unsupported(format: Format, device: Device) -> str:
    """Why weights of `format` cannot be multiplied on this device; "" when they can."""
    old = device.capability is None or device.capability < (8, 9)
    if format == "fp8" and device.platform == "gpu" and old:
        return (
            "fp8 weights need compute capability 8.9 or above (below, XLA writes out a converted copy of a "
            "weight at every step); int8 takes as much memory and runs here"
        )
    return ""


def _triton_module() -> ModuleType:
    """Imported when it is asked for the first time: elsewhere it is of no use, and may not even import."""
    return importlib.import_module("pallas_kernels.pallas_triton_matmul")


def kernel_unsupported(backend: Backend, format: Format) -> str:
    """Why a backend is not for weights of `format`, that are multiplied on its device by some backend; ""
    when it is."""
    if backend.name != "pallas_triton":
        return ""
    try:
        module = _triton_module()
    except ImportError as error:
        return f"cannot be imported with jax {jax.__version__} ({error})"
    return module.unsupported(format, backend.device, backend.interpret)


def resolve_matmul(format: Format, device: Device, *, without: tuple[str, ...] = ()) -> Backend:
    """The best backend for weights of `format` on `device` that is not among `without`. Raises
    NotImplementedError with the reason where none is."""
    if reason := matmul_unsupported(format, device):
        raise NotImplementedError(reason)
    for name in ("pallas_triton", "xla"):
        backend = Backend(name, device)
        if name not in without and not kernel_unsupported(backend, format):
            return backend
    raise NotImplementedError(f"every backend for weights of {format} is passed over: {', '.join(without)}")


def quant_matmul(x: jax.Array, weight: QuantizedWeight, *, backend: Backend) -> jax.Array:
    """x [T, in] float times the weight [out, in] transposed -> [T, out] in x's dtype.

    Accumulated in float32. `quantized.dequantize` says what the weight is. `pallas_triton` takes rows as the
    checkpoint has them, `xla` those and blocks.
    """
    assert x.ndim == 2, f"x has shape {x.shape}, expected [T, in]"
    assert x.shape[1] == weight.inputs, f"x of {x.shape[1]} inputs for a weight of {weight.inputs}"
    return _BACKENDS[backend.name](x, weight, backend).astype(x.dtype)


def reference(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
    """The specification: float32 [T, out]."""
    wide = x.astype(jnp.float32)
    return lax.dot_general(wide, dequantize(weight), _BY_ROWS, precision=lax.Precision.HIGHEST)


_BY_ROWS = (((1,), (1,)), ((), ()))


def _xla(x: jax.Array, weight: QuantizedWeight, backend: Backend) -> jax.Array:
    on_cpu = backend.device.platform == "cpu"
    if on_cpu and x.shape[0] == 1:  # one row leaves the fast products for a slower path, two do not
        return _xla(jnp.pad(x, ((0, 1), (0, 0))), weight, backend)[:1]
    if weight.format != "int4":
        return _channels(x, weight)
    if on_cpu or x.shape[0] > _GROUPWISE_ROWS:
        return _walk(x, weight)
    return _groupwise(x, weight)


def _channels(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
    """One scale for each output: int8 and fp8 are exact in x's type, and the scale waits for the sum."""
    product = _dot(x, weight.values.astype(x.dtype))
    return product * weight.scales


def _dot(x: jax.Array, values: jax.Array) -> jax.Array:
    """x [T, in] times values [out, in] or [blocks, in, block] -> float32 [T, out]."""
    wide = jnp.float32
    if values.ndim == 2:
        return lax.dot_general(x, values, _BY_ROWS, preferred_element_type=wide)
    rows = jnp.broadcast_to(x, (values.shape[0], *x.shape))
    product = lax.dot_general(rows, values, (((2,), (1,)), ((0,), (0,))), preferred_element_type=wide)
    return product.transpose(1, 0, 2).reshape(x.shape[0], -1)


def _groupwise(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
    """int4 in rows: one product for each group, scaled and then summed. No weight is written out."""
    groups, outputs = weight.scales.shape
    half = weight.group // 2
    grouped = x.reshape(x.shape[0], groups, 2, half)
    packed = weight.values.reshape(outputs, groups, half)

    def part(which: int, nibbles: jax.Array) -> jax.Array:  # [groups, T, out]
        dimensions = (((2,), (2,)), ((1,), (1,)))
        nibbles = nibbles.astype(x.dtype)
        return lax.dot_general(grouped[:, :, which], nibbles, dimensions, preferred_element_type=jnp.float32)

    low, high = unpack_int4(packed)
    return jnp.sum((part(0, low) + part(1, high)) * weight.scales[:, None, :], axis=0)


def _walk(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
    """int4, some outputs at a time: a part of the weight is dequantised, multiplied and forgotten."""
    values, scales, blocked = weight.values, weight.scales, weight.block is not None
    width = weight.block or 1  # outputs of an entry along the first axis of values
    entries = values.shape[0]
    count = max(1, min(entries, _BLOCK_BYTES // (4 * weight.inputs * width)))
    compute = jnp.dtype(jnp.float32) if x.dtype == jnp.float32 or blocked else x.dtype
    x = x.astype(compute)

    def body(index: jax.Array, out: jax.Array) -> jax.Array:
        # The last part begins early where parts do not divide the outputs, and writes the same numbers again.
        start = jnp.minimum(index * count, entries - count)
        part = QuantizedWeight(
            lax.dynamic_slice_in_dim(values, start, count),
            lax.dynamic_slice_in_dim(scales, start, count, axis=0 if blocked else 1),
        )
        product = _dot(x, _plain(part).astype(compute))
        return lax.dynamic_update_slice_in_dim(out, product, start * width, axis=1)

    out = jnp.zeros((x.shape[0], weight.outputs), jnp.float32)
    return lax.fori_loop(0, math.ceil(entries / count), body, out)


def _plain(weight: QuantizedWeight) -> jax.Array:
    """`dequantize`, but blocks stay blocks."""
    if weight.block is None:
        return dequantize(weight)
    blocks, _, block = weight.values.shape
    low, high = unpack_int4(weight.values.reshape(blocks, -1, weight.group // 2, block))
    whole = jnp.stack([low, high], axis=2).astype(jnp.float32) * weight.scales[:, :, None, None]
    return whole.reshape(blocks, weight.inputs, block)


@functools.partial(jax.jit, static_argnames=("backend",))
def _triton(x: jax.Array, weight: QuantizedWeight, backend: Backend) -> jax.Array:
    return _triton_module().int4_matmul(x, weight, device=backend.device, interpret=backend.interpret)


_BACKENDS = {
    "pallas_triton": _triton,
    "xla": _xla,
    "reference": lambda x, weight, backend: reference(x, weight),
}
