"""What came of each request, in times; the figures that follow from it; and the objective that it is held to.

All times are seconds from the start of the run. Latencies count from the arrival that was INTENDED: a driver
(or an engine amid a step) that takes a request late makes it wait, and leaving that wait out would make an
overloaded system look well. Percentiles are `numpy.percentile` (linear) over the requests that were answered;
a request that was refused or failed is counted by itself and never passes for a quick one: to an `Objective`
it took for ever.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args

import numpy as np

from jaxinfer.bench.lengths import MOST_TOKENS
from jaxinfer.core import ConfigError

Status = Literal["ok", "refused", "failed"]

PERCENTILES = (50, 95, 99)
FOR_EVER_S = 1e15
"""Stands in for the latency of a request without an answer; infinity cannot be interpolated."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request. `arrived_s` is when it was to arrive, `sent_s` when it was handed over; `token_s` when
    each of its tokens was told; `ended_s` when its end was. `asked_tokens`: how many tokens it was to get.

    "refused": turned away at the door (429, or a request that cannot be served); "failed": anything else that
    is no whole answer. `error` says why.
    """

    index: int
    arrived_s: float
    sent_s: float
    token_s: tuple[float, ...]
    ended_s: float
    prompt_tokens: int
    asked_tokens: int
    cached_tokens: int = 0
    status: Status = "ok"
    finish_reason: str | None = None
    error: str | None = None

    @property
    def output_tokens(self) -> int:
        return len(self.token_s)

    @property
    def ttft_s(self) -> float | None:
        """Intended arrival to first token; None without one."""
        return self.token_s[0] - self.arrived_s if self.token_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time a token after the first; None below two tokens."""
        gaps = len(self.token_s) - 1
        return (self.token_s[-1] - self.token_s[0]) / gaps if gaps > 0 else None

    @property
    def e2e_s(self) -> float:
        """Intended arrival to end."""
        return self.ended_s - self.arrived_s

    @property
    def gaps_s(self) -> list[float]:
        """Between one token and the next. Tokens that came together have gaps of 0."""
        return [b - a for a, b in zip(self.token_s, self.token_s[1:], strict=False)]


# ------------------------------------------------------------------------------------------------ log


class Log:
    """A file of raw times: one JSON object a request and line, with the number of the run (from 0) that it
    was of.

    It is opened at once, so that a path that cannot be written is told before minutes of loading. Raises
    OSError.
    """

    def __init__(self, path: str | Path):
        self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115  # closed by `close`
        self._runs = 0

    def add(self, records: Iterable[RequestRecord]) -> None:
        """Write the requests of one more run, every time as it was measured."""
        for record in records:
            value = {"run": self._runs, **dataclasses.asdict(record), "output_tokens": record.output_tokens}
            self._file.write(json.dumps(value, allow_nan=False) + "\n")
        self._file.flush()
        self._runs += 1

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_log(path: str | Path) -> list[list[RequestRecord]]:
    """What a `Log` holds, by run. Raises OSError, or ConfigError for another kind of file."""
    runs: list[list[RequestRecord]] = []
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                value = json.loads(line.decode())
                run = value.pop("run")
                del value["output_tokens"]
                record = RequestRecord(**value | {"token_s": tuple(value["token_s"])})
                _check_record(record)
                if type(run) is not int or not len(runs) - 1 <= run <= len(runs) or run < 0:
                    raise ValueError(f"run {run!r} after {len(runs)} runs")
                if run == len(runs):
                    runs.append([])
                runs[run].append(record)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise ConfigError(f"{path}:{number} is no line of a log of requests: {error}") from None
    return runs


def _check_record(record: RequestRecord) -> None:
    """Raises ValueError for what no run can have written."""
    for name in ("index", "prompt_tokens", "asked_tokens", "cached_tokens"):
        count = getattr(record, name)
        if type(count) is not int or not 0 <= count <= MOST_TOKENS:
            raise ValueError(f"{name} {count!r}")
    if record.status not in get_args(Status):
        raise ValueError(f"status {record.status!r}")
    times = [record.arrived_s, *record.token_s, record.ended_s]
    for time in (*times, record.sent_s):
        if isinstance(time, bool) or not isinstance(time, (int, float)) or not math.isfinite(time):
            raise ValueError(f"a time of {time!r}")
    # A timer may wake its sleeper up to the resolution of its clock too early.
    if times[0] < 0 or any(later < earlier - 1e-3 for earlier, later in itertools.pairwise(times)):
        raise ValueError(f"times that go back: {times[:5]}")


