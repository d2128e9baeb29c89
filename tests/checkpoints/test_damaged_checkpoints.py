"""Damaged and hostile files: each is refused with a CheckpointError that names the file."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf_writing import random_weights, write_gguf
from safetensors.numpy import save_file

import checkpoints

INDEX = "model.safetensors.index.json"


def write_folder(folder: Path) -> Path:
    """A sharded folder: a.safetensors holds w0, b.safetensors holds w1."""
    for shard, name in (("a", "w0"), ("b", "w1")):
        save_file({name: np.ones((2, 2), np.float32)}, folder / f"{shard}.safetensors")
    (folder / "config.json").write_text("{}")
    set_index(folder, {"w0": "a.safetensors", "w1": "b.safetensors"})
    return folder


def set_index(folder: Path, places: object) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))


def set_header(
    folder: Path, change: Callable[[dict], object] | None = None, length: int | None = None
) -> None:
    shard = folder / "b.safetensors"
    raw = shard.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + size])
    if change:
        change(header)
    text = json.dumps(header).encode()
    shard.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + raw[8 + size :])


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def only_pickle(folder: Path) -> None:
    for item in folder.iterdir():
        item.unlink()
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")


FOLDER_DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "shard missing": (lambda f: (f / "b.safetensors").unlink(), r"b\.safetensors.*missing.*w1"),
    "tensor absent": (
        lambda f: set_index(f, {"w0": "a.safetensors", "w9": "b.safetensors"}),
        r"b\.safetensors.*w9",
    ),
    "truncated data": (
        lambda f: cut(f / "b.safetensors", -4),
        r"b\.safetensors: got \d+ bytes, expected \d+",
    ),
    "truncated header": (lambda f: cut(f / "b.safetensors", 20), r"b\.safetensors: the header claims"),
    "no bytes": (lambda f: cut(f / "b.safetensors", 0), r"b\.safetensors: got 0 bytes"),
    "few bytes": (lambda f: cut(f / "b.safetensors", 5), r"b\.safetensors: got 5 bytes"),
    "absurd header": (
        lambda f: set_header(f, length=2**60),
        r"b\.safetensors: the header claims 1152921504606846976",
    ),
    "offset past end": (
        lambda f: set_header(f, lambda h: h["w1"].update(data_offsets=[0, 2**50])),
        r"b\.safetensors.*w1",
    ),
    "absurd shape": (lambda f: set_header(f, lambda h: h["w1"].update(shape=[2**60, 4])), r"b\.safetensors"),
    "wrong shape": (lambda f: set_header(f, lambda h: h["w1"].update(shape=[2, 3])), r"b\.safetensors"),
    "unknown type": (lambda f: set_header(f, lambda h: h["w1"].update(dtype="F33")), r"b\.safetensors.*F33"),
    "header not JSON": (
        lambda f: (f / "b.safetensors").write_bytes(struct.pack("<Q", 4) + b"{{{{"),
        r"b\.safetensors",
    ),
    "deep header": (
        lambda f: (f / "b.safetensors").write_bytes(struct.pack("<Q", 200_000) + b"[" * 200_000),
        r"b\.safetensors",
    ),
    "path upwards": (lambda f: set_index(f, {"w0": "../a.safetensors"}), r"index\.json.*\.\./a"),
    "absolute path": (
        lambda f: set_index(f, {"w0": str(f / "a.safetensors")}),
        r"index\.json.*not a plain name",
    ),
    "path is a number": (lambda f: set_index(f, {"w0": 3}), r"index\.json.*got 3"),
    "index is a list": (lambda f: set_index(f, []), r"index\.json.*weight_map"),
    "index empty": (lambda f: set_index(f, {}), r"no tensors"),
    "index names a pickle": (lambda f: set_index(f, {"w0": "a.bin"}), r"a\.bin: pickled"),
    "index not JSON": (lambda f: (f / INDEX).write_text("{"), r"index\.json: not valid JSON"),
    "deep index": (
        lambda f: (f / INDEX).write_text("[" * 200_000),
        r"index\.json: JSON is nested too deeply",
    ),
    "config missing": (lambda f: (f / "config.json").unlink(), r"no config\.json"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), r"config\.json: got a JSON list"),
    "config not UTF-8": (
        lambda f: (f / "config.json").write_bytes(b"\xff\xfe{}"),
        r"config\.json: not UTF-8",
    ),
    "no weights": (lambda f: (f / INDEX).unlink(), r"no weights"),
    "only a pickle": (only_pickle, r"pytorch_model\.bin: pickled"),
    "zip inside": (
        lambda f: (f / "b.safetensors").write_bytes(b"PK\x03\x04" + b"x" * 40),
        r"b\.safetensors: pickled",
    ),
}


@pytest.mark.parametrize("case", FOLDER_DAMAGE)
def test_damaged_folder_is_refused(case: str, tmp_path: Path) -> None:
    damage, message = FOLDER_DAMAGE[case]
    folder = write_folder(tmp_path)
    checkpoints.open_checkpoint(folder)
    damage(folder)
    with pytest.raises(checkpoints.CheckpointError, match=message) as caught:
        checkpoints.open_checkpoint(folder)
    assert str(tmp_path) in str(caught.value)


def patched(path: Path, offset: int, replacement: bytes) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset : offset + len(replacement)] = replacement
    path.write_bytes(raw)


def patched_after(path: Path, marker: bytes, skip: int, replacement: bytes) -> None:
    """Overwrite bytes `skip` bytes behind the first `marker`."""
    patched(path, path.read_bytes().index(marker) + len(marker) + skip, replacement)


def rewritten(path: Path, **settings: object) -> None:
    path.unlink()
    write_gguf(path, random_weights(), **settings)  # type: ignore[arg-type]


HUGE = struct.pack("<Q", 2**60)
NORM = b"output_norm.weight"  # then u32 dimension count, u64 dimension, u32 type, u64 offset
GGUF_DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "bad magic": (lambda p: patched(p, 0, b"GGML"), r"not a GGUF file: got magic b'GGML'"),
    "empty file": (lambda p: p.write_bytes(b""), r"not a GGUF file"),
    "version": (lambda p: patched(p, 4, struct.pack("<I", 9)), r"version 9"),
    "big-endian": (lambda p: patched(p, 4, struct.pack(">I", 3)), r"big-endian"),
    "absurd tensor count": (lambda p: patched(p, 8, HUGE), r"claims 1152921504606846976 tensors"),
    "absurd field count": (lambda p: patched(p, 16, HUGE), r"claims 1152921504606846976 fields"),
    "absurd key length": (lambda p: patched(p, 24, HUGE), r"string of 1152921504606846976 bytes"),
    "absurd array": (
        lambda p: patched_after(p, b"ggml.tokens", 8, HUGE),
        r"items of key tokenizer\.ggml\.tokens",
    ),
    "absurd array item": (lambda p: patched_after(p, b"ggml.tokens", 16, HUGE), r"tokenizer\.ggml\.tokens"),
    "array type": (
        lambda p: patched_after(p, b"ggml.tokens", 4, struct.pack("<I", 77)),
        r"tokens.*type number 77",
    ),
    "array in array": (
        lambda p: patched_after(p, b"ggml.tokens", 4, struct.pack("<I", 9)),
        r"arrays of arrays",
    ),
    "value type": (
        lambda p: patched_after(p, b"llama.block_count", 0, struct.pack("<I", 99)),
        r"block_count.*99",
    ),
    "dimensions": (
        lambda p: patched_after(p, NORM, 0, struct.pack("<I", 1000)),
        r"output_norm.*1000 dimensions",
    ),
    "absurd dimension": (lambda p: patched_after(p, NORM, 4, HUGE), r"output_norm.*ends at byte"),
    "empty dimension": (lambda p: patched_after(p, NORM, 4, bytes(8)), r"output_norm.*empty shape"),
    "block type": (lambda p: patched_after(p, NORM, 12, struct.pack("<I", 200)), r"output_norm.*number 200"),
    "rows of half blocks": (
        lambda p: patched_after(p, NORM, 12, struct.pack("<I", 12)),
        r"output_norm.*Q4_K",
    ),
    "unreadable type": (lambda p: patched_after(p, NORM, 12, struct.pack("<I", 24)), r"output_norm.*I8"),
    "offset past end": (lambda p: patched_after(p, NORM, 16, HUGE), r"output_norm.*ends at byte"),
    "truncated data": (lambda p: cut(p, -100), r"tensor .* ends at byte .*truncated"),
    "truncated header": (lambda p: cut(p, 300), r"tiny\.gguf"),
    "truncated count": (lambda p: cut(p, 12), r"the file ends at byte 12"),
    "name not UTF-8": (lambda p: patched(p, p.read_bytes().index(NORM), b"\xff"), r"not UTF-8"),
    "unknown tensor": (lambda p: patched(p, p.read_bytes().index(NORM), b"x"), r"xutput_norm"),
    "alignment": (lambda p: rewritten(p, fields={"general.alignment": 33}), r"alignment.*33"),
    "architecture": (lambda p: rewritten(p, architecture="mamba"), r"architecture 'mamba'"),
    "key missing": (
        lambda p: rewritten(p, fields={"llama.block_count": None}),
        r"llama\.block_count is missing",
    ),
    "key of text": (lambda p: rewritten(p, fields={"llama.block_count": "two"}), r"block_count: got 'two'"),
    "experts": (lambda p: rewritten(p, fields={"llama.expert_count": 8}), r"mixture-of-experts"),
    "split": (lambda p: rewritten(p, fields={"split.count": 3}), r"split GGUF"),
    "wrong heads": (
        lambda p: rewritten(p, fields={"llama.attention.head_count_kv": 4}),
        r"attn_k.*got 16 rows",
    ),
    "heads differ": (
        lambda p: rewritten(p, fields={"llama.attention.head_count_kv": [2, 1]}),
        r"head_count_kv: differs by layer",
    ),
    "part rotated": (
        lambda p: rewritten(p, fields={"llama.rope.dimension_count": 4}),
        r"rope\.dimension_count",
    ),
}


@pytest.mark.parametrize("case", GGUF_DAMAGE)
def test_damaged_gguf_is_refused(case: str, tmp_path: Path) -> None:
    damage, message = GGUF_DAMAGE[case]
    path = write_gguf(tmp_path / "tiny.gguf", random_weights(), tokens=[f"t{index}" for index in range(40)])
    checkpoints.open_checkpoint(path)
    damage(path)
    with pytest.raises(checkpoints.CheckpointError, match=message) as caught:
        checkpoints.open_checkpoint(path)
    assert str(path) in str(caught.value)


def test_every_truncation_of_a_gguf_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", random_weights())
    raw = path.read_bytes()
    for size in {*range(0, 1500, 7), *range(0, len(raw), 997)}:
        path.write_bytes(raw[:size])
        with pytest.raises(checkpoints.CheckpointError, match=r"tiny\.gguf"):
            checkpoints.open_checkpoint(path)


def test_tokenizer_arrays_of_different_lengths(tmp_path: Path) -> None:
    fields = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.token_type": [1, 1]}
    path = write_gguf(tmp_path / "tiny.gguf", random_weights(), fields=fields, tokens=["a", "b", "c"])
    with pytest.raises(checkpoints.CheckpointError, match="token_type: got 2 items, expected 3"):
        checkpoints.open_checkpoint(path).tokenizer_source()


@pytest.mark.parametrize("name", ["model.bin", "model.pt", "model.pth"])
def test_pickles_are_never_opened(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04.")
    with pytest.raises(checkpoints.CheckpointError, match="pickled"):
        checkpoints.open_checkpoint(tmp_path / name)


def test_other_paths_are_refused_with_what_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    for path in (tmp_path, tmp_path / "absent", tmp_path / "notes.txt"):
        with pytest.raises(checkpoints.CheckpointError, match=r"expected a folder .* or a \.gguf file"):
            checkpoints.open_checkpoint(path)
    write_gguf(tmp_path / "tiny.gguf", random_weights())
    with pytest.raises(checkpoints.CheckpointError, match=r"open tiny\.gguf itself"):
        checkpoints.open_checkpoint(tmp_path)
