"""What the Mosaic GPU kernels share: what they serve, the target that a kernel is traced for, and operations
that exist on the device but not in JAX's interpreter, in one JAX version but not in another, or on one
architecture only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mosaic_gpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import Backend, Device, Geometry

MASKED = -1e30
"""A score that nobody sees: finite, so that MASKED - MASKED is 0, not NaN; what it gives is selected away."""

LOG2_E = 1.4426950408889634

FLOAT_DTYPES = ("bfloat16", "float16")
"""Operands of mma.sync with a float32 accumulator."""

WIDTHS = (64, 80, 96, 128, 256)
PAGE_SIZES = (16, 32, 64, 128)
MOST_GROUP = 16
"""Query heads per KV head: the rows of one mma.sync, and of a query tile of 8 tokens in two warpgroups."""

DEFAULT_SHARED_BYTES = 101_376
_SHARED_BYTES = {(8, 0): 166_912, (8, 7): 166_912, (9, 0): 232_448, (10, 0): 232_448, (10, 3): 232_448}


@dataclass(frozen=True)
class Target:
    """How a kernel is traced. `tma`: copies are bulk tensor copies that complete on barriers (9.0 and newer,
    and the interpreter), else cp.async in groups. `interpret`: JAX's interpreter runs it, with no mma."""

    tma: bool
    interpret: bool
    shared_bytes: int

    @classmethod
    def of(cls, backend: Backend) -> Target:
        """The target of a backend that `unsupported_device` has nothing against."""
        if backend.interpret:
            return cls(True, True, DEFAULT_SHARED_BYTES)
        assert backend.device.capability is not None, backend
        return cls(backend.device.capability >= (9, 0), False, shared_bytes(backend.device))

    @property
    def interpret_params(self) -> plgpu.InterpretGPUParams | None:
        """For `plgpu.kernel(interpret=)`; with its race detector on."""
        return plgpu.InterpretGPUParams(detect_races=True) if self.interpret else None


def shared_bytes(device: Device) -> int:
    """Most shared memory of one block in bytes (CUDA C++ Programming Guide, technical specifications)."""
    assert device.capability is not None, device
    return _SHARED_BYTES.get(device.capability, DEFAULT_SHARED_BYTES)


def unsupported_device(device: Device, interpret: bool) -> str:
    """Why no Mosaic GPU kernel of this package runs on `device`; "" when they do."""
    for name in ("kernel", "mma", "wait_gmem_to_smem", "InterpretGPUParams"):
        if not hasattr(plgpu, name):
            return f"needs jax.experimental.pallas.mosaic_gpu.{name}, which jax {jax.__version__} lacks"
    if interpret:
        return ""
    if device.platform != "gpu" or device.capability is None:
        return "needs an NVIDIA GPU"
    if device.capability < (8, 0):
        major, minor = device.capability
        return f"needs bfloat16 mma.sync and cp.async, compute capability 8.0 or newer, got {major}.{minor}"
    return ""


def unsupported_shapes(device: Device, geometry: Geometry) -> str:
    """Why decode and prefill do not serve these shapes on a device that Mosaic kernels run on; "" when both
    do. Their shared memory is enough for all of them on every such device."""
    g = geometry
    if g.heads % g.kv_heads or g.group > MOST_GROUP:
        return f"needs 1 to {MOST_GROUP} query heads per KV head, got {g.heads} and {g.kv_heads}"
    if g.dtype not in FLOAT_DTYPES or g.kv_dtype != g.dtype:
        return f"needs queries and pages both {' or '.join(FLOAT_DTYPES)}, got {g.dtype} and {g.kv_dtype}"
    if g.width not in WIDTHS:
        return f"needs a head width of {_one_of(WIDTHS)}, got {g.width}"
    if g.page_size not in PAGE_SIZES:
        return f"needs pages of {_one_of(PAGE_SIZES)} tokens, got {g.page_size}"
    copies_by_threads = device.capability is not None and device.capability < (9, 0)
    if copies_by_threads and async_copy_tile(g.page_size, g.width) < 32:  # Mosaic's narrowest tile
        return f"needs pages of 32 tokens or more for cp.async of width {g.width}, got {g.page_size}"
    return ""


def _one_of(sizes: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, sizes[:-1]))} or {sizes[-1]}"


def dot(target: Target, accumulator: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """accumulator + a @ b: float32 [16 i, n] += [16 i, k] @ [k, n]. The interpreter has no mma: there it is a
    dot of values."""
    if target.interpret:
        return accumulator + jnp.dot(a, b, preferred_element_type=jnp.float32, precision="highest")
    return plgpu.mma(accumulator, a, b)


def synchronize(target: Target) -> None:
    """A barrier of the warpgroup that also orders its accesses of shared memory before later bulk copies:
    what was written is visible to every warp, and what was read may be overwritten."""
    if target.tma:
        plgpu.commit_smem()
        return

    def barrier(_context: Any) -> None:  # commit_smem has a fence that only 9.0 and newer know
        mosaic_gpu.warpgroup_barrier()

    plgpu.inline_mgpu()(barrier)()


def store(reference: Any, value: jax.Array) -> None:
    """reference[...] = value, for transfers that are no whole number of cache lines or meet banks twice: jax
    0.12 refuses them by that syntax, and 0.11 has no other syntax for them."""
    if hasattr(plgpu, "store"):
        plgpu.store(reference, value, optimized=False)
    else:
        reference[...] = value


def swizzled(shape: tuple[int, ...], dtype: Any, *, most_bytes: int = 128) -> Any:
    """Shared memory [..., rows, columns] of 16-bit elements in tiles of 8 rows by up to `most_bytes`, whose
    16-byte pieces are permuted so that copies and ldmatrix meet no bank twice."""
    swizzle = min(plgpu.find_swizzle(shape[-1] * 16), most_bytes)
    tiling = plgpu.TilingTransform((8, swizzle // 2))  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))  # type: ignore[abstract]


def async_copy_tile(rows: int, columns: int) -> int:
    """Bytes of the widest tile row for which Mosaic's cp.async copies [rows, columns] of 16-bit elements: it
    deals tiles of 8 rows to 4 warps, 4 down, or 2 down and 2 across.

    >>> [async_copy_tile(rows, columns) for rows, columns in ((64, 128), (16, 128), (16, 64), (16, 80))]
    [128, 128, 64, 16]
    """
    tile = plgpu.find_swizzle(columns * 16)
    while rows % 32 and (columns * 2 // tile) % 2:
        tile //= 2
    return tile
