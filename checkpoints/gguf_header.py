"""The header of a GGUF file, checked against the size of the file before anything is believed.

Format: the GGUF specification of the ggml project, versions 2 and 3, little-endian. Layout:

    "GGUF"  u32 version  u64 tensor_count  u64 field_count
    fields:   string key, u32 type, value     (string = u64 length + UTF-8 bytes;
                                               array = u32 item type, u64 count, items)
    tensors:  string name, u32 dimension count, u64 dimensions (innermost first), u32 type, u64 offset
    padding to `general.alignment` (32), then the tensor data; offsets count from there

`gguf.GGUFReader` makes several numpy arrays for every token of the vocabulary (2 s for 49 152 tokens) and
trusts counts; here an array field is only skipped over (10 ms) and decoded when somebody asks for it.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from checkpoints.errors import CheckpointError, quoted, shown
from checkpoints.regular_file import GGUF_MAGIC, map_whole, open_regular

VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
MAX_STRING_BYTES = 64 * 1024 * 1024
MAX_KEY_BYTES = 65535  # the specification's limit
MAX_NAME_BYTES = 255  # the specification has 64; builds of llama.cpp allow more

_SCALARS: dict[GGUFValueType, str] = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}


@dataclass(frozen=True)
class ArrayField:
    """Where an array field lies; `GGUFHeader.array` decodes it."""

    item_type: GGUFValueType
    count: int
    offset: int


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: `shape` in numpy order (outermost first), its block type and its bytes in the file."""

    name: str
    shape: tuple[int, ...]
    block_type: GGMLQuantizationType
    offset: int
    byte_count: int


