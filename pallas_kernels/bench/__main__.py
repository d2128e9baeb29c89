"""Is each kernel right on this device, and how near is it to what the device can do?

    python -m pallas_kernels.bench [--cases decode,prefill,mixed,matmul] [--backends pallas_mosaic,xla]
                                   [--tiny [--interpret]] [--tune [FILE]] [--output FILE] [--seconds N]

Measured first: bandwidth of a copy and rate of a bfloat16 product. Then each case with each backend: compared
with the specification, and timed only if it is right. `floor` is what the case would take at those two
limits, of which the larger; cuDNN and torch (if there) have dense keys of the same shape. The table goes to
stderr, one line of JSON to stdout. The exit status is 1 where a backend that says it serves a case is wrong,
fails or hangs. Rows that there was no time for are "skipped", and counted in both.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from pallas_kernels import attention, tuning
from pallas_kernels.bench import matmuls
from pallas_kernels.bench.report import print_row, print_table
from pallas_kernels.bench.rows import DENSE, Options, Row
from pallas_kernels.bench.workload import TINY_WORKLOADS, WORKLOADS

TORCH = Path(__file__).parents[2] / "benchmarks" / "torch_attention.py"
"""The one file that imports torch, if it is there: a program of its own, since no module of ours may need
it."""

JOB_TIMEOUT_S = 150.0
"""Most that one row may take, compiling included: then it hangs."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.bench", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--cases", default="", help="words that a case's name holds, with commas (default: all)"
    )
    parser.add_argument("--backends", default="", help="with commas (default: all but the reference)")
    parser.add_argument(
        "--tiny", action="store_true", help="small cases, which prove this program on any machine"
    )
    parser.add_argument("--interpret", action="store_true", help="GPU kernels in the interpreter, slowly")
    parser.add_argument(
        "--tune", nargs="?", const=str(tuning.PATH), help="try the kernels' candidates too; writes FILE"
    )
    parser.add_argument("--output", type=Path, help="append every row there as it comes")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no row after that long")
    parser.add_argument("--budget", type=float, default=1.0, help="seconds of timing per row")
    parser.add_argument("--revision", default="", help="where git does not tell it")
    parser.add_argument("--no-torch", action="store_true")
    return parser.parse_args(arguments)


def plan(given: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows to make, in order: limits, then by case."""
    words = [word for word in given.cases.split(",") if word]
    backends = [name for name in given.backends.split(",") if name]
    known = (*attention.BACKENDS, DENSE, matmuls.PLAIN)
    unknown = [name for name in backends if name not in known]
    if unknown:
        raise SystemExit(f"no backend is called {', '.join(unknown)}; there are {', '.join(known)}")
    ours = [name for name in attention.BACKENDS if name in backends or (not backends and name != "reference")]

    def wanted(name: str) -> bool:
        return not words or any(word in name for word in words)

    jobs: list[dict[str, Any]] = [{"kind": "limits"}]
    dense: set[str] = set()
    for workload in TINY_WORKLOADS if given.tiny else WORKLOADS:
        if not wanted(workload.name):
            continue
        for name in ours:
            jobs.append({"kind": "attention", "case": workload.name, "backend": name})
            if given.tune and name.startswith("pallas"):
                tune = {"kind": "tune", "case": workload.name, "backend": name, "path": given.tune}
                jobs.append(tune)
        if workload.shape not in dense and (not backends or DENSE in backends):
            dense.add(workload.shape)
            jobs.append({"kind": "attention", "case": workload.name, "backend": DENSE})
    for case in matmuls.TINY_MATMULS if given.tiny else matmuls.MATMULS:
        if wanted(case.name):
            for name in matmuls.BACKENDS:
                beside = name == matmuls.PLAIN and case.format == "int8"  # once for each shape
                if beside if name == matmuls.PLAIN else not backends or name in backends:
                    jobs.append({"kind": "matmul", "case": case.name, "backend": name})
    if len(jobs) == 1:
        raise SystemExit(f"no case holds {given.cases!r}")
    return [{"number": number, **job} for number, job in enumerate(jobs)]


def run(jobs: list[dict[str, Any]], given: argparse.Namespace) -> list[Row]:
    """All rows, each worker process taking over where the one before died."""
    from pallas_kernels.bench.children import work

    rows: list[Row] = []
    options = Options(given.interpret, given.budget, (2 << 20) if given.tiny else (2 << 30))
    deadline = time.monotonic() + given.seconds
    for row in work(jobs, options, tiny=given.tiny, timeout=JOB_TIMEOUT_S, deadline=deadline):
        rows.append(row)
        print_row(row)
        if given.output:
            with given.output.open("a") as file:
                file.write(json.dumps(row) + "\n")
    return rows


def torch_rows(given: argparse.Namespace, shapes: set[str]) -> list[Row]:
    """What torch takes for the same shapes, in a process of its own; [] without it."""
    if given.no_torch or not TORCH.exists():
        return []
    asked = {}
    for workload in TINY_WORKLOADS if given.tiny else WORKLOADS:
        even = len(set(workload.keys)) == 1 and workload.operation != "mixed"
        if workload.shape in shapes and even:
            asked[workload.shape] = {
                "shape": workload.shape, "rows": len(workload.keys), "keys": workload.keys[0],
                "queries": workload.tokens // len(workload.keys), "heads": workload.heads,
                "kv_heads": workload.kv_heads, "width": workload.width,
            }  # fmt: skip
    try:
        done = subprocess.run(
            [sys.executable, str(TORCH)], input=json.dumps(list(asked.values())), text=True,
            stdout=subprocess.PIPE, timeout=2 * JOB_TIMEOUT_S, check=True,
        )  # fmt: skip
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        return [{"backend": "torch", "status": "refused", "reason": f"{type(error).__name__}: {error}"[:200]}]


def versions(revision: str) -> dict[str, str]:
    found = {"python": platform.python_version(), "date": time.strftime("%Y-%m-%d")}
    for name in (
        "jax",
        "jaxlib",
        "jax-cuda13-plugin",
        "jax-cuda12-plugin",
        "nvidia-cudnn-cu13",
        "torch",
        "triton",
    ):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if not revision:
        asked = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"],
            capture_output=True, text=True,
        )  # fmt: skip
        revision = asked.stdout.strip() or "unknown"
    return {**found, "revision": revision}


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    # Workers and torch come one after the other, and none may keep what it does not use.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    rows = run(plan(given), given)
    first = rows.pop(0)
    measured = {name: first.get(name) for name in ("copy", "copy_memcpy", "copy_kernel", "matmul")}
    rows += torch_rows(given, {row["shape"] for row in rows if row.get("status") == "ok" and "shape" in row})
    report: dict[str, Any] = {
        "device": first.get("device"), **versions(given.revision), "limits": measured, "tiny": given.tiny,
    }  # fmt: skip
    bad = print_table(rows, measured)
    if first.get("status"):
        bad.append(first)
        print(f"the limits could not be measured: {first.get('reason')}", file=sys.stderr)
    skipped = sum(row.get("status") == "skipped" for row in rows)
    print(f"{len(rows)} rows: {len(bad)} wrong or failed, {skipped} skipped", file=sys.stderr)
    print(json.dumps({**report, "wrong": len(bad), "skipped": skipped, "cases": rows}))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
