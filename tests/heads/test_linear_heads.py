"""Other KV heads in layers of linear attention, in either order of the two conversions or in one go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from head_models import (
    FAMILIES,
    KEYS,
    METHODS,
    STORIES,
    assert_close,
    drawn,
    equal_heads,
    heads_of,
    logits_of,
    model_folder,
    opened,
    regrouped,
    tensors_of,
)

from jaxinfer.cli import main
from jaxinfer.config import Favor, ModelConfig
from jaxinfer.convert import convert
from jaxinfer.core import ConfigError
from jaxinfer.heads import HeadPlan, calibrate, lines
from jaxinfer.model import rope
from jaxinfer.model.kv import create_kv
from jaxinfer.model.step import DenseStep

pytestmark = pytest.mark.usefixtures("compile_cache")
FAVOR = Favor(24, 3)


def with_linear(keys: dict[str, Any], *layers: int) -> dict[str, Any]:
    return keys | {
        "linear_attention": {"layers": list(layers), "features": FAVOR.features, "seed": FAVOR.seed}
    }


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "windows"])
def test_equal_heads_lose_nothing_there_either(tmp_path: Path, family: str) -> None:
    """And so do any order of heads, and copies of them: the features that a head meets are the same."""
    keys = with_linear(KEYS | FAMILIES[family], 0)
    tensors = equal_heads(keys, drawn(keys), [(0, 1, 2, 3), (4, 5, 6, 7)])
    folder = model_folder(tmp_path / "model", keys, tensors)
    expected = logits_of(opened(folder))
    for method in METHODS:
        compared = {"calibration_tokens": 150} if method in ("align", "svd") else {"measure": "weights"}
        view, change = regrouped(folder, method=method, kv_heads=2, **compared)
        assert_close(logits_of(view), expected)
        assert max(layer.attention_error or 0 for layer in change.layers) < 1e-3
        assert change.after.linear_layers == (0,)
    keys |= {"num_key_value_heads": 2}
    few = model_folder(tmp_path / "few", keys, drawn(keys))
    expected = logits_of(opened(few))
    for plan in (
        {"kv_heads": 8, "method": "repeat"},
        {"kv_heads": 3, "method": "repeat", "unequal_groups": True},  # query heads of zeros
        {"groups": (((1,), (0,)),) * 2},
    ):
        assert_close(logits_of(regrouped(few, **plan)[0]), expected)


@pytest.mark.parametrize("becomes", ["as it is", "linear", "softmax"])
@pytest.mark.parametrize("method", ["mean", "align", "svd"])
def test_the_error_of_attention_is_that_of_the_model_that_is_written(
    tmp_path: Path, method: str, becomes: str
) -> None:
    """Layer 0, whose input is the same before and after: what its attention adds, by the module itself."""
    keys = KEYS if becomes == "linear" else with_linear(KEYS, 0)
    favors = {"as it is": None, "linear": [FAVOR, None], "softmax": [None, None]}[becomes]
    folder = model_folder(tmp_path / "model", keys, drawn(keys))
    view, change = regrouped(folder, favors, kv_heads=2, method=method, calibration_tokens=120)
    pieces = calibrate.calibration_pieces(opened(folder), None, 120)
    before, after = (first_attention(source, pieces) for source in (opened(folder), view))
    expected = np.linalg.norm(after - before) / np.linalg.norm(before)
    assert change.layers[0].attention_error == pytest.approx(expected, rel=1e-3)
    assert expected > 0.1
    assert ModelConfig.from_hf(view.config) == change.after
    assert change.after.linear_layers == (() if becomes == "softmax" else (0,))


def first_attention(source: Any, pieces: np.ndarray) -> np.ndarray:
    model = calibrate.loaded(source, progress=False)
    config, (texts, length) = model.config, pieces.shape
    positions = jnp.tile(jnp.arange(length), texts)
    angles = rope.rotation(config.rope, config.head_dim, positions, jnp.full_like(positions, length))
    layer = model.layers[0]
    x = layer.attention_norm(model.embedding(jnp.asarray(pieces.reshape(-1))))
    return np.asarray(layer.attention(x, None, DenseStep(*angles, None, texts))[0])


def test_turned_keys_are_as_they_were_to_softmax_and_another_draw_to_features(tmp_path: Path) -> None:
    tensors, draw = equal_heads(KEYS, drawn(KEYS), [tuple(range(8))]), np.random.default_rng(1)
    for layer in range(2):
        heads = heads_of(tensors, layer, "k", 16)
        for head in range(1, 8):
            angles = draw.uniform(0, 2 * np.pi, 8)
            low, high = heads[head, :8].copy(), heads[head, 8:].copy()
            cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
            heads[head] = np.concatenate([low * cos - high * sin, high * cos + low * sin])
    keys = with_linear(KEYS, 1)
    folder = model_folder(tmp_path / "model", keys, tensors)
    change = regrouped(folder, kv_heads=1, method="align", calibration_tokens=200)[1]
    assert change.layers[0].attention_error == pytest.approx(0, abs=1e-3)
    assert change.layers[1].key_error < 1e-3
    assert change.layers[1].attention_error is not None
    assert change.layers[1].attention_error > 0.05
    found = "\n".join(lines(change))
    assert "error         attention 0.000 on average, most 0.000 in layer 0" in found
    assert f"error         linear    {change.layers[1].attention_error:.3f} on average" in found


def test_a_budget_is_of_what_pages_hold(tmp_path: Path) -> None:
    keys = with_linear(KEYS | {"num_hidden_layers": 4}, 1, 2)
    folder = model_folder(tmp_path / "model", keys, drawn(keys))
    for unequal in (False, True):
        plan = {"kv_budget": 0.25, "calibration_tokens": 60, "unequal_groups": unequal}
        change = regrouped(folder, **plan)[1]
        counts = [layer.num_kv_heads for layer in change.after.layers]
        assert counts[1:3] == [8, 8]
        assert counts[0] + counts[3] <= 4
    with pytest.raises(ConfigError, match=r"kv_budget 0\.1 of 16 KV heads is 1, and each of 2 layers"):
        regrouped(folder, kv_budget=0.1)
    # in one go: of the layers that will have pages
    plain = model_folder(tmp_path / "plain", KEYS, drawn(KEYS))
    change = regrouped(plain, [FAVOR, None], kv_budget=0.5, calibration_tokens=60)[1]
    assert [layer.num_kv_heads for layer in change.after.layers] == [8, 4]
    with pytest.raises(ConfigError, match="kv_budget: every layer has linear attention, which holds no K/V"):
        regrouped(plain, [FAVOR, FAVOR], kv_budget=0.5)


def test_one_go_and_either_order_write_the_same(tmp_path: Path) -> None:
    """By methods that look at weights alone; on a text, activations of linear layers are others."""
    plan, linear = HeadPlan(kv_heads=(4, 2, 1, 2, 4)), {"linear_layers": [1, 3], "favor": FAVOR}
    options: Any = {"to": "safetensors", "progress": False}
    convert(STORIES, tmp_path / "both", heads=plan, **linear, **options)
    convert(STORIES, tmp_path / "heads", heads=plan, **options)
    convert(tmp_path / "heads", tmp_path / "heads then linear", **linear, **options)
    convert(STORIES, tmp_path / "linear", **linear, **options)
    convert(tmp_path / "linear", tmp_path / "linear then heads", heads=plan, **options)
    both = opened(tmp_path / "both")
    assert both.config["linear_attention"] == {"layers": [1, 3], "features": 24, "seed": 3}
    for other in ("heads then linear", "linear then heads"):
        found = opened(tmp_path / other)
        assert found.config == both.config
        for name, tensor in tensors_of(both).items():
            np.testing.assert_array_equal(found.read(name), tensor)


def test_what_is_reported_is_what_is_held(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """KV bytes and states as the pool of the model that was written has them."""
    words = ["convert", str(STORIES), str(tmp_path / "both"), "--kv-heads", "2", "--features", "32"]
    assert main([*words, "--linear-layers", "1,3", "--method", "align", "--calibration-tokens", "100"]) == 0
    out = capsys.readouterr().out.splitlines()
    kv = create_kv(ModelConfig.from_hf(opened(tmp_path / "both").config), 1, 1, jnp.dtype("bfloat16"), 0)
    held = sum(x.nbytes for x in jax.tree.leaves((kv.k, kv.v)))
    states = sum(x.nbytes for state in kv.states if state is not None for x in state)  # of place 0
    assert out[1] == f"KV memory     640 -> {held} bytes a token in bfloat16 (30.0%)"
    assert out[2] == f"states        0 -> {states} bytes a sequence; linear attention in layers 1, 3"
    assert any(line.startswith("error         attention") and "layer 1" not in line for line in out)
    assert any(line.startswith("error         linear") for line in out)
    # of a model without pages there are no bytes to take a share of
    every = ["convert", str(STORIES), str(tmp_path / "all"), "--linear-layers", "all"]
    assert main(every) == 0
    assert main(["convert", str(tmp_path / "all"), str(tmp_path / "fewer"), "--kv-heads", "1"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert "KV memory     0 -> 0 bytes a token in bfloat16" in out
    assert "states        102400 -> 25600 bytes a sequence; linear attention in layers 0, 1, 2, 3, 4" in out