def joined(runs: Iterable[Sequence[RequestRecord]]) -> list[RequestRecord]:
    """Several runs as one, each beginning when the one before had ended."""
    runs = list(runs)
    if len(runs) == 1:
        return list(runs[0])
    whole: list[RequestRecord] = []
    start = 0.0
    for records in runs:
        for record in records:
            whole.append(
                dataclasses.replace(
                    record,
                    index=len(whole),
                    arrived_s=record.arrived_s + start,
                    sent_s=record.sent_s + start,
                    token_s=tuple(at + start for at in record.token_s),
                    ended_s=record.ended_s + start,
                )
            )
        start = max((record.ended_s for record in whole), default=0.0)
    return whole


# ------------------------------------------------------------------------------------------ objective

Quantity = Literal["ttft", "tpot", "gap", "e2e"]
_TERM = re.compile(r"(ttft|tpot|gap|itl|e2e)_(p\d+(?:\.\d+)?|mean|max)=(\d+(?:\.\d*)?|\.\d+)(us|ms|s)")
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, slots=True)
class Term:
    """One promise: this statistic ("p95", "mean", "max") of this quantity is at most `limit_s` seconds."""

    quantity: Quantity
    statistic: str
    limit_s: float

    @property
    def name(self) -> str:
        return f"{self.quantity}_{self.statistic}"

    def of(self, values: Sequence[float]) -> float:
        """The statistic of these values; 0 of none."""
        if not values:
            return 0.0
        if self.statistic == "mean":
            return float(np.mean(values))
        if self.statistic == "max":
            return float(np.max(values))
        return float(np.percentile(values, float(self.statistic[1:])))

    def __str__(self) -> str:
        unit, scale = ("s", 1.0) if self.limit_s >= 10 else ("ms", 1e3)
        return f"{self.name}={self.limit_s * scale:g}{unit}"


