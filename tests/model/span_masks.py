"""Attention spans as masks of the dense reference, by the specification of each, position by position."""

from __future__ import annotations

import numpy as np
from dense import Mask

from jaxinfer.config import AttentionSpan, TopPagesSpan


def mask_of(span: AttentionSpan | None, page_size: int, num_prompt: int) -> Mask:
    """What a text whose first `num_prompt` tokens are the prompt sees under a span (None: everything)."""

    def static(layer: int, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        del layer, k
        places = range(len(q))
        assert not isinstance(span, TopPagesSpan)
        if span is None:
            return np.ones((len(q), len(q)), bool)
        return np.array([[span.sees(query, key) for key in places] for query in places])

    def choosing(layer: int, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        assert isinstance(span, TopPagesSpan)
        seen = np.ones((len(q), len(q)), bool)
        for query in range(len(q)):
            if layer < span.skip or not span.pages.chooses(query, num_prompt):
                continue
            own = query // page_size
            bounds = []
            for page in range(own):
                keys = k[page * page_size : (page + 1) * page_size]
                low, high = keys.min(axis=0), keys.max(axis=0)
                bounds.append(max(np.maximum(head * low, head * high).sum() for head in q[query]))
            pages = {*span.pages.chosen(bounds), own}
            seen[query] = [key // page_size in pages for key in range(len(q))]
        return seen

    return choosing if isinstance(span, TopPagesSpan) else static
