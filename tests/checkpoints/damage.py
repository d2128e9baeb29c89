"""What a start does with a checkpoint up to the first product, and the proof that a damaged one stops it."""

from __future__ import annotations

import re
import resource
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_time import cpu_time
from folder_writing import write_folder
from gguf_writing import random_weights, write_gguf

import checkpoints
from jaxinfer.config import ModelConfig
from jaxinfer.core import ConfigError
from jaxinfer.model.weights import check_names

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 96,
    "vocab_size": 40, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": True, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": [2, 3],
}  # fmt: skip
SECONDS, BYTES = 1.0, 100_000_000


def write_model(path: Path, kind: str) -> Path:
    """A tiny Llama at `path`: kind "gguf", "single" or "sharded"."""
    if kind == "gguf":
        tokens = [f"t{index}" for index in range(40)]
        return write_gguf(path / "tiny.gguf", random_weights(), tokens=tokens)
    return write_folder(path, random_weights(), CONFIG, shards=1 if kind == "single" else 2)


def load(path: Path) -> dict[str, np.ndarray]:
    """Open, read the config, compare the names, read every tensor."""
    opened = checkpoints.open_checkpoint(path)
    config = ModelConfig.from_hf(opened.config)
    check_names(config, opened)
    return {name: np.array(opened.read(name)) for name in opened.names()}


def check_refused(path: Path, message: str) -> None:
    """`load` must fail soon, with little memory and an error that names the file and matches `message`."""
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    try:
        with cpu_time() as spent, pytest.raises((checkpoints.CheckpointError, ConfigError)) as raised:
            load(path)
        seconds, caught = spent(), raised.value
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    text = str(caught)
    assert re.search(message, text), f"{message!r} is not in: {text}"
    assert "\n" not in text
    assert len(text) < 1500, len(text)
    if isinstance(caught, checkpoints.CheckpointError):
        assert str(path) in text, text
    assert seconds < SECONDS, (seconds, text)
    assert peak < BYTES, (peak, text)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - grown) * 1024
    assert grown < BYTES, (grown, text)
