"""A comparison that was killed and run again: nothing that was done is done again, and the report is that
of a comparison that nobody killed."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from recipes import recipe
from training import text_file

from jaxinfer.convert import convert
from jaxinfer.lab.checkpoint import TrainingFolder
from jaxinfer.lab.compare import compare, parse_recipe, run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compile_cache")]

RECIPE = recipe(grid__tokens=[0, 320], uptrain__save_every=3, evaluate__windows=2)
"""Ten steps of training, with a state after each third."""
ROLES = ["similarity", "original", "control", "converted", "uptrained"]

VICTIM = """
import json, os, signal, sys
from pathlib import Path
from jaxinfer.engine.engine import Engine
from jaxinfer.lab.compare import compare, parse_recipe
from jaxinfer.lab.trainer import Trainer

cell, what, number, output = sys.argv[1], *map(int, sys.argv[2:4]), Path(sys.argv[4])
kind = (Trainer, Engine)[what]
step, calls = kind.step, 0

def killed(*args, **kwargs):
    global calls
    calls += 1
    if calls == number:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(*args, **kwargs)

def say(line):
    print(line, flush=True)
    if cell in line:
        kind.step = killed

value = json.loads(sys.stdin.read())
compare(parse_recipe(value), output, files=output, draw=False, say=say)
"""
"""Kills itself at a step of the trainer, or of the engine, in a cell."""


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, compile_cache) -> tuple[Path, dict[str, Any]]:
    output = tmp_path_factory.mktemp("unbroken")
    text_file(output)
    lines: list[str] = []
    value = compare(parse_recipe(RECIPE), output, files=output, draw=False, say=lines.append)
    assert [role_of(cell) for cell in value["cells"]] == ROLES
    return output, value


def role_of(cell: dict[str, Any]) -> str:
    return cell["role"] if cell["kind"] == "quality" else cell["kind"]


def timeless(value: Any) -> Any:
    """Without what a clock says."""
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if k not in ("seconds", "tokens_per_s")}
    return [timeless(each) for each in value] if isinstance(value, list) else value


def assert_same_report(output: Path, unbroken: tuple[Path, dict[str, Any]]) -> None:
    found, expected = (json.loads((path / "results.json").read_text()) for path in (output, unbroken[0]))
    assert timeless(found) == timeless(expected)
    assert (output / "report.md").read_text() == (unbroken[0] / "report.md").read_text()


def killed(output: Path, cell: str, what: int, number: int) -> str:
    """What a comparison said until SIGKILL at a step of its trainer (0) or engine (1), in a cell."""
    words = [sys.executable, "-c", VICTIM, cell, str(what), str(number), str(output)]
    project = Path(__file__).parents[2]
    done = subprocess.run(
        words, input=json.dumps(RECIPE), capture_output=True, text=True, timeout=280, cwd=project, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    return done.stdout


def finished(output: Path) -> dict[str, tuple[int, bytes]]:
    """Cells on disk, and when they were written."""
    return {
        path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in (output / "cells").glob("*.json")
    }


def test_sigkill_in_training_and_in_evaluation(unbroken, tmp_path: Path) -> None:
    text_file(tmp_path)
    for path in (unbroken[0] / "work" / "models").glob("source-*"):  # it is trained already
        shutil.copytree(path, tmp_path / "work" / "models" / path.name)
    said = killed(tmp_path, "quality of control", 0, 8)
    assert "quality of original" in said
    first = finished(tmp_path)
    assert len(first) == 2
    (training,) = (tmp_path / "work" / "models").glob("[!s]*.training")
    assert sorted(path.name for path in training.glob("step-*")) == ["step-00000003", "step-00000006"]

    said = killed(tmp_path, "quality of MQA mean, span full", 1, 2)
    assert "quality of original" not in said
    second = finished(tmp_path)
    assert len(second) == 3
    steps = [json.loads(line) for line in (training / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps] == list(range(1, 11))
    assert json.loads((training / "report.json").read_text())["resumed_at_step"] == 6

    lines: list[str] = []
    compare(parse_recipe(RECIPE), tmp_path, files=tmp_path, draw=False, say=lines.append)
    assert [line.split(": ", 1)[1] for line in lines if ": quality of" in line] == [
        "quality of MQA mean, span full", "quality of MQA mean 320 tokens seed 0, span full",
    ]  # fmt: skip
    last = finished(tmp_path)
    assert {name: last[name] for name in second} == second
    assert {name: second[name] for name in first} == first
    assert_same_report(tmp_path, unbroken)


@pytest.mark.parametrize("place", ["after training", "after conversion"])
def test_what_is_written_in_two_parts(unbroken, tmp_path: Path, place: str, monkeypatch) -> None:
    """A model is there, and what the report says of its making is not: it is no model yet."""
    shutil.copytree(unbroken[0], tmp_path, dirs_exist_ok=True)
    cells = {role_of(cell): cell for cell in unbroken[1]["cells"]}
    role = "control" if place == "after training" else "converted"
    (tmp_path / "cells" / f"{cells[role]['id']}.json").unlink()
    models = tmp_path / "work" / "models"
    comparison = run._Comparison(parse_recipe(RECIPE), tmp_path, tmp_path, print)
    comparison.prepare()
    path = comparison._path(comparison.cells[ROLES.index(role)].model)
    before = (path / "model.safetensors").read_bytes()
    shutil.rmtree(path)
    for rest in models.glob(f"{path.name}.*"):
        shutil.rmtree(rest) if rest.is_dir() else rest.unlink()

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        if role == "control":
            patched.setattr(TrainingFolder, "finish", stop)
        else:
            patched.setattr(run, "convert", lambda *a, **k: stop(convert(*a, **k)))
        with pytest.raises(KeyboardInterrupt):
            compare(parse_recipe(RECIPE), tmp_path, files=tmp_path, draw=False, say=print)
    assert path.exists()
    compare(parse_recipe(RECIPE), tmp_path, files=tmp_path, draw=False, say=print)
    assert (path / "model.safetensors").read_bytes() == before
    assert_same_report(tmp_path, unbroken)
