"""results.json and report.md of a comparison. The report is made from the results alone.

    {"format", "name", "recipe": what was asked for, "versions", "revision", "device",
     "source": {"name", "model", "shape", "training"},
     "cells": [{"id", "kind": quality | speed | similarity,
                "role": original | control | converted | uptrained,
                "variant", "method", "tokens", "seed", "span", "config": what the id is a hash of,
                "status": done | failed | missing, "error", "figures", "versions", "revision", "seconds"}],
     "derived": {"recoveries", "best"}: see `jaxinfer.lab.compare.derive`}

Perplexities are per token; nats are natural logarithms; bytes and seconds are plain.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxinfer.lab.compare import derive
from jaxinfer.lab.compare.recipe import FULL, Recipe

FORMAT = "jaxinfer-lab-compare-1"
PACKAGES = ("jaxinfer", "jax", "jaxlib", "flax", "optax", "numpy")
COSTS = {"kv_bytes_per_token": "KV bytes", "tpot_s": "TPOT", "largest_batch": "batch"}


def results(recipe: Recipe, rows: list[dict[str, Any]], source: dict[str, Any]) -> dict[str, Any]:
    """What results.json has."""
    return {
        "format": FORMAT, "name": recipe.name, "recipe": as_json(recipe), "versions": versions(),
        "revision": revision(), "device": _device(), "source": source, "cells": rows,
        "derived": derived(rows),
    }  # fmt: skip


def derived(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All that is computed from figures."""
    return {"recoveries": derive.recoveries(rows), "best": derive.best(rows, rows)}


def as_json(value: Any) -> Any:
    """A recipe, or a part of one, as JSON has it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: as_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: as_json(each) for key, each in value.items()}
    return [as_json(each) for each in value] if isinstance(value, list | tuple) else value


@functools.cache
def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    return found | {name: importlib.metadata.version(name) for name in PACKAGES}


@functools.cache
def revision() -> str | None:
    """The commit of this program's own checkout, with a + where jaxinfer/ has changes; None elsewhere."""
    root = Path(__file__).parents[3]

    def git(*words: str) -> str:
        command = ["git", "-C", str(root), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != root.resolve():
            return None  # installed inside somebody else's repository
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "jaxinfer")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _device() -> dict[str, Any]:
    import jax

    devices = jax.devices()
    return {
        "platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices),
        "cores": os.cpu_count(),
    }  # fmt: skip


def in_short(record: dict[str, Any]) -> str:
    """A finished cell in a few words, for the line of progress."""
    found = record["figures"]
    if "keys" in found:
        return f"{len(found['keys'])} layers"
    if "predicted" in found:
        last = found["predicted"][-1]
        return f"TPOT {_ms(last['tpot_s'])} ms on {found['device']} at {last['context']} tokens"
    value = found["perplexity"][0]["per_token"]["value"]
    return f"perplexity {'infinite' if value is None else f'{value:.3f}'}"


def write(value: dict[str, Any], output: Path) -> None:
    """results.json and report.md, each complete or as it was. Raises OSError."""
    for name, text in (
        ("results.json", json.dumps(value, indent=1, allow_nan=False) + "\n"),
        ("report.md", page(value)),
    ):
        partial = output / f".{name}.{os.getpid()}.partial"  # a report may be asked for while cells run
        partial.write_text(text, encoding="utf-8")
        partial.rename(output / name)


# ---------------------------------------------------------------------------------------------- the page


def page(value: dict[str, Any]) -> str:
    """The report as Markdown."""
    source, rows = value["source"], value["cells"]
    shape = source["shape"]
    spans = list(dict.fromkeys(row["span"] for row in rows if row["kind"] == "quality"))
    parts = [
        f"# {value['name']}",
        f"Original: {source['model']}, {shape['parameters'] / 1e6:.3g} million parameters, "
        f"{shape['query_heads']} query heads, KV heads {_heads(shape)}, "
        f"{shape['kv_bytes_per_token']:.0f} KV bytes a token (bfloat16). {_programs(value)}, "
        f"{value['device']['count']} x {value['device']['kind']}.",
    ]
    for span in spans:
        parts += [f"## Quality, span {span}", *_quality(rows, span)]
    if value["derived"]["recoveries"]:
        parts += ["## What uptraining brought back", *_recoveries(value["derived"]["recoveries"])]
    parts += ["## What it costs", *_costs(value["derived"]["best"], rows)]
    parts += [*_speeds(rows), *_beside_full(rows)]
    if missing := sum(row["status"] == "missing" for row in rows):
        parts.append(f"{missing} of {len(rows)} cells have not been run.")
    parts += _failures(rows)
    parts += ["## Pictures", *_pictures(rows)]
    return "\n\n".join(parts) + "\n"


