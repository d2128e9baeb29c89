"""Compile the engine's programs and kernels for GPUs that are not here, and fail on what a GPU would pay for.

    python -m gpu_check [--target h200 --target l4] [--case PATTERN] [--json FILE] [--jobs N] [--keep FOLDER]

Each case is compiled in a process of its own. A failure: registers spilled, pages not written in place,
copies of pages or weights, more launches or temporary memory than the case's budget, over 60 s of compiling,
more memory or shared memory than the target has, a kernel that is not there, a compiler that dies. Needs the
extra [gpu-check]; no GPU, no driver.
The exit status is 0 when all is well, 1 with failures, 2 where nothing can be compiled.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from gpu_check.report import Report
from gpu_check.targets import CHECKED, TARGETS


@dataclass(frozen=True, slots=True)
class Options:
    targets: tuple[str, ...]
    cases: tuple[str, ...]
    json: Path | None
    jobs: int
    keep: Path | None


def parse(arguments: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(prog="python -m gpu_check", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", action="append", choices=sorted(TARGETS), help="(default: all checked)")
    parser.add_argument(
        "--case", action="append", help="names with * (default: all); --case list prints them"
    )
    parser.add_argument("--json", type=Path, help="write every report there")
    parser.add_argument("--jobs", type=int, default=1, help="children at a time")
    parser.add_argument("--keep", type=Path, help="keep the compiler's dumps in this folder")
    given = parser.parse_args(arguments)
    return Options(
        tuple(given.target or CHECKED), tuple(given.case or ("*",)), given.json, given.jobs, given.keep
    )


COLUMNS = (
    ("target", 6), ("case", 52), ("compile s", 9), ("launches", 8), ("loops", 5), ("copies", 6),
    ("args MiB", 8), ("pool MiB", 8), ("aliased MiB", 11), ("temp MiB", 9), ("kernels", 7), ("regs", 4),
    ("spill B", 7),
)  # fmt: skip


def line(report: Report) -> str:
    """One row of the table; text to the left, numbers to the right."""
    mib = 1 << 20
    values = (
        report.target, report.case, f"{report.compile_s:.1f}", report.launches, report.loops,
        len(report.copies), f"{report.argument_bytes / mib:.1f}", f"{report.pool_bytes / mib:.1f}",
        f"{report.aliased_bytes / mib:.1f}", f"{report.temp_bytes / mib:.2f}",
        len(report.kernels), report.most_registers, report.spill_bytes,
    )  # fmt: skip
    texts = [
        f"{value!s:<{width}}" if index < 2 else f"{value!s:>{width}}"
        for index, (value, (_, width)) in enumerate(zip(values, COLUMNS, strict=True))
    ]
    return "  ".join(texts) + ("  FAILED" if report.failures else "  ok")


def has_plugin() -> bool:
    """Whether JAX can compile for CUDA here."""
    return any(importlib.util.find_spec(name) for name in ("jax_cuda13_plugin", "jax_cuda12_plugin"))


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    os.environ["JAX_PLATFORMS"] = "cpu"  # before jax is imported: the plugin would look for a device
    if not has_plugin():
        print("gpu_check needs the CUDA plugin of jax: pip install '.[gpu-check]'", file=sys.stderr)
        return 2
    from gpu_check.aot import toolkit
    from gpu_check.cases import CASES
    from gpu_check.child import check

    if options.cases == ("list",):
        print("\n".join(CASES))
        return 0
    if toolkit() is None:
        print("gpu_check needs ptxas: pip install '.[gpu-check]'", file=sys.stderr)
        return 2
    wanted = [
        (name, target)
        for target in options.targets
        for name, case in CASES.items()
        if target in case.targets and any(fnmatch.fnmatch(name, pattern) for pattern in options.cases)
    ]
    if not wanted:
        print(f"no case is named {', '.join(options.cases)}; --case list prints them", file=sys.stderr)
        return 2
    print("  ".join(f"{name:<{w}}" if i < 2 else f"{name:>{w}}" for i, (name, w) in enumerate(COLUMNS)))
    reports = []
    with (
        tempfile.TemporaryDirectory(prefix="gpu_check.") as scratch,
        ThreadPoolExecutor(options.jobs) as pool,
    ):
        root = options.keep or Path(scratch)
        folders = [root / target / name.replace("/", ".") for name, target in wanted]
        jobs = [
            pool.submit(
                check, name, target, CASES[name].budget, folder,
                expected=CASES[name].kernels(TARGETS[target]),
            )
            for (name, target), folder in zip(wanted, folders, strict=True)
        ]  # fmt: skip
        for job in jobs:
            report = job.result()
            reports.append(report)
            print(line(report), flush=True)
            for failure in report.failures:
                print(f"    {failure}", flush=True)
    if options.json:
        options.json.write_text(json.dumps([report.to_json() for report in reports], indent=1))
    failed = sum(bool(report.failures) for report in reports)
    print(f"{len(reports)} compiled, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
