"""A folder of config.json, tokenizer files and an Orbax checkpoint in `params`: weights read by part.

    DST/config.json, generation_config.json, tokenizer.json, ...   as in a Hugging Face folder
    DST/jaxinfer.json                                              what the files below are (by `convert`)
    DST/params/_METADATA                                           names of the tensors (Orbax)
    DST/params/manifest.ocdbt, DST/params/d/*                      the tensors (TensorStore)

Formats: an Orbax checkpoint is a `_METADATA` file and one zarr array per tensor, all in one OCDBT database
(Orbax's checkpoint format guide; the pages of TensorStore on the drivers zarr, zarr3 and ocdbt). TensorStore
alone reads it here: importing Orbax imports jax (half a second and more), and Orbax gives a process its part
of a tensor only through jax's shardings. `checkpoints.writing` writes such folders; what Orbax itself saved
of the same names, nested or flat, opens as well.

What is damaged is refused, never read as zeros: zarr takes a chunk that is not there for the fill value
unless told otherwise, and `fill_missing_data_reads` tells it. Nodes of the database carry checksums always,
chunks do when `convert` wrote them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - numpy knows the name "bfloat16" once it is imported
import numpy as np
import tensorstore as ts

from checkpoints.errors import CheckpointError, quoted, shown
from checkpoints.json_file import MAX_INDEX_BYTES, read_json_object, read_optional_json_object
from checkpoints.parts import Index, checked_index, covering
from checkpoints.tokenizer_source import FolderTokenizerSource, folder_tokenizer_source
from checkpoints.writing import (
    DATABASE,
    DTYPES,
    MANIFEST,
    MANIFEST_FORMAT,
    ORBAX_METADATA,
    PARAMS,
    database_spec,
    digest_of,
    is_plain_name,
    params_files,
)

MOST_CHUNKS = 1 << 20
MOST_CHUNK_BYTES = 1 << 31
"""Bounds for metadata that nobody wrote in earnest: Orbax cuts at 2 GiB, and `convert` cuts in 64."""

_RUN_BYTES = 1 << 25
"""What is asked of TensorStore at a time: it reads ahead of its own copying, chunk upon chunk."""

_ARRAY_KINDS = ("np.ndarray", "jax.Array")


class OrbaxFolder:
    """A checkpoint whose tensors lie in chunks, so that `read` touches only the chunks it needs."""

    def __init__(self, path: Path) -> None:
        """Opens every tensor's metadata (not its data) and compares the files' sizes with the manifest.

        Raises CheckpointError for anything missing or damaged that shows without reading the data.
        """
        self.path = path
        self.config: dict[str, Any] = read_json_object(path / "config.json")
        self.generation_config: dict[str, Any] = read_optional_json_object(path / "generation_config.json")
        _check_files(path)
        driver, names = _read_metadata(path / PARAMS / ORBAX_METADATA)
        # A cache for the nodes of the database and none for chunks: each is read once.
        context = ts.Context({"cache_pool#nodes": {"total_bytes_limit": 100_000_000}})
        base = str(path.resolve() / PARAMS) + "/"
        opening = {name: ts.open(_spec(driver, base, name), context=context) for name in names}
        self._stores: dict[str, ts.TensorStore] = {}
        for name, future in opening.items():
            try:
                store = future.result()
            except ValueError as error:
                raise CheckpointError(
                    f"{path / PARAMS}: tensor {name} cannot be opened ({_reason(error)})"
                ) from None
            self._stores[name] = self._checked(name, store)

    def names(self) -> tuple[str, ...]:
        """Names of all tensors (Hugging Face names), sorted."""
        return tuple(sorted(self._stores))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the metadata; matrices are [out, in]."""
        return tuple(self._store(name).shape)

    def dtype(self, name: str) -> np.dtype:
        """Type of the array that `read` gives: float32, float16 or bfloat16."""
        return np.dtype(self._store(name).dtype.numpy_dtype)

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        """One tensor, or the part `tensor[index]` of it, as a new array.

        Chunks that the part does not touch are not read; those it touches are read whole, a few at a time.
        Raises CheckpointError when there is no such tensor, when the index does not fit it, and when data is
        missing or damaged.
        """
        store, where = self._store(name), f"{self.path / PARAMS}: tensor {name}"
        shape = tuple(store.shape)
        pairs = zip(checked_index(index, shape, where), shape, strict=True)
        parts = [covering(item, size) for item, size in pairs]
        wanted = tuple(stop - start for start, stop, _ in parts)
        # numpy allocates, for it says when there is no memory where TensorStore ends the process.
        try:
            values = np.empty(wanted, store.dtype.numpy_dtype)
        except (MemoryError, ValueError) as error:
            raise CheckpointError(f"{where}: no memory for shape {list(wanted)}") from error
        (begin, end, _), *others = parts
        rest = tuple(slice(start, stop) for start, stop, _ in others)
        for start, stop in _runs(begin, end, store, values.nbytes):
            part = store[(slice(start, stop), *rest)][ts.d[:].translate_to[0]]
            target = ts.array(values[start - begin : stop - begin], copy=False, write=True)
            try:
                target.write(part).result()
            except ValueError as error:  # TensorStore raises it for every kind of failure
                raise CheckpointError(f"{where} cannot be read ({_reason(error)})") from None
        return values[tuple(then for _, _, then in parts)]

    def tokenizer_source(self) -> FolderTokenizerSource:
        """Paths of the tokenizer files; missing ones are None. Raises CheckpointError for odd token ids."""
        return folder_tokenizer_source(self.path, self.config, self.generation_config)

    def _store(self, name: str) -> ts.TensorStore:
        store = self._stores.get(name)
        if store is None:
            raise CheckpointError(f"{self.path}: no tensor {name}; it has {len(self._stores)} others")
        return store

    def _checked(self, name: str, store: ts.TensorStore) -> ts.TensorStore:
        """The store, once its type and its chunks are such as somebody means."""
        where = f"{self.path / PARAMS}: tensor {name}"
        stored = str(store.dtype.name)
        if stored not in DTYPES:
            raise CheckpointError(f"{where}: got type {stored}, expected {', '.join(DTYPES)}")
        shape = tuple(store.shape)
        if not shape:
            raise CheckpointError(f"{where}: got a single number, expected an array")
        parts = store.chunk_layout.read_chunk.shape or shape
        chunk = [part or size for part, size in zip(parts, shape, strict=True)]
        count = math.prod(-(-size // max(part, 1)) for size, part in zip(shape, chunk, strict=True))
        size = math.prod(chunk) * store.dtype.numpy_dtype.itemsize
        outside = any(part > max(whole, 1) for whole, part in zip(shape, chunk, strict=True))
        if count > MOST_CHUNKS or size > MOST_CHUNK_BYTES or outside:
            raise CheckpointError(
                f"{where}: got shape {list(shape)} in {count} chunks of {list(chunk)}, expected at most "
                f"{MOST_CHUNKS} chunks of {MOST_CHUNK_BYTES} bytes, none larger than the tensor"
            )
        return store


def _check_files(path: Path) -> None:
    """Compares `params` with the manifest, when there is one: a truncated file is known before it is read,
    and files of another checkpoint are not taken for this one's."""
    present = params_files(path / PARAMS)
    if not os.path.lexists(path / MANIFEST):
        return  # saved by Orbax itself
    manifest = read_json_object(path / MANIFEST)
    if manifest.get("format") != MANIFEST_FORMAT or not isinstance(manifest.get("params"), dict):
        raise CheckpointError(
            f"{path / MANIFEST}: got format {quoted(manifest.get('format'))}, expected {MANIFEST_FORMAT} and "
            "an object under params; convert the model again"
        )
    unlisted = sorted(present.keys() - manifest["params"].keys())
    if unlisted:
        raise CheckpointError(
            f"{path / PARAMS}: file {shown(unlisted[0])} is not in {MANIFEST}, so another checkpoint's"
        )
    for name, size in manifest["params"].items():
        if name not in present:
            raise CheckpointError(f"{path / PARAMS}: file {shown(name)} is missing; {MANIFEST} names it")
        if present[name] != size:
            raise CheckpointError(
                f"{path / PARAMS / name}: got {present[name]} bytes, expected {quoted(size)}"
            )
    got = digest_of(path / PARAMS / DATABASE)
    if got != manifest.get("sha256"):
        raise CheckpointError(
            f"{path / PARAMS / DATABASE}: got sha256 {got}, expected {quoted(manifest.get('sha256'))} as in "
            f"{MANIFEST}; it is another checkpoint's, or damaged"
        )


def _read_metadata(path: Path) -> tuple[str, list[str]]:
    """The zarr driver and the names of the tensors, out of Orbax's `_METADATA`."""
    metadata = read_json_object(path, MAX_INDEX_BYTES)
    if metadata.get("use_ocdbt") is not True:
        raise CheckpointError(f"{path}: got use_ocdbt {quoted(metadata.get('use_ocdbt'))}, expected true")
    tree = metadata.get("tree_metadata")
    if not isinstance(tree, dict) or not tree:
        raise CheckpointError(f"{path}: expected an object with tensors under tree_metadata")
    names: list[str] = []
    for entry_name, entry in tree.items():
        try:
            keys = [item["key"] for item in entry["key_metadata"]]
            kind = entry["value_metadata"]["value_type"]
        except (TypeError, KeyError) as error:
            raise CheckpointError(f"{path}: entry {shown(entry_name)} is damaged ({error!r})") from error
        # Nested keys joined by dots are how Orbax names the array, and how Hugging Face names the tensor.
        if not keys or not all(isinstance(key, str) and is_plain_name(key) for key in keys):
            raise CheckpointError(
                f"{path}: entry {shown(entry_name)}: {quoted(keys)} is not the name of a tensor"
            )
        if kind not in _ARRAY_KINDS:
            raise CheckpointError(f"{path}: entry {shown(entry_name)}: got {quoted(kind)}, expected an array")
        names.append(".".join(keys))
    if len(set(names)) != len(names):
        raise CheckpointError(f"{path}: two entries have the same name")
    return "zarr3" if metadata.get("use_zarr3") else "zarr", names


def _runs(begin: int, end: int, store: ts.TensorStore, nbytes: int) -> Iterator[tuple[int, int]]:
    """Rows begin .. end in runs of whole chunks; `nbytes` is what all of them have. None when that is 0."""
    if nbytes == 0:
        return iter(())
    rows = (store.chunk_layout.read_chunk.shape or store.shape)[0] or 1
    step = max(1, _RUN_BYTES * (end - begin) // (nbytes * rows)) * rows
    return pairwise([begin, *range((begin // step + 1) * step, end, step), end])


def _spec(driver: str, base: str, name: str) -> dict[str, Any]:
    kvstore = {**database_spec(base), "path": f"{name}/", "cache_pool": "cache_pool#nodes"}
    return {"driver": driver, "kvstore": kvstore, "fill_missing_data_reads": False}


def _reason(error: Exception) -> str:
    """TensorStore's message without the specification of the store that follows it."""
    return str(error).partition(" [")[0].strip().splitlines()[0]
