"""Writing folders: safetensors and their index, names, atomic folders, full disks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from named_arrays import ARRAYS, assert_same, pending

import checkpoints
from checkpoints import CheckpointError
from checkpoints.writing import (
    check_room,
    chunk_shape,
    copy_file,
    new_folder,
    write_json,
    write_orbax,
    write_safetensors,
)

ROOT = Path(__file__).parents[2]


def test_chunks_suit_shards_and_rows() -> None:
    assert chunk_shape((576,), 4) == [576]
    assert chunk_shape((576, 1536), 4) == [72, 1536]
    assert chunk_shape((4096, 4096), 2) == [128, 1024]
    for rows, columns in ((128256, 4096), (4096, 14336), (14336, 4096), (49153, 577)):
        chunk = chunk_shape((rows, columns), 2)
        assert chunk[0] * columns <= 1 << 19  # a band of rows that costs little to read twice
        assert 2 * chunk[0] * chunk[1] >= 1 << 18
    assert chunk_shape((0, 7), 4) == [1, 7]
    assert chunk_shape((4, 800_000), 4) == [1, 100_000]


def test_safetensors_are_the_librarys(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    write_safetensors(tmp_path, pending(ARRAYS))
    loaded = load_file(tmp_path / "model.safetensors")
    assert set(loaded) == set(ARRAYS)
    for name, expected in ARRAYS.items():
        assert_same(loaded[name], expected, name)
    raw = (tmp_path / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert header["__metadata__"] == {"format": "pt"}
    for name, expected in ARRAYS.items():
        assert header[name]["data_offsets"][0] % expected.dtype.itemsize == 0


def test_shards_and_their_index(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    with new_folder(tmp_path / "model") as partial:
        write_safetensors(partial, pending(ARRAYS), max_shard_bytes=1_000_000)
        write_json(partial / "config.json", {})
    folder = tmp_path / "model"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(array.nbytes for array in ARRAYS.values())}
    assert sorted(item.name for item in folder.glob("*.safetensors")) == [
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    ]  # fmt: skip
    for name, shard in index["weight_map"].items():
        assert_same(load_file(folder / shard)[name], ARRAYS[name], name)
    opened = checkpoints.open_checkpoint(folder)
    assert opened.names() == tuple(sorted(ARRAYS))


@pytest.mark.parametrize("writer", [write_orbax, write_safetensors])
@pytest.mark.parametrize("name", ["", "a/b", "../a", "/a", "a b", "ä", "a\0", "a\n", ".a", "-a"])
def test_odd_names_are_refused(tmp_path: Path, writer: Any, name: str) -> None:
    with pytest.raises(CheckpointError, match="expected a name of letters"):
        writer(tmp_path, pending({name: np.ones(3, np.float32)}))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("writer", [write_orbax, write_safetensors])
def test_what_cannot_be_written_is_refused(tmp_path: Path, writer: Any) -> None:
    with pytest.raises(CheckpointError, match="tensor a: got type int8"):
        writer(tmp_path, pending({"a": np.ones(3, np.int8)}))
    with pytest.raises(CheckpointError, match="tensor a: there are two"):
        writer(tmp_path, 2 * pending({"a": np.ones(3, np.float32)}))
    with pytest.raises(CheckpointError, match="no tensors"):
        writer(tmp_path, [])
    assert not any(tmp_path.iterdir())


def fail_half_way(folder: Path, failure: type[BaseException]) -> None:
    with new_folder(folder) as partial:
        (partial / "half").write_text("x")
        raise failure


def test_a_new_folder_is_complete_or_absent(tmp_path: Path) -> None:
    for failure in (KeyboardInterrupt, RuntimeError):
        with pytest.raises(failure):
            fail_half_way(tmp_path / "model", failure)
        assert not any(tmp_path.iterdir())
    (tmp_path / "model").mkdir()
    with new_folder(tmp_path / "model") as partial:
        (partial / "whole").write_text("x")
    assert [item.name for item in tmp_path.rglob("*")] == ["model", "whole"]
    with (
        pytest.raises(CheckpointError, match="model: exists already and is not empty"),
        new_folder(tmp_path / "model"),
    ):
        pytest.fail("begun over an existing folder")
    with pytest.raises(CheckpointError, match="is no folder"), new_folder(tmp_path / "model" / "whole"):
        pytest.fail("begun over a file")
    with new_folder(tmp_path / "above" / "model") as partial:
        (partial / "whole").write_text("x")
    assert (tmp_path / "above" / "model").stat().st_mode & 0o777 == 0o777 & ~_umask()


def test_everything_is_on_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files, and the folders that name them, are flushed before the rename, and the folder above after it."""
    done: list[str] = []
    fsync, rename = os.fsync, Path.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    monkeypatch.setattr(Path, "rename", lambda self, to: (done.append("rename"), rename(self, to)))
    (tmp_path / "tokenizer.json").write_text("x" * 1000)
    with new_folder(tmp_path / "model") as partial:
        copy_file(tmp_path / "tokenizer.json", partial / "tokenizer.json")
        (partial / "params").mkdir()
        write_json(partial / "params" / "names.json", {})
    files = {"tokenizer.json", "params", "params/names.json", "."}
    at = done.index("rename")
    assert {os.path.relpath(path, partial) for path in done[:at]} == files
    assert done[at + 1 :] == [str(tmp_path)]
    assert (tmp_path / "model" / "tokenizer.json").read_text() == "x" * 1000
    with pytest.raises(CheckpointError, match=r"absent: cannot be read"):
        copy_file(tmp_path / "absent", tmp_path / "copy")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_room_is_looked_for_first(tmp_path: Path) -> None:
    check_room(tmp_path / "not" / "there", 1)
    with pytest.raises(CheckpointError, match=r"needs 1000000000 MB, and \d+ MB are free"):
        check_room(tmp_path / "not" / "there", 10**15)


