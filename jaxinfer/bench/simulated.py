"""What `jaxinfer simulate` says: the figures of a measured run, and what only a simulation can see."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxinfer.bench.load import Load
from jaxinfer.bench.predicted import Predictor
from jaxinfer.bench.records import Objective, RequestRecord, Summary
from jaxinfer.bench.report import NAMES, Row, milliseconds, percent, rates, revision, table, verdict, versions
from jaxinfer.simulator import Outcome

PARTS = ("linear", "decode_attention", "chunk_attention", "exchange")


def report(
    model: str,
    predictor: Predictor,
    load: Load,
    outcome: Outcome,
    records: list[RequestRecord],
    objective: Objective,
    wall_s: float,
) -> dict[str, Any]:
    """One run as JSON. `records`: those of its outcome. `wall_s`: seconds that the simulation took;
    `speed_up` is what was simulated over that. Shares (`mbu`, `mfu`, `padding_waste`, `walls`, `parts`,
    `held_by`) are of the time in which the device was busy, which is `busy_share` of all."""
    limits, totals, sheet = predictor.limits, outcome.totals, predictor.sheet
    busy = totals.busy_s or math.inf
    value: dict[str, Any] = {
        "benchmark": "simulate",
        "model": model,
        "device": None if sheet is None else sheet.name,
        "basis": predictor.basis,
        "engine": {
            "num_pages": limits.num_pages,
            "page_size": limits.page_size,
            "max_num_seqs": limits.max_num_seqs,
            "max_num_batched_tokens": limits.max_num_batched_tokens,
            "max_model_len": limits.max_model_len,
            "prefix_caching": predictor.prefix_caching,
            "asynchronous": predictor.asynchronous,
        },
        "load": load.described(),
        "simulated": Summary.of(records, objective).as_dict(),
        "steps": totals.steps,
        "step_s": totals.busy_s / max(1, totals.steps),
        "decode_share": totals.decode_steps / max(1, totals.steps),
        "busy_share": totals.busy_s / outcome.ended_s if outcome.ended_s else 0.0,
        "mbu": None if sheet is None else totals.moved_bytes / busy / sheet.bandwidth,
        "mfu": None if sheet is None else totals.operations / busy / sheet.rate(predictor.time.costs.dtype),
        "padding_waste": 1 - totals.tokens / totals.places if totals.places else 0.0,
        "parts": {name: getattr(totals, f"{name}_s") / busy for name in PARTS},
        "walls": {name: seconds / busy for name, seconds in _falling(totals.walls_s)},
        "running_peak": outcome.peaks.running,
        "waiting_peak": outcome.peaks.waiting,
        "pages_peak": outcome.peaks.pages,
        "pages_peak_share": outcome.peaks.pages / limits.usable_pages,
        "preemptions": outcome.preemptions,
        "held_by": {name: seconds / busy for name, seconds in _falling(outcome.held_s)},
        "simulated_s": outcome.ended_s,
        "wall_s": wall_s,
        "speed_up": outcome.ended_s / wall_s if wall_s > 0 else 0.0,
        "versions": versions(),
        "revision": revision(),
    }
    if objective.terms:
        broken = objective.broken(records)
        value["slo"] = {"terms": str(objective), "holds": not broken, "broken": broken}
    return value


def page(value: Mapping[str, Any]) -> str:
    """The report for people."""
    simulated, engine = value["simulated"], value["engine"]
    share = f" x {value['tensor_parallel']}" if value.get("tensor_parallel", 1) > 1 else ""
    lines = [
        f"{value['model']} on {value['device']}{share}, by {value['basis']}",
        f"{simulated['requests']} requests in {simulated['duration_s']:.2f} s: {simulated['ok']} answered"
        + "".join(f", {simulated[name]} {name}" for name in ("refused", "failed") if simulated[name]),
    ]
    lines += [f"  {count} x {error}" for error, count in list(simulated["errors"].items())[:5]]
    rows: list[Row] = [["ms", "mean", "p50", "p95", "p99", "max"]]
    for key, title in NAMES.items():
        spread = simulated[key]
        rows.append([title, *(milliseconds(spread[name]) for name in ("mean", "p50", "p95", "p99", "max"))])
    lines += [table(rows), rates(simulated)]
    walls = ", ".join(f"{name} {percent(part)}" for name, part in value["walls"].items())
    lines += [
        f"{value['steps']} steps of {value['step_s'] * 1e3:.2f} ms, busy {percent(value['busy_share'])} of "
        f"the time: MBU {percent(value['mbu'])}, MFU {percent(value['mfu'])}, "
        f"padding {percent(value['padding_waste'])}; bound by {walls}",
        f"at most {value['running_peak']} of {engine['max_num_seqs']} running, {value['waiting_peak']} "
        f"waiting, {value['pages_peak']} of {engine['num_pages'] - 1} pages "
        f"({percent(value['pages_peak_share'])}) held; {value['preemptions']} preemptions",
    ]
    if value["held_by"]:
        limits = ", ".join(f"{name} {percent(part)}" for name, part in value["held_by"].items())
        lines.append(f"somebody had to wait, of the time: for {limits}")
    if "slo" in value:
        lines.append(verdict(value["slo"]))
    if "against" in value:
        lines.append(_against(value["against"]))
    lines.append(
        f"{value['simulated_s']:.1f} s simulated in {value['wall_s']:.2f} s: {value['speed_up']:.0f} times "
        "as fast as the device"
    )
    return "\n".join(lines)


def _against(found: Mapping[str, Any]) -> str:
    """How far off, by latency and statistic."""
    names = ("mean", "p50", "p95", "p99")
    rows: list[Row] = [[f"against {found['log']}, ms", *(f"{name}  simulated  off" for name in names)]]
    for key, title in NAMES.items():
        cells = []
        for name in names:
            pair = found[key].get(name)
            cells.append("-" if pair is None else _pair(pair))
        rows.append([title, *cells])
    rate = found["output_tokens_per_s"]
    off = "" if rate["error"] is None else f" ({rate['error']:+.1%})"
    last = f"output tokens/s: {rate['measured']:.1f} measured, {rate['simulated']:.1f} simulated{off}"
    return f"{table(rows)}\n{last}"


def _pair(pair: Mapping[str, float | None]) -> str:
    off = "-" if pair["error"] is None else f"{pair['error']:+.1%}"
    return f"{milliseconds(pair['measured'])} {milliseconds(pair['simulated']):>9} {off:>7}"


def _falling(parts: Mapping[Any, float]) -> list[tuple[str, float]]:
    return sorted(parts.items(), key=lambda part: -part[1])
