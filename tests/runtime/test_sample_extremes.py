"""Sampling parameters at the ends of float32, found by trying to break the sampler (SM, B080, B081)."""

from __future__ import annotations

import numpy as np
import pytest
from test_sample import run, settings, without

VOCAB = 64


def choose(
    *, temperature: float = 1.0, top_p: float = 1.0, held: tuple[int, ...] = (), position: int = 7
) -> int:
    logits = np.random.default_rng(3).normal(size=(1, VOCAB)).astype(np.float32)
    seed = [(1 << 32) + 2]
    inputs = settings(1, temperature=temperature, top_p=top_p, sample_position=position, seed=seed)
    return int(run(logits, inputs, without([held])).token[0])


@pytest.mark.parametrize("top_p", [1e-6, 1.2e-38, 1.1e-38, 1e-39, 1e-45])
def test_a_top_p_too_small_for_float32_keeps_the_most_likely(top_p: float) -> None:
    assert choose(top_p=top_p) == choose(temperature=0.0)


@pytest.mark.parametrize("temperature", [1e6, 1e30, 1e38, 3e38])
def test_a_held_back_id_is_never_chosen_however_hot(temperature: float) -> None:
    drawn = {choose(temperature=temperature, held=(5,), position=p) for p in range(60)}
    assert 5 not in drawn
    assert len(drawn) > 10, "so hot a draw is nearly uniform"
