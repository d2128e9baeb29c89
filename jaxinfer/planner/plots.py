"""Pictures of a plan: the roofline with its two phases, and TTFT and TPOT against the context length.

matplotlib is in the extra `plots` and imported here alone, when a picture is wanted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from jaxinfer.core import ConfigError
from jaxinfer.planner.costs import ModelCosts
from jaxinfer.planner.plan import Plan, phases, workload_memory
from jaxinfer.planner.step_time import RooflineTime, StepTime

PREFILL, DECODE = "#1f77b4", "#d62728"


def save_plot(base: Plan, path: Path, time_of: Callable[[ModelCosts], StepTime] | None = None) -> None:
    """Write a PNG (or what the ending of `path` says). Raises ConfigError without matplotlib; OSError."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("a plot needs matplotlib: pip install 'jaxinfer[plots]'") from None
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    roofline, first, token = figure.subplots(1, 3)
    _roofline(roofline, base)
    _curves(first, token, base, time_of)
    figure.suptitle(f"{base.model} on {base.sheet.name}, batch {base.workload.batch}")
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:  # an ending that matplotlib does not write
        raise ConfigError(f"plot {path}: {error}") from None


def _roofline(axes, base: Plan) -> None:
    sheet, dtype = base.sheet, base.costs.dtype
    ridge = sheet.ridge(dtype)
    low, high = min(0.5, base.decode.intensity / 2), max(ridge, base.prefill.intensity) * 8
    axes.loglog([low, ridge, high], [low * sheet.bandwidth, *[sheet.rate(dtype)] * 2], color="black")
    for phase, name, color in ((base.prefill, "prefill", PREFILL), (base.decode, "decode", DECODE)):
        top = min(phase.intensity * sheet.bandwidth, sheet.rate(dtype))
        axes.plot([phase.intensity], [top], "o", mfc="none", color=color)
        axes.plot([phase.intensity], [phase.operations / phase.expected_s], "o", color=color, label=name)
    axes.axvline(ridge, ls=":", color="grey", lw=1)
    axes.set(
        xlabel="operations per byte", ylabel="operations / s", title="roofline (ring: floor, dot: expected)"
    )
    axes.legend(loc="lower right")


def _curves(first, token, base: Plan, time_of: Callable[[ModelCosts], StepTime] | None) -> None:
    longest = max(4 * base.workload.context, base.costs.config.max_position)
    contexts = [c for c in (1 << p for p in range(7, 24)) if c <= longest] or [longest]
    time = RooflineTime(base.costs, base.sheet) if time_of is None else time_of(base.costs)
    workloads = [dataclasses.replace(base.workload, context=context) for context in contexts]
    prefills, decodes = zip(*(phases(base.costs, base.sheet, w, time) for w in workloads), strict=True)
    fits = longest_that_fits(base)
    full = [context for context in contexts if context > fits]
    for axes, name, color, shown in (
        (first, "TTFT of one prompt", PREFILL, prefills),
        (token, f"TPOT of {base.workload.batch}", DECODE, decodes),
    ):
        axes.loglog(contexts, [phase.expected_s for phase in shown], color=color, label="expected")
        axes.loglog(contexts, [phase.floor_s for phase in shown], color=color, ls="--", label="floor")
        if full:
            axes.axvspan(full[0], contexts[-1], color="grey", alpha=0.15, label="does not fit")
        axes.set(xlabel="context, tokens", ylabel="seconds", title=name)
        axes.grid(visible=True, which="both", lw=0.3)
        axes.legend()


def longest_that_fits(base: Plan) -> int:
    """Prompt tokens up to which the batch's K/V fit beside the weights; 0: none does."""
    low, high = 0, 1 << 24
    while low < high:
        middle = (low + high + 1) // 2
        workload = dataclasses.replace(base.workload, context=middle)
        memory = workload_memory(base.costs, base.sheet, workload, base.pool_limit_bytes)
        low, high = (middle, high) if memory.largest_batch >= workload.batch else (low, middle - 1)
    return low