class GGUFHeader:
    """Fields and tensor table of a GGUF file that stays mapped while this object or its arrays live."""

    def __init__(self, path: Path) -> None:
        """Reads and checks the header.

        Raises CheckpointError that names the file and the key or tensor at fault.
        """
        self.path = path
        self.fields: dict[str, Any] = {}
        self.tensors: dict[str, TensorEntry] = {}
        with open_regular(path) as file:
            magic = file.read(4)
        if magic != GGUF_MAGIC:
            raise CheckpointError(f"{path}: not a GGUF file: got magic {magic!r}, expected {GGUF_MAGIC!r}")
        self.buffer = map_whole(path)
        self.size = len(self.buffer)
        self._position = 4
        version = self._number("<I", "version")
        if version not in VERSIONS:
            kind = "big-endian, or version" if version & 0xFFFF == 0 else "version"
            raise CheckpointError(f"{path}: GGUF {kind} {version}; expected one of {VERSIONS}, little-endian")
        tensor_count = self._number("<Q", "tensor count")
        field_count = self._number("<Q", "field count")
        # The smallest field and tensor entries bound any honest count before a loop is entered.
        self._check_count(field_count, 13, "fields")
        self._check_count(tensor_count, 32, "tensors")
        for _ in range(field_count):
            self._read_field()
        self._read_tensors(tensor_count)

    def array(self, key: str) -> list[str] | np.ndarray | None:
        """An array field: a list of str, or a numpy array; None when the file has no such key.

        Raises CheckpointError when the key holds something else or text that is not UTF-8.
        """
        field = self.fields.get(key)
        if field is None:
            return None
        if not isinstance(field, ArrayField):
            raise CheckpointError(f"{self.path}: key {key}: got {quoted(field)}, expected an array")
        if field.item_type != GGUFValueType.STRING:
            item = np.dtype(_SCALARS[field.item_type])
            return np.frombuffer(self.buffer, item, field.count, field.offset)
        buffer, position, result = self.buffer, field.offset, []
        unpack = struct.Struct("<Q").unpack_from
        try:
            for _ in range(field.count):
                start = position + 8
                position = start + unpack(buffer, position)[0]
                result.append(buffer[start:position].decode("utf-8"))
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: key {key}: item {len(result)} is not UTF-8") from error
        return result

    def data(self, entry: TensorEntry) -> np.ndarray:
        """The stored bytes of a tensor, uint8[byte_count], without copying."""
        return np.frombuffer(self.buffer, np.uint8, entry.byte_count, entry.offset)

    def _read_field(self) -> None:
        key = self._string("a field's key", MAX_KEY_BYTES)
        if not key or shown(key) != key:  # what follows names the key in its messages
            raise CheckpointError(f"{self.path}: got a key {quoted(key)}, expected a short word")
        if key in self.fields:
            raise CheckpointError(f"{self.path}: key {key} appears twice")
        value_type = self._value_type(key)
        if value_type == GGUFValueType.STRING:
            self.fields[key] = self._string(f"key {key}")
        elif value_type == GGUFValueType.ARRAY:
            self.fields[key] = self._array(key)
        else:
            self.fields[key] = self._number(_SCALARS[value_type], f"key {key}")

    def _array(self, key: str) -> ArrayField:
        item_type = self._value_type(key)
        count = self._number("<Q", f"length of key {key}")
        if item_type == GGUFValueType.ARRAY:
            raise CheckpointError(f"{self.path}: key {key}: arrays of arrays are not supported")
        smallest = 8 if item_type == GGUFValueType.STRING else struct.calcsize(_SCALARS[item_type])
        self._check_count(count, smallest, f"items of key {key}")
        field = ArrayField(item_type, count, self._position)
        if item_type != GGUFValueType.STRING:
            self._position += count * smallest
            return field
        buffer, position, last = self.buffer, self._position, self.size - 8
        unpack = struct.Struct("<Q").unpack_from
        for index in range(count):
            if position > last:
                raise CheckpointError(
                    f"{self.path}: key {key}: item {index} of {count} lies past the end of the file"
                )
            position += 8 + unpack(buffer, position)[0]
        if position > self.size:
            raise CheckpointError(f"{self.path}: key {key}: the last item ends past the end of the file")
        self._position = position
        return field

    def _read_tensors(self, count: int) -> None:
        raw: list[tuple[str, tuple[int, ...], GGMLQuantizationType, int]] = []
        for _ in range(count):
            name = self._string("a tensor's name", MAX_NAME_BYTES)
            if not name or shown(name) != name:
                raise CheckpointError(f"{self.path}: got a tensor name {quoted(name)}, expected a short word")
            where = f"tensor {name}"
            dimension_count = self._number("<I", where)
            if not 1 <= dimension_count <= MAX_DIMENSIONS:
                raise CheckpointError(
                    f"{self.path}: {where}: got {dimension_count} dimensions, expected 1 to {MAX_DIMENSIONS}"
                )
            shape = tuple(self._number("<Q", where) for _ in range(dimension_count))[::-1]
            number = self._number("<I", where)
            try:
                block_type = GGMLQuantizationType(number)
            except ValueError as error:
                raise CheckpointError(f"{self.path}: {where}: unknown block type number {number}") from error
            raw.append((name, shape, block_type, self._number("<Q", where)))
        alignment = self.fields.get("general.alignment", 32)
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            raise CheckpointError(
                f"{self.path}: key general.alignment: got {quoted(alignment)}, expected a power of two"
            )
        start = (self._position + alignment - 1) // alignment * alignment
        for name, shape, block_type, offset in raw:
            if name in self.tensors:
                raise CheckpointError(f"{self.path}: tensor {name} appears twice")
            if offset % alignment:
                raise CheckpointError(
                    f"{self.path}: tensor {name}: got offset {offset}, expected a multiple of {alignment}"
                )
            self.tensors[name] = self._entry(name, shape, block_type, start, offset)
        self._check_overlaps()

    def _check_overlaps(self) -> None:
        ordered = sorted(self.tensors.values(), key=lambda entry: entry.offset)
        for before, after in itertools.pairwise(ordered):
            if before.offset + before.byte_count > after.offset:
                raise CheckpointError(
                    f"{self.path}: tensor {after.name} starts at byte {after.offset}, inside tensor "
                    f"{before.name}"
                )

    def _entry(
        self, name: str, shape: tuple[int, ...], block_type: GGMLQuantizationType, start: int, offset: int
    ) -> TensorEntry:
        where = f"{self.path}: tensor {name}"
        block_items, block_bytes = GGML_QUANT_SIZES[block_type]
        if 0 in shape:
            raise CheckpointError(f"{where}: got an empty shape {shape}")
        if shape[-1] % block_items:
            raise CheckpointError(
                f"{where}: rows of {shape[-1]} do not divide into {block_type.name} blocks of {block_items}"
            )
        # Python integers: a product of absurd dimensions is refused, not wrapped.
        byte_count = prod(shape) // block_items * block_bytes
        end = start + offset + byte_count
        if end > self.size:
            raise CheckpointError(
                f"{where} of shape {shape} ({block_type.name}) ends at byte {end}, but the file has "
                f"{self.size} (truncated or damaged)"
            )
        return TensorEntry(name, shape, block_type, start + offset, byte_count)

    def _number(self, code: str, where: str) -> Any:
        size = struct.calcsize(code)
        if self._position + size > self.size:
            raise CheckpointError(f"{self.path}: the file ends at byte {self.size}, inside {where}")
        (value,) = struct.unpack_from(code, self.buffer, self._position)
        self._position += size
        return value

    def _string(self, where: str, most_bytes: int = MAX_STRING_BYTES) -> str:
        length = self._number("<Q", where)
        left = self.size - self._position
        if length > min(left, most_bytes):
            raise CheckpointError(
                f"{self.path}: {where}: got a string of {length} bytes; {left} are left and at most "
                f"{most_bytes} are allowed"
            )
        raw = self.buffer[self._position : self._position + length]
        self._position += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: {where}: not UTF-8 text") from error

    def _value_type(self, key: str) -> GGUFValueType:
        number = self._number("<I", f"type of key {key}")
        try:
            return GGUFValueType(number)
        except ValueError as error:
            raise CheckpointError(f"{self.path}: key {key}: unknown value type number {number}") from error

    def _check_count(self, count: int, smallest: int, what: str) -> None:
        left = self.size - self._position
        if count * smallest > left:
            raise CheckpointError(f"{self.path}: claims {count} {what}, but only {left} bytes are left")
