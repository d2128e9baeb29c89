"""Every key of a recipe with values of every wrong type, and what is stated although nothing reads it."""

from __future__ import annotations

import copy
import datetime
from typing import Any

import pytest
from recipes import recipe
from training import settings

from jaxinfer.core import ConfigError
from jaxinfer.lab.compare.recipe import parse_recipe

VALUES: dict[str, Any] = {
    "text": "some", "integer": 3, "number": 0.25, "flag": True, "empty list": [], "list": [1.5, "x"],
    "nested": [[[[]]]], "table": {"some": 1}, "date": datetime.date(2024, 2, 29),
    "not a number": float("nan"), "negative": -2, "lines": "a\nb",
}  # fmt: skip
"""What TOML can say."""

KEYS: dict[str, tuple[str, ...]] = {
    # key: which of VALUES it takes
    "name": ("text",),
    "source": (),
    "source.vocabulary": (),
    "source.data": ("text",),
    "source.config": (),
    "source.config.hidden_size": (),
    "source.config.num_attention_heads": (),
    "source.config.num_hidden_layers": ("integer",),
    "source.config.rms_norm_eps": ("integer", "number"),
    "source.config.rope_theta": ("integer",),
    "source.config.tie_word_embeddings": ("flag",),
    "source.train": (),
    "source.train.tokens": ("integer",),
    "source.train.batch": ("integer",),
    "source.train.learning_rate": ("integer", "number"),
    "source.train.remat": ("flag",),
    "source.train.shard_params": ("flag",),
    "source.train.attention_span": (),
    "source.train.dtype": (),
    "source.train.warmup": ("integer",),
    "variant": (),
    "variant.0.name": ("text",),
    "variant.0.kv_heads": ("integer",),
    "variant.1.kv_budget": ("number",),
    "variant.0.unequal_groups": ("flag",),
    "grid": (),
    "grid.methods": (),
    "grid.methods.1.method": (),
    "grid.methods.1.name": ("text",),
    "grid.methods.1.grouping": (),
    "grid.methods.1.measure": (),
    "grid.tokens": (),
    "grid.seeds": (),
    "grid.spans": (),
    "grid.trained_under": (),
    "grid.control": ("flag",),
    "uptrain": (),
    "uptrain.data": ("text",),
    "uptrain.distill": ("flag",),
    "uptrain.batch": ("integer",),
    "uptrain.sequence_length": ("integer",),
    "uptrain.remat": ("flag",),
    "uptrain.train": (),
    "uptrain.weight_decay": ("integer", "number"),
    "evaluate": (),
    "evaluate.perplexity": ("text",),
    "evaluate.perplexity.0.file": ("text",),
    "evaluate.perplexity.0.start": ("number",),
    "evaluate.window": (),
    "evaluate.stride": ("integer",),
    "evaluate.windows": ("integer",),
    "evaluate.multiple_choice": (),
    "evaluate.questions": ("integer",),
    "evaluate.agreement": ("flag",),
    "calibration": (),
    "calibration.tokens": ("integer",),
    "calibration.text": ("text",),
    "engine": (),
    "engine.dtype": (),
    "engine.max_model_len": ("integer",),
    "engine.max_num_seqs": ("integer",),
    "engine.max_num_batched_tokens": ("integer",),
    "engine.kv_cache_dtype": (),
    "engine.page_size": (),
    "speed": (),
    "speed.device": (),
    "speed.contexts": (),
    "speed.batch": ("integer",),
    "speed.output": ("integer",),
    "speed.measured_contexts": (),
    "speed.measured_output": ("integer",),
    "speed.repeats": ("integer",),
}

WHOLE = {
    "source__train__remat": False, "source__train__shard_params": False, "source__train__dtype": "f32",
    "source__train__attention_span": "window:8", "source__train__warmup": 1,
    "variant": [
        {"name": "MQA", "kv_heads": 1, "unequal_groups": False}, {"kv_budget": 0.5},
    ],
    "grid__methods": [
        "mean", {"method": "align", "name": "a", "grouping": "neighbours", "measure": "text"},
    ],
    "grid__spans": ["full", "window:8"], "grid__trained_under": ["full"], "grid__control": True,
    "uptrain__distill": False, "uptrain__remat": False, "uptrain__train": "all", "uptrain__weight_decay": 0.0,
    "evaluate__stride": 16, "evaluate__multiple_choice": ["q.jsonl"], "evaluate__questions": 4,
    "evaluate__agreement": False, "calibration__text": "rhyme.txt", "engine__dtype": "float32",
    "engine__kv_cache_dtype": "auto", "engine__page_size": 16,
    "speed": {
        "device": "h200", "contexts": [8, 16], "batch": 8, "output": 8, "measured_contexts": [8],
        "measured_output": 4, "repeats": 1,
    },
}  # fmt: skip


