"""What attention computes, whoever computes it: the static options of one layer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rule:
    """softmax(soft_cap(q k^T * scale)) v over the keys that a query sees.

    A query at position p sees keys k <= p of its row. A `window` W leaves of them k > p - W (Mistral,
    2310.06825) and the first `sinks` positions (StreamingLLM, 2309.17453), which are always seen. A
    `soft_cap` c turns a score s into c * tanh(s / c) before the softmax (Gemma 2, 2408.00118).

        window 4, sinks 2, query at 9:  keys 0 1 . . . . 6 7 8 9

    Raises ValueError for options that say nothing: sinks without a window, a window below 1, a cap of 0.
    """

    scale: float
    window: int | None = None
    sinks: int = 0
    soft_cap: float | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"a window holds at least one key, got {self.window}")
        if self.sinks < 0 or (self.sinks and self.window is None):
            raise ValueError(f"sinks are kept beside a window, got sinks {self.sinks}, window {self.window}")
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise ValueError(f"a soft cap is above 0, got {self.soft_cap}")
