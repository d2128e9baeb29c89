"""Folds: what loses nothing loses nothing, and what stands in keys passes RoPE and head norms."""

from __future__ import annotations

from typing import get_args

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.heads import merge
from jaxinfer.heads.merge import Fold, Freedom
from jaxinfer.model import rope

WIDTH = 8
FREEDOMS: list[Freedom] = list(get_args(Freedom))
seeds = st.integers(0, 10**6)
counts = st.integers(1, 4)
freedoms = st.sampled_from(FREEDOMS)


def samples(count: int, seed: int, tokens: int = 50) -> np.ndarray:
    """[T, m, H], no two numbers of one size."""
    draw = np.random.default_rng(seed)
    return draw.standard_normal((tokens, count, WIDTH)) * draw.uniform(0.3, 3, (count, WIDTH))


def folds_of(heads: np.ndarray, freedom: Freedom) -> dict[str, Fold]:
    moments, count = merge.moments_of(heads), heads.shape[1]
    return {
        "mean": merge.mean(count, WIDTH),
        "first": merge.picked(count, WIDTH, 0),
        "last": merge.picked(count, WIDTH, count - 1),
        "norm-weighted": merge.norm_weighted(moments),
        "align": merge.aligned(moments, freedom),
        "svd": merge.factorised(moments, freedom),
    }


def random_map(freedom: Freedom, draw: np.random.Generator) -> np.ndarray:
    """A turn [H, H] of this freedom."""
    return merge._NEAREST[freedom](draw.standard_normal((WIDTH, WIDTH)))


@given(counts, seeds, freedoms)
def test_equal_heads_lose_nothing(count: int, seed: int, freedom: Freedom) -> None:
    one = samples(1, seed)
    # also where some directions of the head are never used
    one[:, :, np.random.default_rng(seed).integers(WIDTH)] = 0
    heads = np.repeat(one, count, axis=1)
    for name, fold in folds_of(heads, freedom).items():
        np.testing.assert_allclose(fold.rebuilt(heads), heads, atol=1e-8, err_msg=name)
        assert fold.lost(merge.moments_of(heads)) <= 1e-9 * np.square(heads).sum(), name
        if name != "svd":  # and the new head is the old one, so that nothing before or after it moves
            new = np.einsum("jab,tjb->ta", fold.encode, heads)
            np.testing.assert_allclose(new, one[:, 0], atol=1e-8, err_msg=name)


@given(counts, seeds, freedoms)
def test_what_moments_say_is_lost_is_what_samples_lose(count: int, seed: int, freedom: Freedom) -> None:
    heads = samples(count, seed)
    for fold in folds_of(heads, freedom).values():
        lost = np.square(fold.rebuilt(heads) - heads).sum()
        assert fold.lost(merge.moments_of(heads)) == pytest.approx(lost, rel=1e-6, abs=1e-6)


@given(st.integers(2, 4), seeds, freedoms)
def test_heads_turned_against_each_other_align(count: int, seed: int, freedom: Freedom) -> None:
    draw = np.random.default_rng(seed)
    turns = np.stack([random_map(freedom, draw) for _ in range(count)])
    turns[0] = np.eye(WIDTH)
    turns[1] = -turns[0]  # so that a mean surely loses
    heads = np.einsum("jab,tb->tja", turns, samples(1, seed)[:, 0])
    folds = folds_of(heads, freedom)
    whole = np.square(heads).sum()
    for name in ("align", "svd"):
        np.testing.assert_allclose(folds[name].rebuilt(heads), heads, atol=1e-6, err_msg=name)
    for name in ("mean", "first"):
        assert folds[name].lost(merge.moments_of(heads)) > 0.05 * whole


