"""A Hugging Face folder: config.json and safetensors weights, in one file or in shards with an index.

`safetensors_header` reads and checks each file; this module adds what concerns the folder as a whole: the
index decides which shard a tensor is read from, a folder that lacks anything its index names is refused when
it is opened, not when the first request arrives, and so is one that holds tensors the index forgets.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.errors import CheckpointError, quoted, shown
from checkpoints.float8 import Scaled, dequantise, pair_scales, scheme_of
from checkpoints.json_file import MAX_INDEX_BYTES, read_json_object, read_optional_json_object
from checkpoints.parts import Index, checked_index
from checkpoints.regular_file import map_whole
from checkpoints.safetensors_header import (
    FLOAT_TYPES,
    PICKLE_SUFFIXES,
    StoredTensor,
    read_header,
    refuse_pickle,
)
from checkpoints.tokenizer_source import FolderTokenizerSource, folder_tokenizer_source

__all__ = ["PICKLE_SUFFIXES", "SafetensorsFolder", "refuse_pickle"]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Integer and bool buffers that old versions of transformers saved beside the weights; no weight is like them.
_BUFFERS = (".masked_bias", ".position_ids", ".causal_mask")


class SafetensorsFolder:
    """A checkpoint read from a Hugging Face folder; tensors are read one at a time from mapped files."""

    def __init__(self, path: Path) -> None:
        """Reads every shard's header (not its data).

        Raises CheckpointError for anything missing or damaged.
        """
        self.path = path
        self.config: dict[str, Any] = read_json_object(path / "config.json")
        self.generation_config: dict[str, Any] = read_optional_json_object(path / "generation_config.json")
        self.applied_quantization: dict[str, Any] | None = None
        """The `quantization_config` that `read` undoes, taken out of `config`; for information."""
        self._maps: dict[Path, mmap.mmap] = {}
        index, single = path / INDEX_FILE, path / SINGLE_FILE
        tensors = self._tensors_of_folder(index, single)
        self._plain: dict[str, StoredTensor] = {
            name: tensor for name, tensor in tensors.items() if self._is_weight(tensor)
        }
        self._scaled: dict[str, Scaled] = {}
        self._apply_float8()
        if not self._plain and not self._scaled:
            raise CheckpointError(f"{path}: the weight files hold no tensors")

    def names(self) -> tuple[str, ...]:
        """Names of all tensors (Hugging Face names), sorted; scales of float8 weights are not among them."""
        return tuple(sorted([*self._plain, *self._scaled]))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the header; matrices are [out, in].

        Raises CheckpointError when there is no such tensor.
        """
        return self._stored(name).shape

    def dtype(self, name: str) -> np.dtype:
        """Type of the array that `read` gives: the stored type, or float32 for float8 weights with scales.

        Raises CheckpointError when there is no such tensor.
        """
        stored = self._stored(name)
        return np.dtype(np.float32) if name in self._scaled else FLOAT_TYPES[stored.type_name]

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        """One tensor, or the part `tensor[index]`: a read-only view of the mapped file in its stored type.

        bfloat16 and float8 are those of `ml_dtypes`. Float8 weights with scales come dequantised, as new
        float32. Raises CheckpointError when there is no such tensor, the index does not fit it, or the file
        has become shorter since it was opened.
        """
        stored = self._stored(name)
        index = checked_index(index, stored.shape, f"{stored.path}: tensor {name}")
        float_type = FLOAT_TYPES[stored.type_name]
        if name not in self._scaled:
            values = self._bytes(stored).view(float_type).reshape(stored.shape)
            return np.require(values[index], requirements="A")  # a file may place a tensor at any byte
        scaled = self._scaled[name]
        scale = self._bytes(scaled.scale).view(FLOAT_TYPES[scaled.scale.type_name])
        if not np.isfinite(scale).all():
            raise CheckpointError(
                f"{scaled.scale.path}: tensor {scaled.scale.name}: got a scale of inf or NaN"
            )
        bits = self._bytes(stored).reshape(stored.shape)
        return dequantise(bits, float_type, scale, scaled.block, index)

    def tokenizer_source(self) -> FolderTokenizerSource:
        """Paths of the tokenizer files; missing ones are None. Raises CheckpointError for odd token ids."""
        return folder_tokenizer_source(self.path, self.config, self.generation_config)

    def _tensors_of_folder(self, index: Path, single: Path) -> dict[str, StoredTensor]:
        if index.exists() or index.is_symlink():
            return self._tensors_of_index(index)
        if single.exists() or single.is_symlink():
            return read_header(single)
        pickles = sorted(item for item in self.path.iterdir() if item.suffix in PICKLE_SUFFIXES)
        if pickles:
            raise refuse_pickle(pickles[0])
        raise CheckpointError(f"{self.path}: no weights; expected {SINGLE_FILE} or {INDEX_FILE}")

    def _tensors_of_index(self, index: Path) -> dict[str, StoredTensor]:
        weight_map = read_json_object(index, MAX_INDEX_BYTES).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{index}: expected an object under the key weight_map")
        wanted: dict[str, set[str]] = {}
        for name, shard_name in weight_map.items():
            self._check_shard_name(index, name, shard_name)
            wanted.setdefault(shard_name, set()).add(name)
        # Beside the index they are shards of another save, or of none; consolidated.* and adapter_* are not.
        for other in sorted(self.path.glob("model*.safetensors")):
            if other.name not in wanted:
                raise CheckpointError(
                    f"{other}: {INDEX_FILE} lies beside it and does not name it; remove one of them"
                )
        tensors: dict[str, StoredTensor] = {}
        for shard_name, names in wanted.items():
            shard = self.path / shard_name
            if not shard.is_file():
                raise CheckpointError(
                    f"{shard}: this shard is missing or no file, but {INDEX_FILE} says it holds {len(names)} "
                    f"tensors ({_some(names)})"
                )
            found = read_header(shard)
            absent, unread = names - found.keys(), found.keys() - names
            if absent:
                raise CheckpointError(
                    f"{shard}: {len(absent)} tensors that {INDEX_FILE} places here are not in it "
                    f"({_some(absent)})"
                )
            if unread:
                raise CheckpointError(
                    f"{shard}: {len(unread)} tensors in it would stay unread, since {INDEX_FILE} does not "
                    f"place them here ({_some(unread)})"
                )
            tensors |= found
        return tensors

    def _check_shard_name(self, index: Path, name: str, shard_name: Any) -> None:
        where = f"{index}: tensor {shown(name)}"
        if not isinstance(shard_name, str):
            raise CheckpointError(f"{where}: got {quoted(shard_name)}, expected a file name")
        # A plain name only: "../x" or "/etc/x" would read files outside the folder.
        plain = shard_name.isprintable() and not any(mark in shard_name for mark in "/\\:")
        if not plain or shard_name in ("", ".", "..") or len(shard_name.encode()) > 255:
            raise CheckpointError(f"{where}: shard {quoted(shard_name)} is not a plain name in the folder")
        if Path(shard_name).suffix in PICKLE_SUFFIXES:
            raise refuse_pickle(self.path / shard_name)

    def _is_weight(self, tensor: StoredTensor) -> bool:
        """Whether a tensor is kept; buffers are passed over, and any other of no float type is refused."""
        if tensor.type_name in FLOAT_TYPES:
            return True
        if tensor.name.endswith(_BUFFERS):
            return False
        settings = self.config.get("quantization_config")
        hint = ""
        if settings is not None:
            method = settings.get("quant_method") if isinstance(settings, dict) else settings
            hint = f"; quantization_config of method {quoted(method)} is not supported"
        raise CheckpointError(
            f"{tensor.path}: tensor {shown(tensor.name)}: got type {tensor.type_name}, expected one of "
            f"{', '.join(FLOAT_TYPES)}{hint}"
        )

    def _apply_float8(self) -> None:
        """Pairs float8 weights with their scales when config.json declares a scheme that is understood."""
        settings = self.config.get("quantization_config")
        scheme = scheme_of(settings)
        if scheme is None:
            return
        plain, scaled = pair_scales(scheme, self._plain)
        if scaled:
            self._plain, self._scaled = plain, scaled
            self.applied_quantization = self.config.pop("quantization_config")

    def _stored(self, name: str) -> StoredTensor:
        stored = self._plain.get(name)
        if stored is None and name in self._scaled:
            stored = self._scaled[name].stored
        if stored is None:
            count = len(self._plain) + len(self._scaled)
            raise CheckpointError(f"{self.path}: no tensor {shown(name)}; it has {count} others")
        return stored

    def _bytes(self, stored: StoredTensor) -> np.ndarray:
        """The stored bytes of a tensor, uint8[byte_count], without copying."""
        if stored.path not in self._maps:
            self._maps[stored.path] = map_whole(stored.path)
        buffer = self._maps[stored.path]
        if stored.offset + stored.byte_count > len(buffer):
            raise CheckpointError(
                f"{stored.path}: tensor {shown(stored.name)} ends at byte "
                f"{stored.offset + stored.byte_count}, but the file now has {len(buffer)}"
            )
        return np.frombuffer(buffer, np.uint8, stored.byte_count, stored.offset)


def _some(names: set[str]) -> str:
    few = ", ".join(map(shown, sorted(names)[:3]))
    return few if len(names) <= 3 else f"{few}, ..."
