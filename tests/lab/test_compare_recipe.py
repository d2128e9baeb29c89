"""Recipes: what is taken, and that every fault is told by its key."""

from __future__ import annotations

from pathlib import Path

import pytest
from recipes import recipe

from jaxinfer.config import PageSpan
from jaxinfer.core import ConfigError
from jaxinfer.lab.compare.cells import Model, Texts, measured_spans, model_config, models
from jaxinfer.lab.compare.recipe import TextPart, Variant, parse_recipe, read_recipe

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "lab").glob("*/*.toml"))


def test_what_a_recipe_says() -> None:
    found = parse_recipe(recipe(grid__spans=["full", "window:8,sinks:2"]))
    assert found.variants == (Variant("MQA", 1),)
    assert found.evaluation.perplexity == (TextPart("rhyme.txt", 0.5, 1.0),)
    assert found.evaluation.windowing.stride == 32
    assert found.spans == ("full", "window:8,sinks:2")
    assert found.control
    assert found.uptraining is not None
    assert found.uptraining.for_run(64, 3, None).num_steps == 2


def test_groups_are_a_variant_of_their_own(tmp_path: Path) -> None:
    """In the plan and in the names of cells; those of other variants are what they were before."""
    found = parse_recipe(recipe(variant=[{"groups": [[0, 3], [1, 2]]}, {"kv_heads": 2}]))
    assert [variant.name for variant in found.variants] == ["groups", "2-heads"]
    assert found.head_plan(found.variants[0], found.methods[0], 0, None).groups == (((0, 3), (1, 2)),)
    texts = Texts(tmp_path, tmp_path)
    stated, counted = (
        model_config(found, Model(variant, found.methods[0]), "source", texts)["heads"]
        for variant in found.variants
    )
    assert stated["groups"] == (((0, 3), (1, 2)),)
    assert "groups" not in counted


def test_models_learn_under_all_of_their_attention_or_under_what_they_are_measured_with() -> None:
    spans = ["full", "window:8", "bigbird:16,global:1,random:1"]

    def grid_of(under: list[str]) -> list[tuple[str, str]]:
        found = parse_recipe(recipe(grid__spans=spans, grid__trained_under=under, grid__control=False))
        assert found.uptraining is not None
        return [
            (model.span, span)
            for model in models(found)
            if model.role == "uptrained"
            for span in measured_spans(found, model)
        ]

    assert grid_of(["full"]) == [("full", span) for span in spans]
    assert grid_of(["own"]) == [(span, span) for span in spans]
    both = grid_of(["full", "own"])
    assert both == [*(("full", span) for span in spans), *((span, span) for span in spans[1:])]
    found = parse_recipe(recipe(grid__spans=spans, grid__trained_under=["own"], engine__page_size=8))
    assert found.uptraining is not None
    chosen = found.uptraining.for_run(64, 0, None, spans[2], found.page_size)
    assert chosen.span() == PageSpan(8, 2, 1, 1, 0)
    assert found.uptraining.for_run(64, 0, None) == found.uptraining.for_run(64, 0, None, "full", 8)


def test_the_grid_is_every_model_once() -> None:
    value = recipe(
        variant=[{"kv_heads": 2}, {"kv_budget": 0.5}], grid__methods=["mean", "random"], grid__seeds=[4, 5]
    )
    found = list(models(parse_recipe(value)))
    assert len(found) == len(set(found)) == 1 + 2 + 2 * (1 + 2) + 2 * (2 + 2)
    assert [str(model) for model in found[:4]] == [
        "original", "control 64 tokens seed 4", "control 64 tokens seed 5", "2-heads mean",
    ]  # fmt: skip
    assert str(found[-1]) == "budget-0.5 random 64 tokens seed 5"
    without = list(models(parse_recipe({**value, "grid": {**value["grid"], "control": False}})))
    assert without == [model for model in found if model.role != "control"]


