"""A small model made here, from random weights, by the trainer that uptrains: for comparisons that need
more KV heads than any model at hand, and an original whose whole past is known."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from checkpoints import writing
from checkpoints.writing import PendingTensor
from jaxinfer.config import ModelConfig
from jaxinfer.lab.compare.recipe import Pretraining
from jaxinfer.lab.settings import Settings
from jaxinfer.lab.uptrain import uptrain
from jaxinfer.model import weights
from jaxinfer.text.files import read_texts

END = "<|endoftext|>"
SPREAD = 0.02
"""Standard deviation of initial matrices; of those that add to the residual stream 1/sqrt(2 L) of it, as
GPT-2 has them."""


def pretrain(wanted: Pretraining, data: Sequence[Path], destination: Path) -> dict[str, Any]:
    """Make the model and write it to the new folder `destination`; a run that was broken off goes on.

    Returns the report of the training. Raises ConfigError, RequestError, CheckpointError as `uptrain` does.
    """
    initial = destination.with_name(destination.name + ".initial")
    if not (initial / "config.json").exists():
        write_initial(wanted, data, initial)
    settings = Settings(**wanted.settings)
    report = uptrain(initial, destination, data, settings, resume=broken_off(destination))
    shutil.rmtree(initial)
    return report


def broken_off(destination: Path) -> bool:
    """Whether a training to `destination` began and did not end."""
    folder = destination.with_name(destination.name + ".training")
    return (folder / "run.json").exists() and not (folder / "report.json").exists()


def is_whole(model: Path) -> bool:
    """Whether a model is there as a whole, with the report of its training."""
    return (model / "config.json").exists() and not broken_off(model)


def is_made(model: Path) -> bool:
    """Whether a model is there as a whole. One whose training was broken off after it was written, and before
    its report, is taken away: going on from the last state gives it again, and the report."""
    if broken_off(model) and model.exists():
        shutil.rmtree(model)
    return is_whole(model)


def write_initial(wanted: Pretraining, data: Sequence[Path], destination: Path) -> None:
    """Random weights (by the seed of the settings), and a tokenizer of bytes and their frequent pairs."""
    tokenizer = _tokenizer(read_texts(data), wanted.vocabulary)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", **wanted.config,
        "vocab_size": wanted.vocabulary, "eos_token_id": tokenizer.token_to_id(END), "torch_dtype": "float32",
    }  # fmt: skip
    model = ModelConfig.from_hf(config)
    generator = np.random.default_rng(wanted.settings.get("seed", 0))
    tensors = []
    for parameter in weights.parameters(model):
        for name, shape in zip(parameter.tensors, parameter.shapes, strict=True):
            values = _initial(generator, name, shape, model.num_layers)
            tensors.append(PendingTensor(name, shape, values.dtype, lambda values=values: values))
    with writing.new_folder(destination) as folder:
        writing.write_safetensors(folder, tensors)
        writing.write_json(folder / "config.json", config)
        writing.write_text(folder / "tokenizer.json", tokenizer.to_str())
        writing.write_json(folder / "tokenizer_config.json", {"eos_token": END})


def _initial(
    generator: np.random.Generator, name: str, shape: tuple[int, ...], num_layers: int
) -> np.ndarray:
    if len(shape) == 1:
        return np.full(shape, 0.0 if name.endswith("bias") else 1.0, np.float32)
    spread = SPREAD
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        spread /= math.sqrt(2 * num_layers)
    return generator.normal(0.0, spread, shape).astype(np.float32)


def _tokenizer(texts: Sequence[str], vocabulary: int) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    made.train_from_iterator(texts, trainer)
    return made
