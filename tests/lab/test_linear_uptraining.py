"""A model converted to linear attention serves, and a few steps of uptraining bring back what it lost."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
from training import RHYME, STORIES, settings, text_file

import checkpoints
from jaxinfer import LLM
from jaxinfer.cli import main
from jaxinfer.config import EngineConfig, Favor, ModelConfig
from jaxinfer.convert import convert
from jaxinfer.core import ConfigError
from jaxinfer.heads import HeadPlan
from jaxinfer.lab.uptrain import uptrain

pytestmark = pytest.mark.usefixtures("compile_cache")

KEY = {"layers": [1, 3], "features": 32, "seed": 5}


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Path:
    return convert(
        STORIES, tmp_path_factory.mktemp("models") / "linear", to="safetensors", linear_layers=[1, 3],
        favor=Favor(32, 5), progress=False,
    )  # fmt: skip


def perplexity(model: Path) -> float:
    with LLM(str(model), max_num_seqs=2, max_num_batched_tokens=64, max_model_len=128, progress=False) as llm:
        (score,) = llm.score([RHYME])
    return score.perplexity


def test_only_the_config_says_so(converted: Path) -> None:
    old, new = checkpoints.open_checkpoint(STORIES), checkpoints.open_checkpoint(converted)
    assert new.config == {**old.config, "linear_attention": KEY}
    assert old.names() == new.names()
    assert all(np.array_equal(old.read(name), new.read(name)) for name in old.names())
    again = convert(converted, converted.parent / "again", linear_layers="all", progress=False)
    assert ModelConfig.from_hf(checkpoints.open_checkpoint(again).config).linear_layers == (0, 1, 2, 3, 4)


def test_heads_and_linear_layers_together(tmp_path: Path) -> None:
    mqa = convert(STORIES, tmp_path / "mqa", heads=HeadPlan(kv_heads=1), linear_layers=[0], progress=False)
    layers = ModelConfig.from_hf(checkpoints.open_checkpoint(mqa).config).layers
    assert [layer.num_kv_heads for layer in layers] == [1] * 5
    assert [layer.favor for layer in layers] == [Favor(), None, None, None, None]


def test_it_serves_and_is_uptrained(converted: Path, tmp_path: Path) -> None:
    text = text_file(tmp_path)
    chosen = settings(steps=20, batch=4, sequence_length=32, learning_rate=3e-3)
    trained = tmp_path / "trained"
    report = uptrain(converted, trained, [text], chosen, progress=False)
    assert report["last_loss"] < 0.8 * report["first_loss"]
    assert checkpoints.open_checkpoint(trained).config["linear_attention"] == KEY
    assert perplexity(trained) < 0.6 * perplexity(converted)


def test_the_engine_says_what_it_leaves_out_and_refuses_what_it_cannot(
    converted: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 64, "progress": False}
    with caplog.at_level(logging.WARNING), LLM(str(converted), **small) as llm:
        assert "prefix caching is off: layers 1, 3 have linear attention" in caplog.text
        stats = llm.stats()
        config = llm.model_config
        assert config is not None
        pages = llm.limits.num_pages * EngineConfig().page_size * config.kv_bytes_per_token(4)
        assert stats["kv_bytes"] == pages + 3 * config.state_bytes
    for options, message in (
        ({"batch_invariant": True}, "batch_invariant: layers 1, 3 have linear attention"),
        ({"attention_span": "bigbird:32,global:1,random:1"}, "attention_span: layers 1, 3 have linear"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM(str(converted), **small, **options)  # type: ignore[arg-type]


def test_a_model_of_linear_layers_alone_has_pages_of_no_bytes(tmp_path: Path) -> None:
    model = convert(STORIES, tmp_path / "all", linear_layers="all", favor=Favor(16), progress=False)
    with LLM(str(model), max_num_seqs=3, max_num_batched_tokens=32, max_model_len=96, progress=False) as llm:
        outputs = llm.generate(["Once upon a time", "The cat"] * 3)
        assert all(output.outputs[0].token_ids for output in outputs)
        assert llm.model_config is not None
        assert llm.stats()["kv_bytes"] == 4 * llm.model_config.state_bytes == 4 * 5 * 4 * 16 * (8 + 2) * 4


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["convert", str(STORIES), str(tmp_path / "linear")]
    assert main([*words, "--linear-layers", "0,2-3", "--features", "16", "--features-seed", "2"]) == 0
    stated = json.loads((tmp_path / "linear" / "config.json").read_text())["linear_attention"]
    assert stated == {"layers": [0, 2, 3], "features": 16, "seed": 2}
    words[-1] = str(tmp_path / "other")
    for flags, message in (
        (["--linear-layers", "5"], "linear_attention must list layers"),
        (["--linear-layers", "3-1"], "--linear-layers is all, or layers and ranges"),
        (["--features", "16"], "need --linear-layers"),
        (["--linear-layers", "all", "--features", "0"], "features must be an integer of 1 to 4096"),
    ):
        assert main([*words, *flags]) != 0
        assert message in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
