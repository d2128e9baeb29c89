"""Choosing tokens on the device: known answers, numpy's answers, and the distribution of the draws."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.core import MAX_HELD_BACK, MAX_LOGPROBS
from jaxinfer.runtime.sample import SamplingInputs, SamplingOutputs, sample

pytestmark = pytest.mark.usefixtures("compile_cache")

OFF = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "top_logprobs": 0, "sample_position": 0}
INTEGERS = {"top_k", "top_logprobs", "sample_position"}
LOW = -30.0
"""A logit that is never drawn."""


def settings(rows: int, vocab_size: int, *, seed: Any = None, held_back: Any = None, **fields: Any):
    """SamplingInputs of `rows` rows; each field is one value, or one per row."""
    given = {**OFF, **fields}
    columns = {
        name: np.broadcast_to(np.asarray(value, np.int32 if name in INTEGERS else np.float32), (rows,))
        for name, value in given.items()
    }
    seeds = np.broadcast_to(np.asarray(range(rows) if seed is None else seed, np.uint64), (rows,))
    words = np.stack([seeds >> np.uint64(32), seeds & np.uint64(0xFFFFFFFF)], axis=1).astype(np.uint32)
    held = np.full((rows, MAX_HELD_BACK), vocab_size, np.int32)
    for row, ids in enumerate(held_back or ()):
        held[row, : len(ids)] = ids
    return SamplingInputs(**columns, seed=words.view(np.int32), held_back=held)


@functools.cache
def _compiled():
    return jax.jit(sample)


def run(logits: Any, inputs: SamplingInputs) -> SamplingOutputs:
    out = _compiled()(jnp.asarray(logits, jnp.float32), jax.tree.map(jnp.asarray, inputs))
    return SamplingOutputs(*(np.asarray(x) for x in out))


def log(*probabilities: float) -> list[float]:
    return [math.log(p) for p in probabilities]


# -------------------------------------------------------------------------------- filters: which tokens stay

REPEATS = 256
FILTERS: dict[str, tuple[list[float], dict[str, Any], set[int]]] = {
    "all off": ([3, 2, 1], {}, {0, 1, 2}),
    "top_k 2": ([1, 4, 2, 3], {"top_k": 2}, {1, 3}),
    "top_k 1": ([1, 4, 2, 3], {"top_k": 1}, {1}),
    "top_k of ties keeps them all": ([3, 2, 2, 1], {"top_k": 2}, {0, 1, 2}),
    "top_k beyond the vocabulary": ([3, 2, 1, 2], {"top_k": 1000}, {0, 1, 2, 3}),
    "top_k of negative logits": ([-1, -4, -2, -3], {"top_k": 2}, {0, 2}),
    "top_p .4": (log(0.5, 0.3, 0.2), {"top_p": 0.4}, {0}),
    "top_p .6": (log(0.5, 0.3, 0.2), {"top_p": 0.6}, {0, 1}),
    "top_p .9": (log(0.5, 0.3, 0.2), {"top_p": 0.9}, {0, 1, 2}),
    "top_p tiny": (log(0.5, 0.3, 0.2), {"top_p": 1e-6}, {0}),
    "top_p of ties keeps them all": (log(0.4, 0.4, 0.2), {"top_p": 0.3}, {0, 1}),
    "min_p .5": (log(0.5, 0.3, 0.2), {"min_p": 0.5}, {0, 1}),
    "min_p 1": (log(0.4, 0.4, 0.2), {"min_p": 1.0}, {0, 1}),
    # The order: temperature, top_k, top_p, min_p, each over what the one before left (B090).
    "top_p .8 at temperature 1": ([3, 2, 1], {"top_p": 0.8}, {0, 1}),
    "top_p .8 at temperature .5": ([3, 2, 1], {"top_p": 0.8, "temperature": 0.5}, {0}),
    "min_p .3 at temperature 1": ([3, 2, 1], {"min_p": 0.3}, {0, 1}),
    "min_p .3 at temperature .5": ([3, 2, 1], {"min_p": 0.3, "temperature": 0.5}, {0}),
    "top_p .5 after top_k 2": (log(0.4, 0.3, 0.2, 0.1), {"top_k": 2, "top_p": 0.5}, {0}),
    "top_p .5 without it": (log(0.4, 0.3, 0.2, 0.1), {"top_p": 0.5}, {0, 1}),
    "all three": (log(0.4, 0.3, 0.2, 0.1), {"top_k": 3, "top_p": 0.9, "min_p": 0.6}, {0, 1}),
    "held back before top_k": ([4, 3, 2, 1], {"top_k": 1, "held_back": (0,)}, {1}),
    "held back before top_p": (log(0.5, 0.3, 0.1, 0.1), {"top_p": 0.5, "held_back": (0,)}, {1}),
}


@functools.cache
def drawn_sets() -> dict[str, set[int]]:
    """All cases in one batch, so that each of them also sees every other as a neighbour."""
    logits, fields, held = [], {name: [] for name in ("temperature", "top_k", "top_p", "min_p")}, []
    for values, changes, _ in FILTERS.values():
        logits += [values + [LOW] * (4 - len(values))] * REPEATS
        held += [changes.get("held_back", ())] * REPEATS
        for name, column in fields.items():
            default = 1.0 if name == "temperature" else OFF[name]
            column += [changes.get(name, default)] * REPEATS
    tokens = run(logits, settings(len(logits), 4, held_back=held, **fields)).token
    return {
        name: set(tokens[index * REPEATS : (index + 1) * REPEATS].tolist())
        for index, name in enumerate(FILTERS)
    }


@pytest.mark.parametrize("name", FILTERS)
def test_tokens_that_stay(name: str) -> None:
    assert drawn_sets()[name] == FILTERS[name][2]


# ------------------------------------------------------------------------------------------------- draws


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> None:
    """Counts must be within what a fair draw gives but once in 30 000 (Wilson and Hilferty's quantile)."""
    expected = probabilities * counts.sum()
    kept = probabilities > 0
    assert not counts[~kept].any()
    statistic = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    free = kept.sum() - 1
    quantile = free * (1 - 2 / (9 * free) + 4.0 * math.sqrt(2 / (9 * free))) ** 3
    assert statistic < quantile, f"{statistic:.1f} >= {quantile:.1f}: {counts} of {expected.round(1)}"


@pytest.mark.parametrize("what", ["seed", "sample_position"])
@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.7, 0), (1.5, 5)])
def test_draws_follow_the_distribution(what: str, temperature: float, top_k: int) -> None:
    """Over neighbouring seeds at one position, and over the positions of one seed."""
    rows = 8192
    logits = np.random.default_rng(1).standard_normal(8).astype(np.float32) * 1.5
    fields = {"seed": np.full(rows, 12345), "sample_position": 7, what: np.arange(rows)}
    inputs = settings(rows, 8, temperature=temperature, top_k=top_k, **fields)
    tokens = run(np.tile(logits, (rows, 1)), inputs).token
    weights = np.exp(logits.astype(np.float64) / temperature)
    if top_k:
        weights[np.argsort(logits)[:-top_k]] = 0
    chi_square(np.bincount(tokens, minlength=8), weights / weights.sum())


