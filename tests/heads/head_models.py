"""Small models on disk whose heads are what a test wants them to be, with the tokenizer of stories260k."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from tiny import GOLDEN, random_tensors, tiny_build

import checkpoints
from checkpoints.writing import PendingTensor, write_safetensors
from jaxinfer.config import ModelConfig
from jaxinfer.heads import HeadChange, HeadPlan, Regrouped, decide
from jaxinfer.model import weights

STORIES = GOLDEN / "stories260k"
KEYS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32",
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 8, "head_dim": 16, "vocab_size": 512, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
"""An MHA model of 8 heads, whose head_dim is not hidden_size / heads."""

FAMILIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"attention_bias": True},
    "head norms": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "some layers without rotation": {
        "model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0],
    },
    "windows": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 7},
}  # fmt: skip
"""Changes of KEYS that conversion has to care about."""

METHODS = ("mean", "first", "random", "norm-weighted", "similarity", "align", "svd")
"""All that merge."""

TEXTS = np.random.default_rng(5).integers(3, 512, (2, 24))


def drawn(keys: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors of a model with these keys."""
    return random_tensors(ModelConfig.from_hf(keys), seed)


def model_folder(folder: Path, keys: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    shutil.copytree(STORIES, folder)
    write_safetensors(
        folder, [PendingTensor(name, a.shape, a.dtype, lambda a=a: a) for name, a in tensors.items()]
    )
    (folder / "config.json").write_text(json.dumps(keys))
    return folder


def heads_of(tensors: dict[str, np.ndarray], layer: int, kind: str, width: int) -> np.ndarray:
    """A view [heads, H, D] of q_proj, k_proj or v_proj, to be written to."""
    weight = tensors[f"model.layers.{layer}.self_attn.{kind}_proj.weight"]
    return weight.reshape(-1, width, weight.shape[1])


def equal_heads(
    keys: dict[str, Any], tensors: dict[str, np.ndarray], groups: list[tuple[int, ...]]
) -> dict[str, np.ndarray]:
    """The tensors with K and V heads of each of these groups equal to its first, in all layers."""
    width = keys["head_dim"]
    for name, tensor in tensors.items():
        if "k_proj" in name or "v_proj" in name:
            heads = tensor.reshape(-1, width, *tensor.shape[1:])
            for group in groups:
                heads[list(group)] = heads[group[0]]
    return tensors


def logits_of(source: Any, texts: np.ndarray = TEXTS) -> np.ndarray:
    """Logits [texts, S, V] of a checkpoint, whatever its kind, by the pass over whole texts."""
    config = ModelConfig.from_hf(source.config)
    graph, state = weights.load_params(config, tiny_build(), source)

    model = nnx.merge(graph, state)
    hidden, _ = model.dense(jnp.asarray(texts))
    return np.asarray(model.logits(hidden.reshape(-1, config.hidden_size))).reshape(*texts.shape, -1)


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    """To 1e-5 of the largest logit, which is no small one."""
    largest = np.abs(expected).max()
    assert largest > 1
    np.testing.assert_allclose(found, expected, atol=1e-5 * largest, rtol=0)


def opened(folder: Path) -> Any:
    return checkpoints.open_checkpoint(folder)


def regrouped(folder: Path, favors: Any = None, **plan: Any) -> tuple[Regrouped, HeadChange]:
    """A checkpoint seen with the heads of this plan, and what was done."""
    source = opened(folder)
    change = decide(source, HeadPlan(**plan), favors=favors, progress=False)
    return Regrouped(source, change), change


def tensors_of(source: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(source.read(name)) for name in source.names()}
