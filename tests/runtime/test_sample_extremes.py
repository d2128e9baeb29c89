"""Sampling parameters at the ends of float32, found by trying to break the sampler (SM, B080, B081)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.core import MAX_HELD_BACK
from jaxinfer.runtime.sample import SamplingInputs, sample

VOCAB = 64
compiled_sample = jax.jit(sample)


def choose(
    *, temperature: float = 1.0, top_p: float = 1.0, held: tuple[int, ...] = (), position: int = 7
) -> int:
    logits = np.random.default_rng(3).normal(size=(1, VOCAB)).astype(np.float32)
    held_back = np.full((1, MAX_HELD_BACK), VOCAB, np.int32)
    held_back[0, : len(held)] = held
    inputs = SamplingInputs(
        jnp.full((1,), temperature, jnp.float32), jnp.zeros((1,), jnp.int32),
        jnp.full((1,), top_p, jnp.float32), jnp.zeros((1,), jnp.float32), jnp.zeros((1,), jnp.int32),
        jnp.asarray([[1, 2]], jnp.int32), jnp.full((1,), position, jnp.int32), jnp.asarray(held_back),
    )  # fmt: skip
    return int(compiled_sample(jnp.asarray(logits), inputs).token[0])


@pytest.mark.parametrize("top_p", [1e-6, 1.2e-38, 1.1e-38, 1e-39, 1e-45])
def test_a_top_p_too_small_for_float32_keeps_the_most_likely(top_p: float) -> None:
    assert choose(top_p=top_p) == choose(temperature=0.0)


@pytest.mark.parametrize("temperature", [1e6, 1e30, 1e38, 3e38])
def test_a_held_back_id_is_never_chosen_however_hot(temperature: float) -> None:
    drawn = {choose(temperature=temperature, held=(5,), position=p) for p in range(60)}
    assert 5 not in drawn
    assert len(drawn) > 10, "so hot a draw is nearly uniform"
