"""Choosing tokens on the device: known answers, numpy's answers, and the distribution of the draws."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.core import MAX_LOGPROBS
from jaxinfer.runtime.sample import Changes, Mask, SamplingInputs, SamplingOutputs, sample

pytestmark = pytest.mark.usefixtures("compile_cache")

OFF = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "top_logprobs": 0, "sample_position": 0}
INTEGERS = {"top_k", "top_logprobs", "sample_position"}
LOW = -30.0
"""A logit that is never drawn."""


def settings(rows: int, *, seed: Any = None, **fields: Any) -> SamplingInputs:
    """SamplingInputs of `rows` rows; each field is one value, or one per row."""
    given = {**OFF, **fields}
    columns = {
        name: np.broadcast_to(np.asarray(value, np.int32 if name in INTEGERS else np.float32), (rows,))
        for name, value in given.items()
    }
    seeds = np.broadcast_to(np.asarray(range(rows) if seed is None else seed, np.uint64), (rows,))
    words = np.stack([seeds >> np.uint64(32), seeds & np.uint64(0xFFFFFFFF)], axis=1).astype(np.uint32)
    return SamplingInputs(**columns, seed=words.view(np.int32))


def changes(rows: int, *entries: tuple[int, int, float, float], spare: int = 2) -> Changes:
    """Of (row, id, factor, addend), with `spare` entries of padding."""
    padded = [*entries, *[(rows, 0, 1.0, 0.0)] * spare]
    columns = [list(column) for column in zip(*padded, strict=True)]
    kinds = (np.int32, np.int32, np.float32, np.float32)
    return Changes(*(np.asarray(column, kind) for column, kind in zip(columns, kinds, strict=True)))


def without(ids_by_row: Sequence[Sequence[int]]) -> Changes:
    """Changes that take these ids out of each row."""
    return changes(
        len(ids_by_row), *((row, i, 1.0, -math.inf) for row, ids in enumerate(ids_by_row) for i in ids)
    )


def mask_of(allowed: np.ndarray) -> Mask:
    """Of bool [B, V]."""
    bits = np.packbits(np.pad(allowed, ((0, 0), (0, -allowed.shape[1] % 32))), axis=1, bitorder="little")
    return Mask(np.int32(1), bits.view("<i4"))


@functools.cache
def _compiled():
    return jax.jit(sample, static_argnames="sampled_vocab")


def run(
    logits: Any,
    inputs: SamplingInputs,
    changed: Changes | None = None,
    mask: Mask | None = None,
    sampled_vocab: int | None = None,
) -> SamplingOutputs:
    given = jax.tree.map(jnp.asarray, (inputs, changed, mask))
    out = _compiled()(jnp.asarray(logits, jnp.float32), *given, sampled_vocab=sampled_vocab)
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
    for values, given, _ in FILTERS.values():
        logits += [values + [LOW] * (4 - len(values))] * REPEATS
        held += [given.get("held_back", ())] * REPEATS
        for name, column in fields.items():
            default = 1.0 if name == "temperature" else OFF[name]
            column += [given.get(name, default)] * REPEATS
    tokens = run(logits, settings(len(logits), **fields), without(held)).token
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
    inputs = settings(rows, temperature=temperature, top_k=top_k, **fields)
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
        single = run(mine[None], settings(1, **own, **{k: [v] for k, v in fields.items()}))
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
            together = run(logits, settings(4, **columns))
            assert together.token[row] == single.token[0]
            assert together.logprob[row] == pytest.approx(single.logprob[0], abs=1e-5)


def test_seeds_and_positions_differ() -> None:
    """Both words of a seed count, and every position has noise of its own (B084)."""
    logits = np.zeros((6, 300))
    seeds = [1, 2, 1 << 32, 2**64 - 1, 1, 1]
    positions = [0, 0, 0, 0, 1, 2]
    tokens = run(logits, settings(6, temperature=1.0, seed=seeds, sample_position=positions)).token
    assert len(set(tokens.tolist())) == 6


def test_a_row_without_temperature_is_greedy_among_drawing_ones() -> None:
    logits = np.random.default_rng(0).standard_normal((64, 8))
    temperature = np.where(np.arange(64) % 2, 5.0, 0.0)
    tokens = run(logits, settings(64, temperature=temperature)).token
    best = logits.astype(np.float32).argmax(-1)
    np.testing.assert_array_equal(tokens[::2], best[::2])
    assert (tokens[1::2] != best[1::2]).any()


def test_greedy_ties_go_to_the_first() -> None:
    assert run([[1, 5, 5, 0], [2, 2, 2, 2]], settings(2)).token.tolist() == [1, 0]


def test_held_back_ids_are_never_chosen() -> None:
    """Drawn or greedy; the reported distribution stays the raw one."""
    logits = np.zeros((512, 40))
    logits[:, :32] = 5.0
    logits[:, 35] = 1.0
    out = run(logits, settings(512, temperature=[0.0] + [1.0] * 511), without([range(32)] * 512))
    assert out.token[0] == 35
    assert set(out.token.tolist()) == set(range(32, 40))
    normalizer = math.log(32 * math.exp(5) + math.e + 7)
    assert out.logprob[0] == pytest.approx(1.0 - normalizer, abs=1e-5)
    assert out.rank[0] == 33


# ---------------------------------------------------------------------------------------- changes and masks


def test_changes_are_factor_then_addend_by_the_sign_of_the_logit() -> None:
    """The Hugging Face rule for repetition; then the addend. Each of these makes id 2 the best, or not."""
    logits = [[4.0, 1.0, 3.0]] * 6 + [[-4.0, -1.0, -3.0]] * 2
    changed = changes(
        8,
        (0, 0, 2.0, 0.0),  # 4 / 2 = 2 < 3
        (1, 0, 1.25, 0.0),  # 4 / 1.25 = 3.2 > 3
        (2, 2, 1.0, 1.5),  # 3 + 1.5
        (3, 2, 0.5, 0.0),  # 3 / 0.5 = 6
        (4, 0, 1.0, -math.inf),
        (4, 2, 2.0, -0.25),  # 3 / 2 - 0.25 = 1.25 > 1
        (6, 1, 4.0, 0.0),  # -1 * 4 < -3
        (7, 1, 2.0, 0.0),  # -1 * 2 > -3
    )
    assert run(logits, settings(8), changed).token.tolist() == [2, 0, 2, 2, 2, 0, 2, 1]


def test_changes_are_those_of_numpy() -> None:
    """Hundreds at a time, drawn from the same noise; the report stays that of the raw distribution."""
    generator = np.random.default_rng(0)
    logits = (generator.standard_normal((16, 300)) * 3).astype(np.float32)
    entries, expected = [], logits.copy()
    for row in range(0, 16, 2):
        for token in generator.permutation(300)[:100].tolist():
            factor, addend = float(generator.uniform(0.5, 2)), float(generator.normal())
            factor, addend = float(np.float32(factor)), float(np.float32(addend))
            entries.append((row, token, factor, addend))
            old = expected[row, token]
            new = old / np.float32(factor) if old > 0 else old * np.float32(factor)
            expected[row, token] = new + np.float32(addend)
    fields = {"temperature": [0.0, 0.0, 0.7, 0.7] * 4, "top_p": 0.9}
    got = run(logits, settings(16, **fields), changes(16, *entries))
    assert got.token.tolist() == run(expected, settings(16, **fields)).token.tolist()
    raw = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    np.testing.assert_allclose(got.logprob, raw[np.arange(16), got.token], atol=1e-5)


def test_padding_and_ids_that_cannot_be_sampled_change_nothing() -> None:
    logits = np.asarray([[1.0, 2.0, 3.0, 4.0]] * 2)
    changed = changes(2, (0, 3, 1.0, 50.0), (2, 0, 1.0, 50.0), (7, 1, 1.0, 50.0))
    assert run(logits, settings(2), changed, sampled_vocab=3).token.tolist() == [2, 2]


def test_a_mask_bounds_drawn_and_greedy_rows() -> None:
    """Its bits beyond the vocabulary mean nothing; a row of ones is free; unused words are not looked at."""
    generator = np.random.default_rng(0)
    allowed = generator.random((64, 75)) < 0.1
    allowed[np.arange(64), generator.integers(0, 75, 64)] = True
    allowed[5] = True
    logits = generator.standard_normal((64, 75)) * 3
    inputs = settings(64, temperature=[0.0, 1.0] * 32, top_k=[0, 3] * 32)
    mask = mask_of(allowed)
    out = run(logits, inputs, None, mask)
    assert allowed[np.arange(64), out.token].all()
    best = np.where(allowed, logits.astype(np.float32), -np.inf).argmax(-1)
    np.testing.assert_array_equal(out.token[::2], best[::2])
    free = run(logits, inputs)
    assert out.token[5] == free.token[5]
    np.testing.assert_array_equal(out.logprob[out.token == free.token], free.logprob[out.token == free.token])
    unused = run(logits, inputs, None, mask._replace(used=np.int32(0)))
    np.testing.assert_array_equal(unused.token, free.token)


def test_changes_come_before_the_mask_and_both_before_the_bound() -> None:
    logits = [[5.0, 4.0, 3.0, 2.0, 9.0]]
    mask = mask_of(np.asarray([[True, False, True, True, True]]))
    assert run(logits, settings(1), without([(0,)]), mask, sampled_vocab=4).token.tolist() == [2]
    lifted = changes(1, (0, 1, 1.0, 100.0))  # what the mask forbids stays forbidden
    assert run(logits, settings(1), lifted, mask, sampled_vocab=4).token.tolist() == [0]


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 2, "top_p": 0.5}])
def test_a_row_with_no_id_left_says_so(fields: dict[str, Any]) -> None:
    """Token 0 with rank 0 and a logprob that is not finite; its neighbours are as they would be."""
    logits = np.random.default_rng(0).standard_normal((3, 40))
    allowed = np.ones((3, 40), bool)
    allowed[1, 4:] = False
    out = run(logits, settings(3, **fields), without([(), (0, 1, 2, 3), ()]), mask_of(allowed))
    assert (out.token[1], out.rank[1], out.logprob[1]) == (0, 0, -math.inf)
    free = run(logits, settings(3, **fields))
    np.testing.assert_array_equal(out.token[[0, 2]], free.token[[0, 2]])
    np.testing.assert_array_equal(out.logprob[[0, 2]], free.logprob[[0, 2]])


# ----------------------------------------------------------------------------------------------- reports


def test_logprobs_ranks_and_alternatives_are_numpys() -> None:
    """Of the raw distribution, whatever the temperature and the filters."""
    logits = (np.random.default_rng(0).standard_normal((5, 300)) * 4).astype(np.float32)
    inputs = settings(
        5, temperature=[0.0, 1.0, 3.0, 0.5, 2.0], top_k=[0, 0, 0, 3, 50], top_logprobs=[20, 0, 1, 5, 20]
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
    out = run([[2.0, 2.0, 2.0, 1.0]] * 2, settings(2), without([(0,), (0, 1, 2)]))
    assert out.token.tolist() == [1, 3]
    assert out.rank.tolist() == [1, 4]


def test_a_vocabulary_smaller_than_the_alternatives() -> None:
    out = run([[1.0, 3.0, 2.0, 0.0]], settings(1, top_logprobs=20))
    assert out.top_ids.shape == (1, MAX_LOGPROBS)
    assert out.top_ids[0, :4].tolist() == [1, 2, 0, 3]
    assert np.isneginf(out.top_logprobs[0, 4:]).all()


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_says_so_and_disturbs_nobody(broken: float, temperature: float) -> None:
    """B159. One bad logit or all of them, with and without filters."""
    logits = np.random.default_rng(0).standard_normal((4, 300)).astype(np.float32)
    inputs = settings(4, temperature=temperature, top_p=[1, 0.9, 1, 0.5], top_logprobs=3)
    clean = run(logits, inputs)
    logits[1], logits[3, 17] = broken, broken
    out = run(logits, inputs)
    assert not np.isfinite(out.logprob[[1, 3]]).any()
    for name, got in out._asdict().items():
        np.testing.assert_array_equal(got[[0, 2]], getattr(clean, name)[[0, 2]], err_msg=name)
