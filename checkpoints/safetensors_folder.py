"""A Hugging Face folder: config.json and safetensors weights, in one file or in shards with an index.

Format: the safetensors specification (8 bytes little-endian header length, a JSON header, then
the tensors). The safetensors library reads and checks the files; this module adds what concerns the folder
as a whole: the index decides which shard a tensor is read from, and a folder that lacks anything its index
names is refused when it is opened, not when the first request arrives.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

# numpy knows the type names "bfloat16" and "float8_*" only once ml_dtypes has registered them.
import ml_dtypes  # noqa: F401
import numpy as np
from safetensors import SafetensorError, safe_open

from checkpoints.errors import CheckpointError
from checkpoints.json_file import read_json_object, read_optional_json_object
from checkpoints.tokenizer_source import FolderTokenizerSource, token_id_tuple

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


def refuse_pickle(path: Path) -> CheckpointError:
    """The error for weights in Python's pickle format, which can run any code when opened."""
    return CheckpointError(
        f"{path}: pickled weights ({'/'.join(PICKLE_SUFFIXES)}) can run code when they are opened and are "
        "never read; expected safetensors or GGUF"
    )


class SafetensorsFolder:
    """A checkpoint read from a Hugging Face folder; tensors are read one at a time from mapped files."""

    def __init__(self, path: Path) -> None:
        """Opens every shard's header (not its data).

        Raises CheckpointError for anything missing or damaged.
        """
        self.path = path
        self.config: dict[str, Any] = read_json_object(path / "config.json")
        self.generation_config: dict[str, Any] = read_optional_json_object(path / "generation_config.json")
        self._shards: dict[Path, Any] = {}
        self._shard_of: dict[str, Path] = {}
        if (path / INDEX_FILE).exists():
            self._open_index(path / INDEX_FILE)
        elif (path / SINGLE_FILE).exists():
            shard = path / SINGLE_FILE
            for name in self._open_shard(shard).keys():  # noqa: SIM118 - safe_open is not a dict
                self._shard_of[name] = shard
        else:
            pickles = sorted(item for item in path.iterdir() if item.suffix in PICKLE_SUFFIXES)
            if pickles:
                raise refuse_pickle(pickles[0])
            raise CheckpointError(f"{path}: no weights; expected {SINGLE_FILE} or {INDEX_FILE}")
        if not self._shard_of:
            raise CheckpointError(f"{path}: the weight files hold no tensors")

    def names(self) -> tuple[str, ...]:
        """Names of all tensors (Hugging Face names), sorted."""
        return tuple(sorted(self._shard_of))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, read from the header; matrices are [out, in]."""
        return tuple(self._slice(name).get_shape())

    def read(self, name: str) -> np.ndarray:
        """One tensor in its stored type, as an array of its own (bfloat16 as `ml_dtypes.bfloat16`).

        Raises CheckpointError when there is no such tensor or numpy has no such type.
        """
        shard = self._shard(name)
        try:
            return self._shards[shard].get_tensor(name)
        except (SafetensorError, TypeError, KeyError, ValueError, AttributeError) as error:
            stored = self._slice(name).get_dtype()
            message = f"{shard}: tensor {name} of type {stored} cannot be read ({error})"
            raise CheckpointError(message) from error

    def tokenizer_source(self) -> FolderTokenizerSource:
        """Paths of the tokenizer files; missing ones are None."""

        def present(file_name: str) -> Path | None:
            return self.path / file_name if (self.path / file_name).is_file() else None

        def configured(key: str) -> Any:
            value = self.generation_config.get(key)
            return self.config.get(key) if value is None else value

        bos = token_id_tuple(configured("bos_token_id"))
        return FolderTokenizerSource(
            tokenizer_json=present("tokenizer.json"),
            tokenizer_config=present("tokenizer_config.json"),
            chat_template=present("chat_template.jinja"),
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=token_id_tuple(configured("eos_token_id")),
        )

    def _open_index(self, index_path: Path) -> None:
        weight_map = read_json_object(index_path).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{index_path}: expected an object under the key weight_map")
        wanted: dict[str, list[str]] = {}
        for name, shard_name in weight_map.items():
            if not isinstance(shard_name, str):
                raise CheckpointError(f"{index_path}: tensor {name}: got {shard_name!r}, expected a name")
            # A plain name only: "../x" or "/etc/x" would read files outside the folder.
            if shard_name in ("", ".", "..") or any(mark in shard_name for mark in "/\\\0:"):
                raise CheckpointError(
                    f"{index_path}: tensor {name}: shard {shard_name!r} is not a plain name in the folder"
                )
            if Path(shard_name).suffix in PICKLE_SUFFIXES:
                raise refuse_pickle(self.path / shard_name)
            wanted.setdefault(shard_name, []).append(name)
        for shard_name, names in wanted.items():
            shard = self.path / shard_name
            if not shard.is_file():
                raise CheckpointError(
                    f"{shard}: this shard is missing, but {INDEX_FILE} says it holds {len(names)} tensors "
                    f"({_some(names)})"
                )
            absent = set(names) - set(self._open_shard(shard).keys())
            if absent:
                raise CheckpointError(
                    f"{shard}: {len(absent)} tensors that {INDEX_FILE} places here are not in it "
                    f"({_some(sorted(absent))})"
                )
            for name in names:
                self._shard_of[name] = shard

    def _open_shard(self, path: Path) -> Any:
        _check_outline(path)
        try:
            shard = safe_open(path, framework="numpy")
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{path}: damaged safetensors file: {_first_line(error)}") from error
        self._shards[path] = shard
        return shard

    def _shard(self, name: str) -> Path:
        shard = self._shard_of.get(name)
        if shard is None:
            raise CheckpointError(f"{self.path}: no tensor {name}; it has {len(self._shard_of)} others")
        return shard

    def _slice(self, name: str) -> Any:
        return self._shards[self._shard(name)].get_slice(name)


def _check_outline(path: Path) -> None:
    """Compares the lengths a safetensors file claims with its size, for messages with numbers in them."""
    size = path.stat().st_size
    if size < 10:
        raise CheckpointError(f"{path}: got {size} bytes; a safetensors file has at least 10")
    with path.open("rb") as file:
        lead = file.read(8)
        (header_size,) = struct.unpack("<Q", lead)
        if lead.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04")) and header_size > size:
            raise refuse_pickle(path)
        if header_size > size - 8:
            raise CheckpointError(
                f"{path}: the header claims {header_size} bytes, but only {size - 8} follow "
                "(truncated, or not a safetensors file)"
            )
        header = file.read(header_size)
    try:
        entries = json.loads(header)
        ends = {key: entry["data_offsets"][1] for key, entry in entries.items() if key != "__metadata__"}
        last = max(ends, key=lambda key: ends[key], default="")
        expected = 8 + header_size + ends.get(last, 0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return  # safetensors itself says what is wrong with such a header
    if expected != size:
        raise CheckpointError(f"{path}: got {size} bytes, expected {expected} (the end of tensor {last})")


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown}, ..."


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
