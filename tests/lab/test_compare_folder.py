"""What a comparison keeps in its folder, and that it is the only one to write there."""

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
from training import STORIES, settings, text_file

from jaxinfer.core import ConfigError
from jaxinfer.lab.checkpoint import LOCK, TrainingFolder, held
from jaxinfer.lab.compare import compare, figures, parse_recipe, source
from jaxinfer.lab.uptrain import uptrain

pytestmark = pytest.mark.usefixtures("compile_cache")
RECIPE = recipe(grid__tokens=[0], uptrain=None)
"""A source that is trained here, and its conversion."""

HOLDER = """
import sys, time
from pathlib import Path
from jaxinfer.lab.checkpoint import held

with held(Path(sys.argv[1]), "refused"):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory, compile_cache) -> tuple[Path, dict[str, Any]]:
    output = tmp_path_factory.mktemp("finished")
    text_file(output)
    return output, run(output, [])


def run(output: Path, lines: list[str], **more: Any) -> dict[str, Any]:
    return compare(parse_recipe(RECIPE), output, files=output, draw=False, say=lines.append, **more)


def test_the_kernel_lets_go_for_a_process_that_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "new" / LOCK
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(file)], stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match="somebody else"), held(file, "somebody else is here"):
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    with held(file, "somebody else is here"):
        pass


def test_two_comparisons_do_not_write_to_one_folder(finished, tmp_path: Path) -> None:
    shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True)
    with held(tmp_path / LOCK, "refused"):
        with pytest.raises(ConfigError, match=r"another comparison is writing to .*wait for its end"):
            run(tmp_path, [])
        assert run(tmp_path, [], report_only=True)["cells"] == finished[1]["cells"]
    assert run(tmp_path, [])["cells"] == finished[1]["cells"]


def test_a_report_leaves_alone_what_is_being_trained(finished, tmp_path: Path) -> None:
    """A model that is there before the report of its training belongs to whoever trains it."""
    shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True)
    (training,) = (tmp_path / "work" / "models").glob("source-*.training")
    (training / "report.json").unlink()
    shutil.rmtree(tmp_path / "source")
    model = training.with_suffix("")
    with pytest.raises(ConfigError, match="nothing to report"):
        run(tmp_path, [], report_only=True)
    assert (model / "config.json").exists()
    assert not source.is_made(model)
    assert not model.exists()


def test_two_trainings_do_not_write_to_one_folder(tmp_path: Path) -> None:
    data = [text_file(tmp_path)]
    chosen = settings(steps=1, batch=2, save_every=0)
    destination = tmp_path / "model"
    folder = TrainingFolder(destination)
    with pytest.raises(ConfigError, match="there is no training to resume"):
        uptrain(STORIES, destination, data, chosen, resume=True, progress=False)
    assert not folder.path.exists()
    with folder.held(), pytest.raises(ConfigError, match=r"model\.training: another training is writing"):
        uptrain(STORIES, destination, data, chosen, progress=False)
    assert not destination.exists()
    assert sorted(path.name for path in folder.path.iterdir()) == [LOCK]
    assert uptrain(STORIES, destination, data, chosen, progress=False)["steps"] == 1
    shutil.rmtree(destination)  # a finished training makes room, and the lock stays with whoever holds it
    before = (folder.path / LOCK).stat().st_ino
    assert uptrain(STORIES, destination, data, chosen, progress=False)["steps"] == 1
    assert (folder.path / LOCK).stat().st_ino == before


def test_work_may_be_removed(finished, tmp_path: Path) -> None:
    """The source is trained again when a cell needs it, and for no report."""
    shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "work")
    expected = {key: finished[1][key] for key in ("source", "cells", "derived")}
    for report_only in (True, False):
        lines: list[str] = []
        value = run(tmp_path, lines, report_only=report_only)
        assert {key: value[key] for key in expected} == expected
        assert not any("training the source" in line for line in lines)
    assert not list((tmp_path / "work").glob("models/*"))
    (tmp_path / "cells" / f"{value['cells'][1]['id']}.json").unlink()
    lines = []
    value = run(tmp_path, lines)
    assert sum("training the source" in line for line in lines) == 1
    assert value["cells"][1]["figures"] == finished[1]["cells"][1]["figures"]


@pytest.mark.parametrize("wrong", [float("nan"), {1, 2}])
def test_figures_that_are_no_json_are_a_failed_cell(finished, tmp_path: Path, monkeypatch, wrong) -> None:
    shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True)
    cells = finished[1]["cells"]
    for cell in cells:
        if cell["kind"] in ("similarity", "quality"):
            (tmp_path / "cells" / f"{cell['id']}.json").unlink()
    monkeypatch.setattr(figures, "similarity", lambda *_: {"keys": wrong})
    value = run(tmp_path, [])
    assert [cell["status"] for cell in value["cells"]] == ["failed", "done", "done"]
    assert "JSON" in value["cells"][0]["error"]
    assert json.loads((tmp_path / "results.json").read_text())["cells"][0]["status"] == "failed"
