"""Programs with one fault each, which `gpu_check` has to find; run as its child is (see `gpu_check.aot`)."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import triton as plt

from gpu_check.aot import Program, least_copy, main
from gpu_check.programs import product
from gpu_check.targets import Target

LAYERS, PAGES, PAGE = 4, 512, (8, 16, 128)  # a layer's K: 16 MiB in bfloat16


def like(*shape: int, dtype: jnp.dtype = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


LEAST = least_copy(like(PAGES, *PAGE))


def write(pages: jax.Array, new: jax.Array, places: jax.Array) -> jax.Array:
    return pages.at[places].set(new)


def healthy(target: Target) -> Program:
    """Nothing is wrong: pages are donated and written in place, layer by layer."""

    def step(pool, new, places):
        return [write(pages, new, places) for pages in pool]

    pool = [like(PAGES, *PAGE)] * LAYERS
    return Program(step, (pool, like(8, *PAGE), like(8, dtype=jnp.int32)), (0,), (0,), LEAST)


def not_donated(target: Target) -> Program:
    program = healthy(target)
    return Program(program.function, program.arguments, (), (0,), LEAST)


def stacked_scan(target: Target) -> Program:
    """A scan over layers with the pool as what it takes and gives: each layer is sliced out and put back."""

    def step(pool, new, places):
        def layer(x, pages):
            pages = write(pages, x, places)
            return x + pages[0], pages

        return lax.scan(layer, new, pool)

    arguments = (like(LAYERS, PAGES, *PAGE), like(8, *PAGE), like(8, dtype=jnp.int32))
    return Program(step, arguments, (0,), (0,), LEAST)


def dequantised(target: Target) -> Program:
    """int8 pages become a whole bfloat16 pool before they are used."""

    def step(values, scales, q):
        pages = lax.optimization_barrier(values.astype(jnp.bfloat16) * scales[..., None])
        return jnp.einsum("h,mkzh->mkz", q, pages)

    arguments = (like(PAGES, *PAGE, dtype=jnp.int8), like(PAGES, *PAGE[:2]), like(PAGE[2]))
    return Program(step, arguments, least=LEAST // 2)


def int8_pool() -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """(values, scales) of a pool whose scales are larger than anything else but the values."""
    return like(8 * PAGES, *PAGE, dtype=jnp.int8), like(8 * PAGES, *PAGE[:2], dtype=jnp.float32)


def int8_step(donate: tuple[int, ...], flips: bool) -> Program:
    """int8 pages and their scales are written."""

    def step(values, scales, new, new_scales, places):
        scales = lax.optimization_barrier(jnp.flip(scales, 0)) if flips else scales
        scales = write(scales, new_scales, places)
        return write(values, new, places), jnp.flip(scales, 0) if flips else scales

    new = like(8, *PAGE, dtype=jnp.int8), like(8, *PAGE[:2], dtype=jnp.float32)
    arguments = (*int8_pool(), *new, like(8, dtype=jnp.int32))
    return Program(step, arguments, donate, (0, 1), least_copy(int8_pool()))


def int8_pages(target: Target) -> Program:
    """Nothing is wrong: values and scales are donated and written in place."""
    return int8_step((0, 1), flips=False)


def scales_not_donated(target: Target) -> Program:
    return int8_step((0,), flips=False)


def scales_copied(target: Target) -> Program:
    """The values are written in place; the scales are made anew, and brought back into their own buffer."""
    return int8_step((0, 1), flips=True)


def gathered(target: Target) -> Program:
    """Nearly all pages are gathered before they are used."""

    def step(pages, places, q):
        return jnp.einsum("h,mkzh->mkz", q, lax.optimization_barrier(pages[places]))

    pages = like(PAGES, *PAGE)
    arguments = (pages, like(PAGES - 64, dtype=jnp.int32), like(PAGE[2]))
    return Program(step, arguments, least=least_copy(pages))


def widened_weight(target: Target) -> Program:
    """What `gpu_check.programs.product` compiles, but a copy of the int8 weight in bfloat16 is written."""
    program = product("int8", 64, target)

    def widened(x, weight):
        return x @ lax.optimization_barrier(weight.values.astype(x.dtype)).T * weight.scales

    return Program(widened, program.arguments, least=program.least)


def converted_weight(target: Target) -> Program:
    """A bfloat16 weight is made float32 before the product."""

    def step(weight, x):
        return x @ lax.optimization_barrier(weight.astype(jnp.float32))

    return Program(step, (like(4096, 4096), like(16, 4096, dtype=jnp.float32)), least=2 * 4096 * 4096)


def triton_spill(target: Target) -> Program:
    """More values than one warp has registers."""

    def kernel(x, y, out):
        a, b = x[...], y[...]
        out[...] = plt.dot(a, b) + plt.dot(b, a)

    shape = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    call = pl.pallas_call(
        kernel,
        out_shape=shape,
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        name="planted",
    )
    return Program(call, (like(128, 128), like(128, 128)))


def mosaic(scratch_rows: int, live_rows: int, target: Target) -> Program:
    """One warpgroup that keeps `live_rows` x 128 float32 in registers and asks for `scratch_rows` x 128 of
    shared memory."""

    def kernel(x, out, scratch):
        held = plgpu.load(x, optimized=False)
        scratch[...] = jnp.zeros((scratch_rows, 128), jnp.float32)
        total = jnp.sum(held)
        if hasattr(plgpu, "store"):
            plgpu.store(out, held * total, optimized=False)
        else:  # jax 0.11
            out[...] = held * total

    call = plgpu.kernel(
        kernel,
        kernel_name="planted",
        out_type=jax.ShapeDtypeStruct((live_rows, 128), jnp.float32),
        scratch_types=[plgpu.SMEM((scratch_rows, 128), jnp.float32)],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return Program(call, (like(live_rows, 128, dtype=jnp.float32),))


def undumped(target: Target) -> Program:
    """A Mosaic kernel that spills, of which Mosaic leaves no dump: nobody has asked it to."""
    del os.environ["MOSAIC_GPU_DUMP_TO"]
    return mosaic(8, 320, target)


def dies(target: Target) -> Program:
    os.kill(os.getpid(), signal.SIGABRT)
    raise AssertionError("still alive")


def hangs(target: Target) -> Program:
    while True:
        signal.pause()


PROGRAMS: dict[str, Callable[[Target], Program]] = {
    "healthy": healthy,
    "not_donated": not_donated,
    "stacked_scan": stacked_scan,
    "dequantised": dequantised,
    "int8_pages": int8_pages,
    "scales_not_donated": scales_not_donated,
    "scales_copied": scales_copied,
    "gathered": gathered,
    "widened_weight": widened_weight,
    "converted_weight": converted_weight,
    "triton_spill": triton_spill,
    "mosaic_spill": functools.partial(mosaic, 8, 320),
    "mosaic_shared": functools.partial(mosaic, 300, 64),
    "undumped": undumped,
    "dies": dies,
    "hangs": hangs,
}

if __name__ == "__main__":
    main(PROGRAMS)
