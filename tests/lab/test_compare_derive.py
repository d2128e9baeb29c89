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
            "figures": {"predicted": [{"tpot_s": tpot, "largest_batch": batch, "context": 8}]},
        }
        for variant, tpot, batch in ((None, 2.0, 10), ("MQA", 1.0, 10))
    ]  # fmt: skip
    found = {one["variant"]: one for one in derive.best(rows, speed)}
    assert found["MQA"]["tokens"] == 64
    assert found["MQA"]["nats"]["mean"] == 2.75
    assert found[None]["fronts"] == ["kv_bytes_per_token", "tpot_s", "largest_batch"]
    assert found["MQA"]["fronts"] == ["tpot_s"]


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
