"""FAVOR+ against its definition and softmax attention: whole texts, runs of any length, any numbers."""

from __future__ import annotations

import functools
import itertools

import favor_by_hand
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.config import Favor
from jaxinfer.core import ConfigError
from jaxinfer.model import favor as model_favor
from jaxinfer.model.favor import FavorState, advance, attend_texts, nothing, random_features

WIDTH, SCALE = 16, 16**-0.5
FAVOR = Favor(features=40, seed=3)


def drawn(length: int, heads: int = 4, kv_heads: int = 2, size: float = 1.0, seed: int = 0):
    """q, k, v of one text."""
    generator = np.random.default_rng(seed)
    shapes = (length, heads, WIDTH), (length, kv_heads, WIDTH), (length, kv_heads, WIDTH)
    q, k, v = (generator.standard_normal(shape).astype(np.float32) for shape in shapes)
    return size * q, size * k, v


@functools.partial(jax.jit, static_argnames="favor")
def one_run(state, q, k, v, real, favor=FAVOR):
    return advance(state, q, k, v, real, favor, SCALE)


@functools.partial(jax.jit, static_argnames="favor")
def whole_texts(q, k, v, favor=FAVOR):
    return attend_texts(q, k, v, favor, SCALE)


def in_runs(q, k, v, counts: list[int], room: int, favor: Favor = FAVOR) -> tuple[np.ndarray, FavorState]:
    """A text run by run, each padded to `room` with numbers that must not matter."""
    state = nothing((k.shape[1], favor.features), WIDTH)
    parts, start = [], 0
    for count in counts:
        padded = [np.full((room, *x.shape[1:]), np.nan, np.float32) for x in (q, k, v)]
        for to, x in zip(padded, (q, k, v), strict=True):
            to[:count] = x[start : start + count]
        attended, state = one_run(state, *padded, np.arange(room) < count, favor=favor)
        assert not np.asarray(attended[count:]).any()
        parts.append(np.asarray(attended[:count]))
        start += count
    return np.concatenate(parts), state


# ------------------------------------------------------------------------------------------- features


def test_features_are_orthogonal_in_blocks_and_as_long_as_normal_vectors() -> None:
    features = random_features(Favor(features=300, seed=5), 64).astype(np.float64)
    lengths = np.sqrt((features**2).sum(axis=1))
    for start in range(0, 256, 64):
        block = features[start : start + 64] / lengths[start : start + 64, None]
        np.testing.assert_allclose(block @ block.T, np.eye(64), atol=1e-3)  # GRID
    assert 64 - 3 < (lengths**2).mean() < 64 + 3
    assert 9 < (lengths**2).std() < 14  # of chi² with 64 degrees: sqrt(2 · 64) = 11.3
    assert abs(features.mean()) < 0.02
    assert 0.97 < features.std() < 1.03


def test_a_seed_gives_the_same_features_for_ever() -> None:
    """By value: a folder that says `seed` must mean the same model on every machine."""
    features = random_features(Favor(features=3, seed=0), 4)
    assert (features * 2**12).astype(np.int64).tolist() == FIRST
    assert features.dtype == np.float32
    assert not np.array_equal(random_features(Favor(3, 1), 4), features)
    np.testing.assert_array_equal(random_features(Favor(40, 0), 4)[:3], features)  # more are more of the same


FIRST = [[-460, 9817, 2143, -502], [4023, -70, 1538, 1506], [3919, 528, -3248, -7125]]


@pytest.mark.parametrize(
    ("field", "value"), [("features", 0), ("features", 4097), ("seed", -1), ("seed", True)]
)
def test_numbers_out_of_range_are_refused(field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=field):
        Favor(**{field: value})


def test_the_kernel_is_unbiased() -> None:
    """The mean over many draws is exp(q·k), within what its spread allows."""
    q, k, _ = drawn(3, 1, 1, size=0.7)
    draws = [
        np.exp(favor_by_hand.log_kernel(q[:, 0], k[:, 0], random_features(Favor(16, s), WIDTH), SCALE))
        for s in range(2000)
    ]
    exact, error = np.exp(q[:, 0] @ k[:, 0].T * SCALE), np.std(draws, axis=0) / np.sqrt(len(draws))
    assert (np.abs(np.mean(draws, axis=0) - exact) < 4 * error).all()


