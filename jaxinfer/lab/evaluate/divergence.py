"""KL(original || variant) of the next token: exact, and as far as the engine's top-k logprobs tell.

The engine reports the logprobs of the k most likely tokens (20 at most), never a whole distribution. So there
are two figures. `bounded`, from the engine's own answers, is the divergence of a coarser pair: the tokens
whose logprob both models report, each alone, and all others as one. Merging outcomes only lowers a KL
divergence (the data-processing inequality), so it is a lower bound, equal to the divergence where every token
is reported. `exact` runs the loaded weights of both models over whole texts (`Llama.dense`) and takes all V
tokens; it sees the same weights, quantised ones too, but no pages: not their rounding under an int8 or fp8
kv_cache_dtype.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence as Seq
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxinfer.config import TopPagesSpan
from jaxinfer.core import RequestError
from jaxinfer.lab.evaluate.scoring import Entries, Span
from jaxinfer.llm import LLM
from jaxinfer.progress import phase
from jaxinfer.runtime import JaxRunner

ROWS = 32
"""Positions whose whole distributions exist at a time: of both models, [ROWS, V] float32 each."""

LEAST_REST = 1e-6
"""What the tokens that are not reported have in sum at least: float32 logprobs sum to 1 no better."""


def bounded(original: Entries, variant: Entries) -> float:
    """A lower bound of KL(original || variant) of one position in nats, from the logprobs reported."""
    shared = original.keys() & variant.keys()
    pairs = [(original[token].logprob, variant[token].logprob) for token in sorted(shared)]
    rest = [1.0 - math.fsum(math.exp(pair[side]) for pair in pairs) for side in (0, 1)]
    total = math.fsum(math.exp(p) * (p - q) for p, q in pairs)
    if rest[0] > LEAST_REST:
        total += rest[0] * math.log(rest[0] / max(rest[1], LEAST_REST))
    return max(total, 0.0)


def exact(original: LLM, variant: LLM, spans: Seq[Span]) -> list[np.ndarray]:
    """KL(original || variant) in nats of each token that the spans look at, float32 [tokens of the span].

    Computed from hidden states of dense passes in the models' dtypes, with float32 logits. Raises
    RequestError for engines that run no JAX model, models of different vocabularies, and a model whose
    queries choose pages.
    """
    check_same_vocabulary(original, variant)
    check_dense(original, variant)
    models = [_model_of(llm) for llm in (original, variant)]
    graphs, states = tuple(graph for graph, _ in models), tuple(state for _, state in models)
    found = []
    with phase("divergence", total=len(spans), wanted=len(spans) > 1) as advance:
        for span in spans:
            ids = jnp.asarray(span.token_ids, jnp.int32)
            # The distribution at a position is of the token after it.
            found.append(np.asarray(_divergence(graphs, states, ids))[span.first - 1 : -1])
            advance(1)
    return found


def check_same_vocabulary(original: LLM, variant: LLM) -> None:
    """Raises RequestError for two models whose distributions are over different tokens."""
    sizes = original.limits.vocab_size, variant.limits.vocab_size
    if sizes[0] != sizes[1]:
        raise RequestError(
            f"{variant.model_name} has {sizes[1]} tokens and {original.model_name} {sizes[0]}: token by "
            "token they can be compared only over one vocabulary",
            "against",
        )


def check_dense(*models: LLM) -> None:
    """Raises RequestError for a model that has no dense pass: one whose queries choose pages of prompts."""
    for llm in models:
        if isinstance(llm.engine_config.span(), TopPagesSpan):
            raise RequestError(
                f"{llm.model_name}: exact KL is of dense passes, and under attention_span "
                f"{llm.engine_config.attention_span!r} there is none; leave it out (--no-exact-kl), and the "
                "bound remains",
                "exact_kl",
            )


def _model_of(llm: LLM) -> tuple[nnx.GraphDef, Any]:
    runner = llm.engine.runner
    if not isinstance(runner, JaxRunner):
        raise RequestError(
            f"{llm.model_name} runs on {type(runner).__name__}, whose weights are not here", "model"
        )
    return runner.model


@functools.partial(jax.jit, static_argnums=0)
def _divergence(
    graphs: tuple[nnx.GraphDef, nnx.GraphDef], states: tuple[Any, Any], token_ids: jax.Array
) -> jax.Array:
    """token_ids int32 [S] -> KL of the distribution after each of them, float32 [S]."""
    length = token_ids.shape[0]
    blocks = -(-length // ROWS)
    hidden = []
    for graph, state in zip(graphs, states, strict=True):
        rows = nnx.merge(graph, state).dense(token_ids[None])[0][0]
        rows = jnp.pad(rows, ((0, blocks * ROWS - length), (0, 0)))
        hidden.append(rows.reshape(blocks, ROWS, -1))

    def block(rows: tuple[jax.Array, jax.Array]) -> jax.Array:
        p, q = (
            jax.nn.log_softmax(nnx.merge(graph, state).logits(x))
            for graph, state, x in zip(graphs, states, rows, strict=True)
        )
        return jnp.sum(jnp.exp(p) * (p - q), axis=-1)

    return lax.map(block, tuple(hidden)).reshape(-1)[:length]
