"""A training that is killed goes on to the same bits; what is damaged, or of another run, is not taken up."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training import STORIES, settings, text_file

from jaxinfer.core import ConfigError
from jaxinfer.lab.checkpoint import TrainingFolder
from jaxinfer.lab.uptrain import uptrain

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("compile_cache")
CHOSEN = settings(steps=14, batch=2, sequence_length=24, train="kv", save_every=3)
RUN = """
import os, signal, sys
from checkpoints import writing
from jaxinfer.lab import trainer
from jaxinfer.lab.settings import Settings
from jaxinfer.lab.uptrain import uptrain

model, destination, text, chosen, where = sys.argv[1:]
update, write_json = trainer.Trainer.step, writing.write_json
saved = []

def step(self, state, frozen, number, *batch):
    done = update(self, state, frozen, number, *batch)  # it runs while this goes on
    if where == "updating" and number == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return done

def write(path, value):
    if path.name == "state.json":
        saved.append(path)
        if where == "saving" and len(saved) == 2:  # Orbax is done, and the state not whole yet
            os.kill(os.getpid(), signal.SIGKILL)
    write_json(path, value)

trainer.Trainer.step, writing.write_json = step, write
uptrain(model, destination, [text], Settings(**eval(chosen)), progress=False)
"""


def curve(folder: Path) -> list[dict]:
    """The log without what a clock says."""
    lines = TrainingFolder(folder).read_log()
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def killed(where: str, destination: Path, text: Path) -> None:
    """The training in a process of its own, which SIGKILL ends in its eighth update or in its second save."""
    words = [str(STORIES), str(destination), str(text), repr(dataclasses.asdict(CHOSEN)), where]
    done = subprocess.run([sys.executable, "-c", RUN, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    assert not destination.exists()


@pytest.fixture(scope="module")
def whole(tmp_path_factory, compile_cache) -> tuple[Path, Path, dict]:
    """A text, what was trained on it without a break, and the report."""
    folder = tmp_path_factory.mktemp("whole")
    text = text_file(folder)
    return text, folder / "model", uptrain(STORIES, folder / "model", [text], CHOSEN, progress=False)


@pytest.mark.parametrize(("where", "state"), [("updating", 6), ("saving", 3)])
def test_killed_and_resumed_is_the_same_to_the_bit(whole, tmp_path: Path, where: str, state: int) -> None:
    text, unbroken, report = whole
    broken = tmp_path / "broken"
    killed(where, broken, text)
    left = list(broken.with_name("broken.training").glob(".step-*.partial-*"))
    assert len(left) == (where == "saving")
    with TrainingFolder(broken).log_path.open("a") as log:
        log.write('{"step": 9, "lo')  # torn by the kill
    resumed = uptrain(STORIES, broken, [text], CHOSEN, resume=True, progress=False)
    assert resumed["resumed_at_step"] == state
    assert [line["step"] for line in curve(broken)] == list(range(1, 15))
    assert curve(broken) == curve(unbroken)
    files = [(folder / "model.safetensors").read_bytes() for folder in (unbroken, broken)]
    assert files[0] == files[1]
    assert resumed["last_loss"] == report["last_loss"] < report["first_loss"]

    # states are gone, the curve stays; another training there is a new one
    assert sorted(p.name for p in broken.with_name("broken.training").iterdir()) == [
        ".lock", "log.jsonl", "report.json", "run.json"
    ]  # fmt: skip
    shutil.rmtree(broken)
    with pytest.raises(ConfigError, match="came to its end"):
        uptrain(STORIES, broken, [text], CHOSEN, resume=True, progress=False)


def test_another_run_is_not_gone_on_with(whole, tmp_path: Path) -> None:
    text, unbroken, _ = whole
    broken = tmp_path / "broken"
    TrainingFolder(broken).path.mkdir()
    shutil.copy(TrainingFolder(unbroken).path / "run.json", TrainingFolder(broken).path)
    with pytest.raises(ConfigError, match="broken off; go on with --resume"):
        uptrain(STORIES, broken, [text], CHOSEN, progress=False)
    changed = dataclasses.replace(CHOSEN, learning_rate=1e-3)
    with pytest.raises(ConfigError, match=r"another run: learning_rate was 0.003 and is 0.001"):
        uptrain(STORIES, broken, [text], changed, resume=True, progress=False)
    other = tmp_path / "other.txt"
    other.write_text("Something else altogether, and once more. " * 9)
    with pytest.raises(ConfigError, match="another run: data was"):
        uptrain(STORIES, broken, [other], CHOSEN, resume=True, progress=False)


def arrays(seed: int) -> dict:
    draw = np.random.default_rng(seed)
    rows = {"layers.0.weight": jnp.asarray(draw.standard_normal((70, 30)), jnp.float32)}
    return {"trained": rows, "count": jnp.asarray(seed, jnp.int32)}


@pytest.fixture
def folder(tmp_path: Path) -> TrainingFolder:
    found = TrainingFolder(tmp_path / "model")
    found.begin({"a": (1, 2)}, resume=False)
    for step in (10, 20, 30):
        found.save(step, arrays(step), {"position": 4 * step, "targets": 7, "seconds": 1.5})
    return found


def assert_restored(folder: TrainingFolder, step: int) -> None:
    record = folder.newest()
    assert record is not None
    assert (record["step"], record["position"]) == (step, 4 * step)
    like = jax.eval_shape(lambda: arrays(step))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), like)
    jax.tree.map(np.testing.assert_array_equal, folder.restore(step, like), arrays(step))


def test_two_states_stay(folder: TrainingFolder) -> None:
    folder.begin({"a": [1, 2]}, resume=True)
    assert sorted(p.name for p in folder.path.glob("step-*")) == ["step-00000020", "step-00000030"]
    assert_restored(folder, 30)


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [torn, flipped, Path.unlink], ids=["torn", "flipped", "lost"])
def test_a_damaged_state_is_passed_over(folder: TrainingFolder, damage, caplog) -> None:
    newest = folder.path / "step-00000030"
    files = [path for path in newest.rglob("*") if path.is_file()]
    assert len(files) > 3
    for file in files:
        kept = file.read_bytes()
        damage(file)
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            assert_restored(folder, 20)
            assert "step-00000030 is damaged" in caplog.text
        file.write_bytes(kept)
    assert_restored(folder, 30)


def test_what_was_being_written_is_no_state(folder: TrainingFolder) -> None:
    """Neither ours nor Orbax's own unfinished folders."""
    (folder.path / ".step-00000040.partial-x1" / "state").mkdir(parents=True)
    shutil.copytree(folder.path / "step-00000030", folder.path / "step-00000050.orbax-checkpoint-tmp-1")
    assert_restored(folder, 30)
    unfinished = folder.path / "step-00000040"
    shutil.copytree(folder.path / "step-00000030", unfinished)
    (unfinished / "state.json").unlink()
    assert_restored(folder, 30)
    folder.save(40, arrays(40), {"position": 160})
    assert_restored(folder, 40)


def test_a_state_that_cannot_be_written_harms_no_other(folder: TrainingFolder, monkeypatch) -> None:
    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jaxinfer.lab.checkpoint.writing.write_json", full)
    with pytest.raises(Exception, match="No space left"):
        folder.save(40, arrays(40), {"position": 160})
    assert not list(folder.path.glob("*00000040*"))
    assert_restored(folder, 30)


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no training to resume"):
        TrainingFolder(tmp_path / "model").begin({}, resume=True)


def test_the_log_is_cut_where_a_state_is(folder: TrainingFolder) -> None:
    lines = [json.dumps({"step": step}) for step in (0, 10, 20, 21)]
    folder.log_path.write_text("\n".join([*lines, '{"ste']))
    with folder.open_log(up_to_step=20) as log:
        log.write('{"step": 21, "again": true}\n')
    assert [line["step"] for line in folder.read_log()] == [0, 10, 20, 21]
    assert folder.read_log()[-1]["again"]
    assert os.listdir(folder.path).count(".log.jsonl") == 0
