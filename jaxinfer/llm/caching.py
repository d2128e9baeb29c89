"""Whether the K/V of one request are of use to another."""

from __future__ import annotations

import logging

from jaxinfer.config import DynamicRope, ModelConfig, shown_layers
from jaxinfer.core import Limits

logger = logging.getLogger(__name__)


def shares_prefixes(wanted: bool, limits: Limits, model: ModelConfig | None, name: str) -> bool:
    """Whether an engine keeps a prefix cache. Where one is `wanted` and of no use, a warning says why."""
    reason = no_prefix_caching(limits, model)
    if wanted and reason:
        logger.warning("%s: prefix caching is off: %s", name, reason)
    return wanted and not reason


def no_prefix_caching(limits: Limits, model: ModelConfig | None) -> str | None:
    """Why K/V of one request is of no use to another that begins alike; None where it is."""
    if limits.window is not None or (model is not None and model.window is not None):
        return "every layer has a sliding window, and pages behind it are given back"
    if model is not None and any(layer.top_pages and layer.top_pages.start is None for layer in model.layers):
        return "an answer's queries choose pages and a prompt's do not: the same text has other K/V in each"
    if model is not None and model.linear_layers:
        return (
            f"layers {shown_layers(model.linear_layers)} have linear attention, and their state after a text "
            "is of no use to one that departs from it before its end"
        )
    if model is not None and isinstance(model.rope, DynamicRope):
        original = model.rope.original_max_position
        if limits.max_model_len > original:
            return (
                f"with dynamic rope the K/V of a prompt depend on its length beyond {original} tokens, and "
                f"max_model_len is {limits.max_model_len}"
            )
    return None
