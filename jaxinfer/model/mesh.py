"""Devices as a grid of two axes, and how arrays lie on it.

"data": each device along it has rows of the batch of its own. "model": each has a part of every weight of
its own. Training splits rows; parameters may be split along "data" as well, each device holding a part and
gathering the rest when a layer runs (ZeRO-3, 1910.02054; FSDP, 2304.11277). Placement is all there is to it:
the compiler inserts what devices tell each other (GSPMD, 2105.04663).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.core import ConfigError

DATA, MODEL = "data", "model"


def device_mesh(devices: Sequence[Any] | None = None, *, model: int = 1) -> Mesh:
    """A grid [data, model] of `devices` (None: all there are), `model` of them to each copy of the weights.

    Raises ConfigError when `model` does not divide their number.
    """
    devices = jax.devices() if devices is None else devices
    if not 1 <= model <= len(devices) or len(devices) % model:
        raise ConfigError(f"{len(devices)} devices cannot be split into groups of {model}")
    return Mesh(np.asarray(devices, dtype=object).reshape(-1, model), (DATA, MODEL))


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def split(mesh: Mesh, axis: int, along: str = DATA) -> NamedSharding:
    """Dimension `axis` of an array in equal parts along an axis of the grid, all other dimensions whole."""
    return NamedSharding(mesh, PartitionSpec(*(None,) * axis, along))


def split_where_possible(mesh: Mesh, shape: tuple[int, ...], along: str = DATA) -> NamedSharding:
    """The first dimension that divides in equal parts, split; an array without one is replicated."""
    parts = mesh.shape[along]
    for axis, size in enumerate(shape):
        if parts > 1 and size % parts == 0 and size:
            return split(mesh, axis, along)
    return replicated(mesh)
