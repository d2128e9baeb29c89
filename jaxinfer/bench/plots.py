"""Pictures of reports, as PNG. matplotlib is imported when one is wanted: it comes with `jaxinfer[plots]`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.bench.records import Objective, RequestRecord
from jaxinfer.bench.workbench import Measured
from jaxinfer.core import ConfigError

BLUE, ORANGE, GREY, RED = "#2f6fb2", "#d9822b", "#8a8f98", "#c23b3b"


def check(path: str | None) -> None:
    """Raise ConfigError now where a picture could not be written after the run; None asks for none."""
    if path is None:
        return
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed: pip install 'jaxinfer[plots]'"
        ) from None
    if Path(path).suffix.lower() != ".png":
        raise ConfigError(f"--plot writes PNG: the file must end with .png, got {path}")
    if not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {Path(path).absolute().parent}")


def run(path: str, measured: Measured, title: str) -> None:
    """Of one run: the share of requests (of gaps: of tokens) served within a time, predicted beside measured.

    Raises OSError.
    """
    figure, axes = _figure(3, title)
    panels: list[tuple[str, Callable[[RequestRecord], list[float]]]] = [
        ("TTFT", lambda record: [] if record.ttft_s is None else [record.ttft_s]),
        ("TPOT", lambda record: [] if record.tpot_s is None else [record.tpot_s]),
        ("gap between tokens", lambda record: record.gaps_s),
    ]
    for axis, (name, values_of) in zip(axes, panels, strict=True):
        kinds = [
            ("measured", measured.run.records, BLUE, "-"),
            ("predicted", measured.predicted, ORANGE, "--"),
        ]
        for label, records, colour, style in kinds:
            answered = [record for record in records or [] if record.status == "ok"]
            values = np.sort([value for record in answered for value in values_of(record)]) * 1e3
            if len(values):
                shares = np.arange(1, len(values) + 1) / len(values)
                axis.step(values, shares, where="post", color=colour, linestyle=style, label=label)
        quantity = {"TTFT": "ttft", "TPOT": "tpot"}.get(name, "gap")
        for term in measured.objective.terms:
            if term.quantity == quantity:
                axis.axvline(term.limit_s * 1e3, color=RED, linewidth=0.8)
        axis.set(xlabel=f"{name}, ms", ylim=(0, 1.02))
        if axis.lines:
            axis.legend(loc="lower right", frameon=False)
    axes[0].set_ylabel("share served within")
    _save(figure, path)


def sweep(path: str, report: dict[str, Any], objective: Objective) -> None:
    """Latency against throughput, a point a run (in red where the objective broke), lines in the order of the
    load; the limits of the objective, and the knee. Raises OSError."""
    figure, axes = _figure(2, f"{report['model']}: latency against throughput")
    runs = [run for run in report["runs"] if run["rate"] is not None]
    runs.sort(key=lambda run: run["rate"])
    limits = {term.quantity: term for term in objective.terms}
    knee = _knee(report, runs)
    for axis, (key, name) in zip(axes, (("ttft_s", "TTFT"), ("tpot_s", "TPOT")), strict=True):
        for percentile, style, width in (("p50", ":", 0.8), ("p95", "-", 1.6), ("p99", "--", 0.8)):
            points = _points(runs, "measured", key, percentile)
            if points:
                axis.plot(*zip(*points, strict=True), style, color=BLUE, linewidth=width, label=percentile)
        for holds, colour in ((True, BLUE), (False, RED)):
            judged = [run for run in runs if run["measured"]["slo"]["holds"] == holds]
            points = _points(judged, "measured", key, "p95")
            if points:
                axis.plot(*zip(*points, strict=True), "o", color=colour, ms=4)
        points = _points(runs, "predicted", key, "p95")
        if points:
            axis.plot(
                *zip(*points, strict=True), "-x", color=ORANGE, ms=4, linewidth=1.0, label="p95 predicted"
            )
        if key[:4] in limits:
            axis.axhline(limits[key[:4]].limit_s * 1e3, color=RED, linewidth=0.8, label=str(limits[key[:4]]))
        if knee is not None:
            axis.axvline(knee, color=GREY, linewidth=0.8, linestyle="-.", label="knee")
        axis.set(xlabel="output tokens/s", ylabel=f"{name}, ms", yscale="log")
        if axis.lines:
            axis.legend(
                frameon=False, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3
            )
    _save(figure, path)


def _points(
    runs: Sequence[dict[str, Any]], source: str, key: str, percentile: str
) -> list[tuple[float, float]]:
    """(tokens per second, milliseconds) of each run; those of one load as one, their mean."""
    by_rate: dict[float, list[tuple[float, float]]] = {}
    for run in runs:
        value = run[source]
        if value is not None and value[key][percentile] is not None:
            point = value["output_tokens_per_s"], value[key][percentile] * 1e3
            by_rate.setdefault(run["rate"], []).append(point)
    return [
        (sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points))
        for points in by_rate.values()
    ]


def _knee(report: dict[str, Any], runs: Sequence[dict[str, Any]]) -> float | None:
    """Tokens per second of the highest load that held."""
    holds_at = report["knee"]["holds_at"]
    rates = [run["measured"]["output_tokens_per_s"] for run in runs if run["rate"] == holds_at]
    return rates[0] if rates and report["knee"]["kind"] == "found" else None


def by(path: str, report: dict[str, Any], key: str, label: str) -> None:
    """TTFT and TPOT of each run against `key` (batch, context), measured and predicted. Raises OSError."""
    figure, axes = _figure(2, f"{report['model']}: by {label}")
    for axis, (quantity, name) in zip(axes, (("ttft_s", "TTFT"), ("tpot_s", "TPOT")), strict=True):
        for source, colour, marker in (("measured", BLUE, "o"), ("predicted", ORANGE, "x")):
            for percentile, style in (("p50", "-"), ("p95", "--")):
                points = [
                    (run[key], run[source][quantity][percentile] * 1e3)
                    for run in report["runs"]
                    if run[source] is not None and run[source][quantity][percentile] is not None
                ]
                if points:
                    axis.plot(
                        *zip(*points, strict=True), style, color=colour, marker=marker, ms=4,
                        label=f"{source} {percentile}",
                    )  # fmt: skip
        axis.set(xlabel=label, ylabel=f"{name}, ms", xscale="log", ylim=(0, None))
        if axis.lines:
            axis.legend(frameon=False)
    _save(figure, path)


def _figure(panels: int, title: str) -> tuple[Any, Any]:
    """A figure of its own: pyplot would keep it, and look for a display."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * panels, 3.8), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(1, panels)
    for axis in axes:
        axis.grid(color="#e4e6ea", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Any, path: str) -> None:
    figure.savefig(path, dpi=144, format="png")