def _programs(value: dict[str, Any]) -> str:
    """Revisions of jaxinfer and versions of jax by which cells were run; of a report without any, its own."""
    rows = [row for row in value["cells"] if row["status"] == "done"] or [value]
    revisions = dict.fromkeys(row["revision"] or row["versions"]["jaxinfer"] for row in rows)
    versions = dict.fromkeys(row["versions"]["jax"] for row in rows)
    return f"jaxinfer {', '.join(revisions)}, jax {', '.join(versions)}"


def _quality(rows: Sequence[dict[str, Any]], span: str) -> list[str]:
    texts = [row for row in derive.done(rows) if row["span"] == span]
    if not texts:
        return ["Nothing was measured."]
    first = texts[0]["figures"]["perplexity"][0]
    groups = [group for group in derive.groups(rows) if group["span"] == span]
    optional = [
        (name, key)
        for name, key in (("accuracy", "accuracy"), ("same next", "same_next"), ("KL, nats", "kl"))
        if any(group[key] is not None for group in groups)
    ]  # fmt: skip
    head = ["model", "method", "tokens", "seeds", "KV heads", "nats", "perplexity", *(n for n, _ in optional)]
    table = [head]
    for group in groups:
        cells = [group["variant"] or group["role"], group["method"] or "", _tokens(group)]
        cells += [str(group["nats"]["count"]) if group["nats"] else "-", _heads(group)]
        cells += [_spread(group["nats"], 4), _spread(group["perplexity"], 3)]
        table.append([*cells, *(_spread(group[key], 4) for _, key in optional)])
    about = (
        f"{first['name']}: {first['counted']} tokens in {first['windows']} windows. ± is the standard "
        "deviation over seeds; the control is the original, trained on the same tokens."
    )
    if span != FULL and any(group["same_next"] is not None for group in groups):
        about += " Same next is against the original with all of its attention, not under the span."
    errors = [group["stderr"] for group in groups if group["stderr"] is not None]
    if errors:
        about += f" The standard error of one model's nats over windows is at most {max(errors):.3f}."
    return [about, markdown(table)]


def _recoveries(found: Sequence[dict[str, Any]]) -> list[str]:
    table = [
        ["variant", "method", "span", "tokens", "seeds", "of nats", "of perplexity", "beyond the control"]
    ]
    for one in found:
        cells = [one["variant"], one["method"], one["span"], _tokens(one), str(len(one["seeds"]))]
        keys = ("recovered_nats", "recovered_perplexity", "beyond_control")
        table.append([*cells, *(_share(one[key]) for key in keys)])
    text = (
        "Shares of what the conversion lost: (converted - uptrained) / (converted - original). Beyond the "
        "control: 1 - (uptrained - control) / (converted - original) in nats, which leaves out what the "
        "original too learns of these texts. ± is the standard deviation over seeds, in brackets the "
        "lowest and the highest."
    )
    return [text, markdown(table)]


