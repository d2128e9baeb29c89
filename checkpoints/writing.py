"""Writes checkpoint folders: safetensors as Hugging Face has them, or Orbax, tensor by tensor.

    with new_folder(destination) as folder:
        write_safetensors(folder, tensors, max_shard_bytes)
        write_json(folder / "config.json", config)

Everything goes to a folder beside the destination that is renamed at the end: a destination is complete, or
it is not there. Tensors are read one after the other, when their turn has come.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.regular_file import open_regular

PARAMS = "params"
MANIFEST = "jaxinfer.json"
MANIFEST_FORMAT = "jaxinfer-params-2"
DATABASE = "manifest.ocdbt"
ORBAX_METADATA = "_METADATA"
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Types of tensors that are written, and their names in safetensors."""

DEFAULT_SHARD_BYTES = 2_000_000_000
OnBytes = Callable[[int], None]

_PARTS = 8
"""Into how many parts an axis is cut: each of 2, 4 or 8 devices finds its shard in chunks of its own."""
_MOST_BAND = 1 << 19
"""Most numbers in a chunk before its columns are cut: who reads a large tensor some rows at a time, as the
loader does, reads the band at each border twice."""
_SMALLEST_CHUNK_BYTES = 1 << 18
_COMMIT_BYTES = 1 << 26
"""Tensors are committed in groups of this size (or one by one, when larger), which bounds host memory."""


@dataclass(frozen=True, slots=True)
class PendingTensor:
    """A tensor to be written: what its header says, and how to get its values ([out, in]) later."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def values(self) -> np.ndarray:
        """The values, contiguous, of the announced shape and type."""
        array = np.ascontiguousarray(self.read()).reshape(self.shape)
        assert array.dtype == self.dtype, f"{self.name}: {array.dtype} is not {self.dtype}"
        return array


@contextlib.contextmanager
def new_folder(destination: Path) -> Iterator[Path]:
    """A folder to write into; it becomes `destination` when the block ends, and vanishes when it fails.

    A process that is killed leaves a folder `.NAME.partial-*` beside the destination, never the destination.
    Raises CheckpointError when the destination is there already (an empty folder may be) or cannot be
    written, disk full included.
    """
    check_free(destination)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{destination.name}.partial-", dir=destination.parent))
    except OSError as error:
        raise _cannot_write(destination, error) from error
    try:
        partial.chmod(0o777 & ~_umask())  # mkdtemp keeps others out
        yield partial
        check_free(destination)  # somebody else may have been quicker
        for folder, _, _ in os.walk(partial):
            _flush_folder(folder)
        partial.rename(destination)
        _flush_folder(destination.parent)
    except OSError as error:
        raise _cannot_write(destination, error) from error
    finally:
        _remove(partial)


def _remove(folder: Path) -> None:
    """Remove a folder to the end, however often Ctrl-C is pressed; half a minute is enough for any disk."""
    until = time.monotonic() + 30.0
    while os.path.lexists(folder) and time.monotonic() < until:
        with contextlib.suppress(KeyboardInterrupt):
            shutil.rmtree(folder, ignore_errors=True)
            if os.path.lexists(folder):
                time.sleep(0.02)


def check_free(destination: Path) -> None:
    """Raises CheckpointError when something other than an empty folder is at `destination`."""
    if not os.path.lexists(destination):
        return
    if not destination.is_dir() or destination.is_symlink():
        raise CheckpointError(f"{destination}: exists already and is no folder; name a new one")
    if any(destination.iterdir()):
        raise CheckpointError(f"{destination}: exists already and is not empty; name a new folder")


def check_room(destination: Path, needed: int) -> None:
    """Raises CheckpointError when the disk of `destination` has less than `needed` bytes free."""
    existing = next(folder for folder in destination.absolute().parents if folder.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise CheckpointError(
            f"{destination}: needs {needed / 1e6:.0f} MB, and {free / 1e6:.0f} MB are free there"
        )


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON object, indented, with its keys in their order, as UTF-8."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a small file as UTF-8, line ends as they are."""
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        _flush_to_disk(file)


def copy_file(source: Path, target: Path) -> None:
    """Copy a regular file. Raises CheckpointError when `source` is none, OSError when writing fails."""
    with open_regular(source) as old, target.open("wb") as new:
        shutil.copyfileobj(old, new)
        _flush_to_disk(new)


