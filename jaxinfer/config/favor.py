"""What a linear-attention layer needs to know: how many random features, and from which draw."""

from __future__ import annotations

from dataclasses import dataclass

from jaxinfer.core import ConfigError

MOST_FEATURES = 4096
"""More would cost more than the keys of any text that fits a model; and sums of so many stay far from the
largest float32."""


@dataclass(frozen=True, slots=True)
class Favor:
    """FAVOR+ (Performer, 2009.14794): softmax attention's kernel exp(q·k / sqrt(H)) as the inner product of
    `features` r positive random features of q and of k, so that all keys before a query are one sum.

    `seed` draws the features. They are no weights: whoever has the seed has them, on every platform. Layers
    of one seed share a draw.

    Raises ConfigError for a number out of range.
    """

    features: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low, high in (("features", 1, MOST_FEATURES), ("seed", 0, 2**63 - 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise ConfigError(
                    f"linear_attention: {name} must be an integer of {low} to {high}, got {value!r}"
                )