def _costs(found: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> list[str]:
    timed = derive.done(rows, "speed")
    head = [
        "model",
        "method",
        "tokens",
        "span",
        "KV bytes/token",
        "TPOT, ms",
        "largest batch",
        "nats",
        "on the front of",
    ]
    table = [head]
    for one in found:
        tpot, batch = one["tpot_s"], one["largest_batch"]
        table.append(
            [
                one["variant"] or "original", one["method"] or "", _tokens(one), one["span"],
                f"{one['kv_bytes_per_token']:.0f}", "-" if tpot is None else _ms(tpot),
                "-" if batch is None else str(batch), f"{one['nats']['mean']:.4f}",
                ", ".join(COSTS[cost] for cost in one["fronts"]) or "-",
            ]
        )  # fmt: skip
    text = "The best model of each variant: its quality, and what it costs."
    if timed:
        figures = timed[0]["figures"]
        text += (
            f" TPOT and largest batch are predicted for one {figures['device']} in bfloat16, at "
            f"{figures['predicted'][-1]['context']} tokens of context (TPOT of {figures['batch']} requests)."
        )
    return [text, markdown(table)]


def _speeds(rows: Sequence[dict[str, Any]]) -> list[str]:
    found = derive.timed(rows)
    if not found:
        return []
    device = found[0]["figures"]["device"]
    table = [
        ["model", "span", "context", "where", "TTFT, ms", "TPOT, ms", "KV of a sequence, MB", "largest batch"]
    ]
    for row in found:
        for where, kind in ((f"{device}, predicted", "predicted"), ("here, measured", "measured")):
            for one in row["figures"][kind]:
                kv = "-" if one["kv_bytes"] is None else f"{one['kv_bytes'] / 1e6:.3f}"
                cells = [row["model"], row["span"], str(one["context"]), where]
                cells += [_ms(one["ttft_s"]), _ms(one["tpot_s"]), kv, str(one.get("largest_batch", "-"))]
                table.append(cells)
    figures = found[0]["figures"]
    text = (
        f"Predicted: bfloat16, TPOT of {figures['batch']} requests at once, one prompt's TTFT. Measured: the "
        "median of one request at a time on the machine that ran this, in its own dtype."
    )
    return ["## Time and memory by context", text, markdown(table)]


def _beside_full(rows: Sequence[dict[str, Any]]) -> list[str]:
    found = derive.beside_full(rows)
    if not found:
        return []
    table = [["model", "span", "context", "where", "TPOT of full, ms", "TPOT, ms", "of full"]]
    for one in found:
        cells = [one["model"], one["span"], str(one["context"]), one["kind"]]
        table.append([*cells, _ms(one["full_s"]), _ms(one["span_s"]), f"{one['share']:.1%}"])
    text = "The same model, decoding with all of its attention and with the span, at the longest context."
    return ["## Spans beside full attention", text, markdown(table)]


def _failures(rows: Sequence[dict[str, Any]]) -> list[str]:
    failed = [row for row in rows if row["status"] == "failed"]
    if not failed:
        return []
    lines = [
        f"- {row['kind']} of {row['variant'] or row['role']} {row['method'] or ''} {row['tokens']} tokens, "
        f"seed {row['seed']}, span {row['span']}: {row['error']}"
        for row in failed
    ]
    return [f"## {len(failed)} cells failed", "\n".join(lines)]


def _pictures(rows: Sequence[dict[str, Any]]) -> list[str]:
    from jaxinfer.lab.compare.plots import wanted

    return [f"![{title}]({name})" for name, title in wanted(rows).items()]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns are in line, so that it can be read in a terminal too."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _tokens(row: dict[str, Any]) -> str:
    """Of uptraining: those learnt from, and under which span where not under all."""
    span = derive.trained_span(row)
    return str(row.get("learnt", row["tokens"])) + ("" if span == FULL else f", under {span}")


def _spread(found: dict[str, Any] | None, digits: int) -> str:
    if found is None:
        return "-"
    text = f"{found['mean']:.{digits}f}"
    return text if found["deviation"] is None else f"{text} ± {found['deviation']:.{digits}f}"


def _share(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    text = f"{found['mean']:.1%}"
    if found["deviation"] is None:
        return text
    return f"{text} ± {100 * found['deviation']:.1f} ({found['lowest']:.1%} .. {found['highest']:.1%})"


def _heads(shape: Mapping[str, Any]) -> str:
    """KV heads of the layers, and how many layers have K/V of their own where others read them."""
    counts, owners = shape["kv_heads"], shape.get("kv_from")
    text = str(counts[0]) if len(set(counts)) == 1 else ",".join(map(str, counts))
    return text if owners is None else f"{text} in {owners.count(None)} of {len(owners)} layers"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.3g}"
