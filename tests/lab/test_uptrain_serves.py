"""What was trained serves: the engine finds the texts more likely than before, and it is trained again."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from training import RHYME, STORIES, settings, text_file

import checkpoints
from checkpoints import CheckpointError
from jaxinfer import LLM
from jaxinfer.cli import main
from jaxinfer.core import ConfigError, RequestError
from jaxinfer.lab.trainer import TrainingError
from jaxinfer.lab.uptrain import uptrain

pytestmark = pytest.mark.usefixtures("compile_cache")
CHOSEN = {"steps": 25, "batch": 4, "sequence_length": 32, "learning_rate": 3e-3}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return text_file(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def trained(text: Path, compile_cache) -> tuple[Path, dict]:
    destination = text.parent / "trained"
    chosen = settings(
        **CHOSEN, eval_file=(str(text),), eval_every=10, distill=str(STORIES), distill_weight=0.1
    )
    return destination, uptrain(STORIES, destination, [text], chosen, progress=False)


def perplexity(model: Path) -> float:
    with LLM(str(model), max_num_seqs=1, max_num_batched_tokens=128, warmup="lazy", progress=False) as llm:
        (score,) = llm.score([RHYME])
    return score.perplexity


def test_the_engine_finds_the_texts_more_likely(trained, text: Path) -> None:
    destination, report = trained
    assert perplexity(destination) < 0.5 * perplexity(STORIES)
    assert report["last_loss"] < report["first_loss"]
    assert report["last_eval_loss"] < report["first_eval_loss"]
    assert report["steps"] == 25
    assert report["tokens"] <= 25 * 4 * 32
    assert report["trained_parameters"] == report["parameters"]
    assert report["tokens_per_s"] > 0
    assert report["peak_memory_bytes"] > 1e6


def test_the_log_is_the_loss_curve(trained) -> None:
    _, report = trained
    lines = [json.loads(line) for line in Path(report["log"]).read_text().splitlines()]
    assert [line["step"] for line in lines if "eval_loss" in line] == [0, 10, 20, 25]
    curve = [line for line in lines if "loss" in line]
    assert [line["step"] for line in curve] == list(range(1, 26))
    for line in curve:
        assert line["loss"] == pytest.approx(0.9 * line["cross_entropy"] + 0.1 * line["divergence"], rel=1e-5)
        assert {"learning_rate", "gradient_norm", "tokens", "seconds"} <= set(line)
    assert abs(curve[0]["divergence"]) < 1e-5  # it began as its original
    assert curve[-1]["tokens"] == report["tokens"]


def test_the_folder_has_what_a_model_has(trained) -> None:
    destination, _ = trained
    assert {file.name for file in STORIES.iterdir()} == {file.name for file in destination.iterdir()}
    old, new = (json.loads((folder / "config.json").read_text()) for folder in (STORIES, destination))
    assert {**old, "torch_dtype": "float32"} == {**new, "torch_dtype": "float32"}


@pytest.mark.parametrize("to", ["safetensors", "orbax"])
def test_only_keys_and_values_are_others_and_it_is_trained_again(
    trained, text: Path, tmp_path: Path, to
) -> None:
    destination, _ = trained
    again = tmp_path / "again"
    chosen = settings(**{**CHOSEN, "steps": 3}, train="kv", to=to, save_dtype="bfloat16", save_every=0)
    report = uptrain(destination, again, [text], chosen, progress=False)
    assert report["trained_parameters"] == 5 * 2 * 32 * 64
    old, new = checkpoints.open_checkpoint(destination), checkpoints.open_checkpoint(again)
    assert old.names() == new.names()
    for name in old.names():
        before, after = old.read(name).astype("bfloat16"), np.asarray(new.read(name))
        assert after.dtype.name == "bfloat16"
        same = np.array_equal(before, after)
        assert same == (".k_proj" not in name and ".v_proj" not in name), name
    assert perplexity(again) < 1.1 * perplexity(destination)


def test_the_command(text: Path, tmp_path: Path, capsys) -> None:
    words = [str(STORIES), str(tmp_path / "result"), "--data", str(text), "--steps", "2", "--batch", "2"]
    words += ["--sequence-length", "16", "--train", "attention", "--dtype", "bf16", "--save-every", "0"]
    assert main(["lab", "uptrain", *words]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["steps"] == 2
    assert report["first_eval_loss"] is None
    assert main(["lab", "uptrain", *words]) == 1
    assert "exists already" in capsys.readouterr().err
    assert main(["lab", "uptrain", *words[:2], "--steps", "2"]) == 2
    assert "--data" in capsys.readouterr().err
    assert main(["lab", "uptrain", *words, "--temperature", "2"]) == 1
    assert "temperature 2.0 is of a distillation" in capsys.readouterr().err


def test_no_numbers_stop_it_and_nothing_is_written(text: Path, tmp_path: Path) -> None:
    chosen = settings(
        steps=9, batch=2, sequence_length=16, learning_rate=1e30, warmup=0, clip=0, save_every=1
    )
    with pytest.raises(TrainingError, match=r"step \d: loss .*The state after step \d is in"):
        uptrain(STORIES, tmp_path / "result", [text], chosen, progress=False)
    assert not (tmp_path / "result").exists()


def changed_stories(folder: Path, **keys) -> Path:
    shutil.copytree(STORIES, folder)
    os.chmod(folder, 0o755)
    for file in folder.iterdir():
        file.chmod(0o644)
    if keys.pop("no_tokenizer", False):
        (folder / "tokenizer.json").unlink()
    if "tokenizer" in keys:
        held = (folder / "tokenizer.json").read_text()
        for old, new in keys["tokenizer"]:
            assert old in held
            held = held.replace(old, new)
        (folder / "tokenizer.json").write_text(held)
    return folder


def test_what_does_not_go_together_is_refused(text: Path, tmp_path: Path) -> None:
    def refused(error: type, message: str, model=STORIES, data=text, target="x", **changes) -> None:
        with pytest.raises(error, match=message):
            uptrain(model, tmp_path / target, [data], settings(**changes), progress=False)
        assert not (tmp_path / "x").exists()

    refused(ConfigError, "random:llama2-7b: there is no checkpoint", model="random:llama2-7b")
    refused(ConfigError, "no tokenizer", model=changed_stories(tmp_path / "mute", no_tokenizer=True))
    refused(ConfigError, "sequence_length 513 is more than the model's own limit of 512", sequence_length=513)
    refused(ConfigError, "devices 99: there are", devices=99)
    refused(OSError, "No such file", data=tmp_path / "none.txt")
    refused(RequestError, "no text in", data=_empty(tmp_path))
    swapped = (('"nd": 264', '"nd": 266'), ('"ed": 266', '"ed": 264'))
    other = changed_stories(tmp_path / "other", tokenizer=swapped)
    refused(ConfigError, "have different tokenizers", distill=str(other))
    refused(ConfigError, "lies inside the source", model=other, target="other/inside")
    refused(CheckpointError, "exists already", target="other")


def _empty(folder: Path) -> Path:
    path = folder / "empty.txt"
    path.write_text("")
    return path
