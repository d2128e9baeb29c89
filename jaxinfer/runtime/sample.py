"""Choosing the next token of every row, on the device, inside the step.

One program serves every mix of parameters: what a row does not use is data, not shape, and the costly
parts (noise, filters, alternatives) run only in a step where some row asks for them (`lax.cond`).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.core import MAX_LOGPROBS


class SamplingInputs(NamedTuple):
    """Per row (B): temperature, top_p, min_p float32 [B]; top_k, top_logprobs, sample_position int32 [B];
    seed int32 [B, 2] (high and low word); held_back int32 [B, 32], ids never to choose, V for none.

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off. Padding rows are greedy.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    top_logprobs: jax.Array
    seed: jax.Array
    sample_position: jax.Array
    held_back: jax.Array


class SamplingOutputs(NamedTuple):
    """token, rank int32 [B]; logprob float32 [B]; top_ids int32, top_logprobs float32 [B, MAX_LOGPROBS]."""

    token: jax.Array
    logprob: jax.Array
    rank: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


def sample(logits: jax.Array, inputs: SamplingInputs, sampled_vocab: int | None = None) -> SamplingOutputs:
    """Choose a token of each row of `logits` float32 [B, V], and report on it.

    Only ids below `sampled_vocab` (static; None: V) are chosen: the output matrices of many models have rows
    that pad it to a round number and stand for no token. logprob, rank and the alternatives are of the raw
    distribution, over all V columns, before held-back ids, temperature and filters; so an alternative may be
    a padding row. A row whose logits are not finite gives a non-finite logprob.
    """
    candidates = logits[:, :sampled_vocab]
    allowed = lax.cond(
        jnp.any(inputs.held_back < candidates.shape[1]),
        lambda: _without(candidates, inputs.held_back),
        lambda: candidates,
    )
    greedy = jnp.argmax(allowed, axis=-1).astype(jnp.int32)
    drawing = inputs.temperature > 0
    token = lax.cond(
        jnp.any(drawing), lambda: jnp.where(drawing, _draw(allowed, inputs), greedy), lambda: greedy
    )
    chosen = jnp.take_along_axis(logits, token[:, None], axis=1, mode="clip")  # [B, 1]
    normalizer = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    top_ids, top_logprobs = lax.cond(
        jnp.any(inputs.top_logprobs > 0), lambda: _top(logits, normalizer), lambda: _no_top(logits)
    )
    return SamplingOutputs(
        token=token,
        logprob=(chosen - normalizer)[:, 0],
        rank=1 + jnp.sum(logits > chosen, axis=-1, dtype=jnp.int32),
        top_ids=top_ids,
        top_logprobs=top_logprobs,
    )


def _without(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """`logits` with the columns `ids` int32 [B, n] of each row at -inf; ids past the columns are nobody's."""
    return logits.at[jnp.arange(logits.shape[0])[:, None], ids].set(-jnp.inf, mode="drop")


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
    # Under a huge temperature the reciprocal is flushed to 0, and -inf * 0 would make a held-back id NaN.
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
