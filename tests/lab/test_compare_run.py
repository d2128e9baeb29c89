"""A comparison from end to end on a model of one layer: what is done is not done again, and what fails stays
alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from recipes import recipe
from training import STORIES, text_file

from jaxinfer.cli import main
from jaxinfer.core import ConfigError
from jaxinfer.lab.compare import compare, figures, parse_recipe, report, run
from jaxinfer.lab.compare import plots as pictures
from jaxinfer.lab.compare.recipe import Speed

pytestmark = pytest.mark.usefixtures("compile_cache")
FIVE = ["similarity", "original", "control", "converted", "uptrained"]


class Journal:
    """The lines of progress, and which cells they say were run."""

    def __init__(self, stop_at: str | None = None):
        self.lines: list[str] = []
        self.stop_at = stop_at

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        if self.stop_at is not None and self.stop_at in line:
            raise KeyboardInterrupt

    @property
    def ran(self) -> list[str]:
        return [line.split(": ", 1)[1] for line in self.lines if ": quality of" in line or ": speed" in line]


@pytest.fixture(scope="module")
def first(tmp_path_factory, compile_cache) -> tuple[Path, dict[str, Any], Journal]:
    """A finished comparison that was interrupted between two cells."""
    output = tmp_path_factory.mktemp("comparison")
    text_file(output)
    journal = Journal(stop_at="done in")
    wanted = parse_recipe(recipe())
    with pytest.raises(KeyboardInterrupt):  # after the first cell, whose figures are on disk
        compare(wanted, output, files=output, draw=False, say=journal)
    assert not (output / "results.json").exists()
    with pytest.raises(ConfigError, match="nothing to report"):
        compare(wanted, output / "other", files=output, draw=False, report_only=True)
    assert len(list((output / "cells").glob("*.json"))) == 1
    value = compare(wanted, output, files=output, draw=False, report_only=True, say=journal)
    assert [cell["status"] for cell in value["cells"]] == ["done", *["missing"] * 4]
    assert "4 of 5 cells have not been run" in (output / "report.md").read_text()
    journal = Journal()
    value = compare(wanted, output, files=output, say=journal)
    assert len(journal.ran) == 4  # all but the similarity
    return output, value, journal


def again(first, folder: Path, journal: Journal, **changes: Any) -> dict[str, Any]:
    """The comparison of a copy of what is there, with another recipe."""
    shutil.copytree(first[0], folder, dirs_exist_ok=True)
    return compare(parse_recipe(recipe(**changes)), folder, files=folder, draw=False, say=journal)


def test_every_cell_has_what_it_should(first) -> None:
    _, value, _ = first
    cells = value["cells"]
    assert [c["role"] if c["kind"] == "quality" else c["kind"] for c in cells] == FIVE
    assert all(cell["status"] == "done" and cell["versions"]["jax"] for cell in cells)
    figures = {cell["role"]: cell["figures"] for cell in cells if cell["kind"] == "quality"}
    assert figures["original"]["shape"]["kv_heads"] == [4]
    assert figures["uptrained"]["shape"]["kv_heads"] == [1]
    for role, what in figures.items():
        assert what["perplexity"][0]["counted"] == figures["original"]["perplexity"][0]["counted"], role
        assert (what["training"] is None) == (role in ("original", "converted"))
    assert figures["uptrained"]["training"]["steps"] == 2
    assert figures["converted"]["conversion"]["key_error"] > 0
    heads = cells[0]["figures"]["keys"][0]
    assert [len(line) for line in heads] == [4] * 4
    assert all(heads[k][k] == pytest.approx(1) for k in range(4))
    assert value["source"]["training"]["tokens"] == 512


def test_the_report_is_made_from_the_results(first) -> None:
    output, value, _ = first
    kept = json.loads((output / "results.json").read_text())
    assert kept == json.loads(json.dumps(value))
    assert (output / "report.md").read_text() == report.page(kept)
    assert str(output) not in json.dumps(kept)
    names = pictures.wanted(kept["cells"])
    assert set(names) == {"quality.png", "uptraining.png", "similarity.png"}
    for name in names:
        assert (output / name).read_bytes().startswith(b"\x89PNG")
        assert f"({name})" in report.page(kept)
    (recovered,) = kept["derived"]["recoveries"]
    nats = {
        cell["role"]: cell["figures"]["perplexity"][0]["nll_per_token"]["value"]
        for cell in kept["cells"]
        if cell["kind"] == "quality"
    }
    if nats["converted"] > nats["original"]:
        lost = nats["converted"] - nats["original"]
        assert recovered["recovered_nats"]["mean"] == (nats["converted"] - nats["uptrained"]) / lost


def test_nothing_is_run_twice(first, tmp_path: Path) -> None:
    journal = Journal()
    assert again(first, tmp_path, journal)["cells"] == first[1]["cells"]
    assert journal.ran == []


def test_a_torn_cell_is_run_again_and_gives_the_same(first, tmp_path: Path) -> None:
    shutil.copytree(first[0], tmp_path, dirs_exist_ok=True)
    cell = first[1]["cells"][3]
    path = tmp_path / "cells" / f"{cell['id']}.json"
    path.write_text(path.read_text()[:-40])
    journal = Journal()
    value = compare(parse_recipe(recipe()), tmp_path, files=tmp_path, draw=False, say=journal)
    assert journal.ran == ["quality of MQA mean, span full"]
    assert value["cells"][3]["figures"] == cell["figures"]


def test_what_is_new_alone_is_run_and_what_fails_stays_alone(first, tmp_path: Path) -> None:
    """Three heads do not divide four; a second seed and the times of another span are new."""
    journal = Journal()
    changes = {
        "variant": [{"name": "three", "kv_heads": 3}, {"name": "MQA", "kv_heads": 1}],
        "speed": {"contexts": [16, 32], "measured_contexts": [16], "output": 8, "measured_output": 4},
    }
    value = again(first, tmp_path, journal, **changes)
    assert [line.split(", span")[0] for line in journal.ran] == [
        "quality of three mean", "quality of three mean 64 tokens seed 0", "speed of original",
        "speed of three mean", "speed of MQA mean",
    ]  # fmt: skip
    failed = [cell for cell in value["cells"] if cell["status"] == "failed"]
    assert {cell["variant"] for cell in failed} == {"three"}
    assert len(failed) == 3
    assert all("kv_heads 3 does not divide the 4 KV heads of layer 0" in cell["error"] for cell in failed)
    assert "## 3 cells failed" in report.page(value)
    done = [cell for cell in value["cells"] if cell["kind"] == "speed" and cell["status"] == "done"]
    original, mqa = (cell["figures"] for cell in done)
    for index in (0, 1):
        assert mqa["predicted"][index]["kv_bytes"] * 4 == original["predicted"][index]["kv_bytes"]
        assert mqa["predicted"][index]["largest_batch"] > original["predicted"][index]["largest_batch"]
    assert mqa["measured"][0]["ttft_s"] > 0
    assert mqa["measured"][0]["kv_bytes"] * 4 == original["measured"][0]["kv_bytes"]
    pictures.draw(value, tmp_path)
    assert (tmp_path / "context.png").stat().st_size > 1000
    journal = Journal()
    again((tmp_path,), tmp_path / "later", journal, **changes)
    assert len(journal.ran) == 3  # those that failed


def test_a_window_has_room_for_more_sequences() -> None:
    """By the tokens of a step: what is in one step is held besides the window."""
    wanted = Speed(device="h200", contexts=(448,), batch=8, output=32)

    def predicted(span: str, tokens: int) -> dict[str, Any]:
        engine = {"max_num_batched_tokens": tokens}
        (found,) = figures.speed(STORIES, span, wanted, engine)["predicted"]
        return found

    full, window, whole = (
        predicted("full", 64),
        predicted("window:32,sinks:4", 64),
        predicted("window:32", 512),
    )
    assert full["kv_bytes"] == whole["kv_bytes"]
    # 448 + 32 tokens in pages of 16; or one page of sinks, and 32 - 1 + 64 positions in a row
    assert window["kv_bytes"] * 30 == full["kv_bytes"] * 8
    assert window["largest_batch"] > 3 * full["largest_batch"] > 0
    assert full["largest_batch"] == whole["largest_batch"]


@pytest.mark.slow
def test_one_time_for_methods_of_one_shape(first, tmp_path: Path) -> None:
    """Of one layer, a budget comes to the same heads whatever the method."""
    journal = Journal()
    changes = {
        "variant": [{"kv_budget": 0.5}], "grid__methods": ["mean", "first"], "grid__tokens": [0],
        "uptrain": None, "speed": {"contexts": [16], "measured_contexts": [16], "measured_output": 4},
    }  # fmt: skip
    value = again(first, tmp_path, journal, **changes)
    mean, other = (c["figures"] for c in value["cells"] if c["kind"] == "speed" and c["variant"])
    assert mean == other
    assert "| budget-0.5 | full | 16      | here, measured" in report.page(value)


@pytest.mark.slow
def test_models_learn_under_the_span_that_they_are_measured_with(first, tmp_path: Path) -> None:
    """The model for the window is another one; what learnt with everything is not measured under it."""
    journal = Journal()
    changes = {
        "grid__spans": ["full", "window:8"], "grid__trained_under": ["own"], "grid__control": False,
        "speed": {"contexts": [16, 32], "output": 8},
    }  # fmt: skip
    value = again(first, tmp_path, journal, **changes)
    assert [line for line in journal.ran if line.startswith("quality")] == [
        "quality of original, span window:8", "quality of MQA mean, span window:8",
        "quality of MQA mean 64 tokens under window:8 seed 0, span window:8",
    ]  # fmt: skip
    assert [cell["status"] for cell in value["cells"]] == ["done"] * len(value["cells"])
    full, own = (cell for cell in value["cells"] if cell["role"] == "uptrained")
    assert (full["trained_span"], own["trained_span"]) == ("full", "window:8")
    losses = [cell["figures"]["training"]["first_loss"] for cell in (full, own)]
    assert abs(losses[0] - losses[1]) > 1e-4  # of the same weights, on the same tokens
    page = report.page(value)
    assert "64, under window:8" in page
    assert "## Spans beside full attention" in page
    pictures.draw(value, tmp_path)


def test_a_discarded_model_is_not_needed(first, tmp_path: Path) -> None:
    shutil.copytree(first[0], tmp_path, dirs_exist_ok=True)
    wanted = parse_recipe(recipe())
    for cell in first[1]["cells"]:  # to be measured again, by the models that are there
        if cell["tokens"]:
            (tmp_path / "cells" / f"{cell['id']}.json").unlink()
    models = tmp_path / "work" / "models"
    before = sum((path / "config.json").exists() for path in models.iterdir())
    compare(wanted, tmp_path, files=tmp_path, draw=False, discard_models=True, say=Journal())
    assert sum((path / "config.json").exists() for path in models.iterdir()) == before - 2
    journal = Journal()
    compare(wanted, tmp_path, files=tmp_path, draw=False, say=journal)
    assert journal.ran == []


def test_the_command(first, tmp_path: Path, capsys, monkeypatch) -> None:
    shutil.copytree(first[0], tmp_path / "out")
    path = tmp_path / "small.toml"
    path.write_text(TOML)
    words = ["lab", "compare", str(path), "--output", str(tmp_path / "out"), "--files", str(first[0])]
    assert main([*words, "--no-plots"]) == 0
    assert "## What uptraining brought back" in capsys.readouterr().out
    assert main([*words, "--no-plots", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["format"] == report.FORMAT
    path.write_text(TOML.replace("kv_heads = 1", "kv_heads = 3"))
    assert main([*words, "--no-plots"]) == 1
    path.write_text(TOML + "\n[plots]\n")
    assert main(words) == 1
    assert "plots is not known" in capsys.readouterr().err
    path.write_text(TOML)
    assert main([*words[:-1], str(tmp_path / "nowhere")]) == 1
    assert "rhyme.txt" in capsys.readouterr().err

    def none() -> None:
        raise ConfigError("the pictures of a comparison need matplotlib")

    monkeypatch.setattr(run.plots, "check", none)
    assert main(words) == 1
    assert "need matplotlib" in capsys.readouterr().err


TOML = """\
name = "small"

[source]
vocabulary = 257
data = ["rhyme.txt"]
config = { hidden_size = 32, intermediate_size = 48, num_hidden_layers = 1, num_attention_heads = 4, \
num_key_value_heads = 4, max_position_embeddings = 64, rms_norm_eps = 1e-5, rope_theta = 10000.0, \
tie_word_embeddings = true }
train = { tokens = 512, batch = 4, sequence_length = 16, learning_rate = 3e-3 }

[[variant]]
name = "MQA"
kv_heads = 1

[grid]
methods = ["mean"]
tokens = [0, 64]

[uptrain]
data = ["rhyme.txt"]
batch = 2
sequence_length = 16
learning_rate = 1e-3

[evaluate]
perplexity = [{ file = "rhyme.txt", start = 0.5 }]
window = 32
windows = 4

[engine]
max_model_len = 64
max_num_seqs = 4
max_num_batched_tokens = 64

[calibration]
tokens = 128
"""
"""The small recipe as people write it."""
