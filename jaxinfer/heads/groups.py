"""Which old KV heads make each new one, which query heads read it, and where those come to stand.

Kernels know one head map: query head i reads KV head i // G. Any other is that one after a permutation of
query heads (rows of q_proj, columns of o_proj, which changes no output), and groups of unequal size are equal
ones after padding with query heads of zeros: a zero row of q_proj gives a head that looks at all keys alike,
and the zero columns of o_proj drop what it saw. KV heads, and so pages, are never padded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxinfer.core import ConfigError

Members = tuple[tuple[int, ...], ...]
"""The old KV heads of each new one."""

MOST_PADDING = 2
"""Query heads, zeros included, are at most so many times those of the model."""
MOST_EXACT = 10
"""Heads up to which the best groups are found by looking at all; beyond, by a search."""
STARTS = 16
"""Random partitions that the search begins from, besides two that are likely."""


@dataclass(frozen=True, slots=True)
class Group:
    """One new KV head: the old ones that it is made of, and the old query heads that read it, in order."""

    kv_heads: tuple[int, ...]
    queries: tuple[int, ...]


HeadMap = tuple[Group, ...]
"""The new KV heads of one layer, in order."""


def merged(members: Members, group_size: int) -> HeadMap:
    """Query heads follow their KV heads; `group_size` G is the old number of them to a KV head."""
    return tuple(
        Group(heads, tuple(head * group_size + place for head in heads for place in range(group_size)))
        for heads in members
    )


def neighbours(kv_heads: int, count: int) -> Members:
    """Heads 0 .. kv_heads - 1 in `count` runs, of sizes as equal as they can be (2305.13245 groups so)."""
    size, larger = divmod(kv_heads, count)
    ends = np.cumsum([size + (index < larger) for index in range(count)]).tolist()
    return tuple(tuple(range(start, end)) for start, end in zip([0, *ends[:-1]], ends, strict=True))


def repeated(heads: int, kv_heads: int, count: int) -> HeadMap:
    """`kv_heads` K copied until there are `count`, each copy for a run of its head's queries.

    Raises ConfigError for fewer than K, or more than there are query heads N = `heads`.
    """
    if not kv_heads <= count <= heads:
        raise ConfigError(
            f"kv_heads {count} is not a repetition of {kv_heads} KV heads under {heads} query heads; allowed "
            f"for method 'repeat': {kv_heads} to {heads}"
        )
    group_size = heads // kv_heads
    return tuple(
        Group((head,), tuple(head * group_size + place for place in places))
        for head, copies in enumerate(map(len, neighbours(count, kv_heads)))
        for places in neighbours(group_size, copies)
    )


def query_heads(maps: Sequence[HeadMap], heads: int) -> int:
    """N', the query heads of every layer once each group is padded to its layer's largest: the least
    multiple of all layers' KV counts that holds them. It is N = `heads` where groups are equal.

    Raises ConfigError when that is more than MOST_PADDING · N.
    """
    needed = [len(groups) * max(len(group.queries) for group in groups) for groups in maps]
    return _multiple({len(groups) for groups in maps}, max(*needed, 1), heads)


def _multiple(counts: set[int], least: int, heads: int) -> int:
    step = math.lcm(*counts)
    found = -(-least // step) * step
    if found > MOST_PADDING * heads:
        shown = ", ".join(map(str, sorted(counts)))
        raise ConfigError(
            f"layers of {shown} KV heads need {found} query heads for their largest group, zeros included; "
            f"at most {MOST_PADDING} x {heads} are allowed; choose counts with a smaller common multiple"
        )
    return found


def slots(groups: HeadMap, num_heads: int) -> tuple[int | None, ...]:
    """The old query head at each of the `num_heads` N' new places; None is a head of zeros."""
    size, rest = divmod(num_heads, len(groups))
    assert rest == 0, f"{num_heads} query heads do not divide over {len(groups)} KV heads"
    assert all(len(group.queries) <= size for group in groups), f"a group of {groups} is larger than {size}"
    return tuple(head for group in groups for head in (*group.queries, *[None] * (size - len(group.queries))))


