"""What is computed from figures: fronts by brute force, recovered parts by hand, reports from results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.lab.compare import derive, report

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "lab").glob("*/results.json"))
NUMBERS = st.integers(-4, 4) | st.floats(-10, 10)


@given(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=30))
def test_the_front_is_what_nothing_beats(points: list[tuple[float, float]]) -> None:
    def beaten(point: tuple[float, float]) -> bool:
        return any(a <= point[0] and b <= point[1] and (a, b) != point for a, b in points)

    front = derive.pareto_front(points)
    assert sorted(front) == [index for index, point in enumerate(points) if not beaten(point)]
    assert [points[index] for index in front] == sorted(points[index] for index in front)


def row(role: str, nats: float, seed: int | None = None, span: str = "full", **more: Any) -> dict[str, Any]:
    perplexity = {"nll_per_token": {"value": nats, "stderr": 0.1}, "per_token": {"value": 2.0**nats}}
    figures = {
        "shape": {"kv_bytes_per_token": 64.0, "kv_heads": [1]}, "perplexity": [perplexity], "choices": [],
        "agreement": None,
    }  # fmt: skip
    usual = {"variant": None, "method": None, "tokens": 0, "status": "done", "kind": "quality"}
    return {**usual, "role": role, "seed": seed, "span": span, "figures": figures, **more}


def grid(**more: Any) -> list[dict[str, Any]]:
    variant = {"variant": "MQA", "method": "mean"}
    return [
        row("original", 2.0),
        row("control", 1.5, 0, tokens=64),
        row("control", 1.75, 1, tokens=64),
        row("converted", 6.0, **variant),
        row("uptrained", 3.0, 0, tokens=64, **variant),
        row("uptrained", 2.5, 1, tokens=64, **variant, **more),
    ]


def test_recovered_parts() -> None:
    (found,) = derive.recoveries(grid())
    assert found["seeds"] == [0, 1]
    nats, beyond = found["recovered_nats"], found["beyond_control"]
    assert (nats["lowest"], nats["highest"], nats["mean"]) == (0.75, 0.875, 0.8125)
    assert nats["deviation"] == pytest.approx(0.125 / 2**0.5)
    assert (beyond["lowest"], beyond["highest"]) == (1 - 1.5 / 4, 1 - 0.75 / 4)
    assert found["recovered_perplexity"]["lowest"] == pytest.approx((64 - 8) / 60)


def test_what_is_missing_is_no_figure() -> None:
    rows = grid()
    (found,) = derive.recoveries([one for one in rows if one["role"] != "control"])
    assert found["beyond_control"] is None
    assert found["recovered_nats"]["count"] == 2
    (found,) = derive.recoveries(grid(status="failed"))
    assert found["seeds"] == [0]
    assert found["recovered_nats"]["deviation"] is None
    rows[0]["figures"]["perplexity"][0]["nll_per_token"]["value"] = 6.5  # the conversion lost nothing
    assert derive.recoveries(rows)[0]["recovered_nats"] is None
    (found,) = derive.recoveries([one for one in rows if one["role"] != "original"])
    assert found["recovered_nats"] is None


def test_the_table_says_which_original_the_next_tokens_are_of() -> None:
    """Perplexity is compared under one span, and agreement with the original as it was."""
    text = {"name": "t", "counted": 9, "windows": 3}
    rows = [row("original", 2.0, span=span) for span in ("full", "window:8")]
    for one in rows:
        one["figures"]["perplexity"][0].update(text)
    said = "Same next is against the original with all of its attention"
    assert said not in " ".join(report._quality(rows, "window:8"))
    for one in rows:
        one["figures"]["agreement"] = {"same_next": {"value": 0.5}, "kl_bound": None, "kl": None}
    assert said not in " ".join(report._quality(rows, "full"))
    assert said in " ".join(report._quality(rows, "window:8"))


def test_spans_are_compared_with_their_own_original() -> None:
    rows = grid() + [{**one, "span": "window:8"} for one in grid() if one["role"] != "original"]
    rows.append(row("original", 4.0, span="window:8"))
    full, window = derive.recoveries(rows)
    assert (full["span"], window["span"]) == ("full", "window:8")
    assert window["recovered_nats"]["lowest"] == 2 * full["recovered_nats"]["lowest"]


def test_the_best_of_each_variant_and_the_fronts() -> None:
    rows = grid()
    speed = [
        {
            "kind": "speed", "status": "done", "variant": variant, "span": "full",
            "method": variant and "first",
            "figures": {
                "shape": rows[0]["figures"]["shape"] | {"kv_heads": heads},
                "predicted": [{"tpot_s": tpot, "largest_batch": batch, "context": 8}],
            },
        }
        for variant, tpot, batch, heads in ((None, 2.0, 10, [4]), ("MQA", 1.0, 10, [1]))
    ]  # fmt: skip
    for one in rows:
        if one["variant"] is None:
            one["figures"]["shape"]["kv_heads"] = [4]
    found = {one["variant"]: one for one in derive.best(rows, speed)}
    assert found["MQA"]["tokens"] == 64
    assert found["MQA"]["nats"]["mean"] == 2.75
    assert found[None]["fronts"] == ["kv_bytes_per_token", "tpot_s", "largest_batch"]
    assert found["MQA"]["fronts"] == ["tpot_s"]


def test_a_model_has_the_time_of_its_own_shape() -> None:
    """A budget that methods spread over the layers, each in its way."""

    def timed(variant: str, method: str, heads: list[int], tpot: float) -> dict[str, Any]:
        shape = {"kv_heads": heads, "kv_bytes_per_token": 64.0}
        last = {"tpot_s": tpot, "largest_batch": 10, "context": 8, "ttft_s": 1.0, "kv_bytes": 8}
        figures = {"shape": shape, "predicted": [last], "measured": [], "device": "h200", "batch": 8}
        usual = {"kind": "speed", "status": "done", "span": "full", "variant": variant, "method": method}
        return {**usual, "figures": figures}

    rows = []
    for method, heads, nats in (("mean", [3, 1], 4.0), ("svd", [1, 3], 3.0), ("align", [3, 1], 3.5)):
        rows.append(row("converted", nats, variant="budget", method=method))
        rows[-1]["figures"]["shape"]["kv_heads"] = heads
    speeds = [
        timed("budget", "mean", [3, 1], 1.0), timed("budget", "svd", [1, 3], 2.0),
        timed("budget", "align", [3, 1], 1.0), timed("stated", "mean", [1, 3], 2.0),
    ]  # fmt: skip
    (best,) = derive.best(rows, speeds)
    assert (best["method"], best["tpot_s"]) == ("svd", 2.0)
    kept = derive.timed(speeds)
    assert [one["model"] for one in kept] == ["budget mean, budget align", "budget svd, stated"]
    page = "\n".join(report._speeds(speeds))
    assert page.count("h200, predicted") == 2


def test_the_report_shows_the_tokens_that_were_learnt() -> None:
    """Whole steps round up what was asked for."""
    rows = grid()
    for one in rows:
        if one["tokens"]:
            one["figures"]["training"] = {"tokens": 96 if one["variant"] else 64}
        one["figures"]["perplexity"][0] |= {"name": "t", "counted": 9, "windows": 1}
    shown = [
        [cell.strip() for cell in line.split("|")] for line in report._quality(rows, "full")[-1].split("\n")
    ]
    assert [(line[1], line[3]) for line in shown[2:]] == [
        ("original", "0"), ("control", "64"), ("MQA", "0"), ("MQA", "96"),
    ]  # fmt: skip
    (found,) = derive.recoveries(rows)
    assert report._tokens(found) == "96"


def test_a_report_names_every_revision_that_ran_its_cells() -> None:
    def ran(revision: str | None, status: str = "done", jax: str = "1") -> dict[str, Any]:
        return {"revision": revision, "status": status, "versions": {"jax": jax, "jaxinfer": "0.1"}}

    value = {"cells": [ran("a"), ran("b+", jax="2"), ran("a"), ran("c", "missing"), ran(None)], **ran("d")}
    assert report._programs(value) == "jaxinfer a, b+, 0.1, jax 1, 2"
    assert report._programs({"cells": [ran("c", "missing")], **ran("d")}) == "jaxinfer d, jax 1"


def test_what_was_learnt_under_a_span_has_the_control_that_learnt_so_too() -> None:
    under = {"span": "window:8", "tokens": 64, "seed": 0}
    learnt = {"variant": "MQA", "method": "mean", **under}
    rows = [
        row("original", 2.0, span="window:8"),
        row("converted", 4.0, span="window:8", variant="MQA", method="mean"),
        row("control", 1.9, **under), row("control", 1.5, trained_span="window:8", **under),
        row("uptrained", 3.0, **learnt), row("uptrained", 2.5, trained_span="window:8", **learnt),
    ]  # fmt: skip
    full, own = derive.recoveries(rows)
    assert "trained_span" not in full
    assert own["trained_span"] == "window:8"
    assert (full["recovered_nats"]["mean"], own["recovered_nats"]["mean"]) == (0.5, 0.75)
    assert full["beyond_control"]["mean"] == pytest.approx(1 - 1.1 / 2)
    assert own["beyond_control"]["mean"] == pytest.approx(1 - 1.0 / 2)
    assert [derive.trained_span(group) for group in derive.groups(rows)] == [
        "full", "full", "full", "window:8", "full", "window:8",
    ]  # fmt: skip
    (best,) = [one for one in derive.best(rows, []) if one["variant"]]
    assert best["nats"]["mean"] == 2.5
    assert report._tokens(best) == "64, under window:8"


def test_spans_stand_beside_full_attention_at_the_longest_context() -> None:
    def timed(span: str, tpot: float, measured: float | None, variant: str | None = None) -> dict[str, Any]:
        found = {"kind": "speed", "status": "done", "variant": variant, "span": span, "role": "original"}
        at = [{"context": 8, "tpot_s": 9.0}]
        return found | {
            "figures": {
                "shape": {"kv_heads": [4 if variant is None else 1]},
                "predicted": [*at, {"context": 64, "tpot_s": tpot}],
                "measured": [] if measured is None else [*at, {"context": 32, "tpot_s": measured}],
            }
        }

    rows = [timed("full", 4.0, 2.0), timed("window:8", 1.0, 1.5), timed("window:8", 1.0, 1.0, "MQA")]
    found = derive.beside_full(rows)
    assert [(one["kind"], one["context"], one["share"]) for one in found] == [
        ("predicted", 64, 0.25), ("measured", 32, 0.75),
    ]  # fmt: skip
    assert derive.beside_full([timed("full", 4.0, None), timed("window:8", 1.0, None)])[0]["full_s"] == 4.0
    page = "\n".join(report._beside_full(rows))
    assert "| original | window:8 | 32      | measured  | 2e+03            | 1.5e+03  | 75.0%   |" in page
    assert report._beside_full(rows[:1]) == []


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.parent.name for path in EXAMPLES])
def test_the_examples_follow_from_their_results(path: Path) -> None:
    value = json.loads(path.read_text())
    assert value["format"] == report.FORMAT
    assert json.loads(json.dumps(report.derived(value["cells"]))) == value["derived"]
    assert (path.parent / "report.md").read_text() == report.page(value)
    text = path.read_text()
    assert "/home/" not in text
    assert "/work/" not in text
    assert "/tmp/" not in text
