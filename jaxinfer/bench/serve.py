"""One load, measured: `bench serve` (requests that come and go) and `bench throughput` (a batch)."""

from __future__ import annotations

from typing import Any

from jaxinfer.bench import report
from jaxinfer.bench.load import Load
from jaxinfer.bench.workbench import Measured, Workbench


def serve(
    bench: Workbench, load: Load, warm_up: int, benchmark: str = "serve"
) -> tuple[Measured, dict[str, Any]]:
    """Warm up with `warm_up` requests, then run the load: the run, and the report of it as JSON.

    Raises ConfigError when no request of the warm-up is answered.
    """
    bench.warm_up(load, warm_up)
    measured = bench.measure(load, f"measuring {benchmark}")
    return measured, {**report.heading(benchmark, bench.target), **measured.result()}


def page(value: dict[str, Any]) -> str:
    """The report for people."""
    load = value["load"]
    kind = ", ".join(
        f"{name} {load[name]:g}" if isinstance(load[name], float) else f"{name} {load[name]}"
        for name in (
            "kind",
            "rate",
            "burstiness",
            "concurrency",
            "file",
            "prompt",
            "output",
            "shared_prefix",
            "seed",
        )
        if load.get(name) is not None
    )
    return "\n".join([f"{value['model']}, {value['target']}; {kind}", report.details(value)])
