"""What a checkpoint is to the rest of the project, and the one function that opens it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np

from checkpoints.errors import CheckpointError, shown
from checkpoints.regular_file import GGUF_MAGIC, open_regular
from checkpoints.safetensors_folder import PICKLE_SUFFIXES, SafetensorsFolder, refuse_pickle
from checkpoints.tokenizer_source import TokenizerSource
from checkpoints.writing import ORBAX_METADATA, PARAMS

ACCEPTED = "a folder with config.json and safetensors or an Orbax checkpoint, or a .gguf file"


class Checkpoint(Protocol):
    """A source of named tensors; it never holds weights itself.

    `config` has the keys of a Hugging Face config.json whatever the format, `generation_config` those of
    generation_config.json (empty when there is none). Names are Hugging Face names and matrices are
    [out, in]. Every method raises CheckpointError, naming file and tensor, when it cannot do its work.
    """

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]

    def names(self) -> tuple[str, ...]:
        """Names of all tensors, sorted."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, from the header."""
        ...

    def dtype(self, name: str) -> np.dtype:
        """Type of the array that `read` gives for this tensor, from the header."""
        ...

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """One tensor, or the part `tensor[index]` of it, read now; possibly a view of the mapped file.

        A part costs no more host memory than itself where the format allows (so a device can be given its
        shard alone).
        """
        ...

    def tokenizer_source(self) -> TokenizerSource:
        """What `jaxinfer.text` builds the tokenizer and the chat template from."""
        ...


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open the checkpoint at `path` by what it is: a Hugging Face folder, an Orbax folder or a GGUF file.

    Headers and small files are read and checked now, tensors when `read` is called. A folder with both
    kinds of weights is refused. Raises CheckpointError for anything else, pickled weights in particular.
    """
    path = Path(path).expanduser()
    try:
        if path.is_dir():
            return _open_folder(path)
        if not path.exists():
            raise CheckpointError(f"{path}: no such file or folder; expected {ACCEPTED}")
    except OSError as error:  # a folder that may not be read, a name that is too long
        raise CheckpointError(f"{shown(str(path))}: cannot be read ({error.strerror or error})") from error
    if path.suffix in PICKLE_SUFFIXES:
        raise refuse_pickle(path)
    with open_regular(path) as file:
        magic = file.read(len(GGUF_MAGIC))
    if magic == GGUF_MAGIC or path.suffix == ".gguf":
        from checkpoints.gguf_file import GGUFFile  # the package gguf is needed for such files alone

        return GGUFFile(path)
    raise CheckpointError(f"{path}: got a file that starts with {magic!r}; expected {ACCEPTED}")


def _open_folder(path: Path) -> Checkpoint:
    if not (path / "config.json").exists():
        inside = sorted(item.name for item in path.iterdir() if item.suffix == ".gguf")
        hint = f"; open {inside[0]} itself" if inside else ""
        raise CheckpointError(f"{path}: no config.json in this folder; expected {ACCEPTED}{hint}")
    params = path / PARAMS
    if params.is_dir() and not any(path.glob("*.safetensors")):
        from checkpoints.orbax_folder import OrbaxFolder  # TensorStore takes 0.15 s to import

        return OrbaxFolder(path)
    if (params / ORBAX_METADATA).exists():
        raise CheckpointError(f"{path}: got safetensors and {PARAMS}, expected one of the two")
    return SafetensorsFolder(path)
