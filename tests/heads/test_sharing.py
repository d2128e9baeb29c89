"""Conversion to shared K/V: which layers share, what the projections become, and what the command writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from head_models import (
    FAMILIES,
    KEYS,
    STORIES,
    assert_close,
    drawn,
    logits_of,
    model_folder,
    opened,
    regrouped,
    tensors_of,
)
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.cli import main
from jaxinfer.config import ModelConfig
from jaxinfer.convert import convert
from jaxinfer.core import ConfigError
from jaxinfer.heads import HeadPlan, Shared, SharePlan
from jaxinfer.model import weights
from jaxinfer.model.kv import create_kv

FOUR = {**KEYS, "num_hidden_layers": 4}
QUIET: Any = {"to": "safetensors", "progress": False}


@given(st.integers(1, 40), st.integers(1, 45))
def test_runs_of_layers_share_the_first(layers: int, share: int) -> None:
    owners = SharePlan(share=share).owners(layers)
    made = [index for index, owner in enumerate(owners) if owner is None]
    assert made == list(range(0, layers, share))
    for index, owner in enumerate(owners):
        assert owner is None or 0 < index - owner < share
    groups = tuple(tuple(range(first, min(first + share, layers))) for first in made)
    assert SharePlan(groups=groups).owners(layers) == owners


def test_groups_say_which_and_leave_the_others() -> None:
    assert SharePlan(groups=((3, 1), (2, 4))).owners(6) == [None, None, None, 1, 2, None]
    assert SharePlan(groups=((2,),)).owners(3) == [None] * 3


def test_one_layer_a_group_is_the_model_itself(tmp_path: Path) -> None:
    convert(STORIES, tmp_path / "same", **QUIET)
    for method in ("first", "mean"):
        convert(STORIES, tmp_path / method, sharing=SharePlan(share=1, method=method), **QUIET)
        for file in (tmp_path / "same").iterdir():
            assert file.read_bytes() == (tmp_path / method / file.name).read_bytes(), file.name


@pytest.mark.parametrize("family", ["plain", "biases", "head norms", "windows"])
@pytest.mark.parametrize("method", ["first", "mean"])
def test_what_becomes_of_projections(tmp_path: Path, family: str, method: Any) -> None:
    keys = {**FOUR, **FAMILIES[family]}
    tensors = drawn(keys)
    source = opened(model_folder(tmp_path / "source", keys, tensors))
    convert(
        tmp_path / "source", tmp_path / "new", sharing=SharePlan(groups=((0, 2, 3),), method=method), **QUIET
    )
    found = opened(tmp_path / "new")
    config = ModelConfig.from_hf(found.config)
    weights.check_names(config, found)
    assert [layer.kv_from for layer in config.layers] == [None, None, 0, 0]
    gone = {f"layers.{index}.self_attn.{kind}" for index in (2, 3) for kind in ("k_", "v_")}
    assert set(source.names()) - set(found.names()) == {
        name for name in tensors if any(part in name for part in gone)
    }
    for name in found.names():
        expected = tensors[name]
        if method == "mean" and ("layers.0.self_attn.k_" in name or "layers.0.self_attn.v_" in name):
            group = [tensors[name.replace("layers.0.", f"layers.{index}.")] for index in (0, 2, 3)]
            expected = np.mean(group, axis=0)
        np.testing.assert_allclose(found.read(name), expected, atol=1e-6)
    part = (slice(3, 9), slice(5, 8))
    view, name = Shared(source, SharePlan(share=2, method=method)), "model.layers.2.self_attn.k_proj.weight"
    np.testing.assert_array_equal(view.read(name, part), view.read(name)[part])
    assert_close(
        logits_of(view), logits_of(Shared(source, SharePlan(groups=((0, 1), (2, 3)), method=method)))
    )


def test_layers_of_one_input_and_one_projection_lose_nothing(tmp_path: Path) -> None:
    """After two layers that add nothing comes the input of the first: with its projections, too, sharing is
    exact."""
    tensors = drawn(FOUR)
    for index in (0, 1, 2):
        at = f"model.layers.{index}"
        tensors[f"{at}.self_attn.o_proj.weight"][:] *= index == 2
        tensors[f"{at}.mlp.down_proj.weight"][:] *= index == 2
        for name in ("input_layernorm", "self_attn.k_proj", "self_attn.v_proj"):
            tensors[f"{at}.{name}.weight"] = tensors[f"model.layers.0.{name}.weight"]
    source = opened(model_folder(tmp_path / "source", FOUR, tensors))
    for method in ("first", "mean"):
        assert_close(logits_of(Shared(source, SharePlan(share=3, method=method))), logits_of(source))
    other = logits_of(Shared(source, SharePlan(share=4)))
    assert np.abs(other - logits_of(source)).max() > 0.1


def test_heads_in_the_same_go(tmp_path: Path) -> None:
    """Heads first, then layers: the same as one after the other."""
    plan, sharing = HeadPlan(kv_heads=2), SharePlan(share=2, method="mean")
    convert(STORIES, tmp_path / "both", heads=plan, sharing=sharing, **QUIET)
    convert(STORIES, tmp_path / "heads", heads=plan, **QUIET)
    convert(tmp_path / "heads", tmp_path / "after", sharing=sharing, **QUIET)
    both, after = opened(tmp_path / "both"), opened(tmp_path / "after")
    assert both.config == after.config
    assert both.config["num_key_value_heads"] == 2
    assert both.config["kv_from"] == [None, 0, None, 2, None]
    for name, tensor in tensors_of(both).items():
        np.testing.assert_array_equal(after.read(name), tensor)
    whole, halved = (ModelConfig.from_hf(opened(path).config) for path in (STORIES, tmp_path / "both"))
    assert halved.kv_bytes_per_token(2) == whole.kv_bytes_per_token(2) / 2 * 3 / 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"share": 0}, "share_kv must be 1 layer or more, got 0"),
        ({"share": True}, "share_kv must be 1 layer or more, got True"),
        ({}, "say how many layers share, or which"),
        ({"share": 2, "groups": ((0, 1),)}, "one of the two"),
        ({"share": 2, "method": "svd"}, "must be one of first, mean, got 'svd'"),
        ({"groups": ((0, 1), (1, 2))}, "names layer 1 more than once"),
        ({"groups": ((0, -1),)}, "numbers from 0 on; got -1"),
        ({"groups": ((0, True),)}, "numbers from 0 on; got True"),
        ({"groups": ()}, "must name layers of each group"),
        ({"groups": ((0, 1), ())}, "must name layers of each group"),
        ({"groups": [[0, 1]]}, "must name layers of each group"),
    ],
)
def test_plans_that_mean_nothing_are_refused_by_name(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SharePlan(**options)


@pytest.mark.parametrize(
    ("heads", "sharing", "message"),
    [
        ({"kv_heads": 2}, {"groups": ((0, 5),)}, "share_kv names layer 5; the model has 0 to 4"),
        ({"kv_heads": (4, 2, 2, 2, 2)}, {"share": 2}, "layer 1 is to have 2 KV heads, and layer 0, .* 4"),
        ({"kv_budget": 0.5}, {"share": 2}, "kv_budget gives each layer KV heads of its own"),
        (
            {"groups": (((0, 1, 2, 3),), *(((0, 1), (2, 3)),) * 4)}, {"groups": ((0, 1),)},
            "layer 1 is to have 2 KV heads, and layer 0, .* 1",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_shared_is_refused_before_heads_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heads: Any, sharing: Any, message: str
) -> None:
    monkeypatch.setattr("jaxinfer.convert.decide", None)
    with pytest.raises(ConfigError, match=message):
        convert(STORIES, tmp_path / "no", heads=HeadPlan(**heads), sharing=SharePlan(**sharing), **QUIET)


def test_models_that_cannot_share_are_refused(tmp_path: Path) -> None:
    def refused(message: str, source: Path = STORIES, **options: Any) -> None:
        with pytest.raises(ConfigError, match=message):
            convert(source, tmp_path / "no", **options, **QUIET)
        assert not (tmp_path / "no").exists()

    refused("share_kv names layer 5; the model has 0 to 4", sharing=SharePlan(groups=((0, 5),)))
    convert(STORIES, tmp_path / "unequal", heads=HeadPlan(kv_heads=(4, 2, 2, 2, 2)), **QUIET)
    refused(
        "layer 1 cannot read the K/V of layer 0: it has 2 KV heads, and that layer 4",
        tmp_path / "unequal",
        sharing=SharePlan(share=2),
    )
    refused(
        "layer 3 cannot read the K/V of layer 2: layer 3 has linear attention",
        linear_layers=[3], sharing=SharePlan(share=2),
    )  # fmt: skip
    keys = {**KEYS, **FAMILIES["some layers without rotation"]}
    mixed = model_folder(tmp_path / "mixed", keys, drawn(keys))
    refused(
        "layer 1 cannot read the K/V of layer 0: its queries are not rotated",
        mixed,
        sharing=SharePlan(share=2),
    )
    convert(STORIES, tmp_path / "shared", sharing=SharePlan(share=2), **QUIET)
    again = "layers 1, 3 of this model read the K/V of earlier ones; convert the model that it was made from"
    refused(f"share_kv: {again}", tmp_path / "shared", sharing=SharePlan(share=4))
    refused(f"other KV heads: {again}", tmp_path / "shared", heads=HeadPlan(kv_heads=1))
    refused(
        "layer 1 cannot read the K/V of layer 0: layer 1 has linear", tmp_path / "shared", linear_layers=[1]
    )
    with pytest.raises(ConfigError, match="other KV heads"):
        regrouped(tmp_path / "shared", kv_heads=1)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it tells is what the pool of the model that was written has."""
    new = tmp_path / "new"
    assert main(["convert", str(STORIES), str(new), "--share-kv", "2", "--to", "safetensors"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "shared K/V    3 of 5 layers have their own; layers 1, 3 read those of an earlier one"
    kv = create_kv(ModelConfig.from_hf(opened(new).config), 1, 1, jnp.dtype("bfloat16"))
    held = sum(x.nbytes for x in jax.tree.leaves(kv))
    assert out[1] == f"KV memory     640 -> {held} bytes a token in bfloat16 (60.0%)"
    assert json.loads((new / "config.json").read_text())["kv_from"] == [None, 0, None, 2, None]
    words = [
        "convert",
        str(STORIES),
        str(tmp_path / "orbax"),
        "--share-kv",
        "0-1|2,3-4",
        "--share-method",
        "mean",
    ]
    assert main([*words, "--kv-heads", "1"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert "KV memory     160 -> 64 bytes a token in bfloat16 (40.0%)" in out
    assert opened(tmp_path / "orbax").config["kv_from"] == [None, 0, None, 2, 2]
    for wrong, status, told in (
        (["--share-method", "mean"], 2, "--share-method needs --share-kv"),
        (["--share-kv", "two"], 2, "--share-kv is a number of layers, or groups of them such as 0-1|2,3"),
        (["--share-kv", "0-1|3-2"], 2, "--share-kv is a number of layers"),
        (["--share-kv", "0"], 1, "share_kv must be 1 layer or more"),
        (["--share-kv", "3,9"], 1, "share_kv names layer 9"),
    ):
        assert main(["convert", str(STORIES), str(tmp_path / "no"), *wrong]) == status
        assert told in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_it_is_planned_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert(STORIES, tmp_path / "shared", sharing=SharePlan(share=2), **QUIET)
    plans = []
    for model in (STORIES, tmp_path / "shared"):
        words = ["plan", str(model), "--device", "h200", "--context", "100", "--output", "20", "--batch", "4"]
        assert main([*words, "--json"]) == 0
        plans.append(json.loads(capsys.readouterr().out))
        assert main(words) == 0
        said = "2 of which read the K/V of an earlier one" in capsys.readouterr().out
        assert said == (model != STORIES)
    one, other = (plan["kv"] for plan in plans)
    assert one["kv_from"] == [None] * 5
    assert other["kv_from"] == [None, 0, None, 2, None]
    assert other["bytes_per_token"] == 0.6 * one["bytes_per_token"]
    assert other["bytes_per_token_per_layer"] == [128, 0, 128, 0, 128]
    assert plans[1]["decode"]["attention_operations"] == plans[0]["decode"]["attention_operations"]
