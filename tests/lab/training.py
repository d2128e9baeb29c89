"""Tiny models in training, and texts of our own to train on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tiny import GOLDEN, random_tensors, tiny_build, tiny_config, tiny_params

from jaxinfer.config import ModelConfig
from jaxinfer.lab import selection
from jaxinfer.lab.data import Blocks, pack
from jaxinfer.lab.settings import Settings
from jaxinfer.lab.trainer import Trainer, TrainState
from jaxinfer.model.mesh import device_mesh

STORIES = GOLDEN / "stories260k"
"""A small trained Llama: 8 query and 4 KV heads in each of 5 layers, 512 tokens."""

SMALL = tiny_config(num_layers=1)
"""One layer: what is compiled is compiled in a second."""

RHYME = (
    "The kettle sings upon the stove, the cat sleeps on the sill; a wind comes over from the grove and goes "
    "across the hill. The miller counts his sacks of rye, the baker lights his fire, and seven swallows "
    "cross the sky and settle on the spire.\n"
)


def text_file(folder: Path, repeats: int = 12) -> Path:
    path = folder / "rhyme.txt"
    path.write_text("".join(f"{number}. {RHYME}" for number in range(repeats)))
    return path


def settings(**changes: Any) -> Settings:
    usual: dict[str, Any] = {"steps": 10, "batch": 4, "sequence_length": 16, "learning_rate": 3e-3}
    return Settings(**{**usual, **changes})


def parameters(config: ModelConfig = SMALL, seed: int = 0, dtype: str = "float32"):
    """Structure and parameters as they are trained."""
    build = dataclasses.replace(tiny_build(dtype), row_major=True)
    return tiny_params(config, random_tensors(config, seed), build)


def start(
    chosen: Settings, config: ModelConfig = SMALL, original: Any = None
) -> tuple[Trainer, TrainState, selection.Arrays]:
    """A trainer of random weights on one device, its first state, and the frozen rows."""
    graph, state = parameters(config)
    trained, frozen = selection.split(config, state, chosen.train)
    mesh = device_mesh(jax.devices()[:1])
    trainer = Trainer(graph, jax.eval_shape(lambda x: x, state), chosen, mesh, original)
    return trainer, trainer.begin(trained), trainer.place(frozen)


def random_blocks(count: int, length: int = 16, vocab: int = SMALL.vocab_size, seed: int = 0) -> Blocks:
    """The last block is not full."""
    return pack(np.random.default_rng(seed).integers(0, vocab, count * length - 3), length)


def arrays_of(state: TrainState) -> dict[str, np.ndarray]:
    """Copies: an update uses its state up."""
    return {name: np.array(array) for name, array in state.trained.items()}
