"""SentencePiece's tokenizer.model without the package: its own answers, and files that must be refused."""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
from cpu_time import cpu_time
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import GOLDEN

import checkpoints
from jaxinfer.text import Tokenizer, TokenizerError, load_tokenizer
from jaxinfer.text.sentencepiece_file import MAX_BYTES, read_sentencepiece

MODEL = GOLDEN / "sentencepiece" / "tokenizer.model"
ANSWERS = json.loads((GOLDEN / "sentencepiece" / "cases.json").read_text())
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
BPE = {3: 2}
IDENTITY = {1: b"identity", 4: 0}


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number: int, value: int | float | bytes) -> bytes:
    """One field of a protocol buffer."""
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3) + varint(value)


def message(fields: dict[int, Any]) -> bytes:
    return b"".join(field(number, value) for number, value in fields.items())


def piece(text: str, score: float = 0.0, kind: int = NORMAL) -> bytes:
    return field(1, message({1: text.encode(), 2: score, 3: kind}))


CONTROLS = piece("<unk>", kind=UNKNOWN) + piece("<s>", kind=CONTROL) + piece("</s>", kind=CONTROL)


def model(pieces: bytes, trainer: dict[int, Any] = BPE, normalizer: dict[int, Any] = IDENTITY) -> bytes:
    return pieces + field(2, message(trainer)) + field(3, message(normalizer))


def stories_model() -> bytes:
    """The vocabulary of stories260k as its tokenizer.model: scores in place of merges."""
    vocabulary = json.loads((GOLDEN / "stories260k" / "tokenizer.json").read_text())["model"]["vocab"]
    pieces = CONTROLS
    for text, token_id in sorted(vocabulary.items(), key=lambda item: item[1])[3:]:
        pieces += piece(text, kind=BYTE) if token_id < 259 else piece(text, 259.0 - token_id)
    return model(pieces, BPE | {35: 1})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sentencepiece")
    shutil.copy(MODEL, path)
    return path


def written(folder: Path, data: bytes, **config: Any) -> Tokenizer:
    (folder / "tokenizer.model").write_bytes(data)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_folder(folder)


# --------------------------------------------------------------------------------------- its own answers


