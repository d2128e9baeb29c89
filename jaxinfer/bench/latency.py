"""`bench latency`: how long requests of one length take, by how many of them run together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxinfer.bench import report
from jaxinfer.bench.report import milliseconds
from jaxinfer.bench.workbench import Workbench, same_batch
from jaxinfer.core import ConfigError


def latency(
    bench: Workbench,
    batches: Sequence[int],
    prompt: int,
    output: int,
    *,
    repeats: int,
    seed: int,
    warm_up: int,
) -> dict[str, Any]:
    """The report as JSON, with a run for each batch size: `repeats` batches that arrive together at an idle
    engine.

    Raises ConfigError for no batch sizes or ones below 1, and when no request of the warm-up is answered.
    """
    check(batches, prompt, output, repeats)
    bench.warm_up(same_batch(prompt, output, max(batches), 1, seed)[0], warm_up)
    runs = []
    for batch in batches:
        measured = bench.measure_repeated(
            same_batch(prompt, output, batch, repeats, seed + 1_000 * batch), f"measuring a batch of {batch}"
        )
        runs.append(measured.result(batch=batch))
        bench.say(f"batch {batch}: {report.rates(runs[-1]['measured'])}")
    return {
        **report.heading("latency", bench.target),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "seed": seed,
        "runs": runs,
    }


def check(batches: Sequence[int], prompt: int, output: int, repeats: int) -> None:
    """Raises ConfigError for what cannot be measured; before a model is loaded."""
    if not batches:
        raise ConfigError("no batch sizes were given")
    for batch in batches:
        same_batch(prompt, output, batch, repeats, 0)


def page(value: dict[str, Any]) -> str:
    """The report for people: a row for each batch size."""
    return latency_table("batch", value["runs"], "batch")


def latency_table(title: str, runs: Sequence[dict[str, Any]], key: str) -> str:
    """A row a run: latencies in ms with what was predicted in brackets, rates, shares of the machine."""
    head = "TTFT p50,p95,p99,TPOT p50,p95,p99,gap p95,p99,e2e p50,p99,tok/s,MBU,MFU,padding,failed"
    rows: list[report.Row] = [(title, *head.split(","))]
    for run in runs:
        measured, predicted = run["measured"], run["predicted"]

        def cell(quantity: str, name: str, measured: Any = measured, predicted: Any = predicted) -> str:
            text = milliseconds(measured[quantity][name])
            return text if predicted is None else f"{text} ({milliseconds(predicted[quantity][name])})"

        shown = run[key]
        rows.append(
            (
                f"{shown:.4g}" if isinstance(shown, float) else str(shown),
                *(cell(q, n) for q in ("ttft_s", "tpot_s") for n in ("p50", "p95", "p99")),
                *(milliseconds(measured["gap_s"][n]) for n in ("p95", "p99")),
                *(milliseconds(measured["e2e_s"][n]) for n in ("p50", "p99")),
                f"{measured['output_tokens_per_s']:.1f}",
                *(report.percent(measured.get(name)) for name in ("mbu", "mfu", "padding_waste")),
                str(measured["refused"] + measured["failed"]),
            )
        )
    lines = [report.table(rows)]
    if any(run["predicted"] is not None for run in runs):
        lines.append("in ms; in brackets: predicted")
    compiles = sum(run["measured"].get("compiles_after_warmup") or 0 for run in runs)
    if compiles:
        lines.append(f"COMPILED {compiles:g} PROGRAMS AMID THE RUNS: their latencies hold those stalls")
    return "\n".join(lines)