@dataclass(frozen=True, slots=True)
class Objective:
    """What is promised of a run (an SLO): all terms. Without terms, that every request is answered.

    Times to a first token (ttft), a token after it (tpot), between two tokens (gap, which others call itl)
    and to the end (e2e).
    """

    terms: tuple[Term, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Objective:
        """Read `ttft_p95=500ms,tpot_p95=50ms`: quantity_statistic=limit, in s, ms or us. Raises
        ConfigError."""
        terms: dict[str, Term] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            match = _TERM.fullmatch(part)
            if match is None or float(match[3]) <= 0:
                raise ConfigError(
                    f"a term of an SLO looks like ttft_p95=500ms (ttft, tpot, gap or e2e; pNN, mean or max; "
                    f"a limit above 0 in s, ms or us); got {part!r}"
                )
            if match[2].startswith("p") and float(match[2][1:]) > 100:
                raise ConfigError(f"{part!r}: a percentile is at most p100")
            quantity: Any = "gap" if match[1] == "itl" else match[1]
            term = Term(quantity, match[2], float(match[3]) * _UNITS[match[4]])
            if term.name in terms:
                raise ConfigError(f"the SLO states {term.name} twice")
            terms[term.name] = term
        return cls(tuple(terms.values()))

    def __str__(self) -> str:
        return ",".join(map(str, self.terms))

    def seen(self, records: Sequence[RequestRecord]) -> dict[str, float]:
        """The statistic of each term in seconds, by name. A request without an answer took FOR_EVER_S, and so
        did what nobody measured: a run of single tokens has no tpot and no gap."""
        values = {term.quantity: _values(records, term.quantity) for term in self.terms}
        lost = [FOR_EVER_S] * sum(record.status != "ok" for record in records)
        return {term.name: term.of([*values[term.quantity], *lost] or [FOR_EVER_S]) for term in self.terms}

    def broken(self, records: Sequence[RequestRecord]) -> list[str]:
        """The terms that do not hold, as one would say it; [] when all do."""
        seen = self.seen(records)
        found = [
            f"{term.name} {_shown(seen[term.name])} > {_shown(term.limit_s)}"
            for term in self.terms
            if seen[term.name] > term.limit_s
        ]
        lost = sum(record.status != "ok" for record in records)
        if not self.terms and lost:
            found.append(f"{lost} of {len(records)} requests were not answered")
        return found

    def margin(self, records: Sequence[RequestRecord]) -> float:
        """How near the worst term is to its limit: its statistic over the limit, 1 where it breaks."""
        seen = self.seen(records)
        return max((seen[term.name] / term.limit_s for term in self.terms), default=0.0)

    def met_by(self, record: RequestRecord) -> bool:
        """Whether one request had what was promised: goodput counts these.

        Its own ttft, tpot and e2e are within the limit, and the statistic of its own gaps is. Of two limits
        on one quantity (a p50 and a p99) the larger one is what every request can ask for.
        """
        if record.status != "ok":
            return False
        limits: dict[str, float] = {}
        for term in self.terms:
            if term.quantity == "gap":
                if term.of(record.gaps_s) > term.limit_s:
                    return False
            else:
                limits[term.quantity] = max(limits.get(term.quantity, 0.0), term.limit_s)
        return all(value <= limits[q] for q in limits for value in _values([record], q))


def _values(records: Iterable[RequestRecord], quantity: str) -> list[float]:
    """All values of a quantity among the answered requests, in seconds."""
    answered = [record for record in records if record.status == "ok"]
    if quantity == "gap":
        return [gap for record in answered for gap in record.gaps_s]
    found = (getattr(record, f"{quantity}_s") for record in answered)
    return [value for value in found if value is not None]


def _shown(seconds: float) -> str:
    if seconds >= FOR_EVER_S / 1e6:
        return "(not answered, or not measured)"
    return f"{seconds:.2f} s" if seconds >= 10 else f"{seconds * 1e3:.1f} ms"


# -------------------------------------------------------------------------------------------- summary


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one quantity, in seconds; None where nothing was measured."""

    count: int
    mean: float | None
    p50: float | None
    p95: float | None
    p99: float | None
    high: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if not values:
            return cls(0, None, None, None, None, None)
        p50, p95, p99 = map(float, np.percentile(values, PERCENTILES))
        return cls(len(values), math.fsum(values) / len(values), p50, p95, p99, max(values))

    def as_dict(self) -> dict[str, float | int | None]:
        value = dataclasses.asdict(self)
        return {"max" if name == "high" else name: number for name, number in value.items()}


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a run. `duration_s` goes from the first intended arrival to the last end. Rates are per
    second of it, and count answered requests alone; `goodput` those that met the objective, None without one.

    `short` counts answered requests that ended before the length asked for. `late` is how far behind its
    intended arrival a request was handed over: the driver's own lag, which latencies include.
    """

    requests: int
    ok: int
    refused: int
    failed: int
    short: int
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    goodput: float | None
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    ttft: Spread
    tpot: Spread
    gap: Spread
    e2e: Spread
    late: Spread
    errors: dict[str, int]

    @classmethod
    def of(cls, records: Sequence[RequestRecord], objective: Objective | None = None) -> Summary:
        """Of all requests of a run; `objective` None or without terms gives no goodput."""
        answered = [record for record in records if record.status == "ok"]
        began = min((record.arrived_s for record in records), default=0.0)
        duration = max((record.ended_s for record in records), default=0.0) - began
        prompt = sum(record.prompt_tokens for record in answered)
        output = sum(record.output_tokens for record in answered)
        errors: dict[str, int] = {}
        for record in records:
            if record.status != "ok":
                name = (record.error or record.status)[:200]
                errors[name] = errors.get(name, 0) + 1

        def rate(count: float) -> float:
            return count / duration if duration > 0 else 0.0

        goodput = None
        if objective is not None and objective.terms:
            goodput = rate(sum(map(objective.met_by, answered)))
        return cls(
            requests=len(records),
            ok=len(answered),
            refused=sum(record.status == "refused" for record in records),
            failed=sum(record.status == "failed" for record in records),
            short=sum(record.output_tokens < record.asked_tokens for record in answered),
            duration_s=duration,
            requests_per_s=rate(len(answered)),
            output_tokens_per_s=rate(output),
            total_tokens_per_s=rate(prompt + output),
            goodput=goodput,
            prompt_tokens=prompt,
            output_tokens=output,
            cached_tokens=sum(record.cached_tokens for record in answered),
            ttft=Spread.of(_values(answered, "ttft")),
            tpot=Spread.of(_values(answered, "tpot")),
            gap=Spread.of(_values(answered, "gap")),
            e2e=Spread.of(_values(answered, "e2e")),
            late=Spread.of([record.sent_s - record.arrived_s for record in records]),
            errors=errors,
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON: spreads as objects `ttft_s`, `tpot_s`, `gap_s`, `e2e_s` and `late_s`."""
        names = ("ttft", "tpot", "gap", "e2e", "late")
        value = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in names}
        value["goodput_requests_per_s"] = value.pop("goodput")
        return value | {f"{name}_s": getattr(self, name).as_dict() for name in names}
