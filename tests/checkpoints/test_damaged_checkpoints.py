"""Damaged and hostile GGUF files, and paths that are no checkpoint: each is refused by name."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from damage import check_refused, load, write_model
from gguf_writing import random_weights, write_gguf

import checkpoints


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def patched(path: Path, offset: int, replacement: bytes) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset : offset + len(replacement)] = replacement
    path.write_bytes(raw)


def patched_after(path: Path, marker: bytes, skip: int, replacement: bytes) -> None:
    """Overwrite bytes `skip` bytes behind the first `marker`."""
    patched(path, path.read_bytes().index(marker) + len(marker) + skip, replacement)


def rewritten(path: Path, **settings: object) -> None:
    """The file again, whole and correct, of other content."""
    path.unlink()
    weights = settings.pop("weights", None) or random_weights()
    write_gguf(path, weights, **settings)  # type: ignore[arg-type]


def field(key: str, value: object) -> Damage:
    """`key` with another value; the message names the key."""
    pattern = key.replace(".", r"\.")
    return lambda path: rewritten(path, fields={key: value}), pattern


def without(name: str) -> Callable[[Path], object]:
    weights = random_weights()
    del weights[name]
    return lambda path: rewritten(path, weights=weights)


def renamed(old: bytes, new: bytes) -> Callable[[Path], object]:
    """Another name of the same length at every place."""
    assert len(old) == len(new)
    return lambda path: path.write_bytes(path.read_bytes().replace(old, new))


def replaced(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


Damage = tuple[Callable[[Path], object], str]
HUGE = struct.pack("<Q", 2**60)
NORM = b"output_norm.weight"  # then u32 dimension count, u64 dimension, u32 type, u64 offset
GGUF_DAMAGE: dict[str, Damage] = {
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
    "experts": field("llama.expert_count", 8),
    "split": (lambda p: rewritten(p, fields={"split.count": 3}), r"split GGUF"),
    "wrong heads": (
        lambda p: rewritten(p, fields={"llama.attention.head_count_kv": 4}),
        r"attn_k.*got 16 rows",
    ),
    "heads of another layer": (
        lambda p: rewritten(p, fields={"llama.attention.head_count_kv": [2, 1]}),
        r"blk\.1\.attn_k.*got 16 rows",
    ),
    "heads for three layers": (
        lambda p: rewritten(p, fields={"llama.attention.head_count_kv": [2, 2, 2]}),
        r"head_count_kv: got 3 numbers, expected one for each of the 2",
    ),
    "no heads in a layer": (
        lambda p: rewritten(p, fields={"llama.attention.head_count_kv": [2, 0]}),
        r"head_count_kv: got 0",
    ),
    "query heads differ": (
        lambda p: rewritten(p, fields={"llama.attention.head_count": [8, 4]}),
        r"head_count: got numbers that differ",
    ),
    "heads of text": (
        lambda p: rewritten(p, fields={"llama.attention.head_count_kv": ["2", "2"]}),
        r"head_count_kv: got another array",
    ),
    "no heads": field("llama.attention.head_count", 0),
    "negative width": (
        lambda p: patched_after(p, b"llama.embedding_length", 0, struct.pack("<Ii", 5, -64)),
        r"embedding_length: got -64",
    ),
    "no width": field("llama.embedding_length", 0),
    "odd head": (
        lambda p: rewritten(p, fields={"llama.attention.key_length": 7, "llama.attention.value_length": 7}),
        r"key_length: got 7",
    ),
    "width 2^32 - 1": (
        lambda p: rewritten(p, fields={"llama.embedding_length": 2**32 - 1}),
        r"token|hidden_size|embed",
    ),
    "layers 2^32 - 1": (
        lambda p: rewritten(p, fields={"llama.block_count": 2**32 - 1}),
        r"block_count: got 4294967295, but the tensors belong to 2 layers",
    ),
    "one layer too few": field("llama.block_count", 1),
    "layer of another number": (renamed(b"blk.1.", b"blk.2."), r"model\.layers\.1\."),
    "layer number padded": (
        renamed(b"blk.1.attn_q.weight", b"blk.01.ttn_q.weight"),
        r"block_count: got 2, but the tensors belong to 3 layers",
    ),
    "not a number": field("llama.attention.layer_norm_rms_epsilon", float("nan")),
    "infinite": field("llama.rope.freq_base", float("inf")),
    "bool as number": field("llama.context_length", True),
    "text as number": field("llama.attention.layer_norm_rms_epsilon", "1e-5"),
    "number as text": field("llama.rope.scaling.type", 3),
    "array as number": field("llama.context_length", [1, 2]),
    "end token negative": (
        lambda p: rewritten(p, fields={"tokenizer.ggml.eos_token_id": "2"}),
        r"eos_token_id: got '2'",
    ),
    "window of another architecture": (
        lambda p: rewritten(p, architecture="qwen2", fields={"qwen2.attention.sliding_window": 8}),
        r"qwen2\.attention\.sliding_window",
    ),
    "rope factors too many": (
        lambda p: rewritten(p, extra={"rope_freqs.weight": np.ones(5, np.float32)}),
        r"rope_freqs\.weight: got shape",
    ),
    "tensor missing": (without("model.layers.1.mlp.up_proj.weight"), r"model\.layers\.1\.mlp\.up_proj"),
    "embedding missing": (renamed(b"token_embd.weight", b"token_embd.wEight"), r"token_embd\.w"),
    "tensor extra": (
        lambda p: rewritten(p, extra={"blk.0.ffn_norm.bias": np.ones(64, np.float32)}),
        r"model\.layers\.0\.post_attention_layernorm\.bias",
    ),
    "tensor of other shape": (
        lambda p: rewritten(p, weights=random_weights() | {"model.norm.weight": np.ones(63, np.float32)}),
        r"model\.norm\.weight",
    ),
    "tensors of one name": (
        renamed(b"blk.1.ffn_up.weight", b"blk.0.ffn_up.weight"),
        r"blk\.0\.ffn_up\.weight appears twice",
    ),
    "key twice": (renamed(b"tokenizer.ggml.tokens", b"llama.context_length\0"), r"got a key"),
    "keys of one name": (
        renamed(b"llama.attention.key_length", b"llama.attention.head_count"),
        r"key llama\.attention\.head_count appears twice",
    ),
    "tensors overlap": (
        lambda p: patched_after(p, NORM, 16, struct.pack("<Q", 64)),
        r"starts at byte \d+, inside tensor",
    ),
    "offset between": (
        lambda p: patched_after(p, NORM, 16, struct.pack("<Q", 65)),
        r"output_norm.*got offset 65",
    ),
    "dimensions beyond 64 bits": (
        lambda p: patched_after(p, b"blk.0.attn_q.weight", 4, struct.pack("<QQ", 2**40, 2**40)),
        r"blk\.0\.attn_q\.weight.*ends at byte",
    ),
    "alignment 0": field("general.alignment", 0),
    "alignment 3": field("general.alignment", 3),
    "alignment of text": field("general.alignment", "32"),
    "version 1": (lambda p: patched(p, 4, struct.pack("<I", 1)), r"version 1"),
    "string of 2^63": (
        lambda p: patched(p, 24, struct.pack("<Q", 2**63)),
        r"string of 9223372036854775808 bytes",
    ),
    "key of escapes": (
        renamed(b"llama.block_count", b"llama.\x1b[2J\x1b[2J\n  "),
        r"got a key 'llama\.\\x1b",
    ),
    "value of bits": (
        lambda p: patched_after(p, b"llama.block_count", 4, b"\xff" * 4),
        r"block_count: got 4294967295",
    ),
    "zip inside": (lambda p: p.write_bytes(b"PK\x03\x04" + bytes(40)), r"not a GGUF file: got magic b'PK"),
    "pickle inside": (lambda p: p.write_bytes(b"\x80\x04." + bytes(40)), r"not a GGUF file: got magic"),
    "safetensors inside": (lambda p: p.write_bytes(struct.pack("<Q", 2) + b"{}"), r"not a GGUF file"),
    "pipe": (lambda p: replaced(p, os.mkfifo), r"no such file|cannot be read"),
    "device": (lambda p: replaced(p, lambda p: p.symlink_to("/dev/zero")), r"no such file|cannot be read"),
    "folder": (lambda p: replaced(p, Path.mkdir), r"no config\.json"),
    "link to nowhere": (lambda p: replaced(p, lambda p: p.symlink_to("nowhere")), r"no such file"),
    "part rotated": (
        lambda p: rewritten(p, fields={"llama.rope.dimension_count": 4}),
        r"rope\.dimension_count",
    ),
}


@pytest.mark.parametrize("case", GGUF_DAMAGE)
def test_damaged_gguf_is_refused(case: str, tmp_path: Path) -> None:
    damage, message = GGUF_DAMAGE[case]
    path = write_model(tmp_path, "gguf")
    damage(path)
    check_refused(path, message)


def test_the_undamaged_file_loads(tmp_path: Path) -> None:
    loaded = load(write_model(tmp_path, "gguf"))
    for name, expected in random_weights().items():
        np.testing.assert_array_equal(loaded[name], expected)


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


def test_other_paths_are_refused_with_what_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    for path in (tmp_path, tmp_path / "absent", tmp_path / "notes.txt"):
        with pytest.raises(checkpoints.CheckpointError, match=r"expected a folder .* or a \.gguf file"):
            checkpoints.open_checkpoint(path)
    write_gguf(tmp_path / "tiny.gguf", random_weights())
    with pytest.raises(checkpoints.CheckpointError, match=r"open tiny\.gguf itself"):
        checkpoints.open_checkpoint(tmp_path)
