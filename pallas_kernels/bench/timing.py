"""Time on a device that works behind Python's back, and the two limits that everything is measured
against."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Timing(NamedTuple):
    """`seconds` of one call, the median over rounds; `least` and `most` of them. `dispatch` is what Python
    took to start one: where it is not well below `seconds`, the device waited for Python and this is no
    kernel's time."""

    seconds: float
    least: float
    most: float
    dispatch: float
    calls: int

    @property
    def launch_bound(self) -> bool:
        return self.dispatch > 0.8 * self.seconds


def measure(
    launch: Callable[[int], Any], *, calls_each: int = 1, budget: float = 1.0, rounds: int = 7
) -> Timing:
    """Time of `launch(i)`, which starts `calls_each` calls and returns their result without waiting.

    Two launches warm up (compiling is in neither figure). A round queues as many as fill its share of
    `budget` seconds and waits once, for the last: the device works through them without a gap. `i` counts
    launches, so that inputs can take turns.
    """
    for index in range(2):
        jax.block_until_ready(launch(index))
    began = time.perf_counter()
    jax.block_until_ready(launch(2))
    once = time.perf_counter() - began
    count = max(1, min(int(budget / rounds / max(once, 1e-6)), 2000))
    if once > budget:
        rounds = 3
    times, dispatches = [], []
    result: Any = None
    for _ in range(rounds):
        began = time.perf_counter()
        for index in range(count):
            result = launch(index)
        queued = time.perf_counter()
        jax.block_until_ready(result)
        times.append((time.perf_counter() - began) / count / calls_each)
        dispatches.append((queued - began) / count / calls_each)
    return Timing(
        statistics.median(times), min(times), max(times), statistics.median(dispatches),
        count * rounds * calls_each,
    )  # fmt: skip


def limits(*, tiny: bool = False, budget: float = 1.0) -> dict[str, float]:
    """What this device can do, measured: copy bandwidth in bytes read and written per second, and rate of a
    bfloat16 product of random numbers in operations per second.

    A copy is made by the driver (`copy_memcpy`) and by a kernel that adds (`copy_kernel`): the better one
    counts.
    """
    rates = _copies(1 << (20 if tiny else 30), budget)
    side = 512 if tiny else 8192
    keys = jax.random.split(jax.random.key(1))
    left, right = (jax.random.normal(key, (side, side), jnp.bfloat16) for key in keys)
    product = jax.jit(lambda a, b: a @ b)
    rate = 2 * side**3 / measure(lambda _: product(left, right), budget=budget).seconds
    return {**rates, "copy": max(rates.values()), "matmul": rate}


def _copies(words: int, budget: float) -> dict[str, float]:
    """Bytes read and written per second, by each way to copy `words` of 4 bytes."""
    data = jax.block_until_ready(jax.random.bits(jax.random.key(0), (words,), jnp.uint32))
    ways = {"copy_memcpy": jax.jit(jnp.copy), "copy_kernel": jax.jit(lambda x: x + jnp.uint32(1))}
    return {
        name: 2 * data.nbytes / measure(lambda _, copy=copy: copy(data), budget=budget).seconds
        for name, copy in ways.items()
    }