@given(st.integers(2, 4), seeds)
def test_factors_of_enough_rank_are_exact(count: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    shared = draw.standard_normal((50, WIDTH))
    values = np.einsum("jab,tb->tja", draw.standard_normal((count, WIDTH, WIDTH)), shared)
    np.testing.assert_allclose(
        merge.factorised(merge.moments_of(values), "any").rebuilt(values), values, atol=1e-6
    )
    numbers = draw.standard_normal((count, WIDTH // 2)) + 1j * draw.standard_normal((count, WIDTH // 2))
    keys = np.einsum("jab,tb->tja", merge._as_matrices(numbers), shared)
    fold = merge.factorised(merge.moments_of(keys), "pairs")
    np.testing.assert_allclose(fold.rebuilt(keys), keys, atol=1e-6)
    # A mixture of pairs is of enough rank for values and cannot be had for keys, which RoPE turns.
    assert merge.factorised(merge.moments_of(values), "pairs").lost(merge.moments_of(values)) > 1e-3


@given(st.integers(2, 4), seeds, st.sampled_from(["any", "pairs"]))
def test_factors_lose_least(count: int, seed: int, freedom: Freedom) -> None:
    moments = merge.moments_of(samples(count, seed))
    losses = {name: fold.lost(moments) for name, fold in folds_of(samples(count, seed), freedom).items()}
    assert losses["svd"] <= min(losses.values()) + 1e-6


def turned(heads: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """RoPE over [T, m, H] as the model does it."""
    angles = positions[:, None, None] * rope.inverse_frequencies(rope.Rope(), WIDTH)
    return np.asarray(rope.rotate(jnp.asarray(heads), jnp.cos(angles), jnp.sin(angles)))


def passes_rope(fold: Fold, heads: np.ndarray) -> bool:
    positions = np.arange(len(heads))
    before, after = fold.rebuilt(turned(heads, positions)), turned(fold.rebuilt(heads), positions)
    return bool(np.allclose(before, after, atol=1e-3))


@given(st.integers(2, 4), seeds, st.sampled_from(["pairs", "pair signs"]))
def test_folds_of_keys_pass_rope(count: int, seed: int, freedom: Freedom) -> None:
    heads = samples(count, seed)
    for name, fold in folds_of(heads, freedom).items():
        assert passes_rope(fold, heads), name


def test_a_fold_that_mixes_pairs_does_not_pass_rope() -> None:
    heads = samples(3, 1)
    folds = folds_of(heads, "any")
    assert not passes_rope(folds["align"], heads)
    assert not passes_rope(folds["svd"], heads)


@given(st.integers(2, 4), seeds, st.sampled_from(["signs", "pair signs"]))
def test_maps_of_keys_pass_a_norm_of_heads(count: int, seed: int, freedom: Freedom) -> None:
    """decode of a normed and weighted head is the normed and weighted decode of it."""
    heads = samples(count, seed)
    weight = np.random.default_rng(seed).uniform(0.5, 2, WIDTH)

    def normed(x: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True)) * weight

    for name in ("align", "svd"):
        decode = folds_of(heads, freedom)[name].decode
        np.testing.assert_allclose(
            np.einsum("jab,tb->tja", decode, normed(heads[:, 0])),
            normed(np.einsum("jab,tb->tja", decode, heads[:, 0])),
            atol=1e-9,
        )


@given(st.integers(2, 4), seeds, freedoms)
def test_likeness_sees_through_turns(count: int, seed: int, freedom: Freedom) -> None:
    draw = np.random.default_rng(seed)
    one = samples(1, seed)[:, 0]
    heads = np.stack([one @ random_map(freedom, draw).T for _ in range(count)], axis=1)
    gram = merge.likeness(merge.moments_of(heads), freedom)
    np.testing.assert_allclose(gram, np.square(one).sum(), rtol=1e-6)
    plain = merge.likeness(merge.moments_of(heads), None)
    np.testing.assert_allclose(plain, np.einsum("tia,tja->ij", heads, heads), atol=1e-6)


def test_norms_by_hand() -> None:
    heads = np.zeros((2, 2, WIDTH))
    heads[0, 0, 0], heads[1, 1, 0] = 3.0, 1.0
    fold = merge.norm_weighted(merge.moments_of(heads))
    np.testing.assert_allclose(fold.encode, [0.75 * np.eye(WIDTH), 0.25 * np.eye(WIDTH)])
