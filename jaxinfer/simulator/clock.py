"""Time that passes only when somebody says so."""

from __future__ import annotations


class VirtualClock:
    """Seconds from 0 on. An engine calls it; a driver of loads asks for `now`."""

    __slots__ = ("_now",)

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        return self._now

    def now(self) -> float:
        return self._now

    def wait_until(self, at_s: float) -> None:
        """Be there at once. A time that has passed changes nothing: the clock never goes back."""
        self._now = max(self._now, at_s)
