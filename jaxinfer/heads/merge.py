"""How the KV heads of a group become one: a linear map of them all, and its way back in q and o.

A Fold of m heads is (encode, decode): the new head is the sum of encode[j] k_j, and stands for each old one
as k_j ~ decode[j] k'. Nothing of it is left to compute when the model runs: encode goes into the rows of
k_proj or v_proj, decode of keys, transposed, into the rows of q_proj (q . decode k' = decode^T q . k'), and
decode of values into the columns of o_proj.

What may stand in a fold of keys depends on what lies between projection and score (`Freedom`). RoPE turns the
pair (i, i + H/2) by its own angle, so only maps that commute with those turns pass it: the complex numbers of
each pair, one by one. A norm of each head (qk_norm) passes, of those, only signs.

Everything is computed from second moments: `moments` [m, H, m, H], sums over samples of products of heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

Freedom = Literal["any", "pairs", "pair signs", "signs"]
"""Maps that may stand between heads: any matrix; a complex number for each pair that RoPE turns; +1 or -1 for
each pair; +1 or -1 for each of the H numbers."""

ROUNDS = 50
"""Most rounds of aligning to a mean that moves itself; a handful is enough."""
ENOUGH = 1e-5
"""Share by which a round must gain for another to follow."""


@dataclass(frozen=True, slots=True)
class Fold:
    """encode, decode float64 [m, H, H]: see above."""

    encode: np.ndarray
    decode: np.ndarray

    def rebuilt(self, heads: np.ndarray) -> np.ndarray:
        """What the new head says that the old ones were: heads [T, m, H] -> [T, m, H]."""
        new = np.einsum("jab,tjb->ta", self.encode.astype(heads.dtype), heads)
        return np.einsum("jab,tb->tja", self.decode.astype(heads.dtype), new)

    def lost(self, moments: np.ndarray) -> float:
        """The sum over samples of |k_j - decode[j] k'|^2, which `moments` [m, H, m, H] are enough for."""
        count, width = self.encode.shape[:2]
        whole = moments.reshape(count * width, count * width)
        encode = self.encode.transpose(1, 0, 2).reshape(width, -1)
        rest = np.eye(count * width) - self.decode.reshape(-1, width) @ encode
        return max(0.0, float(np.einsum("ab,bc,ac->", rest, whole, rest, optimize=True)))


def moments_of(samples: np.ndarray) -> np.ndarray:
    """Samples [T, K, H] -> their second moments, float64 [K, H, K, H]."""
    count, heads, width = samples.shape
    flat = samples.reshape(count, -1).astype(np.float64)
    return (flat.T @ flat).reshape(heads, width, heads, width)


def weighted(weights: np.ndarray, width: int) -> Fold:
    """The mean with these weights [m], which sum to 1."""
    eye = np.broadcast_to(np.eye(width), (len(weights), width, width))  # takes the room of one
    return Fold(eye if len(weights) == 1 else weights[:, None, None] * eye, eye)


def mean(count: int, width: int) -> Fold:
    """Mean pooling (2305.13245)."""
    return weighted(np.full(count, 1 / count), width)


def picked(count: int, width: int, which: int) -> Fold:
    """Head `which` alone stands for all (2305.13245 keeps the first)."""
    return weighted(np.eye(count)[which], width)


def norm_weighted(moments: np.ndarray) -> Fold:
    """Heads weigh as much as their norm: the heads that have most to say (2408.08454)."""
    norms = np.sqrt(np.einsum("jaja->j", moments))
    count, total = len(norms), norms.sum()
    return weighted(norms / total if total > 0 else np.full(count, 1 / count), moments.shape[1])


def aligned(moments: np.ndarray, freedom: Freedom) -> Fold:
    """The mean of heads that were first turned to lie on one another (2412.20677).

    Turns R_j minimise the sum of |R_j k_j - mean of R_i k_i|^2 (generalised Procrustes): all to the largest
    head, then to the mean of what they have become, until that stands still. decode is R_j transposed.
    """
    count = len(moments)
    nearest = _NEAREST[freedom]
    largest = int(np.argmax(np.einsum("jaja->j", moments)))
    whole, width = moments.reshape(count * len(moments[0]), -1), len(moments[0])
    turns, reached = np.stack([nearest(moments[largest, :, j]) for j in range(count)]), -np.inf
    for _ in range(ROUNDS):
        side_by_side = turns.transpose(1, 0, 2).reshape(width, -1)  # [H, m H]
        towards = (side_by_side @ whole).reshape(width, count, width).transpose(1, 0, 2)  # sum with each head
        turns = np.stack([nearest(each) for each in towards])
        agreement = float(np.sum(turns * towards))
        if agreement <= reached + ENOUGH * abs(agreement):
            break
        reached = agreement
    # One turn of all together changes nothing: the largest head is left as it is, so that equal heads are.
    turns = np.einsum("ba,jbc->jac", turns[largest], turns)
    return Fold(turns / count, turns.transpose(0, 2, 1))