def test_a_seed_fixes_a_sample_wherever_it_stands() -> None:
    """Alone, in another row, beside greedy, filtering or unlike neighbours: the same tokens (B083)."""
    generator = np.random.default_rng(0)
    mine = generator.standard_normal(300).astype(np.float32)
    fields = {"temperature": 0.9, "top_p": 0.95}
    for position in range(20):
        own = {"seed": [(1 << 40) + 5], "sample_position": [position]}
        single = run(mine[None], settings(1, 300, **own, **{k: [v] for k, v in fields.items()}))
        for row in range(4):
            logits = generator.standard_normal((4, 300)).astype(np.float32) * 3
            logits[row] = mine
            columns: dict[str, Any] = {
                "temperature": generator.choice([0.0, 0.5, 2.0], 4).astype(np.float32),
                "top_p": generator.choice([0.3, 1.0], 4).astype(np.float32),
                "top_k": generator.choice([0, 3], 4),
                "sample_position": generator.integers(0, 1000, 4),
                "seed": generator.integers(0, 2**62, 4),
            }
            for name, value in {
                **fields,
                "top_k": 0,
                "sample_position": position,
                "seed": own["seed"][0],
            }.items():
                columns[name][row] = value
            together = run(logits, settings(4, 300, **columns))
            assert together.token[row] == single.token[0]
            assert together.logprob[row] == pytest.approx(single.logprob[0], abs=1e-5)


