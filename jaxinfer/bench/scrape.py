"""What jaxinfer's /metrics says, under the names of `Engine.stats`."""

from __future__ import annotations

from typing import Any

from jaxinfer.reading import Reading

COUNTS = {
    "moved_bytes": "moved_bytes_total",
    "operations": "operations_total",
    "tokens_run": "step_tokens_total",
    "tokens_padded": "step_slots_total",
    "steps": "steps_total",
    "failed_steps": "failed_steps_total",
    "preemptions": "num_preemptions_total",
    "programs": "compiles_total",
    "compiles_after_warmup": "compiles_after_warmup_total",
    "mbu": "mbu",
    "mfu": "mfu",
}


def stats(text: str) -> dict[str, Any] | None:
    """Counts by the names of `Engine.stats`; None when these are not the metrics of a jaxinfer server."""
    try:
        read = Reading.parse(text)
    except ValueError:
        return None
    values: dict[str, Any] = {key: read(name) for key, name in COUNTS.items() if read.has(name)}
    for part in ("engine", "dispatch", "wait"):
        known = read.has("host_seconds_total", part=part)
        values[f"{part}_s"] = read("host_seconds_total", part=part) if known else None
    pages = read.total("kv_cache_pages")
    values["pages_total"] = None if pages is None else round(pages)
    values["prefix_cache"] = {name: read(f"prefix_cache_{name}_total") for name in ("queries", "hits")}
    return values