def is_plain_name(name: str) -> bool:
    """Whether a tensor's name is letters, digits, dots, "_" and "-": it becomes a key with slashes around."""
    return re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name) is not None


def write_safetensors(
    folder: Path,
    tensors: Sequence[PendingTensor],
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    on_bytes: OnBytes = lambda count: None,
) -> None:
    """model.safetensors, or shards of at most `max_shard_bytes` of tensors with Hugging Face's index.

    A tensor larger than that has a shard to itself. `on_bytes(n)` is called per tensor. Raises
    CheckpointError for names or types that cannot be written, OSError when writing fails.

    The header is written here rather than by the safetensors library, whose `save_file` takes all tensors of
    a file at once: the format (8 bytes of little-endian length, JSON, tensors back to back) lets a header be
    written before any value is read, and host memory holds one tensor instead of one shard.
    """
    _check_tensors(tensors)
    shards = _shards(tensors, max_shard_bytes)
    if len(shards) == 1:
        _write_shard(folder / "model.safetensors", shards[0], on_bytes)
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(folder / file_name, shard, on_bytes)
        places |= {tensor.name: file_name for tensor in shard}
    total = sum(tensor.nbytes for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    write_json(folder / "model.safetensors.index.json", index)


def write_orbax(
    folder: Path, tensors: Sequence[PendingTensor], on_bytes: OnBytes = lambda count: None
) -> None:
    """An Orbax checkpoint {name: array} in `folder`/params; jaxinfer.json has the sizes of its files and the
    hash of its manifest, which names everything else by random names and places.

    One zarr3 array per tensor in one OCDBT database, every chunk with a crc32c and uncompressed: zstd makes
    SmolLM2's dequantised 538 MB 333, but they take twice as long to read. Written with TensorStore, not with
    Orbax's own `save`, which wants the whole tree in host memory and knows no checksums;
    `tests/checkpoints/test_orbax.py` restores the result with Orbax. `on_bytes(n)` is called per tensor.
    Raises CheckpointError for names or types that cannot be written, OSError when writing fails.
    """
    import tensorstore as ts  # 0.15 s

    _check_tensors(tensors)
    params = folder / PARAMS
    params.mkdir()
    context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
    database = database_spec(str(params.resolve()) + "/")
    # Array metadata lies in the nodes, chunks do not; and there is one manifest, for there is one writer.
    database["config"] = {"max_inline_value_bytes": 1024, "manifest_kind": "single"}
    transaction, waiting = ts.Transaction(), 0
    for tensor in tensors:
        spec = {
            "driver": "zarr3",
            "kvstore": {**database, "path": f"{tensor.name}/"},
            "metadata": _zarr_metadata(tensor),
            "store_data_equal_to_fill_value": True,  # so that a chunk that is not there was lost
        }
        values = tensor.values()
        opening = ts.open(spec, create=True, context=context, transaction=transaction)
        _finished(_finished(opening).write(values))
        del values  # the transaction has its own copy
        on_bytes(tensor.nbytes)
        waiting += tensor.nbytes
        if waiting >= _COMMIT_BYTES:
            _finished(transaction.commit_async())
            transaction, waiting = ts.Transaction(), 0
    _finished(transaction.commit_async())
    tree = {
        str((tensor.name,)): {
            "key_metadata": [{"key": tensor.name, "key_type": 2}],  # 2: the key of a dict
            "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
        }
        for tensor in tensors
    }
    metadata = {
        "tree_metadata": tree,
        "use_ocdbt": True,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    write_json(params / ORBAX_METADATA, metadata)
    # When and by whom it was saved; Orbax warns where the file is absent, and takes null for an answer.
    nothing = {"item_handlers": None, "init_timestamp_nsecs": None, "commit_timestamp_nsecs": None}
    write_json(params / "_CHECKPOINT_METADATA", nothing)
    manifest = {
        "format": MANIFEST_FORMAT,
        "params": params_files(params),
        "sha256": digest_of(params / DATABASE),
    }
    write_json(folder / MANIFEST, manifest)


def database_spec(base: str) -> dict[str, Any]:
    """TensorStore's words for the database in the folder `base` (ends with a slash)."""
    return {"driver": "ocdbt", "base": {"driver": "file", "path": base}}


def digest_of(path: Path) -> str:
    """The sha256 of a small file's bytes, in hexadecimal digits."""
    with open_regular(path) as file:
        return hashlib.sha256(file.read()).hexdigest()


def params_files(params: Path) -> dict[str, int]:
    """Sizes in bytes of all files below `params`, by path relative to it with forward slashes.

    Raises CheckpointError for anything that is neither file nor folder: a pipe would block its reader.
    """
    sizes: dict[str, int] = {}
    for folder, _, file_names in os.walk(params):
        for file_name in file_names:
            file = Path(folder) / file_name
            if not file.is_file():
                raise CheckpointError(f"{file}: not a regular file")
            sizes[file.relative_to(params).as_posix()] = file.stat().st_size
    return dict(sorted(sizes.items()))


def chunk_shape(shape: tuple[int, ...], itemsize: int) -> list[int]:
    """How a tensor is cut: rows into 8 parts, or more until a band of rows is short, then columns into 8.

    Chunks stay above 256 KiB, below which reading them costs more than their bytes do.
    """
    chunk = [max(1, size) for size in shape]
    for axis, size in enumerate(shape):
        parts = 2
        while parts <= _PARTS or (axis == 0 and chunk[0] > 1 and math.prod(chunk) > _MOST_BAND):
            smaller = [*chunk[:axis], max(1, -(-size // parts)), *chunk[axis + 1 :]]
            if math.prod(smaller) * itemsize < _SMALLEST_CHUNK_BYTES:
                return chunk
            chunk, parts = smaller, 2 * parts
    return chunk


_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO)


def _finished(future: Any) -> Any:
    """The result of TensorStore's work, as OSError when it fails: it raises ValueError for everything, and
    here it is always the disk.

    Who presses Ctrl-C waits for what is being written: TensorStore's threads would go on, and make the folder
    anew that is being removed.
    """
    try:
        return future.result()
    except ValueError as error:
        text = str(error)
        for number in _DISK_ERRORS:
            if os.strerror(number) in text:
                raise OSError(number, os.strerror(number)) from None
        raise OSError(text.splitlines()[0].partition(" [")[0][:300]) from None
    finally:
        while not future.done():
            with contextlib.suppress(KeyboardInterrupt, ValueError):
                future.result()


def _zarr_metadata(tensor: PendingTensor) -> dict[str, Any]:
    chunk = chunk_shape(tensor.shape, tensor.dtype.itemsize)
    return {
        "shape": list(tensor.shape),
        "data_type": tensor.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
    }


def _check_tensors(tensors: Sequence[PendingTensor]) -> None:
    seen: set[str] = set()
    for tensor in tensors:
        if not is_plain_name(tensor.name):
            raise CheckpointError(
                f"tensor {tensor.name!r}: expected a name of letters, digits, dots, '_' and '-'"
            )
        if tensor.name in seen:
            raise CheckpointError(f"tensor {tensor.name}: there are two of this name")
        seen.add(tensor.name)
        if tensor.dtype.name not in DTYPES:
            allowed = ", ".join(DTYPES)
            raise CheckpointError(f"tensor {tensor.name}: got type {tensor.dtype}, expected {allowed}")
    if not seen:
        raise CheckpointError("there are no tensors to write")


def _shards(tensors: Sequence[PendingTensor], most: int) -> list[list[PendingTensor]]:
    """Consecutive tensors, as many to a shard as fit."""
    shards: list[list[PendingTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > most:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def _write_shard(path: Path, tensors: Sequence[PendingTensor], on_bytes: OnBytes) -> None:
    # Wider types first: every tensor is then aligned to its own width, as the library has it.
    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    # transformers refuses a file that does not say which framework's layout it has.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in ordered:
        kind = DTYPES[tensor.dtype.name]
        offsets = [offset, offset + tensor.nbytes]
        header[tensor.name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": offsets}
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in ordered:
            file.write(tensor.values().reshape(-1).view(np.uint8))
            on_bytes(tensor.nbytes)
        _flush_to_disk(file)


def _flush_to_disk(file: Any | BinaryIO) -> None:
    """A folder renamed before its files are on disk could be there after a power cut, and they not."""
    file.flush()
    os.fsync(file.fileno())


def _flush_folder(folder: str | Path) -> None:
    """The names in a folder are its data: they, and not the files alone, must be on disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _cannot_write(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path}: cannot be written ({error.strerror or error})")
