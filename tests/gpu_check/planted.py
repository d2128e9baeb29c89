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

from gpu_check.aot import Program, main
from gpu_check.targets import Target

LAYERS, PAGES, PAGE = 4, 512, (8, 16, 128)  # a layer's K: 16 MiB in bfloat16


def like(*shape: int, dtype: jnp.dtype = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


LEAST = 2 * PAGES * 8 * 16 * 128


def write(pages: jax.Array, new: jax.Array, places: jax.Array) -> jax.Array:
    return pages.at[places].set(new)


def healthy(target: Target) -> Program:
    """Nothing is wrong: pages are donated and written in place, layer by layer."""

    def step(pool, new, places):
        return [write(pages, new, places) for pages in pool]

    pool = [like(PAGES, *PAGE)] * LAYERS
    return Program(step, (pool, like(8, *PAGE), like(8, dtype=jnp.int32)), (0,), (0,), LEAST, LAYERS)


def not_donated(target: Target) -> Program:
    program = healthy(target)
    return Program(program.function, program.arguments, (), (0,), LEAST, LAYERS)


def stacked_scan(target: Target) -> Program:
    """A scan over layers with the pool as what it takes and gives: each layer is sliced out and put back."""

    def step(pool, new, places):
        def layer(x, pages):
            pages = write(pages, x, places)
            return x + pages[0], pages

        return lax.scan(layer, new, pool)

    arguments = (like(LAYERS, PAGES, *PAGE), like(8, *PAGE), like(8, dtype=jnp.int32))
    return Program(step, arguments, (0,), (0,), LEAST, LAYERS)


def dequantised(target: Target) -> Program:
    """int8 pages become a whole bfloat16 pool before they are used."""

    def step(values, scales, q):
        pages = lax.optimization_barrier(values.astype(jnp.bfloat16) * scales[..., None])
        return jnp.einsum("h,mkzh->mkz", q, pages)

    arguments = (like(PAGES, *PAGE, dtype=jnp.int8), like(PAGES, *PAGE[:2]), like(PAGE[2]))
    return Program(step, arguments, least=LEAST // 2)


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
        kernel, out_shape=shape, compiler_params=plt.CompilerParams(num_warps=1, num_stages=1)
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
        out_type=jax.ShapeDtypeStruct((live_rows, 128), jnp.float32),
        scratch_types=[plgpu.SMEM((scratch_rows, 128), jnp.float32)],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return Program(call, (like(live_rows, 128, dtype=jnp.float32),))


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
    "converted_weight": converted_weight,
    "triton_spill": triton_spill,
    "mosaic_spill": functools.partial(mosaic, 8, 320),
    "mosaic_shared": functools.partial(mosaic, 300, 64),
    "dies": dies,
    "hangs": hangs,
}

if __name__ == "__main__":
    main(PROGRAMS)
