"""How long prompts and answers are: distributions of token counts, written as on the command line.

128                      all the same
uniform:64-256           every whole number from 64 to 256 is as likely
lognormal:128,0.6        median 128; the logarithm has a standard deviation of 0.6
lognormal:128,0.6,1024   the same, and what is above 1024 is 1024
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxinfer.core import ConfigError

MOST_TOKENS = 10_000_000
"""Longest length that is understood; a run would never end."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts of at least 1. `low` and `high` bound them; `median` and `sigma` are of
    the lognormal alone."""

    kind: Literal["fixed", "uniform", "lognormal"]
    low: int
    high: int
    median: float = 0.0
    sigma: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Read one of the spellings above. Raises ConfigError."""
        kind, _, rest = text.partition(":")
        try:
            if not rest:
                count = int(kind)
                return cls("fixed", count, count)._checked(text)
            if kind == "uniform":
                low, high = map(int, rest.split("-"))
                return cls("uniform", low, high)._checked(text)
            if kind == "lognormal":
                median, sigma, *most = rest.split(",")
                high = int(most[0]) if len(most) == 1 else MOST_TOKENS
                if len(most) < 2:
                    return cls("lognormal", 1, high, float(median), float(sigma))._checked(text)
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
        raise ConfigError(
            "a length looks like 128, uniform:64-256 or lognormal:128,0.6 (median, sigma[, most]); "
            f"got {text!r}"
        )

    @classmethod
    def fixed(cls, count: int) -> Lengths:
        """All the same. Raises ConfigError."""
        return cls("fixed", count, count)._checked(str(count))

    def _checked(self, text: str) -> Lengths:
        if not 1 <= self.low <= self.high <= MOST_TOKENS:
            raise ConfigError(f"{text!r}: lengths go from 1 token to {MOST_TOKENS}, the smaller one first")
        if self.kind == "lognormal" and not (1 <= self.median <= self.high and 0 <= self.sigma <= 10):
            raise ConfigError(f"{text!r}: a median from 1 to the most, and a sigma from 0 to 10")
        return self

    def draw(self, generator: np.random.Generator, count: int) -> list[int]:
        """`count` lengths in tokens."""
        if self.kind == "fixed":
            return [self.low] * count
        if self.kind == "uniform":
            return generator.integers(self.low, self.high + 1, count).tolist()
        drawn = generator.lognormal(math.log(self.median), self.sigma, count)
        return np.clip(np.rint(drawn), self.low, self.high).astype(np.int64).tolist()

    def cut(self, most: int) -> Lengths:
        """The same with no length above `most` >= 1."""
        low, high = min(self.low, most), min(self.high, most)
        return Lengths(self.kind, low, high, min(self.median, high), self.sigma)

    def __str__(self) -> str:
        if self.kind == "fixed":
            return str(self.low)
        if self.kind == "uniform":
            return f"uniform:{self.low}-{self.high}"
        most = "" if self.high == MOST_TOKENS else f",{self.high}"
        return f"lognormal:{self.median:g},{self.sigma:g}{most}"
