"""Choosing the next token of every row, on the device, and reporting how likely tokens are.

One program serves every mix of parameters: what a row does not use is data, not shape, and the costly
parts (noise, filters, alternatives, masks) run only in a step where some row asks for them (`lax.cond`).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.core import MAX_LOGPROBS


class SamplingInputs(NamedTuple):
    """Per row (B): temperature, top_p, min_p float32 [B]; top_k, top_logprobs, sample_position int32 [B];
    seed int32 [B, 2] (high and low word).

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off. Padding rows are greedy. `told` int32
    [B, MAX_LOGPROBS] are ids to report on, -1 where there are none, and none of a row whose first is -1;
    None for no row's.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    top_logprobs: jax.Array
    seed: jax.Array
    sample_position: jax.Array
    told: jax.Array | None = None


class Changes(NamedTuple):
    """Changes to single logits, N of them: row, id int32 [N]; factor, addend float32 [N].

    logit' = (logit / factor if logit > 0 else logit * factor) + addend. No (row, id) comes twice; an entry
    whose row is B or more, or whose id cannot be sampled, changes nothing.
    """

    row: jax.Array
    id: jax.Array
    factor: jax.Array
    addend: jax.Array


class Mask(NamedTuple):
    """Which ids may be chosen: bit i % 32 of words[row, i // 32], int32 [B, ceil(V / 32)]. `used` int32 []
    is 0 when the words of this step mean nothing: every id may be."""

    used: jax.Array
    words: jax.Array


class SamplingOutputs(NamedTuple):
    """token, rank int32 [B]; logprob float32 [B]; top_ids int32, top_logprobs float32 [B, MAX_LOGPROBS].

    Of a row with ids of its own to report on (`SamplingInputs.told`), top_logprobs are those of them, in
    their order, and top_ids their ranks: whoever asks knows the ids.
    """

    token: jax.Array
    logprob: jax.Array
    rank: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


def sample(
    logits: jax.Array,
    inputs: SamplingInputs,
    changes: Changes | None = None,
    mask: Mask | None = None,
    sampled_vocab: int | None = None,
) -> SamplingOutputs:
    """Choose a token of each row of `logits` float32 [B, V], and report on it.

    Only ids below `sampled_vocab` (static; None: V) are chosen: the output matrices of many models have rows
    that pad it to a round number and stand for no token. logprob, rank and the alternatives are of the raw
    distribution, over all V columns, before changes, mask, temperature and filters; so an alternative may be
    a padding row. A row whose logits are not finite gives a non-finite logprob. A row that changes and mask
    leave no id at all gives token 0 with rank 0 and logprob -inf.
    """
    allowed = logits[:, :sampled_vocab]
    if changes is not None:
        allowed = _changed(allowed, changes)
    if mask is not None:
        open_to_all = allowed
        allowed = lax.cond(mask.used > 0, lambda: _masked(open_to_all, mask.words), lambda: open_to_all)
    greedy = jnp.argmax(allowed, axis=-1).astype(jnp.int32)
    none_left = jnp.isneginf(jnp.take_along_axis(allowed, greedy[:, None], axis=1, mode="clip")[:, 0])
    drawing = inputs.temperature > 0
    token = lax.cond(
        jnp.any(drawing), lambda: jnp.where(drawing, _draw(allowed, inputs), greedy), lambda: greedy
    )
    token = jnp.where(none_left, 0, token)
    out = report(logits, token, jnp.any(inputs.top_logprobs > 0), inputs.told)
    return out._replace(
        logprob=jnp.where(none_left, -jnp.inf, out.logprob), rank=jnp.where(none_left, 0, out.rank)
    )


def report(
    logits: jax.Array, token: jax.Array, with_top: jax.Array, told: jax.Array | None = None
) -> SamplingOutputs:
    """How likely `token` int32 [B] is under `logits` float32 [B, V]; with `with_top`, which are most; and of
    the ids `told` (`SamplingInputs`), how likely they are.

    A rank is 1 + the number of likelier tokens: equal ones share the best they could have.
    """
    chosen = jnp.take_along_axis(logits, token[:, None], axis=1, mode="clip")  # [B, 1]
    normalizer = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    top = lax.cond(with_top, lambda: _top(logits, normalizer), lambda: _no_top(logits))
    if told is not None:
        top = lax.cond(jnp.any(told >= 0), lambda: _told(logits, normalizer, told, top), lambda: top)
    top_ids, top_logprobs = top
    return SamplingOutputs(
        token=token,
        logprob=(chosen - normalizer)[:, 0],
        rank=1 + jnp.sum(logits > chosen, axis=-1, dtype=jnp.int32),
        top_ids=top_ids,
        top_logprobs=top_logprobs,
    )


