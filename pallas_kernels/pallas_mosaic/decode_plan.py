"""The static sizes of a decode kernel, from the shapes and the device."""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels.device import Device, Geometry
from pallas_kernels.pallas_mosaic.common import shared_bytes
from pallas_kernels.tuning import Parameters

REDUCTION_BYTES = 2048  # Mosaic's scratch for the maximum and the sum over keys
_BLOCK_BYTES = 32 << 10  # K and V of a block of keys
_MOST_DEPTH = 4
_LEAST_KEYS = 256  # of a share: below, the start of the pipeline costs more than the split gains
_MOST_SPLITS = 64
_BLOCKS_PER_CORE = 4  # thread blocks wanted for each multiprocessor, two of which run at a time
_RESERVED_BYTES = 1024  # of the multiprocessor's shared memory, by the driver for each thread block


@dataclass(frozen=True)
class Plan:
    """Static sizes of one kernel. `block` keys at a time, `depth` slots of K and of V, `splits` shares of at
    least `least` blocks; `m_warps` of the 4 warps side by side along the query heads, of which there are
    `group` (padded to whole transfers of 128 elements); `pages` P, entries of a row of the page table."""

    block: int
    depth: int
    splits: int
    least: int
    m_warps: int
    group: int
    width: int
    page_size: int
    pages: int

    @property
    def rows(self) -> int:
        """Rows of the matrix products: the group, padded."""
        return 16 * self.m_warps

    @property
    def copies(self) -> int:
        """Pages, or parts of one, in a block of keys."""
        return max(1, self.block // self.page_size)


def _m_warps(geometry: Geometry) -> int:
    """One, and four along the keys or the width, 8 of them each, where 32 divides the width; else two and
    two, for twice the rows."""
    return 1 if geometry.width % 32 == 0 else 2


def _slots(
    geometry: Geometry, most_bytes: int, blocks_per_core: int, block: int = 128
) -> tuple[int, int] | None:
    """(keys of a block, at most `block`; depth of the ring) that fit `blocks_per_core` times into a
    multiprocessor."""
    m_warps = _m_warps(geometry)
    rows = 16 * m_warps
    budget = (most_bytes + _RESERVED_BYTES) // blocks_per_core - _RESERVED_BYTES
    while block >= 32:
        fixed = rows * (geometry.width * (2 + 4) + block * 2) + REDUCTION_BYTES + 256  # q, out, p; barriers
        size = 4 * block * geometry.width
        depth = min(_MOST_DEPTH, (budget - fixed) // size)
        # Where two warps hold the same K and V, registers want a smaller block.
        if (size <= _BLOCK_BYTES // m_warps or block == 32) and depth >= 2:
            return block, depth
        block //= 2
    return None


def plan(
    rows: int, pages: int, geometry: Geometry, most_bytes: int, num_cores: int, tuned: Parameters
) -> Plan:
    """The sizes for `rows` B rows of `pages` P pages on a device with `most_bytes` of shared memory a thread
    block and `num_cores` multiprocessors. `tuned` is {} or one of `candidates`.

        Llama-3-8B, 8192 keys, H200:  1 row -> 32 shares of 256 keys, 64 rows -> 2 shares of 4096
    """
    most = tuned.get("block", 128)
    slots = _slots(geometry, most_bytes, 2, most) or _slots(geometry, most_bytes, 1, most)
    assert slots, f"{geometry} needs more than {most_bytes} bytes of shared memory"
    block, depth = slots
    group = geometry.group
    while group * geometry.width % 128:
        group += 1
    wanted = -(-tuned.get("blocks_per_core", _BLOCKS_PER_CORE) * num_cores // (rows * geometry.kv_heads))
    useful = pages * geometry.page_size // _LEAST_KEYS
    splits = max(1, min(wanted, useful, _MOST_SPLITS))
    return Plan(
        block, depth, splits, -(-_LEAST_KEYS // block), _m_warps(geometry), group, geometry.width,
        geometry.page_size, pages,
    )  # fmt: skip


def candidates(device: Device, geometry: Geometry) -> tuple[Parameters, ...]:
    """What is worth timing beside `plan`'s own choice: thread blocks wanted for each multiprocessor (more of
    them have smaller shares), and smaller blocks of keys in deeper rings."""
    slots = _slots(geometry, shared_bytes(device), 2) or _slots(geometry, shared_bytes(device), 1)
    blocks = [size for size in (128, 64, 32) if slots and size <= slots[0]]
    return tuple({"blocks_per_core": n, "block": block} for block in blocks for n in (2, 3, 4, 6, 8))
