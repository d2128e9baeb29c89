"""FAVOR+ as its paper has it, in float64 numpy: every pair of tokens, every feature, nothing carried on."""

from __future__ import annotations

import numpy as np


def exponents(x: np.ndarray, features: np.ndarray, scale: float) -> np.ndarray:
    """log of sqrt(r) · phi(x): x [..., H] -> [..., r]."""
    x = x.astype(np.float64) * np.sqrt(scale)
    return x @ features.astype(np.float64).T - 0.5 * (x * x).sum(axis=-1, keepdims=True)


def log_kernel(q: np.ndarray, k: np.ndarray, features: np.ndarray, scale: float) -> np.ndarray:
    """log of the estimate of exp(scale q·k): q [S, H], k [S', H] -> [S, S']."""
    pairs = exponents(q, features, scale)[:, None] + exponents(k, features, scale)[None, :]
    peak = pairs.max(axis=-1)
    return peak + np.log(np.exp(pairs - peak[..., None]).mean(axis=-1))


def attended(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, features: np.ndarray | None, scale: float
) -> np.ndarray:
    """Causal attention of one text, q [S, N, H], k and v [S, K, H] -> [S, N, H]. No features: softmax's."""
    length, heads, _ = q.shape
    out = np.zeros(q.shape)
    for head in range(heads):
        shared = head // (heads // k.shape[1])
        own_q, own_k, own_v = (x.astype(np.float64) for x in (q[:, head], k[:, shared], v[:, shared]))
        logs = own_q @ own_k.T * scale if features is None else log_kernel(own_q, own_k, features, scale)
        logs = np.where(np.tril(np.ones((length, length), bool)), logs, -np.inf)
        weights = np.exp(logs - logs.max(axis=1, keepdims=True))
        out[:, head] = weights / weights.sum(axis=1, keepdims=True) @ own_v
    return out