def most_members(old: Sequence[int], new: Sequence[int], heads: int) -> list[int]:
    """The most old KV heads that one new one may have, by layer, so that groups of unequal size stay within
    MOST_PADDING. `old` and `new`: KV heads of each layer. Raises ConfigError when no sizes would."""
    equal = [b * -(-a // b) * (heads // a) for a, b in zip(old, new, strict=True)]
    _multiple(set(new), max(equal), heads)
    step = math.lcm(*new)
    largest = MOST_PADDING * heads // step * step
    return [largest // b // (heads // a) for a, b in zip(old, new, strict=True)]


def alike(gram: np.ndarray, count: int, *, least: int = 1, most: int | None = None) -> Members:
    """Heads grouped so that a group's mean loses least: the partition into `count` groups of `least` to
    `most` heads, ordered by first head.

    gram float [K, K]: inner products of the heads. What a group S loses is the distance to its mean,
    sum of gram[i, i] over S - sum of gram over S x S / |S| (key-driven grouping, 2408.08454; unequal groups:
    2406.10247). Up to MOST_EXACT heads it is the best partition; of more, the best that moves of one head and
    exchanges of two reach from several starts.
    """
    heads = len(gram)
    most = heads if most is None else most
    assert least * count <= heads <= most * count, f"{heads} heads in {count} groups of {least} to {most}"
    if heads <= MOST_EXACT:
        return _best(gram, count, least, most)
    draw = np.random.default_rng(0)
    starts = [neighbours(heads, count)]
    order = np.argsort(-gram.sum(axis=1), kind="stable")
    for permutation in [order, *(draw.permutation(heads) for _ in range(STARTS))]:
        starts.append(tuple(tuple(permutation[list(run)].tolist()) for run in neighbours(heads, count)))
    found = [_descend(gram, start, least, most) for start in dict.fromkeys(starts)]
    best = min(found, key=lambda groups: round(_loss(gram, groups), 12))
    return tuple(sorted(tuple(sorted(group)) for group in best))


def _loss(gram: np.ndarray, groups: Members) -> float:
    return float(np.trace(gram)) - sum(
        float(gram[np.ix_(group, group)].sum()) / len(group) for group in groups
    )


def _best(gram: np.ndarray, count: int, least: int, most: int) -> Members:
    """Of all partitions, from small ones: sets of heads are bit masks, and the lowest head of what is left
    begins the next group."""
    heads = len(gram)
    sets = {}
    for mask in range(1, 1 << heads):
        group = tuple(head for head in range(heads) if mask >> head & 1)
        if least <= len(group) <= most:
            sets[mask] = float(gram[np.ix_(group, group)].sum()) / len(group), group
    by_first: dict[int, list[int]] = {}
    for mask in sets:
        by_first.setdefault(mask & -mask, []).append(mask)
    found: dict[int, tuple[float, Members]] = {0: (0.0, ())}  # heads that are placed -> what they keep
    for _ in range(count):
        more: dict[int, tuple[float, Members]] = {}
        for placed, (kept, members) in found.items():
            rest = ~placed & ((1 << heads) - 1)
            for mask in by_first.get(rest & -rest, []):
                both, gained = placed | mask, kept + sets[mask][0]
                if not mask & placed and (both not in more or gained > more[both][0]):
                    more[both] = gained, (*members, sets[mask][1])
        found = more
    return found[(1 << heads) - 1][1]


def _descend(gram: np.ndarray, start: Members, least: int, most: int) -> Members:
    """Better partitions, one move or exchange after the other, until there is none."""
    groups = [list(group) for group in start]

    def kept(*changed: list[int]) -> float:
        return sum(float(gram[np.ix_(group, group)].sum()) / len(group) for group in changed)

    better = True
    while better:
        better = False
        for a in range(len(groups)):
            for b in range(len(groups)):
                for one in tuple(groups[a]) if a != b else ():
                    left, right = groups[a], groups[b]
                    if one not in left:
                        continue
                    rest = [head for head in left if head != one]
                    choices = [(rest, [*right, one])] if len(rest) >= least and len(right) < most else []
                    choices += [
                        ([*rest, other], [one, *(head for head in right if head != other)]) for other in right
                    ]
                    new = max(choices, key=lambda pair: kept(*pair), default=None)
                    if new is not None and kept(*new) > kept(left, right) + 1e-12 * abs(np.trace(gram)):
                        groups[a], groups[b] = new
                        better = True
    return tuple(map(tuple, groups))


def check_members(members: Members, kv_heads: int, layer: int) -> None:
    """Raises ConfigError when a stated grouping does not hold each head of its layer once."""
    if sorted(head for group in members for head in group) != list(range(kv_heads)) or not all(members):
        raise ConfigError(
            f"groups of layer {layer}: got {members!r}; each of its KV heads 0 to {kv_heads - 1} belongs in "
            "exactly one group, and no group is empty"
        )
