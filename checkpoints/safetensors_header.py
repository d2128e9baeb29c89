"""The header of a safetensors file, checked entry by entry before anything is believed.

Format: the safetensors specification. 8 bytes little-endian header length N, N bytes of JSON that start with
"{", and the data:

    {"NAME": {"dtype": "F16", "shape": [2, 3], "data_offsets": [BEGIN, END]}, "__metadata__": {"k": "text"}}

Offsets count from the end of the header, and the tensors fill the data without gaps or overlaps. The
safetensors library checks most of this too, but lets the last of two equal keys win, cannot give float8 to
numpy, and does not always say which tensor is at fault.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from checkpoints.errors import CheckpointError, quoted, shown
from checkpoints.json_file import parse_json_object
from checkpoints.regular_file import open_regular

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_DIMENSIONS = 8
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")

FLOAT_TYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
"""The types a weight may have, by their names in the header."""

_OTHER_SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "U32": 4, "I32": 4, "U64": 8, "I64": 8, "C64": 8,
}  # fmt: skip
# torch.save writes a zip archive, or a bare pickle of protocol 2 to 5.
_PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file: type name as in the header, and where its bytes lie, from the file's start."""

    path: Path
    name: str
    type_name: str
    shape: tuple[int, ...]
    offset: int
    byte_count: int


def refuse_pickle(path: Path) -> CheckpointError:
    """The error for weights in Python's pickle format, which can run any code when opened."""
    return CheckpointError(
        f"{path}: pickled weights ({'/'.join(PICKLE_SUFFIXES)}) can run code when they are opened and are "
        "never read; expected safetensors or GGUF"
    )


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file by name, in the order of the file.

    Raises CheckpointError that names the file and the tensor at fault.
    """
    with open_regular(path) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            lead = file.read(8)
            if size < 10:
                raise CheckpointError(f"{path}: got {size} bytes; a safetensors file has at least 10")
            (header_size,) = struct.unpack("<Q", lead)
            if header_size > min(size - 8, MAX_HEADER_BYTES):
                if lead.startswith(_PICKLE_STARTS):
                    raise refuse_pickle(path)
                raise CheckpointError(
                    f"{path}: the header claims {header_size} bytes, but only {size - 8} follow, and at most "
                    f"{MAX_HEADER_BYTES} are allowed (truncated, or not a safetensors file)"
                )
            raw = file.read(header_size)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
    if not raw.startswith(b"{"):
        raise CheckpointError(f"{path}: the header starts with {raw[:1]!r}, expected b'{{'")
    entries = parse_json_object(raw, f"{path}: header")
    _check_metadata(path, entries.pop("__metadata__", {}))
    data_start, data_size = 8 + header_size, size - 8 - header_size
    tensors = {name: _tensor(path, name, entry, data_start) for name, entry in entries.items()}
    _check_cover(path, tensors, data_start, data_size)
    return tensors


def _check_metadata(path: Path, metadata: Any) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(
            f"{path}: header: __metadata__ must be an object of texts, got {quoted(metadata)}"
        )


def _tensor(path: Path, name: str, entry: Any, data_start: int) -> StoredTensor:
    where = f"{path}: tensor {shown(name)}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(
            f"{where}: got {quoted(entry)}, expected an object of dtype, shape, data_offsets"
        )
    type_name, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(type_name, str) or (type_name not in FLOAT_TYPES and type_name not in _OTHER_SIZES):
        raise CheckpointError(
            f"{where}: type {quoted(type_name)} is unknown; allowed: {', '.join(FLOAT_TYPES)}"
        )
    if not _whole_numbers(shape) or len(shape) > MAX_DIMENSIONS:
        raise CheckpointError(
            f"{where}: got shape {quoted(shape)}, expected at most {MAX_DIMENSIONS} whole numbers"
        )
    if 0 in shape:
        raise CheckpointError(f"{where}: got an empty shape {tuple(shape)}")
    if not _whole_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: got data_offsets {quoted(offsets)}, expected [begin, end]")
    item = FLOAT_TYPES[type_name].itemsize if type_name in FLOAT_TYPES else _OTHER_SIZES[type_name]
    expected, got = prod(shape) * item, offsets[1] - offsets[0]
    if got != expected:
        raise CheckpointError(
            f"{where} of shape {tuple(shape)} ({type_name}): its data_offsets span {got} bytes, "
            f"expected {expected}"
        )
    return StoredTensor(path, name, type_name, tuple(shape), data_start + offsets[0], got)


def _whole_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_cover(path: Path, tensors: dict[str, StoredTensor], data_start: int, data_size: int) -> None:
    """The tensors must fill the data: what lies in a gap is read by nobody, and an overlap is read twice."""
    position, before = data_start, "the header"
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
        if tensor.offset != position:
            kind = "overlaps" if tensor.offset < position else "leaves a gap behind"
            raise CheckpointError(
                f"{path}: tensor {shown(tensor.name)} starts at byte {tensor.offset} and {kind} "
                f"{before}, which ends at byte {position}"
            )
        position, before = tensor.offset + tensor.byte_count, f"tensor {shown(tensor.name)}"
    if position != data_start + data_size:
        raise CheckpointError(
            f"{path}: got {data_start + data_size} bytes, expected {position} (the end of {before})"
        )
