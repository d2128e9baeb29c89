"""Rotary embeddings: their frequencies and the rotation itself."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from dense import frequencies, rotated

from jaxinfer.config import LinearRope, Llama3Rope, ModelConfig, Rope
from jaxinfer.core import ConfigError
from jaxinfer.model.rope import inverse_frequencies, rotate, rotation

ROPES = [
    Rope(),
    Rope(500_000.0),
    LinearRope(10_000.0, 4.0),
    Llama3Rope(500_000.0, 8.0, 1.0, 4.0, 8192),
    Llama3Rope(500_000.0, 32.0, 1.0, 4.0, 128),
    Llama3Rope(10_000.0, 8.0, 2.0, 3.0, 100),
]
HF = {
    "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 2,
}  # fmt: skip
LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip


@pytest.mark.parametrize("head_dim", [8, 64, 80, 128])
@pytest.mark.parametrize("rope", ROPES, ids=str)
def test_frequencies_are_the_formula(rope: Rope, head_dim: int) -> None:
    got = inverse_frequencies(rope, head_dim)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, frequencies(rope, head_dim), rtol=2e-6)


def test_known_frequencies() -> None:
    """H 4: theta ** 0 and theta ** -0.5."""
    np.testing.assert_allclose(inverse_frequencies(Rope(10_000.0), 4), [1.0, 0.01], rtol=1e-6)
    np.testing.assert_allclose(inverse_frequencies(LinearRope(10_000.0, 4.0), 4), [0.25, 0.0025], rtol=1e-6)
    # Wavelengths 6.28 (shorter than 8192 / 4: kept) and 4443 (between 2048 and 8192: interpolated).
    frequency = 500_000.0**-0.5
    smooth = (8192 * frequency / (2 * math.pi) - 1) / 3
    got = inverse_frequencies(Llama3Rope(500_000.0, 8.0, 1.0, 4.0, 8192), 4)
    np.testing.assert_allclose(got, [1.0, frequency * ((1 - smooth) / 8 + smooth)], rtol=1e-6)
    # And 44 429 > 8192: divided by the factor.
    got = inverse_frequencies(Llama3Rope(5e7, 8.0, 1.0, 4.0, 8192), 4)
    np.testing.assert_allclose(got, [1.0, 5e7**-0.5 / 8], rtol=1e-6)


def test_the_kinds_differ() -> None:
    found = {tuple(inverse_frequencies(rope, 64).tolist()) for rope in ROPES}
    assert len(found) == len(ROPES)


def test_rotate_worked_example() -> None:
    """H 4, angle 90 degrees on pair (0, 2) and 180 on pair (1, 3): half-split, not interleaved (B131)."""
    angles = jnp.asarray([[[math.pi / 2, math.pi]]])
    got = rotate(jnp.asarray([[[1.0, 2.0, 3.0, 4.0]]]), jnp.cos(angles), jnp.sin(angles))
    np.testing.assert_allclose(got, [[[-3.0, -2.0, 1.0, -4.0]]], atol=1e-6)


@pytest.mark.parametrize("rope", ROPES[:4], ids=str)
def test_rotation_of_long_positions(rope: Rope) -> None:
    """Up to 2000 positions (B128); angles in float32 are right to about position * 6e-8."""
    x = np.random.default_rng(0).standard_normal((2000, 2, 16)).astype(np.float32)
    cos, sin = rotation(rope, 16, jnp.arange(2000))
    assert cos.shape == (2000, 1, 8)
    np.testing.assert_allclose(rotate(jnp.asarray(x), cos, sin), rotated(x, rope), atol=2e-3)
    np.testing.assert_allclose(rotate(jnp.asarray(x), cos, sin)[:50], rotated(x, rope)[:50], atol=5e-5)


def test_rotation_is_of_the_position_and_nothing_else() -> None:
    """Scores depend on the distance alone, and position 0 rotates nothing."""
    cos, sin = rotation(Rope(), 8, jnp.asarray([0, 5, 100, 105]))
    q = np.random.default_rng(1).standard_normal((1, 1, 8)).astype(np.float32).repeat(4, axis=0)
    turned = np.asarray(rotate(jnp.asarray(q), cos, sin))[:, 0]
    np.testing.assert_array_equal(turned[0], q[0, 0])
    assert turned[0] @ turned[1] == pytest.approx(turned[2] @ turned[3], abs=1e-4)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, Rope(10_000.0)),
        ({"rope_theta": 5e5}, Rope(5e5)),
        ({"rope_theta": 5e5, "rope_scaling": None}, Rope(5e5)),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, Rope(5e5)),
        ({"rope_parameters": {"rope_theta": 5e5}}, Rope(5e5)),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2}}, LinearRope(1e4, 2.0)),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 2}}, LinearRope(1e4, 2.0)),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            Llama3Rope(5e5, 8.0, 1.0, 4.0, 8192),
        ),
        (
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
            Llama3Rope(5e5, 8.0, 1.0, 4.0, 8192),
        ),
    ],
)
def test_both_spellings_of_a_config(keys: dict[str, Any], expected: Rope) -> None:
    """Old and new config.json (B127, B129)."""
    assert ModelConfig.from_hf({**HF, **keys}).rope == expected


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "yarn", "factor": 4.0}, "'yarn' is not supported"),
        ({"type": "dynamic", "factor": 2.0}, "'dynamic' is not supported"),
        ({"rope_type": "linear"}, "'linear' has no 'factor'"),
        ({"rope_type": "llama3", "factor": 8.0}, "'llama3' has no 'low_freq_factor'"),
    ],
)
def test_kinds_that_are_refused(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf({**HF, "rope_scaling": scaling})
