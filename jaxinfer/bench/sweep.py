"""`bench sweep`: how much load a target bears before its objective (SLO) breaks.

First a closed loop with all places taken measures the capacity, the rate that no open loop can exceed for
long. From half of it the search of `knee` goes up or down, in open loops of Poisson arrivals, each with a
seed of its own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxinfer.bench import report
from jaxinfer.bench.knee import Knee, Patience, Range, Verdict, find_knee
from jaxinfer.bench.latency import latency_table
from jaxinfer.bench.lengths import Lengths
from jaxinfer.bench.load import Load, Prompts, closed, poisson
from jaxinfer.bench.records import Objective
from jaxinfer.bench.workbench import Workbench
from jaxinfer.core import ConfigError

LOWEST, HIGHEST = 1 / 16, 2.0
"""Of the capacity: the range that is searched where none is stated."""
PLACES = 32
"""Requests of the closed loop against a server that does not say how many it runs together."""
CONFIRMED_TIMES = 2
"""How much longer the confirming runs are."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a sweep tries. A run lasts `duration_s` of arrivals, or as long as `least_requests` take to
    arrive.

    `low`, `start`, `high`: in requests/s; None: from the capacity. `concurrency`: places of the closed loop
    that measures it; None: as many as the target runs together. Raises
    ConfigError.
    """

    prompts: Prompts
    outputs: Lengths
    seed: int = 0
    burstiness: float = 1.0
    duration_s: float = 30.0
    least_requests: int = 100
    low: float | None = None
    start: float | None = None
    high: float | None = None
    concurrency: int | None = None
    patience: Patience = dataclasses.field(default_factory=Patience)

    def __post_init__(self) -> None:
        if not (0 < self.duration_s < math.inf and self.least_requests >= 1):
            raise ConfigError(
                f"a run lasts above 0 seconds and has a request at least, got {self.duration_s:g} and "
                f"{self.least_requests}"
            )
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"concurrency must be at least 1, got {self.concurrency}")
        stated = [rate for rate in (self.low, self.start, self.high) if rate is not None]
        if stated:  # before a model is loaded: what is stated must be in order
            Range(self.low or stated[0], self.start or stated[0], self.high or stated[-1])

    def load(self, rate: float, number: int, confirms: bool) -> Load:
        """The load of one run; `number` gives it a seed."""
        times = CONFIRMED_TIMES if confirms else 1
        count = times * max(self.least_requests, math.ceil(rate * self.duration_s))
        seed = self.seed + 104_729 * (number + 1)
        return poisson(rate, count, self.prompts, self.outputs, seed=seed, burstiness=self.burstiness)


def sweep(bench: Workbench, plan: Plan, warm_up: int) -> dict[str, Any]:
    """The report as JSON: the knee, and every run that led to it.

    Raises ConfigError for an objective without terms, a range that is none, and when no request of the
    warm-up is answered.
    """
    if not bench.objective.terms:
        raise ConfigError("a sweep needs an SLO that can break, such as ttft_p95=500ms,tpot_p95=50ms")
    first = plan.load(1.0, 0, False)
    bench.warm_up(first, warm_up)
    places = plan.concurrency or bench.target.most_sequences or PLACES
    capacity, runs = None, []
    if plan.low is None or plan.start is None or plan.high is None:
        count = max(2 * places, plan.least_requests)
        full = closed(places, count, plan.prompts, plan.outputs, seed=plan.seed + 15_485_863)
        measured = bench.measure(full, "measuring the capacity")
        capacity = measured.summary.requests_per_s
        if capacity <= 0:
            raise ConfigError("no request of the closed loop that measures the capacity was answered")
        bench.say(f"capacity: {report.rates(measured.result()['measured'])}")
        runs.append(measured.result(purpose="capacity", rate=None))
    within = _range(plan, capacity)

    def probe(rate: float, number: int, confirms: bool) -> Verdict:
        measured = bench.measure(plan.load(rate, number, confirms), f"measuring {rate:.3g} requests/s")
        records = measured.run.records
        broken = bench.objective.broken(records)
        bench.say(f"{rate:.3g} requests/s: {'; '.join(broken) if broken else 'the SLO holds'}")
        runs.append(measured.result(purpose="", rate=rate))
        return Verdict(rate, not broken, bench.objective.margin(records))

    knee = find_knee(probe, within, plan.patience)
    for run, verdict in zip(runs[len(runs) - len(knee.verdicts) :], knee.verdicts, strict=True):
        run["purpose"] = verdict.purpose
    bench.say(knee.says())
    return {
        **report.heading("sweep", bench.target),
        "slo": str(bench.objective),
        "seed": plan.seed,
        "capacity_requests_per_s": capacity,
        "range": dataclasses.asdict(within),
        "knee": _told(knee),
        "predicted_knee": _predicted(bench, plan, within),
        "runs": runs,
    }


def _range(plan: Plan, capacity: float | None) -> Range:
    """The stated rates, and what the capacity says of the others."""
    if capacity is None:
        assert plan.low is not None
        assert plan.start is not None
        assert plan.high is not None
        return Range(plan.low, plan.start, plan.high)
    low = plan.low or min(capacity * LOWEST, plan.start or math.inf, plan.high or math.inf)
    high = plan.high or max(capacity * HIGHEST, plan.start or 0.0, low)
    return Range(low, plan.start or min(max(capacity / 2, low), high), high)


def _told(knee: Knee) -> dict[str, Any]:
    return {
        "kind": knee.kind,
        "holds_at": knee.below,
        "breaks_at": knee.above,
        "confirmed": knee.confirmed,
        "says": knee.says(),
        "confirming": None if knee.confirming is None else [dataclasses.asdict(v) for v in knee.confirming],
    }


def _predicted(bench: Workbench, plan: Plan, within: Range) -> dict[str, Any] | None:
    """The knee of the same search where every run is foretold; None where nothing foretells."""
    if bench.predict is None:
        return None
    return _told(find_knee(predicted_probe(bench.predict, bench.objective, plan), within, plan.patience))


def predicted_probe(
    predict: Callable[[Load], Any], objective: Objective, plan: Plan
) -> Callable[[float, int, bool], Verdict]:
    """Runs that nothing serves."""

    def probe(rate: float, number: int, confirms: bool) -> Verdict:
        records = predict(plan.load(rate, number, confirms))
        return Verdict(rate, not objective.broken(records), objective.margin(records))

    return probe


def page(value: dict[str, Any]) -> str:
    """The report for people: the runs by rate, then what they say."""
    runs = [run for run in value["runs"] if run["rate"] is not None]
    for run in runs:
        run["shown"] = f"{run['rate']:.3g}{'' if run['measured']['slo']['holds'] else ' broken'}"
    table = latency_table("requests/s", sorted(runs, key=lambda run: run["rate"]), "shown")
    for run in runs:
        del run["shown"]
    lines = [table]
    if value["capacity_requests_per_s"] is not None:
        lines.append(f"capacity (closed loop): {value['capacity_requests_per_s']:.3g} requests/s")
    lines.append(f"SLO {value['slo']}: {value['knee']['says']}")
    if value["predicted_knee"] is not None:
        lines.append(f"predicted: {value['predicted_knee']['says']}")
    return "\n".join(lines)
