"""From tensors to parameters: nothing missing, nothing unread, nothing of another shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from tiny import TINY, Tensors, random_tensors, tiny_build, tiny_config, tiny_params

from jaxinfer.config import ModelConfig
from jaxinfer.core import ConfigError
from jaxinfer.model import weights

TIED = tiny_config(tie_word_embeddings=True)
BIASED = tiny_config(qkv_bias=True, output_bias=True, mlp_bias=True, qk_norm=True)


def refuse(config: ModelConfig, change: Callable[[dict[str, np.ndarray]], Any], message: str) -> None:
    tensors = random_tensors(config)
    change(tensors)
    with pytest.raises(ConfigError, match=message):
        weights.load_params(config, tiny_build(), Tensors(tensors))


@pytest.mark.parametrize("name", sorted(random_tensors(BIASED)))
def test_every_missing_tensor_is_named(name: str) -> None:
    refuse(BIASED, lambda tensors: tensors.pop(name), f"no tensor {name!r}")


@pytest.mark.parametrize("name", sorted(random_tensors(BIASED)))
def test_every_mis_shaped_tensor_is_named(name: str) -> None:
    """One row too few, as of another vocabulary or head count."""
    refuse(BIASED, lambda tensors: tensors.update({name: tensors[name][:-1]}), f"tensor {name!r} has shape")


def test_a_transposed_tensor_is_refused() -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    message = rf"'{name}' has shape \(96, 64\), expected \(64, 96\)"
    refuse(TINY, lambda tensors: tensors.update({name: tensors[name].T}), message)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (TINY, "model.layers.0.self_attn.q_proj.bias"),  # a bias that the config does not tell of (B135)
        (TINY, "model.layers.2.mlp.up_proj.weight"),  # a layer too many (B138)
        (TINY, "model.layers.0.self_attn.q_norm.weight"),
        (TINY, "something.else"),
    ],
)
def test_an_unread_tensor_is_named(config: ModelConfig, name: str) -> None:
    message = f"1 tensors that this model does not use: {name}"
    refuse(config, lambda tensors: tensors.update({name: np.zeros((4, 4), np.float32)}), message)


def test_a_checkpoint_of_fewer_layers_is_refused() -> None:
    tensors = Tensors(random_tensors(TINY))
    with pytest.raises(ConfigError, match=r"no tensor 'model\.layers\.2\.input_layernorm\.weight'"):
        weights.load_params(tiny_config(num_layers=3), tiny_build(), tensors)


def test_tied_heads() -> None:
    """Tied and present: the embedding is used (B134). Untied and absent: refused, not made up (B133)."""
    tensors = random_tensors(TIED)
    plain = tiny_params(TIED, tensors)[1]
    head = np.full((TIED.vocab_size, TIED.hidden_size), 9.0, np.float32)
    carried = tiny_params(TIED, {**tensors, "lm_head.weight": head})[1]
    jax.tree.map(np.testing.assert_array_equal, plain, carried)
    refuse(TINY, lambda tensors: tensors.pop("lm_head.weight"), r"no tensor 'lm_head\.weight'")
    wrong = {"lm_head.weight": np.zeros((3, 5), np.float32)}
    refuse(TIED, lambda tensors: tensors.update(wrong), r"'lm_head\.weight' has shape \(3, 5\)")


def test_old_rotary_buffers_are_passed_over() -> None:
    half, width = (TINY.head_dim // 2,), TINY.head_dim
    shapes = {"inv_freq": half, "cos_cached": (1, 1, 32, width), "sin_cached": (32, width)}
    for above in ("model.", "model.layers.0.self_attn.", "model.layers.1."):
        buffers = {f"{above}rotary_emb.{name}": np.zeros(shape, np.float32) for name, shape in shapes.items()}
        tiny_params(TINY, {**random_tensors(TINY), **buffers})


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.self_attn.rotary_emb.inv_freq", (TINY.head_dim // 4,)),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", (2, TINY.head_dim // 2)),
        ("model.rotary_emb.inv_freq", (TINY.head_dim,)),
        ("model.layers.0.self_attn.rotary_emb.cos_cached", (32, TINY.head_dim // 2)),
        ("vision.rotary_emb.inv_freq", (TINY.head_dim // 2,)),
        ("model.layers.0.mlp.rotary_emb.inv_freq", (TINY.head_dim // 2,)),
    ],
)
def test_other_rotary_buffers_are_refused(name: str, shape: tuple[int, ...]) -> None:
    message = f"1 tensors that this model does not use: {name}"
    refuse(TINY, lambda tensors: tensors.update({name: np.zeros(shape, np.float32)}), message)


class Counting(Tensors):
    """Counts the elements read of each tensor."""

    def __init__(self, tensors: dict[str, np.ndarray]):
        super().__init__(tensors)
        self.counts = dict.fromkeys(tensors, 0)

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        part = super().read(name, index)
        self.counts[name] += part.size
        return part


@pytest.mark.parametrize("most_bytes", [1, 3000, weights.READ_BYTES])
def test_every_tensor_is_read_once_and_lands_unchanged(most_bytes: int, monkeypatch) -> None:
    """Each value of the checkpoint is found again in the parameters, whatever their layout, and in however
    many parts it was read."""
    source, counted = Counting(random_tensors(BIASED)), []
    whole = tiny_params(BIASED)[1]
    monkeypatch.setattr(weights, "READ_BYTES", most_bytes)
    _, state = weights.load_params(BIASED, tiny_build(), source, on_tensor=counted.append)
    assert source.counts == {name: tensor.size for name, tensor in source.tensors.items()}
    assert len(counted) == len(list(weights.parameters(BIASED)))
    held = np.sort(np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(state)]))
    np.testing.assert_array_equal(held, np.sort(np.concatenate([t.ravel() for t in source.tensors.values()])))
    assert held.size == BIASED.num_params
    jax.tree.map(np.testing.assert_array_equal, whole, state)


def test_random_parameters_repeat_and_have_the_models_shapes() -> None:
    (graph, first), (_, second) = (weights.random_params(BIASED, tiny_build(), seed=3) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    loaded_graph, loaded = tiny_params(BIASED)
    assert graph == loaded_graph
    assert jax.tree.map(np.shape, first) == jax.tree.map(np.shape, loaded)
    other = weights.random_params(BIASED, tiny_build(), seed=4)[1]
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(other), strict=True))
