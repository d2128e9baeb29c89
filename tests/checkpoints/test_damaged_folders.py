"""Damaged and hostile Hugging Face folders: each is refused by file, tensor or key before anything runs."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from damage import CONFIG, check_refused, load, write_model
from folder_writing import INDEX, SINGLE, change_header, parts_of, write_raw, write_safetensors
from gguf_writing import random_weights

import checkpoints
from checkpoints.safetensors_header import PICKLE_SUFFIXES
from jaxinfer.text import Tokenizer, load_tokenizer
from jaxinfer.text.errors import TokenizerError

Damage = tuple[Callable[[Path], object], str]
Q = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.norm.weight"
NORM_FILE = "b.safetensors"  # the shard that holds it
DEEP = "[" * 100_000


def config(**changes: Any) -> Callable[[Path], object]:
    """Write config.json again with other values; ... leaves the key out."""
    values = {key: value for key, value in (CONFIG | changes).items() if value is not ...}
    return lambda folder: (folder / "config.json").write_text(json.dumps(values))


def text(name: str, content: str | bytes) -> Callable[[Path], object]:
    raw = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(raw)


def raw_config(pair: str) -> Callable[[Path], object]:
    """config.json with `pair`, as it stands, in front of its keys."""
    return text("config.json", "{" + pair + ", " + json.dumps(CONFIG)[1:])


def header(change: Callable[[dict[str, Any]], object], file: str = SINGLE) -> Callable[[Path], object]:
    return lambda folder: change_header(folder / file, change)


def entry(name: str, **values: Any) -> Callable[[Path], object]:
    return header(lambda entries: entries[name].update(values))


def header_text(change: Callable[[bytes], bytes], **more: Any) -> Callable[[Path], object]:
    """model.safetensors with its header's bytes changed."""

    def damage(folder: Path) -> None:
        raw, data = parts_of(folder / SINGLE)
        write_raw(folder / SINGLE, change(raw), data, **more)

    return damage


