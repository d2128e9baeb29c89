"""Head maps: partitions, repetitions, padding, and the search for heads that are alike."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.core import ConfigError
from jaxinfer.heads import groups
from jaxinfer.heads.groups import Group


@given(st.integers(1, 40), st.data())
def test_neighbours_are_runs_of_nearly_one_size(heads: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, heads))
    members = groups.neighbours(heads, count)
    assert len(members) == count
    assert [head for group in members for head in group] == list(range(heads))
    assert {len(group) for group in members} <= {heads // count, -(-heads // count)}


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_every_query_head_stands_once_and_in_its_group(kv_heads: int, size: int, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(kv_heads)))
    cuts = sorted(data.draw(st.sets(st.integers(1, kv_heads))) | {0, kv_heads})
    members = tuple(tuple(order[a:b]) for a, b in itertools.pairwise(cuts))
    heads = kv_heads * size
    mapped = groups.merged(members, size)
    padded = len(members) * max(len(group.queries) for group in mapped)
    at = groups.slots(mapped, padded)
    assert len(at) == padded
    assert sorted(head for head in at if head is not None) == list(range(heads))
    for place, head in enumerate(at):
        if head is not None:  # place i reads KV head i // G', which is made of the one that it read before
            assert head // size in mapped[place // (padded // len(members))].kv_heads
    if padded <= groups.MOST_PADDING * heads:
        assert groups.query_heads([mapped], heads) == padded


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_repeated_heads_keep_their_queries(kv_heads: int, size: int, data: st.DataObject) -> None:
    heads = kv_heads * size
    count = data.draw(st.integers(kv_heads, heads))
    mapped = groups.repeated(heads, kv_heads, count)
    assert len(mapped) == count
    assert [head for group in mapped for head in group.queries] == list(range(heads))
    for group in mapped:
        assert {head // size for head in group.queries} == set(group.kv_heads)
    if heads % count == 0 and count % kv_heads == 0:
        assert groups.query_heads([mapped], heads) == heads


def test_counts_without_a_small_common_multiple_are_refused() -> None:
    maps = [groups.merged(groups.neighbours(8, count), 1) for count in (7, 5)]
    with pytest.raises(ConfigError, match=r"layers of 5, 7 KV heads need 35 query heads.*at most 2 x 8"):
        groups.query_heads(maps, 8)
    with pytest.raises(ConfigError, match="5, 7 KV heads"):
        groups.most_members([8, 8], [7, 5], 8)
    assert groups.most_members([8, 8], [2, 4], 8) == [8, 4]
    assert groups.slots((Group((0, 1), (0, 1, 2, 3)), Group((2,), (4, 5))), 8) == (
        0, 1, 2, 3, 4, 5, None, None,
    )  # fmt: skip


def random_gram(heads: int, seed: int) -> np.ndarray:
    samples = np.random.default_rng(seed).standard_normal((heads, 4))
    return samples @ samples.T


def loss(gram: np.ndarray, members: groups.Members) -> float:
    """By definition: distances to the mean, in a basis in which gram is of inner products."""
    values, vectors = np.linalg.eigh(gram)
    points = vectors * np.sqrt(np.maximum(values, 0))
    return sum(
        float(np.square(points[list(group)] - points[list(group)].mean(axis=0)).sum()) for group in members
    )


@given(st.integers(2, 8) | st.integers(11, 13), st.integers(0, 10**6), st.data())
@settings(max_examples=25)
def test_alike_loses_no_more_than_neighbours(heads: int, seed: int, data: st.DataObject) -> None:
    gram = random_gram(heads, seed)
    count = data.draw(st.integers(1, heads))
    found = groups.alike(gram, count)
    assert sorted(head for group in found for head in group) == list(range(heads))
    assert len(found) == count
    assert all(found)
    assert loss(gram, found) <= loss(gram, groups.neighbours(heads, count)) + 1e-9
    divisors = [k for k in range(1, heads + 1) if heads % k == 0]
    count = data.draw(st.sampled_from(divisors))
    equal = groups.alike(gram, count, least=heads // count, most=heads // count)
    assert {len(group) for group in equal} == {heads // count}


def partitions(heads: int) -> list[groups.Members]:
    """All of them, each with its groups in order of their first head."""
    found: list[groups.Members] = [()]
    for head in range(heads):
        found = [
            new
            for members in found
            for new in [
                (*members, (head,)),
                *((*members[:i], (*members[i], head), *members[i + 1 :]) for i in range(len(members))),
            ]
        ]
    return found


@given(st.integers(2, 6), st.integers(0, 10**6), st.data())
@settings(max_examples=30)
def test_alike_is_the_best_of_all_partitions(heads: int, seed: int, data: st.DataObject) -> None:
    gram = random_gram(heads, seed)
    count = data.draw(st.integers(1, heads))
    most = data.draw(st.integers(-(-heads // count), heads))
    allowed = [m for m in partitions(heads) if len(m) == count and max(map(len, m)) <= most]
    best = min(loss(gram, members) for members in allowed)
    assert loss(gram, groups.alike(gram, count, most=most)) == pytest.approx(best, abs=1e-9)


def test_the_search_finds_planted_groups_among_many() -> None:
    kinds = np.random.default_rng(2).permutation(np.repeat(np.arange(8), 4))
    points = np.eye(8)[kinds] * 10 + np.random.default_rng(3).standard_normal((32, 8))
    expected = sorted(tuple(np.flatnonzero(kinds == kind).tolist()) for kind in range(8))
    assert list(groups.alike(points @ points.T, 8, least=4, most=4)) == expected
    assert list(groups.alike(points @ points.T, 8)) == expected


@given(st.integers(2, 4), st.integers(1, 3), st.integers(0, 10**6))
@settings(max_examples=25)
def test_planted_groups_are_found(count: int, size: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    kinds = draw.permutation(np.repeat(np.arange(count), size))
    points = np.eye(count)[kinds] * 10 + 0.1 * draw.standard_normal((len(kinds), count))
    expected = sorted(tuple(np.flatnonzero(kinds == kind).tolist()) for kind in range(count))
    assert list(groups.alike(points @ points.T, count, least=size, most=size)) == expected
    assert list(groups.alike(points @ points.T, count)) == expected
