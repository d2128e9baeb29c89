"""Trying the sizes that a kernel names as possible, on the device at hand; keeping the best of what was
right."""

from __future__ import annotations

import importlib
import time
from pathlib import Path

import jax

from pallas_kernels import tuning
from pallas_kernels.bench.rows import Bench, Row
from pallas_kernels.bench.workload import Workload

WORTH = 0.98
"""A candidate is recorded if it takes less than this share of what the kernel's own choice takes."""


def tune_row(bench: Bench, workload: Workload, name: str, path: str) -> Row:
    """Time a backend's own choice and each of its candidates on a workload, and record in the table at `path`
    the fastest that was right, if it beats the own choice. Its row says what was tried."""
    row: Row = {"case": workload.name, "shape": workload.shape, "backend": name, "kind": "tune"}
    if reason := bench.refusal(workload, name):
        return row | {"status": "refused", "reason": reason}
    candidates = getattr(importlib.import_module(f"pallas_kernels.{name}"), "candidates", None)
    if candidates is None or workload.operation == "mixed":
        return row | {"status": "refused", "reason": "it names no candidates for this"}
    operation = f"{name}.{workload.operation}"
    key = tuning.geometry_key(workload.geometry, len(workload.decodes))
    own = _attempt(bench, workload, name)
    tried = []
    for parameters in candidates(bench.device, workload.geometry, workload.operation):
        with tuning.trial(operation, key, parameters):
            got = _attempt(bench, workload, name)
        tried.append({"parameters": parameters, **got})
    right = [one for one in tried if one["status"] == "ok"]
    row |= {"status": own["status"], "own": own, "tried": tried, "key": key}
    best = min(right, key=lambda one: one["seconds"], default=None)
    if own["status"] == "ok" and best is not None and best["seconds"] < WORTH * own["seconds"]:
        entry = {
            "parameters": best["parameters"], "seconds": best["seconds"], "beside": own["seconds"],
            "date": time.strftime("%Y-%m-%d"), "jax": jax.__version__,
        }  # fmt: skip
        tuning.record(Path(path), bench.device.kind, operation, key, entry)
        row["recorded"] = entry
    return row


def _attempt(bench: Bench, workload: Workload, name: str) -> Row:
    """A candidate may be too large for the device, which is no failure: its row says so."""
    jax.clear_caches()  # what was traced keeps the parameters that it was traced with
    try:
        row = bench.attention(workload, name)
    except Exception as error:
        row = {"status": "failed", "reason": f"{type(error).__name__}: {str(error)[:200]}"}
    jax.clear_caches()
    return {key: row[key] for key in ("status", "reason", "seconds", "error") if key in row}