FULL = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from named_arrays import ARRAYS, new_folder, pending
from checkpoints import CheckpointError
from checkpoints.writing import write_orbax, write_safetensors
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))  # as a full disk: writing fails half-way
try:
    with new_folder(Path(sys.argv[1])) as partial:
        {"orbax": write_orbax, "safetensors": write_safetensors}[sys.argv[2]](partial, pending(ARRAYS))
except CheckpointError as error:
    print(error)
"""


@pytest.mark.parametrize("kind", ["orbax", "safetensors"])
def test_failed_writing_is_told_and_leaves_nothing(tmp_path: Path, kind: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "model"), kind, str(Path(__file__).parent)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path / 'model'}: cannot be written (File too large)\n"
    assert not any(tmp_path.iterdir())


INTERRUPTED = """
import os, signal, sys, threading, time
from pathlib import Path
import numpy as np
sys.path.insert(0, sys.argv[2])
from named_arrays import pending, write
from checkpoints import writing
writing._COMMIT_BYTES = 1 << 22
arrays = {f"x{n}": np.full((1024, 1024), n, np.float32) for n in range(16)}
folder = Path(sys.argv[1])
began = time.monotonic()
write(folder / "whole", arrays)
whole, interrupted = time.monotonic() - began, 0
for trial in range(24):
    delay = 0.05 + whole * trial / 24
    keys = range(1 + trial % 3)
    presses = [threading.Timer(delay + n / 100, os.kill, (os.getpid(), signal.SIGINT)) for n in keys]
    try:
        for press in presses:
            press.start()
        time.sleep(0.05)
        write(folder / f"model{trial}", arrays)
    except KeyboardInterrupt:
        interrupted += 1
    until = time.monotonic() + 0.15  # for what would still be written
    while time.monotonic() < until or any(press.is_alive() for press in presses):
        try:
            time.sleep(0.01)
        except KeyboardInterrupt:
            pass
print(interrupted, [item.name for item in folder.iterdir() if item.name.startswith(".")])
"""


def test_interrupts_leave_nothing_that_is_still_being_written(tmp_path: Path) -> None:
    """TensorStore's threads go on after Ctrl-C: what they wrote into the removed folder stayed for good."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path), str(Path(__file__).parent)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    interrupted, left = done.stdout.split(" ", 1)
    assert int(interrupted) > 5
    assert left == "[]\n"
