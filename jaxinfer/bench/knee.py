"""The highest load under which an objective holds, found by runs that are noisy.

    knee = find_knee(probe, Range(low=0.5, start=4, high=16))

A run says whether the objective held, and by how much. Measured twice, a load near its limit holds once and
breaks once, so that:

* every run lasts a stated time and has a least number of requests (the probe's business: a P95 of 20 requests
is one request), with arrivals of another seed each time; * a run whose worst term is within `near` of its
limit is repeated, up to `repeats` runs, and the majority decides; * bisection stops when the loads that hold
and break are within `tolerance` of each other: below that lies noise; * what was found is not believed before
two fresh, longer runs, one just below and one just above it, have held and broken. If they say otherwise the
search goes on from what they said, `CONFIRMATIONS` times at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from jaxinfer.core import ConfigError

CONFIRMATIONS = 3
"""Pairs of runs below and above at most."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one run at `rate` said. `margin`: the worst term's statistic over its limit, 1 where it breaks."""

    rate: float
    holds: bool
    margin: float
    purpose: str = ""


Probe = Callable[[float, int, bool], Verdict]
"""(rate, number of the run from 0, whether it confirms: then it is the longer one) -> what it said."""


@dataclass(frozen=True, slots=True)
class Range:
    """Loads that are tried: from `low` to `high`, the first at `start`; in requests per second."""

    low: float
    start: float
    high: float

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.start <= self.high:
            raise ConfigError(
                f"a sweep goes from a low rate above 0 over its start to a high one, got "
                f"{self.low:g}, {self.start:g}, {self.high:g}"
            )


@dataclass(frozen=True, slots=True)
class Patience:
    """How sure the search is to be. Raises ConfigError."""

    tolerance: float = 0.1
    near: float = 0.15
    repeats: int = 3
    most_runs: int = 30

    def __post_init__(self) -> None:
        if not (
            0.005 <= self.tolerance <= 1 and 0 <= self.near < 1 and self.repeats >= 1 and self.most_runs >= 4
        ):
            raise ConfigError(
                "a sweep needs a tolerance from 0.005 to 1, near from 0 to 1, repeats of at least 1 and at "
                f"least 4 runs, got {self.tolerance:g}, {self.near:g}, {self.repeats} and {self.most_runs}"
            )


@dataclass(slots=True)
class Knee:
    """What a search found. "found": it holds at `below` and breaks at `above`, and two runs beside them
    agreed where `confirmed`. "above": it holds at the highest load tried (`below`). "below": it is broken at
    the lowest one (`above`). "unsettled": the runs were used up, or contradicted each other."""

    kind: Literal["found", "above", "below", "unsettled"] = "unsettled"
    below: float | None = None
    above: float | None = None
    confirmed: bool = False
    verdicts: list[Verdict] = field(default_factory=list)
    confirming: tuple[Verdict, Verdict] | None = None

    def says(self) -> str:
        """It in a sentence."""
        if self.kind == "below":
            return (
                f"the SLO is broken at the lowest load tried, {self.above:.3g} requests/s: its knee is lower"
            )
        if self.kind == "above":
            return (
                f"the SLO holds at the highest load tried, {self.below:.3g} requests/s: the knee lies above"
            )
        if self.kind == "unsettled" or self.below is None or self.above is None:
            held = max((v.rate for v in self.verdicts if v.holds), default=None)
            broke = min((v.rate for v in self.verdicts if not v.holds), default=None)
            shown = [f"{name} {rate:.3g}" for name, rate in (("held at", held), ("broke at", broke)) if rate]
            return (
                f"unsettled after {len(self.verdicts)} runs: the SLO {' and '.join(shown)} requests/s; "
                "longer runs, or a quieter machine, would tell"
            )
        text = f"the SLO holds up to {self.below:.3g} requests/s and breaks at {self.above:.3g}"
        if self.confirming is None:
            return f"{text}; NOT confirmed: the runs allowed were used up"
        low, high = self.confirming
        seen = (
            f"a run at {low.rate:.3g} {'held' if low.holds else 'BROKE'}, "
            f"one at {high.rate:.3g} {'broke' if not high.holds else 'HELD'}"
        )
        return f"{text}; {'confirmed' if self.confirmed else 'NOT confirmed'}: {seen}"


def find_knee(probe: Probe, within: Range, patience: Patience | None = None) -> Knee:
    """Search; what the probe raises passes through."""
    return _Search(probe, within, patience or Patience()).run()


class _OutOfRuns(Exception):
    pass


class _Search:
    def __init__(self, probe: Probe, within: Range, patience: Patience):
        self.probe, self.within, self.patience = probe, within, patience
        self.knee = Knee()

    def run(self) -> Knee:
        knee = self.knee
        try:
            for _ in range(CONFIRMATIONS):
                if not self._bracket():
                    return knee
                self._bisect()
                if self._confirm():
                    knee.kind, knee.confirmed = "found", True
                    return knee
        except _OutOfRuns:
            pass
        if knee.below and knee.above and knee.confirming is None:
            narrow = knee.above / knee.below <= 1 + self.patience.tolerance
            knee.kind = "found" if narrow else "unsettled"
        return knee

    def _once(self, rate: float, purpose: str, confirms: bool = False) -> Verdict:
        knee = self.knee
        if len(knee.verdicts) >= self.patience.most_runs:
            raise _OutOfRuns
        said = self.probe(rate, len(knee.verdicts), confirms)
        verdict = Verdict(rate, said.holds, said.margin, purpose)
        knee.verdicts.append(verdict)
        return verdict

    def _holds(self, rate: float, purpose: str) -> bool:
        """Judge a load; the bracket moves."""
        votes = [self._once(rate, purpose)]
        while abs(votes[-1].margin - 1) <= self.patience.near and len(votes) < self.patience.repeats:
            ayes = sum(vote.holds for vote in votes)
            if max(ayes, len(votes) - ayes) > self.patience.repeats // 2:
                break
            votes.append(self._once(rate, f"{purpose}, again"))
        holds = sum(vote.holds for vote in votes) * 2 > len(votes)
        if holds:
            self.knee.below = rate
        else:
            self.knee.above = rate
        return holds

    def _bracket(self) -> bool:
        """Find a load that holds and a higher one that breaks; False when the range has none of one kind."""
        knee, within = self.knee, self.within
        if knee.below is None and knee.above is None:
            self._holds(within.start, "start")
        while knee.below is None:
            assert knee.above is not None
            if knee.above <= within.low:
                knee.kind = "below"
                return False
            self._holds(max(within.low, knee.above / 2), "down")
        while knee.above is None:
            if knee.below >= within.high:
                knee.kind = "above"
                return False
            self._holds(min(within.high, knee.below * 2), "up")
        return True

    def _bisect(self) -> None:
        knee = self.knee
        assert knee.below is not None
        assert knee.above is not None
        while knee.above / knee.below > 1 + self.patience.tolerance:
            self._holds(math.sqrt(knee.above * knee.below), "between")

    def _confirm(self) -> bool:
        """Two longer runs, outside of the bracket by half its tolerance; one that contradicts it becomes an
        end of the next bracket."""
        knee, beside = self.knee, 1 + self.patience.tolerance / 2
        assert knee.below is not None
        assert knee.above is not None
        low = self._once(knee.below / beside, "confirms below", True)
        high = self._once(knee.above * beside, "confirms above", True)
        knee.confirming = (low, high)
        if low.holds and not high.holds:
            return True
        if not low.holds:
            knee.above, knee.below = low.rate, None
        else:
            knee.below, knee.above = high.rate, None
        return False
