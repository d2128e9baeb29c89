"""What is computed from the figures of cells: recovered parts, spreads over seeds, Pareto fronts.

Nothing here is measured: everything can be computed again from results.json.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from jaxinfer.lab.compare.recipe import FULL

Row = dict[str, Any]


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Which of (cost, loss) are on the front: no other point is as low in both and lower in one. In order of
    cost; equal points are all on it or all not."""
    found, lowest = [], math.inf
    order = sorted(range(len(points)), key=lambda index: points[index])
    for index in order:
        cost, loss = points[index]
        if loss < lowest:
            lowest = loss
            found.append(index)
        elif found and points[found[-1]] == (cost, loss):
            found.append(index)
    return found


def spread(values: Sequence[float]) -> dict[str, float | int | None]:
    """Of seeds: mean, lowest, highest, standard deviation of the sample (None of fewer than two)."""
    return {
        "mean": statistics.fmean(values), "lowest": min(values), "highest": max(values),
        "deviation": statistics.stdev(values) if len(values) > 1 else None, "count": len(values),
    }  # fmt: skip


def nll(row: Row) -> float | None:
    """Nats a token of the first text."""
    return row["figures"]["perplexity"][0]["nll_per_token"]["value"]


def perplexity(row: Row) -> float | None:
    return row["figures"]["perplexity"][0]["per_token"]["value"]


def accuracy(row: Row) -> float | None:
    """Of the last set of questions, which is all of a format where there are several files of one."""
    choices = row["figures"]["choices"]
    return choices[-1]["acc"]["value"] if choices else None


def done(cells: Iterable[Row], kind: str = "quality") -> list[Row]:
    return [row for row in cells if row["kind"] == kind and row["status"] == "done"]


def recoveries(cells: Sequence[Row]) -> list[Row]:
    """For each variant, method, span, span of training and number of tokens, over seeds, how much of what the
    conversion lost came back:

      recovered_nats        (converted - uptrained) / (converted - original), in nats a token
      recovered_perplexity  the same of perplexities
      beyond_control        1 - (uptrained - control) / (converted - original), in nats: the control is the
                            original, trained on the same tokens, so that what both learn of the texts does
                            not count as recovery

    A figure is None where a cell that it needs is missing, or the conversion lost nothing.
    """
    rows = done(cells)
    found: dict[tuple, Row] = {}
    for row in rows:
        if row["role"] != "uptrained":
            continue
        span = row["span"]
        original = _only(rows, role="original", span=span)
        same = {"variant": row["variant"], "method": row["method"], "span": span}
        converted = _only(rows, role="converted", seed=row["seed"], **same) or _only(
            rows, role="converted", seed=None, **same
        )
        learnt = {"tokens": row["tokens"], "seed": row["seed"]}
        controls = [each for each in rows if trained_span(each) == trained_span(row)]
        control = _only(controls, role="control", span=span, **learnt)
        key = (row["variant"], row["method"], span, trained_span(row), row["tokens"])
        entry = found.setdefault(
            key,
            {
                **same, **_named_span(row), "tokens": row["tokens"], **_learnt(row),
                "seeds": [], "nats": [], "ppl": [], "beyond": [],
            },
        )  # fmt: skip
        entry["seeds"].append(row["seed"])
        entry["nats"].append(_part(nll, converted, row, converted, original))
        entry["ppl"].append(_part(perplexity, converted, row, converted, original))
        left = _part(nll, row, control, converted, original)
        entry["beyond"].append(None if left is None else 1 - left)
    return [
        {
            "variant": entry["variant"], "method": entry["method"], "span": entry["span"],
            **_named_span(entry), "tokens": entry["tokens"],
            **{key: entry[key] for key in ("learnt",) if key in entry}, "seeds": entry["seeds"],
            "recovered_nats": _over_seeds(entry["nats"]), "recovered_perplexity": _over_seeds(entry["ppl"]),
            "beyond_control": _over_seeds(entry["beyond"]),
        }
        for entry in found.values()
    ]  # fmt: skip


def trained_span(row: Row) -> str:
    """What its queries saw while the model learnt; results from before there was a choice do not say."""
    return row.get("trained_span", FULL)


def _named_span(row: Row) -> Row:
    """Named where it is not all."""
    return {} if trained_span(row) == FULL else {"trained_span": trained_span(row)}


def _only(rows: Sequence[Row], **wanted: Any) -> Row | None:
    return next((row for row in rows if all(row[key] == value for key, value in wanted.items())), None)


def _part(figure, above: Row | None, below: Row | None, whole: Row | None, least: Row | None) -> float | None:
    """(above - below) / (whole - least); None where one is missing or nothing was lost."""
    values = [None if row is None else figure(row) for row in (above, below, whole, least)]
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    a, b, w, low = known
    return (a - b) / (w - low) if w > low else None


def _over_seeds(values: Sequence[float | None]) -> dict[str, float | int | None] | None:
    known = [value for value in values if value is not None]
    return spread(known) if known else None


