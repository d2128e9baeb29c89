"""Linear attention by FAVOR+ (Performer, 2009.14794): all that a text has said is one state of fixed size.

The kernel of softmax attention is an expectation over w ~ N(0, I), with q and k scaled by H^-1/4:

    exp(q·k) = E[exp(w·q - |q|²/2) exp(w·k - |k|²/2)]

With r draws in place of the expectation, the keys before a query enter only through sums over them. For each
KV head and feature f, e_f(x) = w_f·x - |x|²/2 being the exponent:

    S_f = Σ exp(e_f(k)) v    z_f = Σ exp(e_f(k))    attended(q) = Σ_f exp(e_f(q)) S_f / Σ_f exp(e_f(q)) z_f

which weighs every value positively, with weights that add up to 1. Draws are orthogonal in blocks of H, each
of a length of its own, which keeps the estimate of exp(q·k) unbiased and its variance lower.

float32 cannot hold such exponentials as they come: exp(e) of a long key is 0, and of a lucky draw too large.
So sums are kept relative to the largest exponent so far (the `peaks`), which each feature has of its own, and
each query to the largest exponent that it meets at a key it sees. One pair of the two gives exactly 1, and
the denominator is never less: there is nothing to divide by zero, and no epsilon.

Shapes in the alphabet of docs/shapes.md, and r features, C tokens of a run.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.config import Favor
from pallas_kernels import RaggedBatch

NOTHING = -1e30
"""The peak of no key at all. Finite: its difference to itself is 0."""
RANGE = 70.0
"""exp stays within exp(-RANGE) .. exp(RANGE). A key whose exponent lies further below the largest one of its
run counts for as much as one at that distance: to a query that sees larger keys, nothing. For one that sees
no larger ones the shares are exact up to this distance."""
RUN = 128
"""Tokens of a run of whole texts: within a run pairs of tokens are weighed, [RUN, RUN] a head."""
GRID = 2.0**-12
"""Features are multiples of it, so that a last bit that libraries differ in does not show: the same seed
gives the same features everywhere."""


class FavorState(NamedTuple):
    """What a layer knows of the tokens so far, of each KV head; float32. exp(peaks) · sums is S and
    exp(peaks) · totals is z.

    sums [..., K, r, H], totals [..., K, r], peaks [..., K, r]; in a KVState [R + 1, ...], a place for each
    sequence that may run, and place 0 for rows of padding.
    """

    sums: jax.Array
    totals: jax.Array
    peaks: jax.Array


@functools.lru_cache(maxsize=32)
def random_features(favor: Favor, width: int) -> np.ndarray:
    """w, float32 [r, H]: the same for the same seed, whatever the platform and the versions of libraries.

    Rows are normal vectors, orthogonal within blocks of H. numpy guarantees what a bit generator gives, and
    not what is made of it: normals are made here (Box and Muller, 1958), and their orthogonal directions.
    """
    bits = np.random.PCG64(favor.seed)
    blocks = []
    for _ in range(-(-favor.features // width)):
        directions = _orthogonal(_normals(bits, (width, width)))
        lengths = np.sqrt((_normals(bits, (width, width)) ** 2).sum(axis=1))
        blocks.append(np.round(directions * lengths[:, None] / GRID) * GRID)
    return np.concatenate(blocks)[: favor.features].astype(np.float32)


def _normals(bits: np.random.PCG64, shape: tuple[int, ...]) -> np.ndarray:
    count = math.prod(shape)
    raw = bits.random_raw(2 * -(-count // 2))
    uniform = ((raw >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53  # in (0, 1)
    radius, angle = np.sqrt(-2.0 * np.log(uniform[0::2])), 2.0 * np.pi * uniform[1::2]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count].reshape(shape)


def _orthogonal(rows: np.ndarray) -> np.ndarray:
    """Rows of length 1 by Gram and Schmidt, twice, since once leaves them only nearly orthogonal."""
    result = np.zeros_like(rows)
    for index, row in enumerate(rows):
        for _ in range(2):
            row = row - (result[:index] @ row) @ result[:index]
        result[index] = row / np.sqrt((row * row).sum())
    return result


def nothing(shape: tuple[int, ...], width: int) -> FavorState:
    """The state before the first token; shape (..., K, r)."""
    return FavorState(
        jnp.zeros((*shape, width), jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.full(shape, NOTHING, jnp.float32),
    )


def advance(
    state: FavorState, q: jax.Array, k: jax.Array, v: jax.Array, real: jax.Array, favor: Favor, scale: float
) -> tuple[jax.Array, FavorState]:
    """A run of C consecutive tokens of one text: what each sees of the text up to itself, and the next state.

    q [C, N, H], k and v [C, K, H], real bool [C] (padding follows the real ones; it adds nothing, and gives
    zeros) -> (float32 [C, N, H], the state). `scale` is that of q·k.
    """
    tokens, heads, width = q.shape
    grouped = q.reshape(tokens, k.shape[1], heads // k.shape[1], width)
    reads, writes = (_exponents(x, favor, scale) for x in (grouped, k))  # [C, K, G, r], [C, K, r]
    writes = jnp.where(real[:, None, None], writes, NOTHING)
    # The largest exponents that each query meets, and those of the whole run. They scale what is divided by
    # one another and cancel: no gradient goes through them.
    largest = lax.stop_gradient(jnp.maximum(lax.cummax(writes, axis=0), state.peaks))
    peaks = largest[-1]
    meets = reads + largest[:, :, None]
    meets -= lax.stop_gradient(jnp.max(meets, axis=-1, keepdims=True))  # 0 at the best feature, < 0 at others
    read = jnp.exp(jnp.minimum(meets + (peaks - largest)[:, :, None], RANGE))
    write = jnp.where(real[:, None, None], jnp.exp(jnp.maximum(writes - peaks, -RANGE)), 0.0)
    decay = jnp.exp(jnp.maximum(state.peaks - peaks, -RANGE))
    sums, totals = state.sums * decay[..., None], state.totals * decay

    values = jnp.where(real[:, None, None], v.astype(jnp.float32), 0.0)  # 0 · NaN would be NaN
    causal = jnp.arange(tokens)[:, None] >= jnp.arange(tokens)[None, :]
    pairs = jnp.where(causal, _einsum("ckgr,skr->kgcs", read, write), 0.0)
    above = _einsum("kgcs,skh->ckgh", pairs, values) + _einsum("ckgr,krh->ckgh", read, sums)
    below = jnp.sum(pairs, axis=-1).transpose(2, 0, 1) + _einsum("ckgr,kr->ckg", read, totals)
    attended = jnp.where(real[:, None, None, None], above / below[..., None], 0.0)

    sums += _einsum("skr,skh->krh", write, values)
    totals += jnp.sum(write, axis=0)
    return attended.reshape(tokens, heads, width), FavorState(sums, totals, peaks)


def _exponents(x: jax.Array, favor: Favor, scale: float) -> jax.Array:
    """w·x - |x|²/2 of x [..., H] scaled by the root of `scale`: float32 [..., r]."""
    x = x.astype(jnp.float32) * math.sqrt(scale)
    features = jnp.asarray(random_features(favor, x.shape[-1]))
    return _einsum("...h,rh->...r", x, features) - 0.5 * jnp.sum(x * x, axis=-1, keepdims=True)


# An exponent off by 0.01 is a weight off by 1 %: no product of less than float32, as GPUs would take.
_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def attend_texts(q: jax.Array, k: jax.Array, v: jax.Array, favor: Favor, scale: float) -> jax.Array:
    """Whole texts from position 0, differentiable: q [texts, S, N, H], k and v [texts, S, K, H] -> q's shape
    and dtype. RUN tokens at a time, so that memory grows with S and not with S²."""
    texts, length, _, width = q.shape
    run = min(RUN, length)
    padding = -length % run
    real = jnp.arange(length + padding) < length

    def runs(x: jax.Array) -> jax.Array:
        """[texts, S, ...] -> [runs, texts, run, ...]"""
        x = jnp.pad(x, ((0, 0), (0, padding), *((0, 0),) * (x.ndim - 2)))
        return x.reshape(texts, -1, run, *x.shape[2:]).swapaxes(0, 1)

    def body(state: FavorState, given: tuple[jax.Array, ...]) -> tuple[FavorState, jax.Array]:
        q, k, v, real = given
        one = functools.partial(advance, real=real, favor=favor, scale=scale)
        attended, state = jax.vmap(one)(state, q, k, v)
        return state, attended

    start = nothing((texts, k.shape[2], favor.features), width)
    _, attended = lax.scan(body, start, (runs(q), runs(k), runs(v), real.reshape(-1, run)))
    return attended.swapaxes(0, 1).reshape(texts, -1, *q.shape[2:])[:, :length].astype(q.dtype)


def attend_rows(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    states: FavorState,
    batch: RaggedBatch,
    places: jax.Array,
    *,
    decode_rows: int,
    favor: Favor,
    scale: float,
) -> tuple[jax.Array, FavorState]:
    """A packed step: q [T, N, H], k and v [T, K, H] -> (what they see, the states with this step in them).

    places int32 [B]: where each row's state lies in `states`; 0 for padding rows. A row that begins at
    position 0 begins from nothing, whatever its place holds. Rows of one token go together, chunks tile after
    tile, as `batch` cuts them for attention over pages.
    """
    tokens, dtype = q.shape[0], q.dtype
    parts = []
    if decode_rows:
        own = places[:decode_rows]
        held = _held(states, own, batch.positions[:decode_rows] == 0)
        real = batch.token_row[:decode_rows, None] >= 0
        one = functools.partial(advance, favor=favor, scale=scale)
        row_q, row_k, row_v = (x[:decode_rows, None] for x in (q, k, v))
        attended, held = jax.vmap(one)(held, row_q, row_k, row_v, real)
        states = FavorState(*(x.at[own].set(new) for x, new in zip(states, held, strict=True)))
        parts.append(attended[:, 0])
    if decode_rows < tokens:
        attended, states = _tiles(q, k, v, states, batch, places, favor, scale)
        parts.append(attended[decode_rows:])
    return (jnp.concatenate(parts) if len(parts) > 1 else parts[0]).astype(dtype), states


def _held(states: FavorState, places: jax.Array, begins: jax.Array) -> FavorState:
    """The states at `places`, those of rows that begin emptied; both of one shape, () or [rows]."""
    # Read apart from what is made of it: else XLA reads again after the write, and copies all states first.
    found = FavorState(*lax.optimization_barrier(tuple(x[places] for x in states)))
    before = nothing(found.totals.shape, found.sums.shape[-1])

    def chosen(new: jax.Array, held: jax.Array) -> jax.Array:
        return jnp.where(begins.reshape(begins.shape + (1,) * (held.ndim - begins.ndim)), new, held)

    return FavorState(*map(chosen, before, found))


def _tiles(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    states: FavorState,
    batch: RaggedBatch,
    places: jax.Array,
    favor: Favor,
    scale: float,
) -> tuple[jax.Array, FavorState]:
    """Rows of more than one token: float32 [T, N, H], where other tokens keep zeros, and the states."""
    tokens, sizes = q.shape[0], batch.tile_sizes

    def longer(x: jax.Array) -> jax.Array:  # a tile may reach past the last token
        return jnp.pad(x, ((0, sizes[0]), *((0, 0),) * (x.ndim - 1)))

    q, k, v, positions = longer(q), longer(k), longer(v), longer(batch.positions)
    out = jnp.zeros(q.shape, jnp.float32)
    for index, size in enumerate(sizes):
        if size > tokens and size != sizes[-1]:
            continue

        def tile(number, carry, index=index, size=size):
            out, states = carry
            row, start, count = batch.tiles[index][number]
            real = jnp.arange(size) < count
            held = _held(states, places[row], positions[start] == 0)
            tile_q, tile_k, tile_v = (lax.dynamic_slice_in_dim(x, start, size) for x in (q, k, v))
            attended, held = advance(held, tile_q, tile_k, tile_v, real, favor, scale)
            # Tokens past the tile belong to another row, perhaps already done: keep what is there.
            old = lax.dynamic_slice_in_dim(out, start, size)
            attended = jnp.where(real[:, None, None], attended, old)
            out = lax.dynamic_update_slice_in_dim(out, attended, start, axis=0)
            return out, FavorState(*(x.at[places[row]].set(new) for x, new in zip(states, held, strict=True)))

        out, states = lax.fori_loop(0, batch.num_tiles[index], tile, (out, states))
    return out[:tokens], states
