"""The flags that put linear attention in the place of softmax's, for every command that converts a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from jaxinfer.cli.group_lists import numbers_of
from jaxinfer.cli.terminal import UsageError

if TYPE_CHECKING:
    from jaxinfer.config import Favor


@dataclass(frozen=True, kw_only=True)
class LinearFlags:
    """Linear attention (FAVOR+, Performer): which layers, and how near to softmax's."""

    linear_layers: str | None = None
    """Layers, from 0 on, that keep a state of fixed size in place of K/V: 3,7,12-15 or all."""
    features: int | None = None
    """Random features of linear attention; 128 by default. More are nearer to softmax, and a larger state."""
    features_seed: int | None = None
    """What they are drawn from; 0 by default."""

    def layers(self) -> list[int] | Literal["all"] | None:
        """Raises UsageError for what is no list of layers; which ones a model has is not known here."""
        if self.linear_layers is None or self.linear_layers == "all":
            return self.linear_layers  # type: ignore[return-value]
        layers = numbers_of(self.linear_layers)
        if layers is None:
            raise UsageError(
                f"--linear-layers is all, or layers and ranges such as 3,7,12-15; got {self.linear_layers!r}"
            )
        return layers

    def favor(self) -> Favor | None:
        """What is asked for of the features; None where nothing is. Raises UsageError, or ConfigError."""
        named = {"features": self.features, "seed": self.features_seed}
        stated = {name: value for name, value in named.items() if value is not None}
        if stated and self.linear_layers is None:
            raise UsageError(
                "--features and --features-seed need --linear-layers, which say where they are used"
            )
        if self.linear_layers is None:
            return None
        from jaxinfer.config import Favor

        return Favor(**stated)
