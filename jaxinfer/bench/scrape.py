"""What jaxinfer's /metrics says, under the names of `Engine.stats`."""

from __future__ import annotations

import re
from typing import Any

COUNTS = {
    "moved_bytes": "jaxinfer_moved_bytes_total",
    "operations": "jaxinfer_operations_total",
    "tokens_run": "jaxinfer_step_tokens_total",
    "tokens_padded": "jaxinfer_step_slots_total",
    "steps": "jaxinfer_steps_total",
    "failed_steps": "jaxinfer_failed_steps_total",
    "preemptions": "jaxinfer_num_preemptions_total",
    "programs": "jaxinfer_compiles_total",
    "compiles_after_warmup": "jaxinfer_compiles_after_warmup_total",
    "mbu": "jaxinfer_mbu",
    "mfu": "jaxinfer_mfu",
}
_LINE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)(?: \d+)?")


def stats(text: str) -> dict[str, Any] | None:
    """Counts by the names of `Engine.stats`; None when these are not the metrics of a jaxinfer server."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("jaxinfer_") and (match := _LINE.fullmatch(line)):
            part = re.search(r'part="(\w+)"', match[2] or "")
            found[match[1] + (f".{part[1]}" if part else "")] = float(match[3])
    if COUNTS["steps"] not in found:
        return None
    values: dict[str, Any] = {key: found[name] for key, name in COUNTS.items() if name in found}
    for key in ("engine", "dispatch", "wait"):
        values[f"{key}_s"] = found.get(f"jaxinfer_host_seconds_total.{key}")
    values["prefix_cache"] = {
        "queries": found.get("jaxinfer_prefix_cache_queries_total", 0.0),
        "hits": found.get("jaxinfer_prefix_cache_hits_total", 0.0),
    }
    return values
