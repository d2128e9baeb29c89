"""A model that is trained or learnt from: opened, loaded to be trained, and written with what it learnt."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from flax import nnx

import checkpoints
from checkpoints.writing import PendingTensor
from jaxinfer.config import ModelConfig
from jaxinfer.core import ConfigError
from jaxinfer.lab import selection
from jaxinfer.lab.settings import Settings
from jaxinfer.lab.trainer import DTYPES, placement
from jaxinfer.model import weights
from jaxinfer.model.llama import Build
from jaxinfer.progress import phase
from jaxinfer.text.errors import TokenizerError
from jaxinfer.text.tokenizer import Tokenizer, load_tokenizer
from pallas_kernels import Backend


@dataclass(frozen=True, slots=True)
class Subject:
    """A model on disk: where it is, what it is, and how it reads text (None: not at all)."""

    path: Path
    checkpoint: checkpoints.Checkpoint
    config: ModelConfig
    tokenizer: Tokenizer | None


def open_subject(model: str) -> Subject:
    """Open MODEL without its weights. Raises ConfigError or CheckpointError for what cannot be trained."""
    if model.startswith("random:"):
        raise ConfigError(
            f"{model}: there is no checkpoint of it; give a pulled name, a folder or a .gguf file"
        )
    path = checkpoints.resolve(model)
    checkpoint = checkpoints.open_checkpoint(path)
    config = ModelConfig.from_hf(checkpoint.config)
    weights.check_names(config, checkpoint)
    try:
        return Subject(path, checkpoint, config, load_tokenizer(checkpoint.tokenizer_source()))
    except TokenizerError as error:
        raise ConfigError(f"{path}: the tokenizer cannot be used: {error}") from error


def refuse_another_language(subject: Subject, original: Subject) -> None:
    """Raises ConfigError unless logits of `original` are over the tokens of `subject`."""
    reason = None
    if original.config.vocab_size != subject.config.vocab_size:
        reason = f"vocabularies of {original.config.vocab_size} and {subject.config.vocab_size} tokens"
    elif _vocabulary(original) not in (None, _vocabulary(subject)):
        reason = "different tokenizers"
    if reason is not None:
        raise ConfigError(
            f"distill: {original.path} and {subject.path} have {reason}: logits of the one cannot "
            "teach the other"
        )


def _vocabulary(subject: Subject) -> dict[str, int] | None:
    return None if subject.tokenizer is None else subject.tokenizer.get_vocab()


def load(
    subject: Subject, dtype: str, settings: Settings, mesh: jax.sharding.Mesh, progress: bool | None
) -> tuple[nnx.GraphDef, nnx.State]:
    """Structure and parameters, row-major in `dtype` ("f32", "bf16"), each where it belongs on `mesh`."""
    build = Build(DTYPES[dtype], jax.default_backend(), Backend("xla"), row_major=True)

    def place(parameter: weights.Parameter) -> jax.sharding.Sharding:
        return placement(settings, mesh, (parameter.outputs, *parameter.shapes[0][1:]))

    sharding: Callable | None = place if mesh.size > 1 else None
    total = sum(1 for _ in weights.parameters(subject.config))
    with phase(f"loading {subject.path.name}", total=total, wanted=progress is not False) as advance:
        return weights.load_params(
            subject.config, build, subject.checkpoint, sharding=sharding, on_tensor=advance
        )


def digest(state: nnx.State) -> str:
    """What tells these parameters from others: sha256, in hexadecimal digits."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        found.update(np.ascontiguousarray(np.asarray(leaf)).view(np.uint8))
    return found.hexdigest()


def tensors(subject: Subject, trained: selection.Arrays, settings: Settings) -> list[PendingTensor]:
    """What the model is now: trained tensors from `trained`, frozen ones from its own checkpoint, each in
    `save_dtype` when its turn has come."""
    target = np.dtype(settings.save_dtype)

    def from_training(held: jax.Array, rows: slice) -> Callable[[], np.ndarray]:
        return lambda: np.asarray(held[rows]).astype(target)

    def from_checkpoint(name: str) -> Callable[[], np.ndarray]:
        return lambda: np.asarray(subject.checkpoint.read(name)).astype(target)

    pending = []
    for parameter in weights.parameters(subject.config):
        begin = selection.first_trained_row(subject.config, parameter, settings.train)
        start = 0
        for name, shape in zip(parameter.tensors, parameter.shapes, strict=True):
            if begin is None or start < begin:
                read = from_checkpoint(name)
            else:
                held = trained[selection.name_of(parameter)]
                read = from_training(held, slice(start - begin, start - begin + shape[0]))
            pending.append(PendingTensor(name, shape, target, read))
            start += shape[0]
    return pending
