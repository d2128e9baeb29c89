"""Rotary position embeddings, half-split as Hugging Face stores Llama's Q and K rows."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.config import DynamicRope, LinearRope, Llama3Rope, Rope, YarnRope


def inverse_frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Angular frequency of each rotated pair, radians per position: float32 [H / 2].

    Computed in float32, as the checkpoints' own training code does: theta ** (2 i / H) in float64 differs
    by enough to move logits at long positions. Of a DynamicRope, those of texts within its original length.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequency = np.float32(1.0) / np.float32(rope.theta) ** exponent
    if isinstance(rope, LinearRope):
        return (frequency / np.float32(rope.factor)).astype(np.float32)
    if isinstance(rope, Llama3Rope):
        return _llama3(rope, frequency)
    if isinstance(rope, YarnRope):
        return _yarn(rope, frequency, head_dim)
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


def _yarn(rope: YarnRope, frequency: np.ndarray, head_dim: int) -> np.ndarray:
    """The ramp runs over the pair's index, between the pairs that turn beta_fast and beta_slow times."""

    def pair_that_turns(times: float) -> float:
        wavelength_log = math.log(rope.original_max_position / (times * 2 * math.pi))
        return head_dim * wavelength_log / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    # The upper bound is in elements and not in pairs: so in the paper's code, and in everyone's since.
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    pairs = np.arange(head_dim // 2, dtype=np.float32)
    ramp = np.clip((pairs - np.float32(low)) / np.float32(high - low), 0.0, 1.0)
    return (frequency / np.float32(rope.factor) * ramp + frequency * (1 - ramp)).astype(np.float32)


def rotation(
    rope: Rope, head_dim: int, positions: jax.Array, lengths: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """cos and sin of every token's angles: positions int32 [T] -> two float32 [T, 1, H / 2].

    lengths int32 [T]: how long the text was when the token was computed; only DynamicRope looks at it.
    """
    if isinstance(rope, DynamicRope):
        frequency = _dynamic(rope, head_dim, lengths)
    else:
        frequency = inverse_frequencies(rope, head_dim)
    angles = positions.astype(jnp.float32)[:, None] * frequency
    scale = rope.attention_factor if isinstance(rope, YarnRope) else 1.0
    return jnp.cos(angles)[:, None, :] * scale, jnp.sin(angles)[:, None, :] * scale


def _dynamic(rope: DynamicRope, head_dim: int, lengths: jax.Array) -> jax.Array:
    """Frequencies float32 [T, H / 2]: theta * (factor * length / original - (factor - 1)) ** (H / (H - 2)),
    which is theta itself up to the original length."""
    length = jnp.maximum(lengths, rope.original_max_position).astype(jnp.float32)
    stretch = rope.factor * length / rope.original_max_position - (rope.factor - 1.0)
    theta = rope.theta * stretch ** (head_dim / (head_dim - 2))
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    scaled = 1.0 / theta[:, None] ** exponent
    # Short texts get the very numbers that an unscaled model has.
    short = (lengths <= rope.original_max_position)[:, None]
    return jnp.where(short, inverse_frequencies(rope, head_dim), scaled)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate pair (i, i + H / 2) of x [T, heads, H] by the angle of its token, in float32.

    H 4, angle a on pair 0 and b on pair 1: [x0, x1, x2, x3] ->
    [x0 cos a - x2 sin a, x1 cos b - x3 sin b, x2 cos a + x0 sin a, x3 cos b + x1 sin b]
    """
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)
