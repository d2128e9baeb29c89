"""How many KV heads each layer keeps under a total of them: what loses least on the calibration text."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.core import ConfigError
from jaxinfer.heads.calibrate import Activations


def attention_loss(
    before: Activations, keys: np.ndarray, values: np.ndarray, output: np.ndarray, window: int | None
) -> float:
    """How far a layer's attention comes from what it was: |y' - y|^2 / |y|^2 over the calibration text, y
    being what it adds to the residual stream.

    `keys`, `values` [texts, S, K, H]: what stands for the layer's own after merging, seen from its own query
    heads. `output` [D, N · H]: o_proj.
    """
    plain = _attend(before.q, before.k, before.v, window)
    changed = _attend(before.q, keys, values, window) - plain
    lost, whole = (np.square(x.reshape(-1, output.shape[1]) @ output.T).sum() for x in (changed, plain))
    return float(lost / whole) if whole > 0 else 0.0


def _attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int | None) -> np.ndarray:
    """[texts, S, N, H], causal."""
    return np.asarray(_attend_on_device(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), window))


def _attention(q: jax.Array, k: jax.Array, v: jax.Array, window: int | None) -> jax.Array:
    local = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=local)


_attend_on_device = jax.jit(_attention, static_argnums=3)


def total_of(budget: float, kv_heads: Sequence[int]) -> int:
    """The most KV heads of all layers together under a share `budget` of those in `kv_heads`. Raises
    ConfigError when that is less than one a layer."""
    total = math.floor(budget * sum(kv_heads) + 1e-9)
    if total < len(kv_heads):
        raise ConfigError(
            f"kv_budget {budget:g} of {sum(kv_heads)} KV heads is {total}, and each of {len(kv_heads)} "
            f"layers needs one; at least {len(kv_heads) / sum(kv_heads):.3f} is needed"
        )
    return total


def best_counts(losses: Sequence[dict[int, float]], total: int) -> tuple[tuple[int, ...], float] | None:
    """The count of each layer, of those that its dict has with their losses, that together are at most
    `total` and lose least; and that loss. None when no choice is within the total. Exact: a table of totals.
    """
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for layer in losses:
        new: dict[int, tuple[float, tuple[int, ...]]] = {}
        for used, (lost, counts) in best.items():
            for count, more in layer.items():
                together = used + count
                found = (lost + more, (*counts, count))
                if together <= total and (together not in new or found[0] < new[together][0]):
                    new[together] = found
        best = new
    if not best:
        return None
    lost, counts = min(best.values(), key=lambda found: found[0])
    return counts, lost
