"""What the tests of the planner share: models by name, and numbers as they are printed."""

from __future__ import annotations

import dataclasses
from decimal import Decimal
from typing import Any

from jaxinfer.config import ModelConfig
from jaxinfer.planner import ModelCosts
from jaxinfer.presets import PRESETS

KIB, MIB, GIB = 2**10, 2**20, 2**30
GB, TERA = 1e9, 1e12


def costs_of(name: str, *, kv_heads: int | None = None, **options: Any) -> ModelCosts:
    """A built-in shape as it is run; with `kv_heads`, as it would be with that many in every layer (also with
    more than it has, which `with_kv_heads` never makes)."""
    config = ModelConfig.from_hf(PRESETS[name])
    if kv_heads is not None:
        layers = tuple(dataclasses.replace(layer, num_kv_heads=kv_heads) for layer in config.layers)
        config = dataclasses.replace(config, layers=layers)
    return ModelCosts(config, **options)


def windowed(costs: ModelCosts, window: int | None, every: int = 1) -> ModelCosts:
    """The model with a window in each layer but every `every`-th (1: in all)."""
    layers = tuple(
        dataclasses.replace(layer, window=None if every > 1 and index % every == 0 else window)
        for index, layer in enumerate(costs.config.layers)
    )
    return dataclasses.replace(costs, config=dataclasses.replace(costs.config, layers=layers))


def agrees(value: float, printed: str) -> bool:
    """Whether `value`, rounded to the digits of `printed`, is what is printed: "16.0" allows 15.95 to 16.05,
    "2.8e14" allows 2.75e14 to 2.85e14."""
    number = Decimal(printed)
    half = Decimal((0, (5,), int(number.as_tuple().exponent) - 1))
    return abs(Decimal(value) - number) <= half
