from __future__ import annotations

import json
import shutil
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import GOLDEN, SmallSource, small_source

import checkpoints
from jaxinfer.text import ByteTokenizer, Tokenizer, TokenizerError, load_tokenizer
from jaxinfer.text.pieces import read_decoder

CASES = json.loads((GOLDEN / "tokenizer_cases.json").read_text())["cases"]
SMALL = Tokenizer.from_gguf(small_source())
BYTES = ByteTokenizer()


@pytest.mark.model
@pytest.mark.parametrize("case", CASES, ids=[repr(case["text"][:20]) for case in CASES])
def test_smollm2_cases_both_ways(smollm2: Tokenizer, case: dict) -> None:
    assert smollm2.encode(case["text"]) == case["ids"]
    assert smollm2.decode(case["ids"], skip_special_tokens=False) == case["text"]
    stream = smollm2.stream(skip_special_tokens=False)
    pushed = [stream.push(token_id) for token_id in case["ids"]]
    assert "".join(pushed) + stream.finish() == case["text"]
    assert b"".join(map(smollm2.token_bytes, case["ids"])) == case["text"].encode()
    assert "\ufffd" not in "".join(pushed)


def both_ways(tokenizer: Tokenizer, text: str) -> None:
    """Encode, decode, and decode piece by piece."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    stream = tokenizer.stream(skip_special_tokens=False)
    pushed = [stream.push(token_id) for token_id in ids]
    assert "".join(pushed) + stream.finish() == text
    assert "\ufffd" not in "".join(pushed)


@pytest.mark.model
def test_smollm2_cases_from_a_tokenizer_json(smollm2: Tokenizer, tmp_path: Path) -> None:
    smollm2._core.save(str(tmp_path / "tokenizer.json"))
    from_json = Tokenizer.from_folder(tmp_path)
    for case in CASES:
        assert from_json.encode(case["text"]) == case["ids"]
        both_ways(from_json, case["text"])


@pytest.mark.parametrize(
    "kind", ["bytes", "bpe", "gguf pieces", "json pieces", "llama-bpe", "qwen2", "tekken"]
)
def test_texts_of_the_cases_come_back_whole(stories: Tokenizer, kind: str) -> None:
    """Every kind of tokenizer: byte-level BPE by each pre-tokenizer, SentencePiece with byte fallback."""
    known = {"bytes": BYTES, "bpe": SMALL, "gguf pieces": SENTENCE_PIECE, "json pieces": stories}
    tokenizer = known.get(kind) or Tokenizer.from_gguf(small_source(pre=kind))
    for case in CASES:
        text = case["text"]
        if kind == "qwen2":
            text = unicodedata.normalize("NFC", text)  # as the models' own tokenizer does
        if not (kind.endswith("pieces") and any(special in text for special in ("<s>", "</s>", "<unk>"))):
            both_ways(tokenizer, text)


@pytest.mark.model
def test_smollm2_facts(smollm2: Tokenizer) -> None:
    assert (smollm2.vocab_size, smollm2.bos_id, smollm2.eos_ids) == (49152, 1, frozenset({2}))
    assert (smollm2.bos_token, smollm2.eos_token, smollm2.adds_bos) == ("<|im_start|>", "<|im_end|>", False)
    assert len(smollm2.special_ids) == 17
    assert smollm2.token_text(253) == " a"
    assert smollm2.encode("<|im_end|>") == [2]
    plain = smollm2.encode("<|im_end|>", parse_special=False)
    assert not smollm2.special_ids & set(plain)
    assert smollm2.decode(plain) == "<|im_end|>"


def test_folder_and_library_agree(stories: Tokenizer) -> None:
    library = tokenizers.Tokenizer.from_file(str(GOLDEN / "stories260k" / "tokenizer.json"))
    for text in ("Once upon a time", "", " two  spaces", "naïve 🤗 日本", "<s>x</s>", "a\nb"):
        assert stories.encode(text) == library.encode(text).ids
        assert (
            stories.encode(text, add_special_tokens=False)
            == library.encode(text, add_special_tokens=False).ids
        )
        assert stories.decode(stories.encode(text)) == library.decode(library.encode(text).ids)
    assert (stories.bos_id, stories.eos_ids, stories.adds_bos) == (1, frozenset({2}), True)
    assert stories.token_bytes(3 + 0xE2) == b"\xe2"
    assert stories.token_text(259) == " t"
    assert stories.vocab_size == 512


def test_add_bos_and_eos_follow_tokenizer_config(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "stories260k", tmp_path / "model")
    path = tmp_path / "model" / "tokenizer_config.json"
    config = json.loads(path.read_text())
    for add_bos, add_eos in ((True, True), (False, True), (False, False), (True, False)):
        path.write_text(json.dumps(config | {"add_bos_token": add_bos, "add_eos_token": add_eos}))
        ids = Tokenizer.from_folder(tmp_path / "model").encode("Once")
        assert ids == [1] * add_bos + [403] + [2] * add_eos
    path.write_text("{}")  # without the keys the post-processor of tokenizer.json stays
    assert Tokenizer.from_folder(tmp_path / "model").encode("Once") == [1, 403]


@pytest.mark.parametrize("key", ["add_bos_token", "add_eos_token"])
@pytest.mark.parametrize("value", ["false", 1, []])
def test_switches_that_are_none_are_refused(tmp_path: Path, key: str, value: object) -> None:
    shutil.copytree(GOLDEN / "stories260k", tmp_path / "model")
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps({key: value}))
    with pytest.raises(TokenizerError, match=rf"tokenizer_config\.json: {key} must be true or false, got"):
        Tokenizer.from_folder(tmp_path / "model")


def test_every_end_id_is_kept(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "stories260k", tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [5, 11]}')
    assert Tokenizer.from_folder(tmp_path / "model").eos_ids == {2, 5, 11}
    source = checkpoints.open_checkpoint(tmp_path / "model").tokenizer_source()
    loaded = load_tokenizer(source)
    assert loaded is not None
    assert loaded.eos_ids == {2, 5, 11}


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "stories260k", tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()
    source = checkpoints.open_checkpoint(tmp_path / "model").tokenizer_source()
    assert load_tokenizer(source) is None
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer.from_folder(tmp_path / "model")


def stories_as_gguf(**changes: object) -> SmallSource:
    """The tokenizer of stories260k as llama.cpp stores it: scores in place of merges."""
    model = json.loads((GOLDEN / "stories260k" / "tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    types = [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259)
    scores = [0.0] * 259 + [-float(index) for index in range(len(tokens) - 259)]
    settings: dict[str, object] = {
        "tokens": tuple(tokens),
        "model": "llama",
        "pre": "default",
        "scores": np.array(scores, np.float32),
        "token_types": np.array(types),
        "bos_token_id": 1,
        "eos_token_ids": (2,),
        "unknown_token_id": 0,
    }
    return SmallSource(**(settings | changes))  # type: ignore[arg-type]


SENTENCE_PIECE = Tokenizer.from_gguf(stories_as_gguf())


@given(st.text(max_size=60) | st.text("Once upna time.thewy,▁ ", max_size=60))
def test_sentence_piece_from_gguf_equals_the_folder(stories: Tokenizer, text: str) -> None:
    assert SENTENCE_PIECE.encode(text) == stories.encode(text)
    assert SENTENCE_PIECE.decode(stories.encode(text)) == stories.decode(stories.encode(text))


def test_sentence_piece_without_prefix_space() -> None:
    tokenizer = Tokenizer.from_gguf(stories_as_gguf(add_space_prefix=False, add_bos=False))
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    assert tokenizer.token_text(tokenizer.encode("hello")[0])[0] == "h"
    assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"


@given(st.text(max_size=80))
def test_byte_level_round_trip(text: str) -> None:
    for tokenizer in (SMALL, BYTES):
        ids = tokenizer.encode(text, parse_special=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_token_types_of_a_gguf() -> None:
    control = SMALL.encode("<|im_start|>")
    assert control == [261]
    assert SMALL.special_ids == {261, 262, 263}
    user_defined = SMALL.encode("a<think>b")
    assert len(user_defined) == 3
    assert SMALL.decode(user_defined) == "a<think>b"
    assert SMALL.token_bytes(265) == b""  # unused: padding of the embedding matrix
    assert SMALL.encode("[PAD9]") != [265]


def test_padding_of_a_gguf_is_no_vocabulary() -> None:
    """Rows past the tokenizer: of type unused, or user-defined and named by their id (older converters)."""
    source = small_source()
    tokens = (*source.tokens, "[PAD266]", "[PAD267]", "[PAD9]x")
    assert Tokenizer.from_gguf(source).vocab_size == 265
    assert SMALL.base_vocab_size == 265
    padded = small_source(tokens=tokens[:-1], token_types=np.array([*source.token_types, 5, 4]))
    tokenizer = Tokenizer.from_gguf(padded)
    assert tokenizer.vocab_size == 265
    assert 267 not in tokenizer.encode("[PAD267]")
    named = small_source(tokens=tokens, token_types=np.array([*source.token_types, 5, 4, 4]))
    assert Tokenizer.from_gguf(named).vocab_size == 269, "a name of its own is a token"


def test_a_gap_in_the_vocabulary_hides_no_token() -> None:
    tokens = list(small_source().tokens)
    types = [1] * 261 + [3, 3, 3, 4, 5]
    tokens[258], types[258] = "unused", 5
    tokens[265], types[265] = "ab", 1
    merges = ("h e", "l l", "Ġ w", "ð Ł", "a b")
    gap = Tokenizer.from_gguf(small_source(tokens=tuple(tokens), token_types=np.array(types), merges=merges))
    assert gap.vocab_size == 266
    assert gap.encode("ab") == [265]
    assert gap.decode([265]) == "ab"
    assert gap.token_bytes(258) == b""


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "a 123", ["a", " ", "1", "2", "3"]),
        ("gpt-2", "a 123", ["a", " 123"]),
        ("llama-bpe", "a 12345", ["a", " ", "123", "45"]),
        ("llama3", "don't", ["don", "'t"]),
        ("qwen2", "a 123", ["a", " ", "1", "2", "3"]),
        ("tekken", "aB 12", ["a", "B", " ", "1", "2"]),
        (None, "a 123", ["a", " 123"]),
    ],
)
def test_pre_tokenizer_kinds(pre: str | None, text: str, pieces: list[str]) -> None:
    tokenizer = Tokenizer.from_gguf(small_source(pre=pre))
    spaced = [piece.replace(" ", "Ġ") for piece in pieces]
    assert [piece for piece, _ in tokenizer._core.pre_tokenizer.pre_tokenize_str(text)] == spaced


def test_a_gguf_that_names_no_pre_tokenizer_is_told(caplog: pytest.LogCaptureFixture) -> None:
    Tokenizer.from_gguf(small_source(pre="gpt-2"))
    assert not caplog.records
    Tokenizer.from_gguf(small_source(pre=None))
    assert "names no pre-tokenizer" in caplog.text


def test_bos_of_a_gguf() -> None:
    bos = small_source().bos_token_id
    assert Tokenizer.from_gguf(small_source()).encode("a")[:1] != [bos]
    assert Tokenizer.from_gguf(small_source(pre="llama-bpe")).encode("a")[:1] == [bos]
    assert Tokenizer.from_gguf(small_source(pre="llama-bpe", add_bos=False)).encode("a")[:1] != [bos]
    assert Tokenizer.from_gguf(small_source(add_bos=True)).encode("a")[:1] == [bos]
    assert Tokenizer.from_gguf(small_source(add_bos=True)).encode("a", add_special_tokens=False)[:1] != [bos]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "made-up"}, "made-up.*allowed: gpt-2, smollm"),
        ({"model": "bert"}, "'bert' is not supported"),
        ({"model": "llama"}, "scores is missing"),
        ({"merges": ("nospace",)}, "item 0 is 'nospace'"),
        ({"merges": ("q zz",)}, "do not fit together"),
        ({"tokens": ("a",) * 266}, "tokens 0 and 1 are both 'a'"),
    ],
)
def test_unusable_gguf_tokenizers_are_refused_by_name(changes: dict, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_gguf(small_source(**changes))


def test_unknown_decoders_are_refused_by_name() -> None:
    for spec in (
        {"type": "WordPiece"},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Replace"}]},
    ):
        with pytest.raises(TokenizerError, match="is not supported"):
            read_decoder(spec)


@pytest.mark.parametrize("tokenizer", [SMALL, BYTES, SENTENCE_PIECE], ids=["bpe", "bytes", "pieces"])
def test_ids_past_the_tokenizer_are_nothing(tokenizer: Tokenizer) -> None:
    past = [tokenizer.vocab_size, tokenizer.vocab_size + 7, 2**31, 2**40, -1]
    ids = tokenizer.encode("ab", add_special_tokens=False)
    assert tokenizer.decode(ids[:1] + past + ids[1:]) == "ab"
    assert [tokenizer.token_bytes(token_id) for token_id in past] == [b""] * 5
    stream = tokenizer.stream()
    assert "".join(map(stream.push, [*ids, *past])) + stream.finish() == "ab"


@pytest.mark.parametrize("tokenizer", [SMALL, BYTES, SENTENCE_PIECE], ids=["bpe", "bytes", "pieces"])
def test_lone_surrogates_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match=r"lone surrogate U\+D83D at character 2"):
        tokenizer.encode("ab\ud83d")


def test_byte_tokenizer() -> None:
    assert BYTES.encode("hé") == [104, 195, 169]
    assert (BYTES.vocab_size, BYTES.bos_id, BYTES.eos_ids) == (259, 256, {257})
    assert BYTES.token_bytes(195) == b"\xc3"
    assert BYTES.token_text(195) == "\ufffd"
    assert BYTES.decode([104, 257]) == "h"
    assert BYTES.decode([104, 257], skip_special_tokens=False) == "h<|eos|>"


def test_a_stored_truncation_does_not_cut_prompts(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer.from_file(str(GOLDEN / "stories260k" / "tokenizer.json"))
    library.enable_truncation(4)
    library.enable_padding(length=9)
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.decode(tokenizer.encode("Once upon a time")) == "Once upon a time"


def test_threads_share_a_tokenizer() -> None:
    text = "hello world <|im_end|> " * 5
    expected = {flag: SMALL.encode(text, parse_special=flag) for flag in (True, False)}
    fresh = Tokenizer.from_gguf(small_source())

    def work(index: int) -> bool:
        flag = bool(index % 2)
        ids = fresh.encode(text, parse_special=flag)
        return ids == expected[flag] and fresh.decode(ids, skip_special_tokens=False) == text

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(work, range(4000)))
