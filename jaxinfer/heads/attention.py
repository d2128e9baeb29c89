"""What a layer's attention says of the calibration text before and after its heads were merged: softmax's
over a window or all, or linear attention's with the layer's own features."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.config import Favor, LayerConfig
from jaxinfer.heads.calibrate import Activations
from jaxinfer.heads.groups import Members
from jaxinfer.heads.merge import Fold
from jaxinfer.model import favor as linear


def attention_loss(
    before: Activations,
    members: Members,
    folds: tuple[Sequence[Fold], Sequence[Fold]],
    output: np.ndarray,
    layers: tuple[LayerConfig, LayerConfig],
) -> float:
    """How far a layer's attention comes from what it was: |y' - y|^2 / |y|^2 over the calibration text, y
    being what it adds to the residual stream.

    `members` and `folds` (of keys, of values): the new heads. `output` [D, N · H]: o_proj. `layers`: what the
    layer is and what it becomes; where one has linear attention, its features are the model's own.
    """
    if layers[0] == layers[1] and all(len(heads) == 1 for heads in members):
        return 0.0
    plain = _attend(before.q, before.k, before.v, layers[0])
    changed = _through_new_heads(before, members, folds, layers[1]) - plain
    lost, whole = (np.square(x.reshape(-1, output.shape[1]) @ output.T).sum() for x in (changed, plain))
    return float(lost / whole) if whole > 0 else 0.0


def _through_new_heads(
    before: Activations, members: Members, folds: tuple[Sequence[Fold], Sequence[Fold]], layer: LayerConfig
) -> np.ndarray:
    """What the model's own query heads see by way of the new KV heads, [texts, S, N, H]. Features of linear
    attention depend on what q and k are, and not on their products alone: so both are made as the converted
    model makes them, group by group."""
    size = before.q.shape[2] // before.k.shape[2]
    seen = np.empty_like(before.q)
    for heads, keys, values in zip(members, *folds, strict=True):
        queries = [head * size + place for head in heads for place in range(size)]
        decode_k, decode_v = (
            np.repeat(fold.decode, size, axis=0).astype(np.float32) for fold in (keys, values)
        )
        q = np.einsum("jba,xsjb->xsja", decode_k, before.q[:, :, queries], optimize=True)
        k, v = (
            np.einsum("jab,xsjb->xsa", fold.encode.astype(np.float32), x[:, :, list(heads)], optimize=True)
            for fold, x in ((keys, before.k), (values, before.v))
        )
        attended = _attend(q, k[:, :, None], v[:, :, None], layer)
        seen[:, :, queries] = np.einsum("jab,xsjb->xsja", decode_v, attended, optimize=True)
    return seen


def _attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, layer: LayerConfig) -> np.ndarray:
    """[texts, S, N, H], causal."""
    return np.asarray(_on_device(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), layer.window, layer.favor))


def _attention(
    q: jax.Array, k: jax.Array, v: jax.Array, window: int | None, favor: Favor | None
) -> jax.Array:
    if favor is not None:
        return linear.attend_texts(q, k, v, favor, q.shape[-1] ** -0.5)
    local = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=local)


_on_device = jax.jit(_attention, static_argnums=(3, 4))
