"""Rotary position embeddings, half-split as Hugging Face stores Llama's Q and K rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.config import LinearRope, Llama3Rope, Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Angular frequency of each rotated pair, radians per position: float32 [H / 2].

    Computed in float32, as the checkpoints' own training code does: theta ** (2 i / H) in float64 differs
    by enough to move logits at long positions.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequency = np.float32(1.0) / np.float32(rope.theta) ** exponent
    if isinstance(rope, LinearRope):
        return (frequency / np.float32(rope.factor)).astype(np.float32)
    if isinstance(rope, Llama3Rope):
        return _llama3(rope, frequency)
    return frequency.astype(np.float32)


def _llama3(rope: Llama3Rope, frequency: np.ndarray) -> np.ndarray:
    """Wavelengths longer than original / low are slowed by `factor`, shorter than original / high are kept,
    and between the two the frequency is interpolated (Llama 3.1 model card and reference code)."""
    wavelength = 2 * np.pi / frequency
    smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    smooth = np.clip(smooth, 0.0, 1.0)
    return ((1 - smooth) * frequency / rope.factor + smooth * frequency).astype(np.float32)


def rotation(rope: Rope, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin of every token's angles: positions int32 [T] -> two float32 [T, 1, H / 2]."""
    angles = positions.astype(jnp.float32)[:, None] * inverse_frequencies(rope, head_dim)
    return jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate pair (i, i + H / 2) of x [T, heads, H] by the angle of its token, in float32.

    H 4, angle a on pair 0 and b on pair 1: [x0, x1, x2, x3] ->
    [x0 cos a - x2 sin a, x1 cos b - x3 sin b, x2 cos a + x0 sin a, x3 cos b + x1 sin b]
    """
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)
