"""How many KV heads each layer keeps under a total of them: what loses least on the calibration text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jaxinfer.core import ConfigError


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