def _told(
    logits: jax.Array, normalizer: jax.Array, ids: jax.Array, top: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Ranks and logprobs of `ids` int32 [B, K] in the rows that have some, and `top` in the others."""
    asked = ids[:, :1] >= 0
    values = jnp.take_along_axis(logits, ids, axis=1, mode="clip")  # [B, K]
    # One id after the other: all at once is a kernel of K sums a row, which spills its registers on a GPU.
    likelier = lax.map(lambda each: jnp.sum(logits > each[:, None], axis=-1, dtype=jnp.int32), values.T)
    return jnp.where(asked, 1 + likelier.T, top[0]), jnp.where(asked, values - normalizer, top[1])


def _changed(logits: jax.Array, changes: Changes) -> jax.Array:
    """Gather, change, scatter: the rest of [B, V] is only copied."""
    where = (changes.row, changes.id)
    before = logits.at[where].get(mode="fill", fill_value=0.0)
    after = jnp.where(before > 0, before / changes.factor, before * changes.factor) + changes.addend
    return logits.at[where].set(after, mode="drop", unique_indices=True)


def _masked(logits: jax.Array, words: jax.Array) -> jax.Array:
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.int32)) & 1  # [B, ceil(V / 32), 32]
    bits = bits.reshape(words.shape[0], -1)[:, : logits.shape[1]]
    return jnp.where(bits > 0, logits, -jnp.inf)


def _top(logits: jax.Array, normalizer: jax.Array) -> tuple[jax.Array, jax.Array]:
    count = min(MAX_LOGPROBS, logits.shape[1])
    values, ids = lax.top_k(logits, count)
    pad = ((0, 0), (0, MAX_LOGPROBS - count))
    return jnp.pad(ids, pad), jnp.pad(values - normalizer, pad, constant_values=-jnp.inf)


def _no_top(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    shape = (logits.shape[0], MAX_LOGPROBS)
    return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)


def _draw(logits: jax.Array, inputs: SamplingInputs) -> jax.Array:
    """Gumbel-max over the filtered logits; int32 [B]. A row's noise depends on its seed and position alone,
    so neither the batch nor the path that led here (chunks, preemption, restart) changes it."""
    temperature = jnp.where(inputs.temperature > 0, inputs.temperature, 1.0)
    # Under a huge temperature the reciprocal is flushed to 0, and -inf * 0 would make what was taken out NaN.
    scaled = jnp.where(jnp.isneginf(logits), -jnp.inf, logits / temperature[:, None])
    filtering = jnp.any((inputs.top_k > 0) | (inputs.top_p < 1) | (inputs.min_p > 0))
    scaled = lax.cond(filtering, lambda: _filter(scaled, inputs), lambda: scaled)

    def noise(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(lax.bitcast_convert_type(seed, jnp.uint32), impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(key, position), (logits.shape[1],), jnp.float32)

    noisy = scaled + jax.vmap(noise)(inputs.seed, inputs.sample_position)
    return jnp.argmax(noisy, axis=-1).astype(jnp.int32)


def _filter(scaled: jax.Array, inputs: SamplingInputs) -> jax.Array:
    """top_k, then top_p, then min_p, each over what the one before left; -inf where a token is cut.

    A cut is at a value, so tokens that tie with the last one kept stay in. The most likely one always stays,
    also where top_p times the mass is too small a number for float32.
    """
    vocab_size = scaled.shape[1]
    keys = _ordered(scaled)
    wanted = jnp.where(inputs.top_k > 0, jnp.minimum(inputs.top_k, vocab_size), vocab_size)
    kept = keys >= _cut(keys, jnp.ones_like(scaled), wanted.astype(jnp.float32))
    weights = jnp.where(kept, jnp.exp(scaled - jnp.max(scaled, axis=-1, keepdims=True)), 0.0)
    mass = jnp.sum(weights, axis=-1)
    wanted = jnp.where(inputs.top_p < 1, inputs.top_p * mass, 0.0)
    kept &= (inputs.top_p >= 1)[:, None] | (keys >= _cut(keys, weights, wanted))
    # The most likely token has weight 1, so min_p is a bound on the weights themselves.
    kept &= weights >= inputs.min_p[:, None]
    kept |= keys == jnp.max(keys, axis=-1, keepdims=True)
    return jnp.where(kept, scaled, -jnp.inf)


def _ordered(x: jax.Array) -> jax.Array:
    """Float32 to uint32 such that x < y exactly when the keys are so ordered (-0.0 just below 0.0)."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _cut(keys: jax.Array, weights: jax.Array, wanted: jax.Array) -> jax.Array:
    """The largest key c with sum(weights[keys >= c]) >= wanted, uint32 [B, 1]; 0 when all weights fall short.

    Found bit by bit from the top: 32 passes over [B, V], no sort and no limit on how many tokens stay.
    """

    def settle(bit: jax.Array, cut: jax.Array) -> jax.Array:
        candidate = cut | (jnp.uint32(1) << (jnp.uint32(31) - bit.astype(jnp.uint32)))
        mass = jnp.sum(jnp.where(keys >= candidate[:, None], weights, 0.0), axis=-1)
        return jnp.where(mass >= wanted, candidate, cut)

    return lax.fori_loop(0, 32, settle, jnp.zeros(keys.shape[0], jnp.uint32))[:, None]
