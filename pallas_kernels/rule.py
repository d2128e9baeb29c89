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

    NaN or infinity in a key that a query sees reaches that query; in a later key of its row, perhaps too: a
    chunk shares what it reads. Other rows never see it.
    """

    scale: float
    window: int | None = None
    sinks: int = 0
    soft_cap: float | None = None

    def __post_init__(self) -> None:
        assert self.window is None or self.window >= 1, f"a window of {self.window} keys"
        assert self.sinks == 0 or (self.sinks > 0 and self.window is not None), (
            f"{self.sinks} sinks beside a window of {self.window}"
        )
        assert self.soft_cap is None or self.soft_cap > 0, f"a soft cap of {self.soft_cap}"
