"""A figure with its standard error, and the difference of two of them over the same examples."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Estimate:
    """`influence[i]` is how far unit i (an example, a window) moves the value: value - (value without what
    makes unit i unlike the others), to first order. They sum to 0.

    The standard error is that of the delta method, sqrt(n / (n - 1) · Σ influence²): of a mean it is the
    usual s / sqrt(n). None below two units, and past a float's range. Figures over the same units have a
    paired difference (`minus`), whose error is smaller than that of two samples: what is hard for one model
    is hard for the other.
    """

    value: float
    influence: tuple[float, ...] = field(repr=False, default=())

    @property
    def stderr(self) -> float | None:
        count = len(self.influence)
        if count < 2:
            return None
        # hypot scales: of a perplexity of 1e200 the squares would be infinite, and the root is not.
        found = math.sqrt(count / (count - 1)) * math.hypot(*self.influence)
        return found if math.isfinite(found) else None

    def minus(self, other: Estimate) -> Estimate:
        """self - other, paired where both are of the same number of units."""
        moved: tuple[float, ...] = ()
        if len(self.influence) == len(other.influence):
            moved = tuple(a - b for a, b in zip(self.influence, other.influence, strict=True))
        return Estimate(self.value - other.value, moved)

    def times(self, factor: float) -> Estimate:
        return Estimate(self.value * factor, tuple(factor * x for x in self.influence))


def mean(values: Seq[float]) -> Estimate:
    """The mean of one or more values, one of each unit."""
    return ratio(values, [1.0] * len(values))


def ratio(sums: Seq[float], weights: Seq[float]) -> Estimate:
    """Σ sums / Σ weights, such as nll per token over windows of several tokens each."""
    total = math.fsum(weights)
    assert total > 0, f"weights {weights} of a ratio sum to {total}"
    value = math.fsum(sums) / total
    return Estimate(value, tuple((s - value * w) / total for s, w in zip(sums, weights, strict=True)))


def exponential(estimate: Estimate) -> Estimate:
    """exp of an estimate, infinite past a float's range."""
    value = math.exp(estimate.value) if estimate.value < 709.0 else math.inf
    return Estimate(value, tuple(value * x for x in estimate.influence))
