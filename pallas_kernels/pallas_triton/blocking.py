"""Block sizes by GPU and head width: what compiles without spilling registers and fits the shared memory.

Chosen from what ptxas reports for sm_80, sm_89, sm_90a, sm_100a and sm_120a, not from timings. Triton spaces
the loads of page ids and of the pages that they lead to evenly over the stages, so 2 n + 1 stages keep n
blocks of K and V under way.
"""

from __future__ import annotations

from pallas_kernels.device import Device, Geometry
from pallas_kernels.pallas_triton.common import Blocking, lanes_of, power_of_two

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
