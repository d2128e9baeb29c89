"""Small Hugging Face folders for tests: safetensors files written byte by byte, so that they can be wrong."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TYPE_NAMES = {
    np.dtype(np.float64): "F64", np.dtype(np.float32): "F32", np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16", np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
    np.dtype(ml_dtypes.float8_e5m2): "F8_E5M2", np.dtype(np.bool_): "BOOL", np.dtype(np.int8): "I8",
    np.dtype(np.uint8): "U8", np.dtype(np.int32): "I32", np.dtype(np.int64): "I64",
    np.dtype(np.complex64): "C64",
}  # fmt: skip


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> Path:
    """A correct file with the tensors in their order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in tensors.items():
        end = len(data) + array.nbytes
        header[name] = {
            "dtype": TYPE_NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [len(data), end],
        }
        data += array.tobytes()
    return write_raw(path, json.dumps(header).encode(), data)


def write_raw(path: Path, header: bytes, data: bytes, claimed: int | None = None) -> Path:
    """A file of these parts; `claimed` is what it says the header's length is."""
    path.write_bytes(struct.pack("<Q", len(header) if claimed is None else claimed) + header + data)
    return path


def parts_of(path: Path) -> tuple[bytes, bytes]:
    """(header, data) of a correct file."""
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    return raw[8 : 8 + size], raw[8 + size :]


def change_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Parse the header, let `change` have it, and write it back."""
    raw, data = parts_of(path)
    header = json.loads(raw)
    change(header)
    write_raw(path, json.dumps(header).encode(), data)


def write_folder(
    folder: Path, tensors: dict[str, np.ndarray], config: dict[str, Any] | None = None, shards: int = 1
) -> Path:
    """A folder of config.json and the tensors, in model.safetensors or in shards a, b, ... with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {}))
    if shards == 1:
        write_safetensors(folder / SINGLE, tensors)
        return folder
    places: dict[str, str] = {}
    for number in range(shards):
        shard = f"{'abcdefgh'[number]}.safetensors"
        names = list(tensors)[number::shards]
        write_safetensors(folder / shard, {name: tensors[name] for name in names})
        places |= dict.fromkeys(names, shard)
    index = {
        "metadata": {"total_size": sum(array.nbytes for array in tensors.values())},
        "weight_map": places,
    }
    (folder / INDEX).write_text(json.dumps(index))
    return folder