# ------------------------------------------------------------------------------------------- equalities


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=4),
    st.sampled_from([0.05, 1.0, 3.0, 8.0]),
    st.integers(0, 2**20),
)
def test_runs_of_any_length_give_what_the_definition_gives(counts: list[int], size: float, seed: int) -> None:
    q, k, v = drawn(sum(counts), size=size, seed=seed)
    expected = favor_by_hand.attended(q, k, v, random_features(FAVOR, WIDTH), SCALE)
    in_parts, state = in_runs(q, k, v, counts, 12)
    np.testing.assert_allclose(in_parts, expected, atol=2e-4 * max(1.0, size))
    at_once, whole = in_runs(q, k, v, [len(q)], 48)
    np.testing.assert_allclose(at_once, expected, atol=2e-4 * max(1.0, size))
    np.testing.assert_array_equal(state.peaks, whole.peaks)
    np.testing.assert_allclose(state.totals, whole.totals, rtol=1e-4)
    np.testing.assert_allclose(state.sums, whole.sums, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("length", [1, 128, 300])
def test_whole_texts_give_what_the_definition_gives(length: int) -> None:
    texts = [drawn(length, seed=i) for i in range(2)]
    got = whole_texts(*(np.stack(x) for x in zip(*texts, strict=True)))
    for text, found in zip(texts, got, strict=True):
        expected = favor_by_hand.attended(*text, random_features(FAVOR, WIDTH), SCALE)
        np.testing.assert_allclose(found, expected, atol=3e-4)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.floats(-3, 5), min_size=8, max_size=8), st.lists(st.integers(1, 8), min_size=8, max_size=8),
    st.integers(0, 2**20),
)  # fmt: skip
def test_numbers_of_any_size_give_averages_of_values(
    powers: list[float], counts: list[int], seed: int
) -> None:
    """Keys and queries up to 10^5 long, whose exponentials no float32 holds: what is attended still lies
    within the values seen, the denominator is at least 1, and the first token sees itself."""
    q, k, v = drawn(8, seed=seed)
    sizes = np.float32(10) ** np.asarray(powers, np.float32)[:, None, None]
    got, state = in_runs(q * sizes, k * sizes[::-1], v, [2, 5, 1], 8)
    np.testing.assert_allclose(got[0], np.repeat(v[0], 2, axis=0), rtol=1e-5)
    for token in range(8):
        seen = np.repeat(v[: token + 1], 2, axis=1)
        assert (seen.min(axis=0) - 1e-4 <= got[token]).all()
        assert (got[token] <= seen.max(axis=0) + 1e-4).all()
    assert (np.asarray(state.totals) >= 1.0).all()


def test_what_is_not_finite_shows_and_harms_no_other_text() -> None:
    """Nor other heads; that padding may be NaN is what `in_runs` says."""
    q, k, v = (np.stack(x) for x in zip(*(drawn(128, seed=i) for i in range(2)), strict=True))
    k[0, 4, 0, 2] = np.nan
    got = whole_texts(q, k, v)
    assert np.isnan(got[0, 4:, :2]).all()  # the query heads of that KV head
    assert np.isfinite(got[0, :, 2:]).all()
    assert np.isfinite(got[1]).all()


def test_gradients_are_those_of_the_definition() -> None:
    """Against the same sums in jax without peaks, where numbers are small enough to need none."""
    q, k, v = (jnp.asarray(x)[None] for x in drawn(20, size=0.5))
    features = jnp.asarray(random_features(FAVOR, WIDTH))

    def plain(q, k, v):
        def phi(x):
            x = x * SCALE**0.5
            return jnp.exp(x @ features.T - 0.5 * (x * x).sum(-1, keepdims=True))

        k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
        weights = jnp.einsum("bqnr,bknr->bnqk", phi(q), phi(k)) * jnp.tril(jnp.ones((20, 20)))
        return jnp.einsum("bnqk,bknh->bqnh", weights / weights.sum(-1, keepdims=True), v)

    target = jnp.asarray(np.random.default_rng(1).standard_normal(q.shape))
    grads = [
        jax.jit(jax.grad(lambda *x, f=f: (f(*x) * target).sum(), argnums=(0, 1, 2)))(q, k, v)
        for f in (plain, whole_texts)
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), *grads)


def test_gradients_through_several_runs_are_finite_for_large_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_favor, "RUN", 8)
    q, k, v = (jnp.asarray(x)[None] for x in drawn(30, size=20.0))
    loss = jax.jit(jax.grad(lambda *x: (attend_texts(*x, FAVOR, SCALE) ** 2).sum(), argnums=(0, 1, 2)))
    grads = loss(q, k, v)
    assert all(np.isfinite(g).all() and np.any(g) for g in grads)


# ------------------------------------------------------------------------------------ approximation


def error_of(features: int, seeds: int = 8) -> float:
    """Mean distance from softmax attention, as a share of the spread of what it gives."""
    q, k, v = drawn(40, size=0.6, seed=11)
    exact = favor_by_hand.attended(q, k, v, None, SCALE)
    errors = []
    for seed in range(seeds):
        favor = Favor(features, seed)
        got = favor_by_hand.attended(q, k, v, random_features(favor, WIDTH), SCALE)
        errors.append(np.sqrt(((got - exact) ** 2).mean()) / exact.std())
    return float(np.mean(errors))


def test_the_error_falls_with_the_number_of_features() -> None:
    """Towards softmax attention, by about half for four times the features: a mean of r draws."""
    errors = [error_of(features) for features in (16, 64, 256)]
    assert all(later < 0.8 * earlier for earlier, later in itertools.pairwise(errors)), errors
    assert errors[-1] < 0.25, errors