def beside_full(cells: Sequence[Row]) -> list[Row]:
    """Seconds a token of each model under each span beside those under its full attention, at the longest
    context of either kind (`predicted`, `measured`): `full_s`, `span_s`, and `share`, the second of the
    first."""
    rows = timed(cells)
    found = []
    for row in rows:
        full = _of_shape(rows, _shape(row), FULL)
        if row["span"] == FULL or full is None:
            continue
        for kind in ("predicted", "measured"):
            own, other = row["figures"][kind], full["figures"][kind]
            if not own or not other or None in (own[-1]["tpot_s"], other[-1]["tpot_s"]):
                continue
            assert own[-1]["context"] == other[-1]["context"], f"contexts of {row['model']} differ"
            seconds = {"full_s": other[-1]["tpot_s"], "span_s": own[-1]["tpot_s"]}
            found.append(
                {
                    "model": row["model"], "span": row["span"], "kind": kind,
                    "context": own[-1]["context"], **seconds,
                    "share": seconds["span_s"] / seconds["full_s"],
                }
            )  # fmt: skip
    return found


def timed(cells: Sequence[Row]) -> list[Row]:
    """The times of each shape under each span once, the first cell's that has them, with `model`: which
    variants ("original") have the shape, and by which methods where those of a variant come to several."""
    rows = done(cells, "speed")
    kept: list[Row] = []
    for row in rows:
        if _of_shape(kept, _shape(row), row["span"]) is None:
            kept.append({**row, "model": _models_of(rows, _shape(row))})
    return kept


def _models_of(rows: Sequence[Row], shape: Row) -> str:
    names: dict[str, None] = {}
    for row in rows:
        if _shape(row) == shape:
            name = row["variant"] or "original"
            several = any(each["variant"] == row["variant"] and _shape(each) != shape for each in rows)
            names[f"{name} {row['method']}" if several else name] = None
    return ", ".join(names)


def _shape(row: Row) -> Row:
    return row["figures"]["shape"]


def _of_shape(rows: Sequence[Row], shape: Row, span: str) -> Row | None:
    return next((row for row in rows if row["span"] == span and _shape(row) == shape), None)


def groups(cells: Sequence[Row]) -> list[Row]:
    """Cells that differ in their seed alone as one: spreads of nats, perplexity and accuracy."""
    return [_group(rows) for rows in _alike(cells)]


def _alike(cells: Sequence[Row]) -> list[list[Row]]:
    found: dict[tuple, list[Row]] = {}
    for row in done(cells):
        key = (row["role"], row["variant"], row["method"], row["tokens"], row["span"], trained_span(row))
        found.setdefault(key, []).append(row)
    return list(found.values())


def _learnt(row: Row) -> Row:
    """The tokens that were learnt from, where they are not those asked for, which whole steps round up."""
    training = row["figures"].get("training")
    return {} if training is None or training["tokens"] == row["tokens"] else {"learnt": training["tokens"]}


def _group(rows: Sequence[Row]) -> Row:
    first = rows[0]["figures"]
    agreements = [row["figures"]["agreement"] for row in rows]
    return {
        **{key: rows[0][key] for key in ("role", "variant", "method", "tokens", "span")},
        **_named_span(rows[0]),
        **_learnt(rows[0]),
        "kv_bytes_per_token": first["shape"]["kv_bytes_per_token"],
        "kv_heads": first["shape"]["kv_heads"],
        **{key: first["shape"][key] for key in ("kv_from",) if key in first["shape"]},
        "stderr": first["perplexity"][0]["nll_per_token"]["stderr"],
        "nats": _over_seeds([nll(row) for row in rows]),
        "perplexity": _over_seeds([perplexity(row) for row in rows]),
        "accuracy": _over_seeds([accuracy(row) for row in rows]),
        "same_next": _over_seeds([_agreement(a, "same_next") for a in agreements]),
        "kl": _over_seeds([_agreement(a, "kl") for a in agreements]),
    }


def _agreement(agreement: Row | None, figure: str) -> float | None:
    return None if agreement is None or agreement[figure] is None else agreement[figure]["value"]


def best(cells: Sequence[Row], speeds: Sequence[Row]) -> list[Row]:
    """Of each variant (None: the original) and span, the model with the least nats, with what it costs: KV
    bytes a token; predicted seconds a token and largest batch at the longest context. `fronts` names the
    costs on whose Pareto front it is."""
    kept: dict[tuple, tuple[Row, Row]] = {}
    for same in _alike(cells):
        group = _group(same)
        if group["role"] == "control" or group["nats"] is None:
            continue
        key = (group["variant"], group["span"])
        if key not in kept or group["nats"]["mean"] < kept[key][0]["nats"]["mean"]:
            kept[key] = group, _shape(same[0])
    rows, times = [], timed(speeds)
    for group, shape in kept.values():
        time = _of_shape(times, shape, group["span"])
        last = None if time is None else time["figures"]["predicted"][-1]
        rows.append(
            {
                **group, "tpot_s": None if last is None else last["tpot_s"],
                "largest_batch": None if last is None else last["largest_batch"],
                "context": None if last is None else last["context"], "fronts": [],
            }
        )  # fmt: skip
    for cost, sign in (("kv_bytes_per_token", 1), ("tpot_s", 1), ("largest_batch", -1)):
        known = [row for row in rows if row[cost] is not None]
        for index in pareto_front([(sign * row[cost], row["nats"]["mean"]) for row in known]):
            known[index]["fronts"].append(cost)
    return rows
