"""Comparisons of models whose layers share K/V: what a recipe may say of them, and one that is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from recipes import recipe
from training import text_file

from jaxinfer.core import ConfigError
from jaxinfer.heads import SharePlan
from jaxinfer.lab.compare import compare, parse_recipe
from jaxinfer.lab.compare.cells import Model, Texts, model_config, models, shapes

SHARED = {"variant": [{"share_kv": 2}, {"kv_heads": 2}, {"kv_heads": 2, "share_kv": [[0, 1], [2, 3]]}]}

SPEED = {"device": "h200", "contexts": [32]}


def test_a_variant_of_shared_kv_is_made_by_what_can_make_it(tmp_path: Path) -> None:
    found = parse_recipe(
        recipe(**SHARED, grid__methods=["svd", "mean", "first"], grid__tokens=[0], uptrain=None, speed=SPEED)
    )
    assert [variant.name for variant in found.variants] == ["shared-2", "2-heads", "2-heads-shared"]
    made = [(each.variant.name, each.method.name) for each in models(found) if each.variant and each.method]
    assert made == [
        ("shared-2", "mean"), ("shared-2", "first"),
        ("2-heads", "svd"), ("2-heads", "mean"), ("2-heads", "first"),
        ("2-heads-shared", "mean"), ("2-heads-shared", "first"),
    ]  # fmt: skip
    assert [each.method.name for each in shapes(found) if each.method] == ["mean", "svd", "mean"]
    alone, heads, both = found.variants
    mean = found.methods[1]
    assert found.share_plan(alone, mean) == SharePlan(share=2, method="mean")
    assert found.share_plan(both, mean) == SharePlan(groups=((0, 1), (2, 3)), method="mean")
    assert (found.share_plan(heads, mean), found.head_plan(alone, mean, 0, None)) == (None, None)
    texts = Texts(tmp_path, tmp_path)
    configs = [model_config(found, Model(variant, mean), "source", texts) for variant in found.variants]
    assert configs[0]["sharing"] == {"share": 2, "groups": None, "method": "mean"}
    assert configs[0]["heads"] is None
    assert "sharing" not in configs[1]  # named as it was before layers shared
    assert configs[2]["heads"] == configs[1]["heads"]


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (r"variant.*share_kv must be 1 layer or more, got 0", {"variant": [{"share_kv": 0}]}),
        (r"variant.*share_kv must be 1 layer or more, got '2'", {"variant": [{"share_kv": "2"}]}),
        (r"variant.*names layer 1 more than once", {"variant": [{"share_kv": [[0, 1], [1]]}]}),
        (r"variant.*must name layers of each group", {"variant": [{"share_kv": []}]}),
        (r"variant.*one of kv_heads", {"variant": [{"share_kv": 2, "unequal_groups": True}]}),
        (
            r"variant 'shared-2': share_kv is of methods first, mean",
            {"variant": [{"share_kv": 2}, {"kv_heads": 1}], "grid__methods": ["svd"]},
        ),
        (
            r"variant 'shared-2': share_kv is of methods first, mean",
            {"variant": [{"share_kv": 2}], "grid__methods": [{"method": "mean", "grouping": "alike"}]},
        ),
        (
            r"grid.methods has 'svd', by which no variant is made",
            {"variant": [{"share_kv": 2}], "grid__methods": ["mean", "svd"]},
        ),
        (r"kv_budget gives each layer", {"variant": [{"share_kv": 2, "kv_budget": 0.5}]}),
        (r"variant has .* mean the same", {"variant": [{"share_kv": 2}, {"share_kv": 2, "name": "two"}]}),
    ],
)
def test_what_cannot_be_made_is_refused_by_name(message: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_recipe(recipe(**changes))


@pytest.mark.usefixtures("compile_cache")
def test_a_comparison_from_end_to_end(tmp_path: Path) -> None:
    """Converted and uptrained beside the original: half of its KV bytes, and a shape of its own."""
    text_file(tmp_path)
    wanted = recipe(
        variant=[{"share_kv": 2}], source__config__num_hidden_layers=2, grid__methods=["mean"],
        grid__control=False, uptrain__train="kv",
    )  # fmt: skip
    value = compare(parse_recipe(wanted), tmp_path / "out", files=tmp_path, draw=False, say=lambda line: None)
    assert [cell["status"] for cell in value["cells"]] == ["done"] * len(value["cells"])
    found = {cell["role"]: cell["figures"] for cell in value["cells"] if cell["kind"] == "quality"}
    assert set(found) == {"original", "converted", "uptrained"}
    shapes = {role: figures["shape"] for role, figures in found.items()}
    assert "kv_from" not in shapes["original"]
    assert shapes["converted"] == shapes["uptrained"]
    assert shapes["converted"]["kv_from"] == [None, 0]
    assert 2 * shapes["converted"]["kv_bytes_per_token"] == shapes["original"]["kv_bytes_per_token"]
    assert found["uptrained"]["training"]["trained_parameters"] == 2 * 32 * 32  # K and V of the one owner
    assert found["converted"]["conversion"] is None
    report = (tmp_path / "out" / "report.md").read_text()
    assert "shared-2" in report
    assert "4 in 1 of 2 layers" in report
