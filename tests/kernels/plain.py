"""Attention token by token in float64, with none of the code under test: the reference of `reference`."""

from __future__ import annotations

import jax
import numpy as np

from pallas_kernels.cases import Step, StepCase


def plain(step: Step, case: StepCase) -> np.ndarray:
    """[T, N, H] float64 of plain pages."""
    q, k_pages, v_pages = (np.asarray(x, np.float64) for x in step[:3])
    batch = jax.tree.map(np.asarray, step.batch)
    heads, kv_heads = q.shape[1], k_pages.shape[1]
    out = np.zeros_like(q)
    for token in np.flatnonzero(step.real):
        position = int(batch.positions[token])
        ids = batch.page_table[batch.token_row[token]]
        keys = [k for k in range(position + 1) if ids[k // case.page_size]]
        if case.window is not None:
            keys = [k for k in keys if k > position - case.window or k < case.sinks]
        if not keys:
            continue
        places = [(ids[k // case.page_size], k % case.page_size) for k in keys]
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            k = np.stack([k_pages[page, kv_head, offset] for page, offset in places])
            v = np.stack([v_pages[page, kv_head, offset] for page, offset in places])
            scores = k @ q[token, head] / np.sqrt(q.shape[-1])
            if case.soft_cap is not None:
                scores = case.soft_cap * np.tanh(scores / case.soft_cap)
            weights = np.exp(scores - scores.max())
            out[token, head] = weights @ v / weights.sum()
    return out
