"""How much of the machine the steps use: what each must move and compute, and what the machine could.

MBU is bytes per second over the bandwidth, MFU operations per second over the matmul rate. Both count the
least that the work needs, for real tokens alone, so that padding, copies and waiting show as a smaller share.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.config import ModelConfig
from jaxinfer.core import StepPlan
from jaxinfer.model.kv import KVState
from jaxinfer.planner import ModelCosts
from jaxinfer.runtime.trace import release_freed_memory

logger = logging.getLogger(__name__)

TIMED_S = 0.1
"""About how long each of the two limits is measured, after its compile."""
SWEPT_BYTES = 256 << 20
"""Memory swept on a GPU: more than its caches hold (50 MB on an H200)."""
SIDE = 4096
"""Of the square matrices multiplied on a GPU: 96 MB in bfloat16."""
REPEATS = 16
"""How many times more, within a program, makes the time that is measured there."""


class StepCost:
    """Adds up what the steps of one runner move (bytes) and compute (operations): `ModelCosts` says how."""

    def __init__(self, costs: ModelCosts):
        self.costs = costs
        self.moved_bytes = 0.0
        self.operations = 0.0

    def add(self, plan: StepPlan) -> None:
        """Count one step."""
        work = self.costs.work_of(plan)
        self.moved_bytes += self.costs.moved_bytes(work)
        self.operations += self.costs.operations(work)


def costs_of(config: ModelConfig, graph: nnx.GraphDef, state: nnx.State, kv: KVState) -> ModelCosts:
    """The arithmetic of a model as it lies in memory: dtypes are read off its arrays."""
    model = nnx.merge(graph, state)
    formats = {"int8": "int8", "uint8": "int4", "float8_e4m3fn": "fp8"}  # of pallas_kernels.quantized
    weights = {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(model.layers))}
    pages = str(jax.tree.leaves(kv.k[0])[0].dtype.name)
    return ModelCosts(
        config,
        dtype=jax.tree.leaves(nnx.state(model.embedding))[0].dtype.name,
        kv_dtype={"float8_e4m3fn": "fp8_e4m3"}.get(pages, pages),
        quantization=next((formats[name] for name in sorted(weights) if name in formats), None),
        page_size=kv.k[0].shape[2],
    )


# ---------------------------------------------------------------------------------------- the machine


@dataclass(frozen=True, slots=True)
class Machine:
    """What was measured of a device: `bandwidth` of its memory in bytes/s, `matmul_rate` in operations/s of a
    product of two square matrices in `dtype`."""

    bandwidth: float
    matmul_rate: float
    dtype: str


def measure_machine(platform: str, dtype: Any) -> Machine:
    """Measure the default device: under a second on a CPU, besides two small compiles.

    On CPU the bandwidth is that of reading a matrix of 64 MB (beyond the caches of a few cores, and little
    where memory is short), elsewhere of reading and writing SWEPT_BYTES in place. What it takes is freed at
    the end; the pool of pages has its memory by then, so little more than SWEPT_BYTES is taken at a time.
    Raises what jax raises when there is no room, and ArithmeticError where the clock is too coarse.
    """
    dtype = jnp.dtype(dtype)
    if platform == "cpu":
        large = jnp.ones((4096, 4096), jnp.float32)
        bandwidth = large.nbytes / _best(jnp.dot, (large, jnp.ones(large.shape[1:], jnp.float32)))
        del large
        square = jnp.ones((1024, 1024), dtype)
        rate = 2 * 1024**3 / _best(jnp.dot, (square, square))
        del square
    else:
        swept = jnp.ones((SWEPT_BYTES // 4,), jnp.float32)
        bandwidth = 2 * SWEPT_BYTES / seconds_of_one(jnp.negative, swept)
        del swept
        # The product of ones and 1 / side is ones again, however often.
        factor = jnp.full((SIDE, SIDE), 1 / SIDE, dtype)
        rate = 2 * SIDE**3 / seconds_of_one(jnp.dot, jnp.ones((SIDE, SIDE), dtype), factor)
        del factor
    release_freed_memory()
    return Machine(bandwidth, rate, dtype.name)


def repeated(step: Callable[..., jax.Array]) -> Any:
    """The program (x, count, *others) -> x after `count` times x = step(x, *others), in the memory of x."""

    def run(x: jax.Array, count: jax.Array, *others: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, count, lambda _, x: step(x, *others), x)

    return jax.jit(run, donate_argnums=0)


def seconds_of_one(step: Callable[..., jax.Array], x: jax.Array, *others: jax.Array) -> float:
    """Time of one x = step(x, *others), of many in one program, so that arrays need not be large: what the
    start and the end of a program cost is in both of the times taken and falls out. `x` is used up."""
    program = repeated(step)
    x = jax.block_until_ready(program(x, 1, *others))
    best = {1: float("inf"), 1 + REPEATS: float("inf")}
    end = time.perf_counter() + TIMED_S
    while time.perf_counter() < end or best[1 + REPEATS] == float("inf"):
        for count in best:
            start = time.perf_counter()
            x = jax.block_until_ready(program(x, count, *others))
            best[count] = min(best[count], time.perf_counter() - start)
    seconds = (best[1 + REPEATS] - best[1]) / REPEATS
    if seconds <= 0:
        raise ArithmeticError(f"{REPEATS} more steps took no time: {best}")
    return seconds


def _best(function: Callable[..., jax.Array], arguments: Sequence[jax.Array]) -> float:
    """Shortest time of one call in seconds; at least two calls are timed."""
    program = jax.jit(function)
    jax.block_until_ready(program(*arguments))
    times: list[float] = []
    end = time.perf_counter() + TIMED_S
    while len(times) < 2 or time.perf_counter() < end:
        start = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        times.append(time.perf_counter() - start)
    return min(times)
