"""`bench context`: what a longer context costs one request: time to the first token, time per token,
memory."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from typing import Any

from jaxinfer.bench import report
from jaxinfer.bench.latency import latency_table
from jaxinfer.bench.target import InProcess
from jaxinfer.bench.workbench import Workbench, same_batch
from jaxinfer.core import ConfigError

SHORTEST = 1024


def lengths_up_to(limit: int, output: int) -> list[int]:
    """1024, 2048, ... and the longest prompt that leaves room for `output` tokens. Raises ConfigError."""
    longest = limit - output
    if longest < 1:
        raise ConfigError(f"{output} tokens of output leave no room for a prompt within {limit} tokens")
    lengths, length = [], SHORTEST
    while length < longest:
        lengths.append(length)
        length *= 2
    return [*lengths, longest]


def context(
    bench: Workbench, lengths: Sequence[int], output: int, *, repeats: int, seed: int, warm_up: int
) -> dict[str, Any]:
    """The report as JSON, with a run for each length of a prompt, one request at a time.

    `kv_bytes` of a run: what the pages of its longest request take. `peak_bytes`: the most that the device,
    on a CPU the process, has held so far. Raises ConfigError for a length that does not fit.
    """
    target = bench.target
    most = target.most_tokens
    if not lengths or min(lengths) < 1 or (most is not None and max(lengths) + output > most):
        raise ConfigError(
            f"prompts of {list(lengths)} tokens and {output} of output must be at least 1 and fit in {most}"
        )
    check(lengths, output, repeats)
    runs = []
    for length in lengths:
        # Each length runs programs of its own, and what compiles one is no time to a first token.
        bench.warm_up(same_batch(length, output, 1, 1, seed + length)[0], warm_up)
        measured = bench.measure_repeated(
            same_batch(length, output, 1, repeats, seed + length), f"measuring {length} tokens of context"
        )
        runs.append(
            measured.result(context=length, kv_bytes=_kv_bytes(target, length + output), **_peak(target))
        )
        bench.say(f"context {length}: {report.rates(runs[-1]['measured'])}")
    return {**report.heading("context", target), "output_tokens": output, "seed": seed, "runs": runs}


def check(lengths: Sequence[int], output: int, repeats: int) -> None:
    """Raises ConfigError for what no model could be asked; before one is loaded."""
    for length in lengths or (1,):
        same_batch(length, output, 1, repeats, 0)


def page(value: dict[str, Any]) -> str:
    """The report for people: a row for each length."""
    rows: list[report.Row] = [("context", "K/V MB", "peak MB")]
    for run in value["runs"]:
        sizes = [run["kv_bytes"], run["peak_bytes"]]
        rows.append((str(run["context"]), *("-" if size is None else f"{size / 1e6:.2f}" for size in sizes)))
    return "\n\n".join([latency_table("context", value["runs"], "context"), report.table(rows)])


def _kv_bytes(target: Any, tokens: int) -> int | None:
    """What the pages of `tokens` tokens take in the pool."""
    if not isinstance(target, InProcess):
        return None
    limits, pool = target.llm.limits, target.llm.stats().get("kv_bytes")
    if pool is None:
        return None
    pages = limits.most_pages(tokens - 1, limits.max_num_batched_tokens)  # the last token needs no K/V
    return pool // limits.num_pages * pages


def _peak(target: Any) -> dict[str, int | None]:
    if not isinstance(target, InProcess):
        return {"peak_bytes": None}
    import jax

    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return {"peak_bytes": stats["peak_bytes_in_use"]}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"peak_bytes": peak * (1 if sys.platform == "darwin" else 1024)}
