"""What training minimises: cross entropy of the next token, and how far the model is from its original.

Logits are made, used and dropped in chunks of rows: float32 [rows, V] of a whole batch would be the largest
array of all (V 49152, 4 texts of 256 tokens: 200 MB, and several of it in the backward pass).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.model.llama import Llama, Output

CHUNK_BYTES = 64 << 20
"""Of one chunk's float32 logits."""


class Losses(NamedTuple):
    """Sums over the counted targets, float32 scalars, in nats; `targets` is how many they are.

    `divergence` is KL(original || model) at the temperature, 0 without an original.
    """

    cross_entropy: jax.Array
    divergence: jax.Array
    targets: jax.Array


class Original(NamedTuple):
    """The model to learn from (1503.02531): its output head,
    hidden [texts, S, its own D], and the temperature that divides both models' logits."""

    output: Output
    hidden: jax.Array
    temperature: float


def losses(
    output: Output,
    hidden: jax.Array,
    targets: jax.Array,
    counted: jax.Array,
    *,
    dtype: jnp.dtype,
    original: Original | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Losses:
    """hidden [texts, S, D] before the last norm, targets int32 and counted bool [texts, S] -> their Losses.

    `output` has the parameters as they are trained, in float32: each chunk casts them to `dtype`, so that the
    gradients of chunks are added in float32. Differentiable in `output` and `hidden`; nothing of a chunk is
    held for the backward pass, which makes its logits again.
    """
    texts, length = targets.shape
    vocab = output.head.weight.shape[0]
    size = min(length, max(1, chunk_bytes // (4 * vocab * texts)))
    chunks = -(-length // size)

    def cut(x: jax.Array) -> jax.Array:
        """[texts, S, ...] -> [chunks, texts, size, ...]: texts stay on the devices that have them."""
        spare = [(0, 0)] * x.ndim
        spare[1] = (0, chunks * size - length)
        return jnp.moveaxis(jnp.pad(x, spare).reshape(texts, chunks, size, *x.shape[2:]), 1, 0)

    graph, parameters = nnx.split(output)
    taught = None if original is None else nnx.split(original.output)

    @jax.checkpoint
    def chunk(parameters, hidden, targets, counted, original_hidden) -> Losses:
        logits = _logits(graph, cast(parameters, dtype), hidden)
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        entropy = jax.nn.logsumexp(logits, axis=-1) - chosen
        divergence = jnp.zeros_like(entropy)
        if original is not None and taught is not None:
            # the original's own parameters are constants here: no gradient asks for them
            teaching = _logits(taught[0], taught[1], original_hidden)
            divergence = kl_divergence(teaching, logits, original.temperature)
        return Losses(
            jnp.sum(entropy, where=counted),
            jnp.sum(divergence, where=counted),
            counted.sum(dtype=jnp.float32),
        )

    def add(total: Losses, part) -> tuple[Losses, None]:
        return jax.tree.map(jnp.add, total, chunk(parameters, *part)), None

    parts = tuple(map(cut, (hidden, targets, counted)))
    parts += (None if original is None else cut(original.hidden),)
    zero = jnp.zeros((), jnp.float32)
    return jax.lax.scan(add, Losses(zero, zero, zero), parts)[0]


def _logits(graph, parameters, hidden: jax.Array) -> jax.Array:
    """hidden [texts, size, D] -> float32 [texts, size, V]"""
    rows = hidden.reshape(-1, hidden.shape[-1])
    return nnx.merge(graph, parameters)(rows).reshape(*hidden.shape[:-1], -1)


def kl_divergence(original: jax.Array, model: jax.Array, temperature: float) -> jax.Array:
    """KL(softmax(original / t) || softmax(model / t)) of logits float32 [..., V] -> nats [...]."""
    wanted = jax.nn.log_softmax(original / temperature)
    return jnp.sum(jnp.exp(wanted) * (wanted - jax.nn.log_softmax(model / temperature)), axis=-1)


def cast(parameters: nnx.State, dtype: jnp.dtype) -> nnx.State:
    """Every array in `dtype`."""
    return jax.tree.map(lambda x: x.astype(dtype), parameters)


def text_losses(
    model: nnx.GraphDef,
    parameters: nnx.State,
    tokens: jax.Array,
    counted: jax.Array,
    *,
    dtype: jnp.dtype,
    remat: bool = False,
    original: tuple[nnx.GraphDef, nnx.State, float] | None = None,
) -> Losses:
    """Losses of blocks of tokens int32 [texts, S + 1] (`jaxinfer.lab.data.Blocks`), products in `dtype`.

    `original`: the structure and parameters of the model to learn from, and the temperature.
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    hidden, _ = _merged(model, cast(parameters, dtype)).dense(inputs, remat=remat)
    teaching = None
    if original is not None:
        graph, state, temperature = original
        teacher = _merged(graph, state)
        seen = jax.lax.stop_gradient(teacher.dense(inputs)[0])
        teaching = Original(teacher.output(), seen, temperature)
    output = _merged(model, parameters).output()
    return losses(output, hidden, targets, counted, dtype=dtype, original=teaching)


def _merged(graph: nnx.GraphDef, state: nnx.State) -> Llama:
    return nnx.merge(graph, state)
