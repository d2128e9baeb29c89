"""The kinds of rotary position embedding, as numbers; `model.rope` computes with them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding without scaling: inv_freq[i] = theta ** (-2 i / H) (RoFormer, 2104.09864)."""

    theta: float = 10000.0


@dataclass(frozen=True, slots=True)
class LinearRope(Rope):
    """Position interpolation (2306.15595): every frequency is divided by `factor`."""

    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class DynamicRope(Rope):
    """Dynamic NTK scaling: theta grows with the length of the text once it passes `original_max_position`.

    Up to there it is `Rope(theta)`. A token of a longer text is rotated as the text stood when the token was
    computed: the whole prompt for one of the prompt, the text up to itself for a generated one. That is what
    a prefill in one go followed by cached decoding does, and no chunking or recomputation changes it.
    """

    factor: float = 1.0
    original_max_position: int = 2048


@dataclass(frozen=True, slots=True)
class Llama3Rope(Rope):
    """Llama 3.1's scaling: long wavelengths divided by `factor`, short ones kept, a linear ramp between."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class YarnRope(Rope):
    """YaRN (2309.00071): frequencies that turn more than `beta_fast` times within the original context are
    kept, those that turn less than `beta_slow` times are divided by `factor`, a linear ramp between.

    `attention_factor` multiplies cos and sin, so attention scores grow by its square. `truncate` rounds the
    ends of the ramp to whole pairs.
    """

    factor: float = 1.0
    original_max_position: int = 2048
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
