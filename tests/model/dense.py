"""A Llama forward pass as one reads it in the papers: dense, float64, numpy, none of the code under test."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfer.config import LinearRope, Llama3Rope, ModelConfig, Rope
from jaxinfer.model.kv import WriteSlots, create_kv
from pallas_kernels import RaggedBatch
from pallas_kernels.batch import fill_tiles, tile_capacity

Tensors = dict[str, np.ndarray]


def frequencies(rope: Rope, head_dim: int) -> list[float]:
    """Radians per position of each pair, one by one, in Python floats."""
    result = []
    for pair in range(head_dim // 2):
        frequency = 1.0 / rope.theta ** (2 * pair / head_dim)
        if isinstance(rope, LinearRope):
            frequency /= rope.factor
        elif isinstance(rope, Llama3Rope):
            wavelength = 2 * math.pi / frequency
            longest = rope.original_max_position / rope.low_freq_factor
            shortest = rope.original_max_position / rope.high_freq_factor
            if wavelength > longest:
                frequency /= rope.factor
            elif wavelength >= shortest:
                smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
                    rope.high_freq_factor - rope.low_freq_factor
                )
                frequency = (1 - smooth) * frequency / rope.factor + smooth * frequency
        result.append(frequency)
    return result


def rotated(x: np.ndarray, rope: Rope) -> np.ndarray:
    """x [T, heads, H], token t at position t: pairs are (i, i + H / 2)."""
    tokens, _, width = x.shape
    angles = np.outer(np.arange(tokens), frequencies(rope, width))[:, None, :]
    low, high = x[..., : width // 2], x[..., width // 2 :]
    return np.concatenate(
        [low * np.cos(angles) - high * np.sin(angles), high * np.cos(angles) + low * np.sin(angles)], axis=-1
    )


def dense_logits(config: ModelConfig, tensors: Tensors, tokens: list[int]) -> np.ndarray:
    """[T, V] float64."""
    held = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    count, width = len(tokens), config.head_dim

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ held[f"{name}.weight"].T + held.get(f"{name}.bias", 0.0)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        mean_square = (x * x).mean(-1, keepdims=True)
        return x / np.sqrt(mean_square + config.rms_norm_eps) * held[f"{name}.weight"]

    x = held["model.embed_tokens.weight"][tokens]
    causal = np.tril(np.ones((count, count), bool))
    for index in range(config.num_layers):
        at = f"model.layers.{index}"
        y = norm(x, f"{at}.input_layernorm")
        q = rotated(linear(y, f"{at}.self_attn.q_proj").reshape(count, -1, width), config.rope)
        k = rotated(linear(y, f"{at}.self_attn.k_proj").reshape(count, -1, width), config.rope)
        v = linear(y, f"{at}.self_attn.v_proj").reshape(count, -1, width)
        attended = np.zeros((count, config.num_heads, width))
        for head in range(config.num_heads):
            shared = head // (config.num_heads // config.num_kv_heads)
            scores = np.where(causal, q[:, head] @ k[:, shared].T / math.sqrt(width), -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            attended[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, shared]
        x = x + linear(attended.reshape(count, -1), f"{at}.self_attn.o_proj")
        y = norm(x, f"{at}.post_attention_layernorm")
        gate = linear(y, f"{at}.mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(y, f"{at}.mlp.up_proj"), f"{at}.mlp.down_proj")
    x = norm(x, "model.norm")
    return linear(x, "model.embed_tokens" if config.tie_word_embeddings else "lm_head")


def chunk_logits(
    config: ModelConfig, graph: nnx.GraphDef, state: nnx.State, tokens: list[int], page_size: int = 16
) -> np.ndarray:
    """[T, V] of `Llama` itself: the tokens as one chunk of one row, over pages in falling order."""
    count = len(tokens)
    pages = -(-count // page_size)
    table = np.arange(pages, 0, -1, dtype=np.int32)
    positions = np.arange(count, dtype=np.int32)
    tiles, num_tiles = fill_tiles([(0, 0, count)], tile_capacity(count, 1))
    batch = RaggedBatch(
        np.zeros(count, np.int32), positions, table[None], np.asarray([count], np.int32), tiles, num_tiles
    )
    slots = WriteSlots(table[positions // page_size], positions % page_size)
    dtype = jax.tree.leaves(state)[0].dtype

    @jax.jit
    def forward(state, tokens, batch, slots):
        model = nnx.merge(graph, state)
        hidden, _ = model(tokens, create_kv(config, pages + 1, page_size, dtype), batch, slots, decode_rows=0)
        return model.logits(hidden)

    return np.asarray(forward(state, jnp.asarray(tokens, jnp.int32), batch, slots))