def weights(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """model.safetensors written again, whole and correct, with other tensors in it."""

    def damage(folder: Path) -> None:
        arrays = random_weights()
        change(arrays)
        write_safetensors(folder / SINGLE, arrays)

    return damage


def places(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        change(index["weight_map"])
        (folder / INDEX).write_text(json.dumps(index))

    return damage


def replaced(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return damage


def cut(name: str, size: int) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def swap_ends(entries: dict[str, Any]) -> None:
    entries[Q]["data_offsets"].reverse()


def shift(entries: dict[str, Any]) -> None:
    entries[Q]["data_offsets"] = [offset + 4 for offset in entries[Q]["data_offsets"]]


SINGLE_DAMAGE: dict[str, Damage] = {
    "config missing": (lambda f: (f / "config.json").unlink(), r"no config\.json"),
    "config empty": (text("config.json", ""), r"config\.json: not valid JSON"),
    "config is a list": (text("config.json", "[]"), r"config\.json: got a JSON list"),
    "config not UTF-8": (text("config.json", b"\xff\xfe{}"), r"config\.json: not UTF-8"),
    "config deep": (text("config.json", '{"a":' + DEEP), r"config\.json: JSON is nested too deeply"),
    "config deep, closed": (
        raw_config('"a": ' + "[" * 40 + "]" * 40), r"config\.json: JSON is nested too deeply",
    ),
    "config huge": (text("config.json", " " * 5_000_000), r"config\.json: got 5000000 bytes"),
    "config key twice": (raw_config('"hidden_size": 64'), r"config\.json: key hidden_size appears twice"),
    "config NaN": (raw_config('"rope_theta2": NaN'), r"config\.json: not valid JSON \(NaN"),
    "config infinity": (raw_config('"x": -Infinity'), r"config\.json: not valid JSON \(-Infinity"),
    "config 1e999": (raw_config('"x": 1e999'), r"config\.json: the number 1e999 is too large"),
    "config long number": (raw_config('"x": 1' + "0" * 5000), r"config\.json: the number .* is too large"),
    "config is a folder": (replaced("config.json", Path.mkdir), r"config\.json: cannot be read"),
    "config is a pipe": (replaced("config.json", os.mkfifo), r"config\.json: cannot be read .*regular"),
    "config is a device": (
        replaced("config.json", lambda p: p.symlink_to("/dev/zero")), r"config\.json: .* regular",
    ),
    "config is a link to itself": (
        replaced("config.json", lambda p: p.symlink_to(p)), r"config\.json",
    ),
    "generation config not JSON": (text("generation_config.json", "{"), r"generation_config\.json: not"),
    "generation config links nowhere": (
        lambda f: (f / "generation_config.json").symlink_to("nowhere"), r"generation_config\.json: cannot be",
    ),
    "number as text": (config(hidden_size="64"), "hidden_size"),
    "bool as number": (config(num_hidden_layers=True), "num_hidden_layers"),
    "fraction as number": (config(intermediate_size=96.5), "intermediate_size"),
    "negative size": (config(vocab_size=-40), "vocab_size"),
    "zero heads": (config(num_attention_heads=0), "num_attention_heads"),
    "size missing": (config(hidden_size=...), "hidden_size"),
    "list as size": (config(head_dim=[8]), "head_dim"),
    "hidden 2^40": (config(hidden_size=2**40), r"model\.embed_tokens\.weight|hidden_size"),
    "vocabulary 2^40": (config(vocab_size=2**40), r"model\.embed_tokens\.weight|vocab_size"),
    "layers 2^40": (config(num_hidden_layers=2**40), r"num_hidden_layers|model\.layers\.2\."),
    "layers 2^40, no KV heads": (
        config(num_hidden_layers=2**40, num_key_value_heads=...), r"num_hidden_layers|model\.layers",
    ),
    "one layer too many": (config(num_hidden_layers=3), r"model\.layers\.2\.input_layernorm"),
    "one layer too few": (config(num_hidden_layers=1), r"model\.layers\.1\."),
    "heads do not divide": (config(num_key_value_heads=3), "num_key_value_heads"),
    "odd head": (config(head_dim=7), "head_dim"),
    "eps of text": (config(rms_norm_eps="1e-5"), "rms_norm_eps"),
    "rope kind a list": (config(rope_scaling={"rope_type": ["x"]}), "rope_scaling|rope kind"),
    "rope a list": (config(rope_scaling=[1]), "rope_scaling"),
    "architectures text": (config(architectures="LlamaForCausalLM"), "architectures"),
    "architectures numbers": (config(architectures=[{}, 3]), "architectures"),
    "end token text": (config(eos_token_id="2"), "eos_token_id"),
    "begin token text": (config(bos_token_id="1"), "bos_token_id"),
    "file missing": (lambda f: (f / SINGLE).unlink(), r"no weights"),
    "file empty": (text(SINGLE, b""), r"model\.safetensors: got 0 bytes"),
    "file short": (cut(SINGLE, 5), r"model\.safetensors: got 5 bytes"),
    "file is a folder": (replaced(SINGLE, Path.mkdir), r"model\.safetensors: cannot be read"),
    "file is a pipe": (replaced(SINGLE, os.mkfifo), r"model\.safetensors: cannot be read .*regular"),
    "file links nowhere": (
        replaced(SINGLE, lambda p: p.symlink_to("nowhere")), r"model\.safetensors: cannot be read",
    ),
    "header cut": (cut(SINGLE, 200), r"model\.safetensors: the header claims"),
    "data cut": (cut(SINGLE, -4), r"model\.safetensors: got \d+ bytes, expected \d+ \(the end of tensor"),
    "data too long": (
        lambda f: (f / SINGLE).write_bytes((f / SINGLE).read_bytes() + b"1234"), r"got \d+ bytes, expected",
    ),
    "header of 2^60": (header_text(bytes, claimed=2**60), r"the header claims 1152921504606846976"),
    "header of 2^64 - 1": (header_text(bytes, claimed=2**64 - 1), r"the header claims 18446744073709551615"),
    "header not JSON": (text(SINGLE, struct.pack("<Q", 4) + b"{{{{"), r"header: not valid JSON"),
    "header a list": (text(SINGLE, struct.pack("<Q", 2) + b"[]"), r"header starts with b'\['"),
    "header deep": (
        header_text(lambda _: b'{"a":' + DEEP.encode()), r"header: JSON is nested too deeply",
    ),
    "header not UTF-8": (header_text(lambda raw: raw.replace(b"norm", b"n\xffrm", 1)), r"header: not UTF-8"),
    "header key twice": (
        header_text(lambda raw: b'{"%s": 1, ' % Q.encode() + raw[1:]), rf"header: key {Q} appears twice",
    ),
    "name with escapes": (
        header(lambda h: h.update({"\x1b[2J\n\ud800": 3})), r"tensor '\\x1b\[2J\\n\\ud800'",
    ),
    "name of a megabyte": (header(lambda h: h.update({"x" * 1_000_000: 3})), r"tensor 'xxx"),
    "metadata of numbers": (header(lambda h: h.update(__metadata__={"a": 1})), r"__metadata__"),
    "entry a number": (header(lambda h: h.update({Q: 1})), rf"tensor {Q}: got 1, expected"),
    "entry incomplete": (header(lambda h: h[Q].pop("dtype")), rf"tensor {Q}: got .*expected"),
    "entry with more": (entry(Q, stride=[1]), rf"tensor {Q}: got .*expected"),
    "offsets past the end": (entry(Q, data_offsets=[2**50, 2**50 + 16384]), r"bytes, expected|gap"),
    "offsets negative": (entry(Q, data_offsets=[-16384, 0]), rf"tensor {Q}: got data_offsets"),
    "offsets reversed": (header(swap_ends), rf"tensor {Q}: got data_offsets"),
    "offsets of floats": (entry(Q, data_offsets=[0.0, 16384.0]), rf"tensor {Q}: got data_offsets"),
    "offsets shifted": (header(shift), r"leaves a gap|overlaps"),
    "offsets of another": (
        header(lambda h: h[Q].update(data_offsets=h[Q.replace("0", "1")]["data_offsets"])),
        r"leaves a gap|overlaps",
    ),
    "gap": (header(lambda h: h.pop(Q)), r"leaves a gap behind"),
    "shape 2^60": (entry(Q, shape=[2**60, 4]), rf"tensor {Q} .*span 16384 bytes, expected"),
    "shape beyond 64 bits": (entry(Q, shape=[2**40, 2**40]), rf"tensor {Q} .*span 16384 bytes"),
    "shape negative": (entry(Q, shape=[-64, -64]), rf"tensor {Q}: got shape"),
    "shape of bools": (entry(Q, shape=[True, 4096]), rf"tensor {Q}: got shape"),
    "shape of 1000 axes": (entry(Q, shape=[1] * 1000), rf"tensor {Q}: got shape"),
    "shape empty": (entry(Q, shape=[0, 64], data_offsets=[0, 0]), rf"tensor {Q}: got an empty shape"),
    "shape too small": (entry(Q, shape=[64, 63]), rf"tensor {Q} .*span 16384 bytes, expected 16128"),
    "type unknown": (entry(Q, dtype="F33"), rf"tensor {Q}: type 'F33' is unknown"),
    "type a list": (entry(Q, dtype=["F32"]), rf"tensor {Q}: type \['F32'\] is unknown"),
    "type of other width": (entry(Q, dtype="F16"), rf"tensor {Q} .*span 16384 bytes, expected 8192"),
    "integers": (entry(Q, dtype="I32"), rf"{SINGLE}: tensor {Q}: got type I32"),
    "bools": (weights(lambda a: a.update({Q: np.ones((64, 64), np.bool_)})), rf"tensor {Q}: got type BOOL"),
    "complex": (weights(lambda a: a.update({Q: np.ones((64, 64), np.complex64)})), rf"{Q}: got type C64"),
    "tensor missing": (weights(lambda a: a.pop(Q)), Q),
    "tensor extra": (weights(lambda a: a.update(extra=np.ones(3, np.float32))), "extra"),
    "tensor of other shape": (weights(lambda a: a.update({Q: np.ones((32, 64), np.float32)})), Q),
    "tensor transposed": (
        weights(lambda a: a.update({"model.layers.0.mlp.up_proj.weight": np.ones((64, 96), np.float32)})),
        "up_proj",
    ),
    "no tensors": (weights(lambda a: a.clear()), r"hold no tensors"),
    "float8 without scale": (
        lambda f: (
            config(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})(f),
            weights(lambda a: a.update({Q: a[Q].astype(ml_dtypes.float8_e4m3fn)}))(f),
        ),
        r"weight_scale_inv is missing",
    ),
    "zip inside": (text(SINGLE, b"PK\x03\x04" + b"x" * 40), r"model\.safetensors: pickled"),
    "index beside the file": (
        text(INDEX, json.dumps({"weight_map": {Q: "a.safetensors"}})), r"model\.safetensors.*lies beside",
    ),
}  # fmt: skip
SINGLE_DAMAGE |= {
    f"pickle of protocol {protocol} inside": (
        text(SINGLE, bytes([0x80, protocol]) + b"}q\x00." + b"x" * 40), r"model\.safetensors: pickled",
    )
    for protocol in (2, 3, 4, 5)
}  # fmt: skip

SHARDED_DAMAGE: dict[str, Damage] = {
    "shard missing": (lambda f: (f / NORM_FILE).unlink(), r"b\.safetensors.*missing.*10 tensors.*layers"),
    "shard is a pipe": (replaced(NORM_FILE, os.mkfifo), r"b\.safetensors.*no file"),
    "shard is a folder": (replaced(NORM_FILE, Path.mkdir), r"b\.safetensors.*no file"),
    "shard empty": (text(NORM_FILE, b""), r"b\.safetensors: got 0 bytes"),
    "shard cut": (cut(NORM_FILE, -4), r"b\.safetensors: got \d+ bytes"),
    "tensor in no shard": (places(lambda m: m.update(w9=NORM_FILE)), r"b\.safetensors.*not in it.*w9"),
    "tensor in the other shard": (
        places(lambda m: m.update({NORM: "a.safetensors"})), rf"a\.safetensors.*not in it.*{NORM}",
    ),
    "tensor not in the index": (places(lambda m: m.pop(NORM)), rf"b\.safetensors: 1 .*unread.*{NORM}"),
    "path upwards": (places(lambda m: m.update({NORM: "../b.safetensors"})), r"index\.json: tensor .*\.\./b"),
    "path absolute": (places(lambda m: m.update({NORM: "/etc/passwd"})), r"index\.json.*not a plain name"),
    "path downwards": (places(lambda m: m.update({NORM: "x/b"})), r"index\.json.*not a plain name"),
    "path of Windows": (places(lambda m: m.update({NORM: "C:b"})), r"index\.json.*not a plain name"),
    "path with zero": (places(lambda m: m.update({NORM: "b\0c"})), r"index\.json.*not a plain name"),
    "path of dots": (places(lambda m: m.update({NORM: ".."})), r"index\.json.*not a plain name"),
    "path empty": (places(lambda m: m.update({NORM: ""})), r"index\.json.*not a plain name"),
    "path surrogate": (places(lambda m: m.update({NORM: "\ud800"})), r"index\.json.*not a plain name"),
    "path of 300 letters": (places(lambda m: m.update({NORM: "b" * 300})), r"index\.json.*not a plain name"),
    "path of a megabyte": (places(lambda m: m.update({NORM: "b" * 10**6})), r"index\.json.*not a plain name"),
    "path a number": (places(lambda m: m.update({NORM: 3})), r"index\.json.*got 3"),
    "path a pickle": (places(lambda m: m.update({NORM: "b.bin"})), r"b\.bin: pickled"),
    "index not JSON": (text(INDEX, "{"), r"index\.json: not valid JSON"),
    "index deep": (text(INDEX, '{"weight_map":' + DEEP), r"index\.json: JSON is nested too deeply"),
    "index a list": (text(INDEX, '{"weight_map": []}'), r"index\.json.*weight_map"),
    "index empty": (text(INDEX, '{"weight_map": {}}'), r"no tensors"),
    "index without map": (text(INDEX, "{}"), r"index\.json.*weight_map"),
    "index is a pipe": (replaced(INDEX, os.mkfifo), r"index\.json: cannot be read"),
    "index links nowhere": (replaced(INDEX, lambda p: p.symlink_to("no")), r"index\.json: cannot be"),
    "index names a shard twice": (
        text(INDEX, '{"weight_map": {"x": "a.safetensors", "x": "b.safetensors"}}'), r"key x appears twice",
    ),
    "index missing": (lambda f: (f / INDEX).unlink(), r"no weights"),
    "one tensor in both": (
        lambda f: (f / NORM_FILE).write_bytes((f / "a.safetensors").read_bytes()), r"b\.safe.*not in it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_the_undamaged_folder_loads(tmp_path: Path, kind: str) -> None:
    loaded = load(write_model(tmp_path, kind))
    for name, expected in random_weights().items():
        np.testing.assert_array_equal(loaded[name], expected)


@pytest.mark.parametrize("case", SINGLE_DAMAGE)
def test_damaged_folder_is_refused(case: str, tmp_path: Path) -> None:
    damage, message = SINGLE_DAMAGE[case]
    damage(write_model(tmp_path, "single"))
    check_refused(tmp_path, message)


@pytest.mark.parametrize("case", SHARDED_DAMAGE)
def test_damaged_shards_are_refused(case: str, tmp_path: Path) -> None:
    damage, message = SHARDED_DAMAGE[case]
    damage(write_model(tmp_path, "sharded"))
    check_refused(tmp_path, message)


def test_every_truncation_of_a_file_is_refused(tmp_path: Path) -> None:
    file = write_model(tmp_path, "single") / SINGLE
    raw = file.read_bytes()
    for size in {*range(0, 3000, 11), *range(0, len(raw), 1009)}:
        file.write_bytes(raw[:size])
        with pytest.raises(checkpoints.CheckpointError, match=r"model\.safetensors"):
            checkpoints.open_checkpoint(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("name", ["config.json", SINGLE])
def test_unreadable_files_are_refused(tmp_path: Path, name: str) -> None:
    (write_model(tmp_path, "single") / name).chmod(0)
    check_refused(tmp_path, rf"{name}: cannot be read")


@pytest.mark.parametrize("suffix", PICKLE_SUFFIXES)
def test_pickles_are_never_opened(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"model{suffix}").write_bytes(b"\x80\x04.")
    check_refused(tmp_path / f"model{suffix}", "pickled")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    check_refused(tmp_path, rf"model\{suffix}: pickled")


@pytest.mark.parametrize("content", [b"", b"{", DEEP.encode(), b"\xff\xfe", b'{"model": 3}', b"[]"])
def test_a_damaged_tokenizer_is_refused(tmp_path: Path, content: bytes) -> None:
    (write_model(tmp_path, "single") / "tokenizer.json").write_bytes(content)
    source = checkpoints.open_checkpoint(tmp_path).tokenizer_source()
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        load_tokenizer(source)


ODD_FILES = {
    "link to nowhere": lambda path: path.symlink_to("nowhere"),
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
}
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


@pytest.mark.parametrize("name", TOKENIZER_FILES)
@pytest.mark.parametrize("odd", ODD_FILES)
def test_a_tokenizer_file_that_is_no_file_is_not_absent(tmp_path: Path, odd: str, name: str) -> None:
    write_model(tmp_path, "single")
    ODD_FILES[odd](tmp_path / name)
    with pytest.raises(checkpoints.CheckpointError, match=rf"{re.escape(name)}: cannot be read"):
        checkpoints.open_checkpoint(tmp_path).tokenizer_source()
    with pytest.raises(TokenizerError, match=rf"{re.escape(name)}: cannot be read"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt", "tekken.json"])
def test_a_tokenizer_of_another_kind_is_refused_with_what_to_do(tmp_path: Path, name: str) -> None:
    write_model(tmp_path, "single")
    (tmp_path / name).write_text("{}")
    with pytest.raises(checkpoints.CheckpointError, match=rf"{name}: this kind .* write a tokenizer\.json"):
        checkpoints.open_checkpoint(tmp_path).tokenizer_source()
    (tmp_path / "tokenizer.json").write_text("{}")
    checkpoints.open_checkpoint(tmp_path).tokenizer_source()


@pytest.mark.parametrize("value", ["2", True, -1, [2, None], 2.0, {"id": 2}])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_end_tokens_that_are_none_are_refused(tmp_path: Path, file: str, value: object) -> None:
    write_model(tmp_path, "single")
    config(eos_token_id=value)(tmp_path) if file == "config.json" else text(
        file, json.dumps({"eos_token_id": value})
    )(tmp_path)
    with pytest.raises(checkpoints.CheckpointError, match=rf"{file}: key eos_token_id: got"):
        checkpoints.open_checkpoint(tmp_path).tokenizer_source()
