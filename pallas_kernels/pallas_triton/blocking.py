"""Block sizes by GPU and head width: what compiles without spilling registers and fits the shared memory.

Chosen from what ptxas reports for sm_80, sm_89, sm_90a, sm_100a and sm_120a, not from timings; the tuning
table has what was measured to be better. Triton spaces the loads of page ids and of the pages that they lead
to evenly over the stages, so 2 n + 1 stages keep n blocks of K and V under way.
"""

from __future__ import annotations

import dataclasses

from pallas_kernels.device import Device, Geometry
from pallas_kernels.pallas_triton.common import Blocking, lanes_of, power_of_two
from pallas_kernels.tuning import Parameters, geometry_key, lookup

ONE_AHEAD, TWO_AHEAD = 3, 5
DECODE_ROWS = 64  # most query heads of a program: a larger group is shared out


def decode_blocking(device: Device, geometry: Geometry) -> Blocking:
    """One KV head's query heads and 64 keys. K and V of such a block are 32 KB of bf16 at H 128: two of them
    under way in one program cover what a multiprocessor of an H200 must have in flight (its share of the
    bandwidth times the latency)."""
    rows = max(16, power_of_two(min(geometry.group, DECODE_ROWS)))
    keys = 32 if _wide(geometry) else 64
    if geometry.dtype == "float32" and lanes_of(geometry.width) > 128:
        keys = 16
    return Blocking(rows, keys, warps=4, stages=TWO_AHEAD if _large_memory(device) else ONE_AHEAD)


def prefill_blocking(device: Device, geometry: Geometry) -> Blocking:
    """128 rows, so that a block of K and V serves many queries. Without the matrix units of Hopper and of
    Blackwell servers both operands of a product pass through registers, where 64 keys of H 128 would not fit;
    with 8 bits their widened copies do so too."""
    if geometry.dtype == "float32":  # no matrix unit multiplies these exactly: every thread has its sums
        return Blocking(32, 16, warps=8, stages=ONE_AHEAD)
    if _wide(geometry):
        return Blocking(64, 32, warps=8, stages=TWO_AHEAD if _matrix_unit(device) else ONE_AHEAD)
    if _matrix_unit(device):
        return Blocking(128, 64, warps=8, stages=TWO_AHEAD)
    if geometry.kv_dtype != geometry.dtype:
        return Blocking(128, 32, warps=8, stages=ONE_AHEAD)
    return Blocking(128, 64 if lanes_of(geometry.width) <= 64 else 32, warps=8, stages=TWO_AHEAD)


def tuned(operation: str, own: Blocking, device: Device, geometry: Geometry, rows: int = 0) -> Blocking:
    """`own` with what the tuning table says for this device and geometry, and of decode these rows. Its own
    rows stay: the host cuts query tiles by them."""
    found = lookup(device.kind, f"pallas_triton.{operation}", geometry_key(geometry, rows))
    return dataclasses.replace(own, **found)


def candidates(device: Device, geometry: Geometry, operation: str) -> tuple[Parameters, ...]:
    """What `python -m pallas_kernels.bench --tune` tries: larger and smaller blocks of keys, more warps,
    other distances ahead. Some spill or do not fit: the bench finds out."""
    own = decode_blocking(device, geometry) if operation == "decode" else prefill_blocking(device, geometry)
    return tuple(
        {"keys": keys, "warps": warps, "stages": stages}
        for keys in sorted({max(16, own.keys // 2), own.keys, own.keys * 2})
        for warps in (4, 8)
        for stages in (3, 5, 7)
        if (keys, warps, stages) != (own.keys, own.warps, own.stages)
    )


def _matrix_unit(device: Device) -> bool:
    """Whether products read their operands from shared memory: Hopper (wgmma) and Blackwell for servers
    (tcgen05). The interpreter plays a Hopper."""
    return device.capability is None or device.capability[0] in (9, 10)


def _large_memory(device: Device) -> bool:
    """Whether a program may have more than 100 KB of shared memory."""
    return _matrix_unit(device) or device.capability in ((8, 0), (8, 7), (11, 0))


def _wide(geometry: Geometry) -> bool:
    """Heads beyond 128, and float32: half the keys for the same registers and memory."""
    return lanes_of(geometry.width) > 128 or geometry.dtype == "float32"