def factorised(moments: np.ndarray, freedom: Freedom) -> Fold:
    """The group's heads, side by side, as the nearest thing of one head's rank (2406.07056).

    Values: the H principal directions of all m · H numbers. Keys under RoPE: of each pair's m complex
    numbers the one principal combination, which is what commutes with turning. Keys under a norm of heads:
    a factor would be normed away, so that they are aligned by signs.
    """
    if freedom in ("signs", "pair signs"):
        return aligned(moments, freedom)
    count, width = moments.shape[:2]
    scale = np.sqrt(count)
    if freedom == "any":
        _, vectors = np.linalg.eigh(moments.reshape(count * width, count * width))
        basis = vectors[:, -width:].reshape(count, width, width)
        basis = basis @ _nearest_orthogonal(basis.sum(axis=0)).T  # the basis of the mean, where there is one
        return Fold(basis.transpose(0, 2, 1) / scale, basis * scale)
    products = _complex_products(moments)  # [H / 2, m, m]
    _, vectors = np.linalg.eigh(products)
    vector = vectors[:, :, -1]  # [H / 2, m]: k_j ~ vector_j z
    total = vector.sum(axis=1, keepdims=True)
    vector = vector * np.where(np.abs(total) > 1e-9, np.conj(total) / np.maximum(np.abs(total), 1e-9), 1)
    numbers = vector.T  # [m, H / 2]
    return Fold(_as_matrices(np.conj(numbers) / scale), _as_matrices(numbers * scale))


def likeness(moments: np.ndarray, freedom: Freedom | None) -> np.ndarray:
    """Inner products of heads float64 [K, K]; with a `freedom`, as large as turning one makes them."""
    if freedom is None:
        return np.einsum("iaja->ij", moments)
    count, gram = len(moments), np.empty((len(moments), len(moments)))
    for i in range(count):
        for j in range(i, count):
            cross = moments[i, :, j]
            gram[i, j] = gram[j, i] = np.sum(_NEAREST[freedom](cross) * cross)
    return gram


# ------------------------------------------------------------------------ the nearest map that is allowed
# Each takes the cross moments [H, H] of a target with a head and gives the R that turns the head next to it.


def _nearest_orthogonal(cross: np.ndarray) -> np.ndarray:
    left, _, right = np.linalg.svd(cross)
    return left @ right


def _nearest_turns(cross: np.ndarray) -> np.ndarray:
    number = _pairs_of(cross)
    size = np.abs(number)
    return _as_matrices(np.where(size > 0, number / np.where(size > 0, size, 1), 1))


def _nearest_pair_signs(cross: np.ndarray) -> np.ndarray:
    return _as_matrices(np.where(np.real(_pairs_of(cross)) < 0, -1, 1).astype(complex))


def _nearest_signs(cross: np.ndarray) -> np.ndarray:
    return np.diag(np.where(np.diagonal(cross) < 0, -1.0, 1.0))


_NEAREST: dict[Freedom, Callable[[np.ndarray], np.ndarray]] = {
    "any": _nearest_orthogonal,
    "pairs": _nearest_turns,
    "pair signs": _nearest_pair_signs,
    "signs": _nearest_signs,
}


def _pairs_of(cross: np.ndarray) -> np.ndarray:
    """Of each pair (i, i + H/2), as complex numbers, the sum of target times conjugate head: [H / 2]."""
    half = len(cross) // 2
    low, high = np.arange(half), np.arange(half) + half
    real = cross[low, low] + cross[high, high]
    return real + 1j * (cross[high, low] - cross[low, high])


def _complex_products(moments: np.ndarray) -> np.ndarray:
    """Of each pair, the sums of k_i times conjugate k_j over samples: complex [H / 2, m, m]."""
    count = len(moments)
    return np.stack(
        [np.stack([_pairs_of(moments[i, :, j]) for j in range(count)], -1) for i in range(count)], -2
    )


def _as_matrices(numbers: np.ndarray) -> np.ndarray:
    """Complex [..., H / 2] -> the real [..., H, H] that multiply the pairs (i, i + H/2) by them."""
    half = numbers.shape[-1]
    matrices = np.zeros((*numbers.shape[:-1], 2 * half, 2 * half))
    low, high = np.arange(half), np.arange(half) + half
    matrices[..., low, low] = matrices[..., high, high] = np.real(numbers)
    matrices[..., high, low], matrices[..., low, high] = np.imag(numbers), -np.imag(numbers)
    return matrices
