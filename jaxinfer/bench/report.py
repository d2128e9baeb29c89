"""What a benchmark says: one JSON object for machines, tables for people."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from jaxinfer.bench.records import Objective, RequestRecord, Summary
from jaxinfer.bench.target import Run, Target

Row = Sequence[str]


def heading(benchmark: str, target: Target) -> dict[str, Any]:
    """What every report begins with: what was measured, on what, by which versions."""
    return {"benchmark": benchmark, **target.describe(), "versions": versions(), "revision": revision()}


def versions() -> dict[str, str]:
    """Of what decides speed here; "" for what is not installed."""
    found = {"python": platform.python_version()}
    for name in ("jax", "jaxlib", "flax", "numpy", "jaxinfer"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = ""
    return found


def revision() -> str | None:
    """The commit that this package lies in, with "-dirty" where files were changed; None outside of git."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, cwd=Path(__file__).parent)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return said.stdout.strip() or None


def result(
    run: Run, objective: Objective, predicted: Sequence[RequestRecord] | None = None
) -> dict[str, Any]:
    """One run as JSON: the load, what was measured, and what was predicted of it (None: nothing was)."""
    return {
        "load": run.load.described(),
        "measured": {**Summary.of(run.records, objective).as_dict(), **run.engine, **judged(run, objective)},
        "predicted": None if predicted is None else Summary.of(predicted, objective).as_dict(),
    }


def judged(run: Run, objective: Objective) -> dict[str, Any]:
    """Whether the objective held; {} without one."""
    if not objective.terms:
        return {}
    broken = objective.broken(run.records)
    return {"slo": {"terms": str(objective), "holds": not broken, "broken": broken}}


def as_line(report: Mapping[str, Any]) -> str:
    """The last line of stdout."""
    return json.dumps(report, allow_nan=False)


# --------------------------------------------------------------------------------------------- tables


def table(rows: Iterable[Row]) -> str:
    """Columns in line: the first to the left, the others to the right."""
    cells = [list(map(str, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for first, *others in cells:
        parts = [first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(others, widths[1:], strict=True))]
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)


def details(value: Mapping[str, Any]) -> str:
    """One result (of `result`) as a page: counts, latencies with the prediction beside them, rates,
    shares."""
    measured, predicted = value["measured"], value["predicted"]
    counts = f"{measured['requests']} requests in {measured['duration_s']:.2f} s: {measured['ok']} answered"
    for name in ("refused", "failed", "short"):
        if measured[name]:
            counts += f", {measured[name]} {name}"
    lines = [counts]
    lines += [f"  {count} x {error}" for error, count in list(measured["errors"].items())[:5]]
    head = ["ms", "mean", "p50", "p95", "p99", "max"]
    rows: list[Row] = [head if predicted is None else [*head, "predicted p50", "p95", "p99"]]
    for key, title in NAMES.items():
        spread = measured[key]
        row = [title, *(milliseconds(spread[name]) for name in ("mean", "p50", "p95", "p99", "max"))]
        if predicted is not None:
            row += [milliseconds(predicted[key][name]) for name in ("p50", "p95", "p99")]
        rows.append(row)
    lines += [table(rows), rates(measured)]
    if predicted is not None:
        lines.append("predicted: " + rates(predicted))
    lines.append(shares(measured))
    if "slo" in measured:
        lines.append(verdict(measured["slo"]))
    return "\n".join(lines)


NAMES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "gap_s": "gap", "e2e_s": "end to end"}
"""Latencies of a report, and what people call them."""


def rates(measured: Mapping[str, Any]) -> str:
    """Requests and tokens per second."""
    text = (
        f"{measured['requests_per_s']:.3g} requests/s, "
        f"{measured['output_tokens_per_s']:.1f} output tokens/s, "
        f"{measured['total_tokens_per_s']:.1f} tokens/s with prompts"
    )
    good = measured["goodput_requests_per_s"]
    return text if good is None else f"{text}, goodput {good:.3g} requests/s"


def shares(measured: Mapping[str, Any]) -> str:
    """What of the machine was used, and what went to waste."""
    names = (
        ("mbu", "MBU"), ("mfu", "MFU"), ("padding_waste", "padding"), ("prefix_hit_rate", "prefix hits"),
        ("host_share", "Python"),
    )  # fmt: skip
    parts = [f"{title} {percent(measured.get(key))}" for key, title in names]
    compiles = measured.get("compiles_after_warmup")
    if compiles:
        parts.append(f"COMPILED {compiles:g} PROGRAMS AMID THE RUN: its latencies hold those stalls")
    if measured.get("preemptions"):
        parts.append(f"{measured['preemptions']:g} preemptions")
    return ", ".join(parts)


def verdict(slo: Mapping[str, Any]) -> str:
    """One line on the objective."""
    if slo["holds"]:
        return f"SLO {slo['terms']}: holds"
    return f"SLO {slo['terms']}: BROKEN, {'; '.join(slo['broken'])}"


def milliseconds(seconds: float | None) -> str:
    """Of a table, without its unit."""
    return "-" if seconds is None else f"{seconds * 1e3:.2f}" if seconds < 10 else f"{seconds * 1e3:.0f}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.1f} %"