def test_a_recipe_that_trains_nothing_needs_no_uptraining() -> None:
    found = parse_recipe(recipe(grid__tokens=[0], uptrain=None))
    assert found.uptraining is None
    assert [model.role for model in models(found)] == ["original", "converted"]


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.parent.name for path in EXAMPLES])
def test_the_examples_are_recipes(path: Path) -> None:
    assert read_recipe(path).name == path.parent.name


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (r"sources is not known; there are", {"sources": 1}),
        (r"^source is missing", {"source": None}),
        (r"source\.weights is not known", {"source__weights": 1}),
        (r"source must be a table", {"source": "smollm2-135m"}),
        (r"source\.vocabulary must be an integer of 257 or more, got 256", {"source__vocabulary": 256}),
        (r"source\.train\.tokens is missing", {"source__train__tokens": None}),
        (r"source\.train\.rate is not known", {"source__train__rate": 1}),
        (r"source\.train\.distill has no place", {"source__train__distill": "x"}),
        (r"source\.config: .*hidden_size", {"source__config__hidden_size": 0}),
        (r"source\.model must be a text", {"source": {"model": 3}}),
        (r"^variant is missing", {"variant": None}),
        (r"variant\[0\]\.heads is not known", {"variant": [{"kv_heads": 1, "heads": 2}]}),
        (r"variant\[0\]: one of kv_heads, kv_budget", {"variant": [{"name": "x"}]}),
        (r"variant\[0\]: kv_heads must be 1 or more", {"variant": [{"kv_heads": 0}]}),
        (r"variant\[0\]: groups must be lists of old heads", {"variant": [{"groups": [0, 1]}]}),
        (r"variant\[0\]: groups are stated", {"variant": [{"groups": [[0, 1]], "unequal_groups": True}]}),
        (r"variant\[0\]: kv_budget must be above 0", {"variant": [{"kv_budget": 2.0}]}),
        (r"variant\.name has 'a' twice", {"variant": [{"name": "a", "kv_heads": k} for k in (1, 2)]}),
        (r"variant must be tables", {"variant": [1]}),
        (r"grid\.trained_under has 'window'; there are full, own", {"grid__trained_under": ["window"]}),
        (r"grid\.trained_under is empty", {"grid__trained_under": []}),
        (
            r"grid\.trained_under 'own': attention_span 'topk-pages:2,from:0' cannot be learnt under",
            {"grid__trained_under": ["own"], "grid__spans": ["full", "topk-pages:2,from:0"]},
        ),
        (r"uptrain\.attention_span is not said here", {"uptrain__attention_span": "window:8"}),
        (r"variant\.name is empty", {"variant": []}),
        (r"grid\.methods is missing", {"grid__methods": None}),
        (r"grid\.methods\[0\] must be a name or a table", {"grid__methods": [3]}),
        (r"grid\.methods\[0\]\.kind is not known", {"grid__methods": [{"method": "mean", "kind": 1}]}),
        (r"with method 'median': method must be one of", {"grid__methods": ["median"]}),
        (r"grid\.tokens must be a list of integers of 0 or more", {"grid__tokens": [-1]}),
        (r"grid\.tokens must be a list of integers", {"grid__tokens": 5}),
        (r"grid\.tokens must be a list of integers", {"grid__tokens": [True]}),
        (r"grid\.tokens has 64 twice", {"grid__tokens": [64, 64]}),
        (r"grid\.seeds is empty", {"grid__seeds": []}),
        (r"grid\.spans: attention_span 'far' is none of", {"grid__spans": ["far"]}),
        (r"grid\.spans: 'topk-pages:2,skip:1': .*say from:P", {"grid__spans": ["topk-pages:2,skip:1"]}),
        (r"from position 32 on, and texts are scored 32 tokens", {"grid__spans": ["topk-pages:2,from:32"]}),
        (r"grid\.token is not known", {"grid__token": [1]}),
        (r"grid\.control must be true or false", {"grid__control": "no"}),
        (r"^uptrain is missing", {"uptrain": None}),
        (r"uptrain\.seed is not said here", {"uptrain__seed": 1}),
        (r"uptrain: learning_rate must be above 0", {"uptrain__learning_rate": 0}),
        (r"uptrain\.rate is not known", {"uptrain__rate": 1}),
        (r"uptrain: temperature 2.0 is of a distillation", {"uptrain__temperature": 2.0}),
        (r"uptrain\.data names no text", {"uptrain__data": []}),
        (r"evaluate\.perplexity: a text is a file name or a table", {"evaluate__perplexity": [1]}),
        (
            r"evaluate\.perplexity\[0\]: start and end",
            {"evaluate__perplexity": [{"file": "x", "start": 1.0}]},
        ),
        (r"evaluate\.perplexity\[0\]\.file is missing", {"evaluate__perplexity": [{"start": 0.5}]}),
        (r"evaluate: stride 40 with windows of 32", {"evaluate__stride": 40}),
        (r"evaluate\.task is not known", {"evaluate__task": "x"}),
        (r"evaluate\.multiple_choice must be texts", {"evaluate__multiple_choice": [1]}),
        (r"engine\.seed is not known", {"engine__seed": 1}),
        (r"engine, grid\.spans: .*max_num_seqs", {"engine__max_num_seqs": 0}),
        (r"calibration\.tokens must be an integer of 2 or more", {"calibration__tokens": 1}),
        (r"speed\.contexts is missing", {"speed": {"device": "h200"}}),
        (r"speed\.device: no sheet of a device 'h9'", {"speed": {"device": "h9", "contexts": [8]}}),
        (r"speed\.output must be an integer of 2", {"speed": {"contexts": [8], "output": 1}}),
        (r"name must be a text of one line", {"name": "a\nb"}),
    ],
)
def test_a_fault_is_told_by_its_key(message: str, changes: dict) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_recipe(recipe(**changes))


def test_a_file_that_is_no_recipe_is_named(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text("name = ")
    with pytest.raises(ConfigError, match=r"wrong\.toml: not TOML"):
        read_recipe(path)
    path.write_text("name = 'x'\n")
    with pytest.raises(ConfigError, match=r"wrong\.toml: grid is missing"):
        read_recipe(path)