def whole() -> dict[str, Any]:
    """A recipe with every key of KEYS."""
    return copy.deepcopy(recipe(**WHOLE))


@pytest.mark.parametrize("path", KEYS)
def test_a_value_of_a_wrong_type_is_told_by_its_key(path: str) -> None:
    *above, name = path.split(".")
    for kind, wrong in VALUES.items():
        value = whole()
        table: Any = value
        for key in above:
            table = table[int(key)] if isinstance(table, list) else table[key]
        assert name in table, "the recipe of this test has every key"
        table[name] = wrong
        if kind in KEYS[path]:
            parse_recipe(value)
            continue
        with pytest.raises(ConfigError) as caught:
            parse_recipe(value)
        told = str(caught.value)
        # some are told with the table that they stand in, or with what does not go together
        assert any(word in told for word in (name, "source.config", *above[:1])), (kind, told)


def test_the_recipe_of_these_tests_is_one() -> None:
    assert len(parse_recipe(whole()).variants) == 2


@pytest.mark.parametrize("kind", VALUES)
def test_groups_of_a_wrong_type_are_told(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"variant\[0\]: groups must"):
        parse_recipe(recipe(variant=[{"groups": VALUES[kind]}]))


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (r"evaluate\.questions would not be read", {"evaluate__questions": 4}),
        (r"speed\.repeats would not be read", {"speed": {"contexts": [8], "repeats": 2}}),
        (r"speed\.measured_output would not be read", {"speed": {"contexts": [8], "measured_output": 2}}),
        (r"^uptrain would not be read: nothing is learnt", {"grid__tokens": [0]}),
        (
            r"grid\.trained_under would not be read",
            {"grid__tokens": [0], "uptrain": None, "grid__trained_under": ["full"]},
        ),
        (r"grid\.control would not be read", {"grid__tokens": [0], "uptrain": None, "grid__control": True}),
        (
            r"grid\.seeds \[0, 1\] would not be read",
            {"grid__tokens": [0], "uptrain": None, "grid__seeds": [0, 1]},
        ),
        (r"speed\.contexts is empty", {"speed": {"contexts": []}}),
        (r"speed\.contexts must rise.*got \[16, 8\]", {"speed": {"contexts": [16, 8]}}),
        (r"speed\.contexts must rise.*got \[8, 8\]", {"speed": {"contexts": [8, 8]}}),
        (
            r"speed\.measured_contexts must rise.*got \[16, 8\]",
            {"speed": {"contexts": [8], "measured_contexts": [16, 8]}},
        ),
        (r"grid\.tokens is empty", {"grid__tokens": [], "uptrain": None}),
        (
            r"grid\.tokens has 100 and 120, which are both rounded up to 4 steps of 32",
            {"grid__tokens": [100, 120]},
        ),
        (
            r"uptrain, of grid\.tokens 64: warmup must be 0 to 2",
            {"uptrain__warmup": 3, "grid__tokens": [0, 640, 64]},
        ),
        (
            r"grid\.spans has 'window:8' and 'window:8,sinks:0', which mean the same",
            {"grid__spans": ["window:8", "window:8,sinks:0"]},
        ),
        (
            r"grid\.methods has 'mean' and 'near', which mean the same",
            {"grid__methods": ["mean", {"method": "mean", "grouping": "neighbours", "name": "near"}]},
        ),
        (r"variant has 'a' and 'b', which mean", {"variant": [{"name": n, "kv_heads": 1} for n in "ab"]}),
        (r"variant\[0\]\.kv_heads has no layer", {"variant": [{"kv_heads": []}]}),
        (r"source\.train: sequence_length 128 is more than", {"source__train__sequence_length": 128}),
    ],
)
def test_what_nothing_reads_or_says_the_same_twice_is_refused(message: str, changes: dict) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_recipe(recipe(**changes))


def test_methods_that_differ_by_their_grouping_are_two() -> None:
    """Similarity has no other than the one that it is named for."""

    def both(method: str) -> list[Any]:
        return [method, {"method": method, "grouping": "alike", "name": "other"}]

    assert len(parse_recipe(recipe(grid__methods=both("align"))).methods) == 2
    with pytest.raises(ConfigError, match="mean the same"):
        parse_recipe(recipe(grid__methods=both("similarity")))


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("remat must be true or false, got 'no'", {"remat": "no"}),
        ("shard_params must be true or false, got 1", {"shard_params": 1}),
        ("eval_file must be a tuple of file names, got 'x'", {"eval_file": "x"}),
        ("distill must name a model, got 3", {"distill": 3}),
        ("attention_span", {"attention_span": 3}),
    ],
)
def test_settings_have_types(message: str, changes: dict) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(**changes)
