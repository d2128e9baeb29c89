"""Parts of tensors: the index of `Checkpoint.read`, checked, and what has to be read for it.

Quantised data is decoded in runs of whole rows, so an index along the rows is taken in two steps: the run of
rows that covers it, and then the stride (1 in nearly every case) within that run.
"""

from __future__ import annotations

from checkpoints.errors import CheckpointError

Index = tuple[slice, ...]


def checked_index(index: Index, shape: tuple[int, ...], where: str) -> Index:
    """`index` with one slice for every axis of `shape`; the empty index is the whole tensor.

    Raises CheckpointError, beginning with `where`, for more slices than axes or anything but slices.
    """
    if not isinstance(index, tuple) or not all(isinstance(item, slice) for item in index):
        raise CheckpointError(f"{where}: got index {index!r}, expected a tuple of slices")
    if len(index) > len(shape):
        raise CheckpointError(f"{where}: got {len(index)} slices, expected at most {len(shape)}")
    return index + (slice(None),) * (len(shape) - len(index))


def covering(item: slice, size: int) -> tuple[int, int, slice]:
    """(start, stop, then): `x[item]` is `x[start:stop][then]` for every x of `size` items; start <= stop."""
    picked = range(*item.indices(size))
    if not picked:
        return 0, 0, slice(None)
    low, high = min(picked[0], picked[-1]), max(picked[0], picked[-1]) + 1
    return low, high, slice(None, None, picked.step)


def length(item: slice, size: int) -> int:
    """How many of `size` items a slice picks."""
    return len(range(*item.indices(size)))


def is_whole(item: slice, size: int) -> bool:
    """Whether a slice picks all of `size` items in their order."""
    return range(*item.indices(size)) == range(size)