def test_seeds_and_positions_differ() -> None:
    """Both words of a seed count, and every position has noise of its own (B084)."""
    logits = np.zeros((6, 300))
    seeds = [1, 2, 1 << 32, 2**64 - 1, 1, 1]
    positions = [0, 0, 0, 0, 1, 2]
    tokens = run(logits, settings(6, 300, temperature=1.0, seed=seeds, sample_position=positions)).token
    assert len(set(tokens.tolist())) == 6


def test_a_row_without_temperature_is_greedy_among_drawing_ones() -> None:
    logits = np.random.default_rng(0).standard_normal((64, 8))
    temperature = np.where(np.arange(64) % 2, 5.0, 0.0)
    tokens = run(logits, settings(64, 8, temperature=temperature)).token
    best = logits.astype(np.float32).argmax(-1)
    np.testing.assert_array_equal(tokens[::2], best[::2])
    assert (tokens[1::2] != best[1::2]).any()


def test_greedy_ties_go_to_the_first() -> None:
    assert run([[1, 5, 5, 0], [2, 2, 2, 2]], settings(2, 4)).token.tolist() == [1, 0]


def test_held_back_ids_are_never_chosen() -> None:
    """Drawn or greedy, up to 32 of them; the reported distribution stays the raw one."""
    logits = np.zeros((512, 40))
    logits[:, :32] = 5.0
    logits[:, 35] = 1.0
    inputs = settings(512, 40, temperature=[0.0] + [1.0] * 511, held_back=[tuple(range(32))] * 512)
    out = run(logits, inputs)
    assert out.token[0] == 35
    assert set(out.token.tolist()) == set(range(32, 40))
    normalizer = math.log(32 * math.exp(5) + math.e + 7)
    assert out.logprob[0] == pytest.approx(1.0 - normalizer, abs=1e-5)
    assert out.rank[0] == 33


# ----------------------------------------------------------------------------------------------- reports


def test_logprobs_ranks_and_alternatives_are_numpys() -> None:
    """Of the raw distribution, whatever the temperature and the filters."""
    logits = (np.random.default_rng(0).standard_normal((5, 300)) * 4).astype(np.float32)
    inputs = settings(
        5, 300, temperature=[0.0, 1.0, 3.0, 0.5, 2.0], top_k=[0, 0, 0, 3, 50], top_logprobs=[20, 0, 1, 5, 20]
    )
    out = run(logits, inputs)
    wide = logits.astype(np.float64)
    expected = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    chosen = expected[np.arange(5), out.token]
    np.testing.assert_allclose(out.logprob, chosen, atol=1e-5)
    np.testing.assert_array_equal(out.rank, 1 + (expected > chosen[:, None]).sum(-1))
    order = np.argsort(-expected, axis=-1, kind="stable")[:, :MAX_LOGPROBS]
    np.testing.assert_array_equal(out.top_ids, order)
    np.testing.assert_allclose(out.top_logprobs, np.take_along_axis(expected, order, 1), atol=1e-5)


def test_ranks_of_equal_logits_are_the_best_they_share() -> None:
    out = run([[2.0, 2.0, 2.0, 1.0]] * 2, settings(2, 4, held_back=[(0,), (0, 1, 2)]))
    assert out.token.tolist() == [1, 3]
    assert out.rank.tolist() == [1, 4]


def test_a_vocabulary_smaller_than_the_alternatives() -> None:
    out = run([[1.0, 3.0, 2.0, 0.0]], settings(1, 4, top_logprobs=20))
    assert out.top_ids.shape == (1, MAX_LOGPROBS)
    assert out.top_ids[0, :4].tolist() == [1, 2, 0, 3]
    assert np.isneginf(out.top_logprobs[0, 4:]).all()


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_says_so_and_disturbs_nobody(broken: float, temperature: float) -> None:
    """B159. One bad logit or all of them, with and without filters."""
    logits = np.random.default_rng(0).standard_normal((4, 300)).astype(np.float32)
    inputs = settings(4, 300, temperature=temperature, top_p=[1, 0.9, 1, 0.5], top_logprobs=3)
    clean = run(logits, inputs)
    logits[1], logits[3, 17] = broken, broken
    out = run(logits, inputs)
    assert not np.isfinite(out.logprob[[1, 3]]).any()
    for name, got in out._asdict().items():
        np.testing.assert_array_equal(got[[0, 2]], getattr(clean, name)[[0, 2]], err_msg=name)
