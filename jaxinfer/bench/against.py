"""A simulation held against a run that was measured: the same arrivals and lengths, and how far off it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxinfer.bench.load import Arrival, Load
from jaxinfer.bench.records import RequestRecord, Spread, Summary
from jaxinfer.core import ConfigError

LATENCIES = ("ttft", "tpot", "gap", "e2e")
STATISTICS = ("mean", "p50", "p95", "p99")


def load_of(records: Sequence[RequestRecord], *, seed: int = 0, name: str = "") -> Load:
    """The load of a measured run: the requests that were answered, when they arrived, as long as they were.

    What their prompts had in common is not in a log: each is drawn for itself. Of a closed loop the arrivals
    are those that were measured, however much sooner or later the simulation would have had a place. Raises
    ConfigError when none was answered.
    """
    arrivals = [
        Arrival(record.arrived_s, record.prompt_tokens, record.output_tokens)
        for record in records
        if record.status == "ok" and record.token_s
    ]
    if not arrivals:
        raise ConfigError(f"{name or 'the log'} holds no request that was answered")
    arrivals.sort(key=lambda arrival: arrival.at_s)
    return Load(tuple(arrivals), seed, None, {"kind": "log", "file": name})


def check_same(load: Load, records: Sequence[RequestRecord]) -> None:
    """Raise ConfigError unless a log is of this load: so many requests, each of these lengths."""
    asked = [(arrival.num_prompt, arrival.output_tokens) for arrival in load.arrivals]
    logged = [(record.prompt_tokens, record.asked_tokens) for record in records]
    if len(asked) != len(logged):
        raise ConfigError(
            f"the log is of {len(logged)} requests, the load of {len(asked)}: state the same load"
        )
    for index, (ours, theirs) in enumerate(zip(asked, logged, strict=True)):
        if ours != theirs:
            raise ConfigError(
                f"request {index} of the load has {ours[0]} + {ours[1]} tokens, of the log {theirs[0]} + "
                f"{theirs[1]}: state the same load, with the same --seed"
            )


def errors(measured: Sequence[RequestRecord], simulated: Sequence[RequestRecord]) -> dict[str, Any]:
    """By latency and statistic: measured and simulated seconds, and `error`, simulated / measured - 1. With
    the same of output tokens per second. What was not measured is left out."""
    ours, theirs = Summary.of(simulated), Summary.of(measured)
    found: dict[str, Any] = {}
    for name in LATENCIES:
        mine: Spread = getattr(ours, name)
        other: Spread = getattr(theirs, name)
        pairs = {of: (getattr(other, of), getattr(mine, of)) for of in STATISTICS}
        found[f"{name}_s"] = {of: _compared(*pair) for of, pair in pairs.items() if None not in pair}
    found["output_tokens_per_s"] = _compared(theirs.output_tokens_per_s, ours.output_tokens_per_s)
    return found


def _compared(measured: float, simulated: float) -> dict[str, float | None]:
    return {
        "measured": measured,
        "simulated": simulated,
        "error": simulated / measured - 1 if measured else None,
    }
