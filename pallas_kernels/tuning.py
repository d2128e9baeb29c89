"""Sizes that kernels were measured to be fastest with, by kind of device: what is not in the table was not
measured.

`tuning.json` beside this file holds {device kind: {operation: {key: entry}}}, where an entry is

    {"parameters": {"keys": 128, "warps": 4, "stages": 3}, "seconds": 0.00051, "beside": 0.00058,
     "date": "2026-12-01", "jax": "0.11.2"}

`seconds` a call with these parameters, `beside` with the kernel's own choice, both of one run. A kernel asks
while it is traced and keeps its own choice where it gets {}:

    keys = lookup(device.kind, "pallas_triton.decode", geometry_key(geometry, rows)).get("keys", 64)

A backend that can be tuned has `candidates(device, geometry, operation) -> tuple[dict[str, int], ...]`,
operation "decode" or "prefill": what `python -m pallas_kernels.bench --tune` tries, and all that it ever
writes here.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

from pallas_kernels.device import Geometry

PATH = Path(__file__).with_name("tuning.json")
FIELDS = ("parameters", "seconds", "beside", "date", "jax")
"""Of an entry, all of them: a line that does not say when and with what it was measured is no measurement."""

Parameters = dict[str, int]
Table = dict[str, dict[str, dict[str, dict[str, Any]]]]

_override: tuple[str, str, Parameters] | None = None


def geometry_key(geometry: Geometry, rows: int = 0) -> str:
    """What an entry is for: the shapes and types, and of decode the rows, rounded up to a power of two.

    >>> geometry_key(Geometry(32, 8, 128, 16), 48)
    'N32-K8-H128-Z16-bfloat16-kv-bfloat16-D64'
    """
    shapes = f"N{geometry.heads}-K{geometry.kv_heads}-H{geometry.width}-Z{geometry.page_size}"
    decode = f"-D{1 << (rows - 1).bit_length()}" if rows else ""
    return f"{shapes}-{geometry.dtype}-kv-{geometry.kv_dtype}{decode}"


def lookup(kind: str, operation: str, key: str) -> Parameters:
    """The parameters to use on devices of `kind` ("NVIDIA H200"); {} where nothing was measured."""
    if _override is not None and _override[:2] == (operation, key):
        return dict(_override[2])
    entry = _table().get(kind, {}).get(operation, {}).get(key)
    return {} if entry is None else dict(entry["parameters"])


@contextlib.contextmanager
def trial(operation: str, key: str, parameters: Parameters) -> Generator[None]:
    """Let `lookup` answer `parameters` for this one operation and key, whatever the table says. What was
    traced before or within keeps what it was told: `jax.clear_caches` on both ends."""
    global _override
    before, _override = _override, (operation, key, parameters)
    try:
        yield
    finally:
        _override = before


@functools.cache
def _table() -> Table:
    return read(PATH)


def read(path: Path) -> Table:
    """A table from a file, {} where there is none. Raises ValueError for an entry that lacks one of
    FIELDS."""
    table = json.loads(path.read_text()) if path.exists() else {}
    for kind, operations in table.items():
        for operation, entries in operations.items():
            for name, entry in entries.items():
                missing = [field for field in FIELDS if field not in entry]
                if missing:
                    raise ValueError(f"{path}: {kind} / {operation} / {name} lacks {', '.join(missing)}")
    return table


def record(path: Path, kind: str, operation: str, key: str, entry: dict[str, Any]) -> None:
    """Put one measurement into the file, in place of an older one of the same kind, operation and key."""
    assert set(entry) == set(FIELDS), f"an entry has {FIELDS}, got {sorted(entry)}"
    table = read(path)
    table.setdefault(kind, {}).setdefault(operation, {})[key] = entry
    path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    _table.cache_clear()
