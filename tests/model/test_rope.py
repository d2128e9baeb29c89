"""Rotary embeddings: their frequencies and the rotation itself."""

from __future__ import annotations

import json
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from dense import frequencies, rotated
from tiny import GOLDEN

from jaxinfer.config import DynamicRope, LinearRope, Llama3Rope, ModelConfig, Rope, YarnRope
from jaxinfer.core import ConfigError
from jaxinfer.model.rope import inverse_frequencies, rotate, rotation

ROPES = [
    Rope(),
    Rope(500_000.0),
    LinearRope(10_000.0, 4.0),
    Llama3Rope(500_000.0, 8.0, 1.0, 4.0, 8192),
    Llama3Rope(500_000.0, 32.0, 1.0, 4.0, 128),
    Llama3Rope(10_000.0, 8.0, 2.0, 3.0, 100),
    DynamicRope(5_000.0, 2.0, 4096),
    YarnRope(10_000.0, 4.0, 2048, 1.1386),
    YarnRope(1_000_000.0, 4.0, 32768, 1.0, 16.0, 2.0),
    YarnRope(10_000.0, 2.0, 128, truncate=False),
]
HF = {
    "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 2,
}  # fmt: skip
LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"factor": 4.0, "original_max_position_embeddings": 512}


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


@pytest.mark.parametrize("rope", [*ROPES[:4], DynamicRope(10_000.0, 4.0, 512), ROPES[-1]], ids=str)
def test_rotation_of_long_positions(rope: Rope) -> None:
    """Up to 2000 positions (B128); angles in float32 are right to about position * 6e-8."""
    x = np.random.default_rng(0).standard_normal((2000, 2, 16)).astype(np.float32)
    cos, sin = rotation(rope, 16, jnp.arange(2000), jnp.full(2000, 2000))
    assert cos.shape == (2000, 1, 8)
    np.testing.assert_allclose(rotate(jnp.asarray(x), cos, sin), rotated(x, rope), atol=2e-3)
    np.testing.assert_allclose(rotate(jnp.asarray(x), cos, sin)[:50], rotated(x, rope)[:50], atol=1e-4)


def test_rotation_is_of_the_position_and_nothing_else() -> None:
    """Scores depend on the distance alone, and position 0 rotates nothing."""
    positions = jnp.asarray([0, 5, 100, 105])
    cos, sin = rotation(Rope(), 8, positions, positions + 1)
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
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, DynamicRope(1e4, 2.0, 2048)),
        ({"rope_scaling": {"rope_type": "yarn", **YARN}}, YarnRope(1e4, 4.0, 512, 0.1 * math.log(4) + 1)),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, YarnRope(1e4, 4.0, 2048, 0.1 * math.log(4) + 1)),
        (
            {"rope_scaling": {"rope_type": "yarn", **YARN}, "original_max_position_embeddings": 256},
            YarnRope(1e4, 4.0, 256, 0.1 * math.log(4) + 1),
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", **YARN, "attention_factor": 1.5}},
            YarnRope(1e4, 4.0, 512, 1.5),
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", **YARN, "mscale": 2.0, "mscale_all_dim": 1.0}},
            YarnRope(1e4, 4.0, 512, (0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1)),
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
        ({"rope_type": "longrope", "factor": 4.0}, "'longrope' is not supported"),
        ({"type": "mrope", "mrope_section": [1]}, "'mrope' is not supported"),
        ({"rope_type": "yarn"}, "'yarn' has no 'factor'"),
        ({"rope_type": "yarn", "factor": 4.0, "beta_fast": 1, "beta_slow": 2}, "beta_fast"),
        ({"rope_type": "yarn", "factor": 4.0, "long_factor": [1.0]}, "long_factor"),
        ({"rope_type": "linear"}, "'linear' has no 'factor'"),
        ({"rope_type": "llama3", "factor": 8.0}, "'llama3' has no 'low_freq_factor'"),
    ],
)
def test_kinds_that_are_refused(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf({**HF, "rope_scaling": scaling})


def test_the_longest_text_of_stretched_models() -> None:
    """Dynamic scaling stretches max_position_embeddings; YaRN's configs state either length in it."""

    def longest(**scaling: Any) -> int:
        return ModelConfig.from_hf(
            {**HF, "max_position_embeddings": 4096, "rope_scaling": scaling}
        ).max_position

    assert longest(rope_type="dynamic", factor=2.5) == 10240
    assert longest(rope_type="yarn", factor=4.0, original_max_position_embeddings=1024) == 4096
    assert longest(rope_type="yarn", factor=4.0, original_max_position_embeddings=4096) == 16384
    assert longest(rope_type="yarn", factor=4.0) == 16384
    assert longest(rope_type="linear", factor=4.0) == 4096
    scaling = {"rope_type": "linear", "factor": 4.0}
    linear = ModelConfig.from_hf({**HF, "max_position_embeddings": 4096, "rope_scaling": scaling})
    assert linear.longest_position == 16384  # some state the length before scaling: may be asked for


def test_two_spellings_at_once_must_agree() -> None:
    both = {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "linear"}}
    assert ModelConfig.from_hf({**HF, **both}).rope == LinearRope(1e4, 2.0)
    both["rope_parameters"]["factor"] = 4.0
    with pytest.raises(ConfigError, match="contradict"):
        ModelConfig.from_hf({**HF, **both})


def test_dynamic_scaling_looks_at_each_texts_own_length() -> None:
    """Unscaled up to the original length, per token and not per batch, and never below it (B130)."""
    rope, positions = DynamicRope(10_000.0, 2.0, 64), jnp.asarray([10, 10, 10])
    cos, _ = rotation(rope, 8, positions, jnp.asarray([11, 64, 100]))
    plain, _ = rotation(Rope(10_000.0), 8, positions, positions)
    np.testing.assert_array_equal(cos[:2], plain[:2])
    stretched = np.cos(10 * np.asarray(frequencies(rope, 8, 100)))
    np.testing.assert_allclose(cos[2, 0], stretched, rtol=1e-5)
    assert np.abs(cos[2] - plain[2]).max() > 1e-3


VECTORS = json.loads((GOLDEN / "rope_vectors.json").read_text())
CONTRADICTORY = {"linear_attention_factor_ignored", "rope_scaling_beats_rope_parameters"}
OUT_OF_RANGE = {"yarn_attention_factor_zero", "yarn_factor_half"}


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_vectors_of_another_implementation(vector: dict[str, Any]) -> None:
    """What transformers 5.24 reads from a config and computes; where it only warns, we refuse."""
    if vector["name"] in CONTRADICTORY | OUT_OF_RANGE:
        with pytest.raises(ConfigError, match="rope"):
            ModelConfig.from_hf(vector["config"])
        return
    config = ModelConfig.from_hf(vector["config"])
    assert config.head_dim == vector["head_dim"]
    length = vector["seq_len"] or 1
    positions = jnp.asarray([0, 1], jnp.int32)
    cos, sin = rotation(config.rope, config.head_dim, positions, jnp.asarray([length, length]))
    np.testing.assert_allclose(cos[0, 0], vector["attention_factor"], rtol=1e-6)
    angles = np.arctan2(sin[1, 0], cos[1, 0])
    np.testing.assert_allclose(angles, vector["inv_freq"], rtol=4e-6, atol=3e-7)
    if not isinstance(config.rope, DynamicRope):
        np.testing.assert_allclose(
            inverse_frequencies(config.rope, config.head_dim), vector["inv_freq"], rtol=2e-6
        )
