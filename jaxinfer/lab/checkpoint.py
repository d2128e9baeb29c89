"""States of a training on disk, from which it goes on to the same bits.

    DST.training/run.json               what is being trained, on what, how
    DST.training/log.jsonl              the loss curve
    DST.training/step-00000100/state    parameters and moments, an Orbax checkpoint {name: array}
    DST.training/step-00000100/state.json   step, data position, seed; sha256 of all of it
    DST.training/report.json            of a training that came to its end; states are gone then
    DST.training/.lock                  held by the process that trains here, until it ends

A state appears under its name when all of it is on disk. One that is damaged all the same is passed over,
and the one before it is taken.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import jax

from checkpoints import writing
from jaxinfer.core import ConfigError

logger = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{8})")
KEPT = 2
"""States that stay: the newest, and one in case it is damaged."""
LOCK = ".lock"
"""The file in a folder that its only writer holds."""


@contextlib.contextmanager
def held(file: Path, refusal: str) -> Iterator[None]:
    """Hold `file`, which is made where it is missing, against all others who ask like this. The kernel lets
    go of it when this process ends, however it does. Raises ConfigError with `refusal` where somebody has it,
    OSError where it cannot be made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(refusal) from None
        yield


class TrainingFolder:
    """The folder beside the destination in which a training keeps what it needs to go on."""

    def __init__(self, destination: Path):
        self.path = destination.with_name(destination.name + ".training")
        self._run, self._report = self.path / "run.json", self.path / "report.json"
        self.log_path = self.path / "log.jsonl"

    def held(self) -> contextlib.AbstractContextManager[None]:
        """Nobody else trains in this folder meanwhile. Raises ConfigError where somebody does."""
        refusal = f"{self.path}: another training is writing to it; wait for its end, or choose another DST"
        return held(self.path / LOCK, refusal)

    def begin(self, run: dict[str, Any], *, resume: bool) -> None:
        """Make the folder for this run, or with `resume` find the run in it that it is.

        A training that came to its end makes room for a new one. Raises ConfigError where one was broken off
        and nobody said `resume`, where there is none and somebody did, and for one of another run, naming
        what differs.
        """
        run = json.loads(json.dumps(run))
        if self._report.exists():
            if resume:
                raise ConfigError(f"{self.path}: this training came to its end; there is nothing to resume")
            for entry in self._content():  # and not the folder: whoever holds it holds this file in it
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        if not resume:
            if self._content():
                raise ConfigError(
                    f"{self.path}: holds a training that was broken off; go on with --resume, or remove "
                    "the folder"
                )
            self.path.mkdir(parents=True, exist_ok=True)
            partial = self.path / ".run.json"
            writing.write_json(partial, run)
            partial.rename(self._run)
            return
        old = self.old_run()
        differing = [key for key in {**old, **run} if old.get(key) != run.get(key)]
        if differing:
            shown = ", ".join(f"{key} was {old.get(key)!r} and is {run.get(key)!r}" for key in differing)
            raise ConfigError(f"{self.path}: holds the training of another run: {shown}")

    def old_run(self) -> dict[str, Any]:
        """What was begun here. Raises ConfigError where nothing was."""
        try:
            return json.loads(self._run.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self._run}: there is no training to resume ({error})") from None

    def save(self, step: int, arrays: Any, record: dict[str, Any]) -> None:
        """Keep a tree of arrays and a JSON object as the state after `step` updates. Raises CheckpointError
        when it cannot be written; older states are still there then."""
        import orbax.checkpoint as ocp  # 2 s

        target = self._place(step)
        if target.exists():
            shutil.rmtree(target)
        with writing.new_folder(target) as folder:
            with ocp.StandardCheckpointer() as checkpointer:
                checkpointer.save((folder / "state").resolve(), _named(arrays))
                checkpointer.wait_until_finished()
            files = {name: [size, _flushed(folder / name)] for name, size in _sizes(folder)}
            record = {"step": step, **record, "files": files}
            writing.write_json(folder / "state.json", {"record": record, "sha256": _digest(record)})
        for old in self._steps()[KEPT:]:
            shutil.rmtree(self._place(old), ignore_errors=True)

    def newest(self) -> dict[str, Any] | None:
        """The record of the newest state that is whole; None without one."""
        for step in self._steps():
            folder = self._place(step)
            if (record := _whole(folder)) is not None:
                return record
            logger.warning("%s is damaged, and passed over", folder)
        return None

    def restore(self, step: int, like: Any) -> Any:
        """The arrays of a state, in the shapes, types and places of `like`."""
        import orbax.checkpoint as ocp

        with ocp.StandardCheckpointer() as checkpointer:
            found = checkpointer.restore((self._place(step) / "state").resolve(), _named(like))
        leaves = [found[name] for name in _named(like)]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)

    def finish(self, report: dict[str, Any]) -> None:
        """The result is written: no state is needed any more, nor what a killed process left of one. The log
        stays, and the report beside it."""
        writing.write_json(self._report, report)
        for entry in self.path.glob("*step-*"):
            shutil.rmtree(entry, ignore_errors=True)

    def _place(self, step: int) -> Path:
        return self.path / f"step-{step:08d}"

    def _content(self) -> list[Path]:
        """All that a training has left here; its report last: while it is there, the training is finished."""
        found = [entry for entry in self.path.iterdir() if entry.name != LOCK] if self.path.exists() else []
        return sorted(found, key=lambda entry: entry == self._report)

    def _steps(self) -> list[int]:
        """Steps of the states that are there, newest first. What was being written when a process was killed
        has another name."""
        found = (_NAME.fullmatch(entry.name) for entry in self.path.iterdir())
        return sorted((int(match[1]) for match in found if match), reverse=True)

    # ------------------------------------------------------------------------------------------ the log

    def open_log(self, *, up_to_step: int) -> TextIO:
        """The log, to be added to, without the lines of updates after `up_to_step` and torn ones: they are
        about to be done again."""
        lines = [line for line in self.read_log() if line["step"] <= up_to_step]
        partial = self.log_path.with_name(".log.jsonl")
        writing.write_text(partial, "".join(json.dumps(line) + "\n" for line in lines))
        partial.rename(self.log_path)
        return self.log_path.open("a", encoding="utf-8", buffering=1)

    def read_log(self) -> list[dict[str, Any]]:
        """The whole lines of the log."""
        if not self.log_path.exists():
            return []
        found = []
        for line in self.log_path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                break
        return found


def _named(tree: Any) -> dict[str, Any]:
    """Leaves by their path in the tree: a checkpoint that needs no class of optax to be read."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _sizes(folder: Path) -> Iterator[tuple[str, int]]:
    for root, _, names in os.walk(folder):
        for name in sorted(names):
            file = Path(root) / name
            yield file.relative_to(folder).as_posix(), file.stat().st_size


def _flushed(file: Path) -> str:
    """The sha256 of a file, which is on disk from here on."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _whole(folder: Path) -> dict[str, Any] | None:
    """The record of a state, if all its files are there as they were written."""
    try:
        held = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        record = held["record"]
        if held["sha256"] != _digest(record):
            return None
        for name, (size, digest) in record["files"].items():
            file = folder / name
            if file.stat().st_size != size or _flushed(file) != digest:
                return None
        return record
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