@pytest.mark.parametrize("case", ANSWERS["cases"], ids=lambda case: repr(case["text"][:20]))
def test_ids_and_texts_are_those_of_the_package(folder: Path, case: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode(case["text"], add_special_tokens=False, parse_special=False) == case["ids"]
    assert tokenizer.decode(case["ids"], skip_special_tokens=False) == case["decoded"]
    stream = tokenizer.stream(skip_special_tokens=False)
    assert "".join(map(stream.push, case["ids"])) + stream.finish() == case["decoded"]


def test_facts(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (800, 1, frozenset({2}))
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.adds_bos) == ("<s>", "</s>", True)
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.encode("a</s>") == [1, 267, 2]
    assert 2 not in tokenizer.encode("a</s>", parse_special=False)


@given(st.text(max_size=60) | st.text("Once upna time.thewy,▁ ", max_size=60))
def test_stories_from_either_file(stories: Tokenizer, text: str) -> None:
    assert FROM_MODEL.encode(text) == stories.encode(text)
    assert FROM_MODEL.encode(text, parse_special=False) == stories.encode(text, parse_special=False)
    ids = stories.encode(text)
    assert FROM_MODEL.decode(ids) == stories.decode(ids)


@pytest.fixture(scope="module", autouse=True)
def _from_model(tmp_path_factory: pytest.TempPathFactory) -> None:
    global FROM_MODEL
    FROM_MODEL = written(tmp_path_factory.mktemp("stories"), stories_model())


FROM_MODEL: Tokenizer


def test_settings_of_tokenizer_config(tmp_path: Path) -> None:
    data = MODEL.read_bytes()
    assert written(tmp_path, data, add_bos_token=False).encode("a") == [267]
    assert written(tmp_path, data, add_eos_token=True).encode("a") == [1, 267, 2]
    assert written(tmp_path, data, eos_token="<sep>").eos_ids == {3}
    assert written(tmp_path, data, add_prefix_space=False).decode([747]) == "b"
    # transformers' `legacy`: a space goes before the text after a control token too, or not.
    for text, legacy, ids in (("a<sep>b", True, [267, 3, 297]), ("a<sep>b", False, [267, 3, 747])):
        got = written(tmp_path, data, legacy=legacy).encode(text, add_special_tokens=False)
        assert got == ids
    tokenizer = written(tmp_path, data, legacy=False)
    for case in ANSWERS["user_defined"]:
        if not case["text"].startswith("<"):  # the package writes a lone space before a leading one
            assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids"]


@pytest.mark.parametrize("key", ["add_bos_token", "add_eos_token", "add_prefix_space", "legacy"])
def test_switches_that_are_none_are_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(TokenizerError, match=rf"tokenizer_config\.json: {key} must be true or false"):
        written(tmp_path, MODEL.read_bytes(), **{key: "no"})


def test_added_tokens_get_the_ids_that_are_stated(tmp_path: Path) -> None:
    data = MODEL.read_bytes()
    stated = {
        "0": {"content": "<unk>", "special": True},
        "801": {"content": "<|im_end|>", "special": True},
        "800": {"content": "<tool>", "special": False},
    }
    tokenizer = written(tmp_path, data, added_tokens_decoder=stated, eos_token={"content": "<|im_end|>"})
    assert tokenizer.encode("a<|im_end|>", add_special_tokens=False) == [267, 801]
    assert (tokenizer.special_ids, tokenizer.eos_ids) == ({0, 1, 2, 801}, {801})
    assert (tokenizer.base_vocab_size, tokenizer.vocab_size) == (800, 802)
    assert tokenizer.decode([267, 800, 801]) == "a<tool>"
    (tmp_path / "added_tokens.json").write_text('{"<pad>": 800}')
    assert written(tmp_path, data, pad_token="<pad>").special_ids == {0, 1, 2, 800}
    (tmp_path / "added_tokens.json").unlink()
    for wrong, told in (
        ({"900": {"content": "x1"}}, "'x1' should have the id 900"),
        ({"5": {"content": "x1"}}, "'x1' should have the id 5"),
        ({"-1": {"content": "x1"}}, "is no id"),
        ({"800": {}}, "has no content"),
    ):
        with pytest.raises(TokenizerError, match=told):
            written(tmp_path, data, added_tokens_decoder=wrong)


def test_a_checkpoint_folder_uses_it_where_there_is_no_tokenizer_json(tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(GOLDEN / "stories260k", path)
    (path / "tokenizer.model").write_bytes(b"not looked at")
    source = checkpoints.open_checkpoint(path).tokenizer_source()
    assert load_tokenizer(source) is not None
    (path / "tokenizer.json").unlink()
    (path / "tokenizer.model").write_bytes(stories_model())
    tokenizer = load_tokenizer(checkpoints.open_checkpoint(path).tokenizer_source())
    assert tokenizer is not None
    assert tokenizer.encode("Once") == [1, 403]
    assert tokenizer.eos_ids == {2}


# ----------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (model(CONTROLS, {3: 1}), "model_type UNIGRAM is not supported; allowed: BPE"),
        (model(CONTROLS, {}), "model_type UNIGRAM"),  # the default of the format
        (model(CONTROLS, {3: 3}), "model_type WORD"),
        (model(CONTROLS, {3: 99}), "model_type 99"),
        (model(CONTROLS, BPE | {24: 1}), "treat_whitespace_as_suffix True"),
        (model(CONTROLS, BPE, {1: b"nmt_nfkc", 2: b"\1\2"}), "normalizer 'nmt_nfkc'"),
        (model(CONTROLS, BPE, {1: b"identity"}), "remove_extra_whitespaces True"),
        (model(CONTROLS, BPE, IDENTITY | {5: 0}), "escape_whitespaces False"),
        (model(CONTROLS) + field(5, message({2: b"\1"})), "denormalizer"),
        (b"", "it holds no pieces"),
        (b"\x80" * 100, "more than 10 bytes"),
        (b"\x80", "ends within a number"),
        (b"\x0a\xff\xff\xff\xff\x0f", "claims 4294967295 bytes and 0 follow"),
        (b"\x0b", "wire type 3"),
        (field(1, 5), "piece is no message"),
        (field(1, field(1, b"\xff")), "piece 0 is not UTF-8"),
        (field(1, field(2, 1.0)), "piece 0 is no text"),
        (model(CONTROLS + piece("a", float("nan"))), "score of piece 3 is nan"),
        (model(CONTROLS + piece("a", kind=7)), "piece 3 is of type 7"),
        (model(CONTROLS + piece("a", kind=2**64 - 1)), "piece 3 is of type"),
        (model(CONTROLS * 2), "2 unknown pieces"),
        (model(CONTROLS + piece("a") * 2), "tokens 3 and 4 are both 'a'"),
        (model(CONTROLS, BPE | {35: 1}), "256 byte pieces; it holds 0"),
        (model(CONTROLS + piece("a" * 257)), "a piece has 257 characters; at most 256"),
        (json.dumps({"model": "no"}).encode(), "not a SentencePiece model"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_used_is_refused_by_name(tmp_path: Path, data: bytes, told: str) -> None:
    with pytest.raises(TokenizerError, match=told):
        written(tmp_path, data)


def test_hostile_files_are_refused_fast(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    with cpu_time() as spent:
        with path.open("wb") as file:  # a sparse file of a terabyte
            file.truncate(1 << 40)
        with pytest.raises(TokenizerError, match=f"at most {MAX_BYTES}"):
            read_sentencepiece(path)
        path.write_bytes(b"\x0a\x00" * 4_000_000)
        with pytest.raises(TokenizerError, match="piece 0 is no text"):
            read_sentencepiece(path)
        assert spent() < 2


@given(data=st.data())
def test_damaged_files_raise_nothing_else(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    good = bytearray(model(CONTROLS + piece("a", -1.0) + piece("b", -2.0) + piece("ab", -0.5)))
    for _ in range(data.draw(st.integers(1, 3))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.model"
    path.write_bytes(good[: data.draw(st.integers(0, len(good)))])
    with contextlib.suppress(TokenizerError):
        assert len(read_sentencepiece(path).tokens) > 0
