"""Texts to blocks: every token is learnt from once, and the order of blocks is fixed by seed and position."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from training import STORIES

from jaxinfer.core import RequestError
from jaxinfer.lab.compare.cells import Texts
from jaxinfer.lab.compare.recipe import TextPart
from jaxinfer.lab.data import Order, pack, token_stream
from jaxinfer.lab.evaluate import read_text
from jaxinfer.text import ByteTokenizer, Tokenizer
from jaxinfer.text.files import read_texts


@given(st.integers(2, 200), st.integers(1, 40))
def test_every_token_but_the_first_is_a_target_once(tokens: int, length: int) -> None:
    stream = np.arange(1, tokens + 1, dtype=np.int32)
    blocks = pack(stream, length)
    inputs, targets = blocks.tokens[:, :-1], blocks.tokens[:, 1:]
    np.testing.assert_array_equal(targets[blocks.counted], stream[1:])
    np.testing.assert_array_equal(inputs[blocks.counted], stream[:-1])
    assert blocks.num_targets == tokens - 1
    assert blocks.counted[:-1].all()
    assert not blocks.tokens[:, 1:][~blocks.counted].any()
    assert blocks.length == length


@given(st.integers(2, 200), st.integers(1, 40), st.integers(1, 100))
def test_held_out_texts_are_cut_in_whole_blocks(tokens: int, length: int, most: int) -> None:
    stream = np.arange(tokens, dtype=np.int32)
    whole, cut = pack(stream, length), pack(stream, length, most_targets=most)
    assert len(cut) == min(len(whole), max(1, most // length))
    np.testing.assert_array_equal(cut.tokens, whole.tokens[: len(cut)])
    np.testing.assert_array_equal(cut.counted, whole.counted[: len(cut)])


@given(st.integers(1, 12), st.integers(0, 5), st.lists(st.integers(1, 9), max_size=12))
def test_an_epoch_takes_every_block_once_however_it_is_asked_for(
    blocks: int, seed: int, counts: list
) -> None:
    order, position, taken = Order(blocks, seed), 0, []
    for count in counts:
        taken += order.take(position, count).tolist()
        position += count
    for epoch in range(position // blocks):
        assert sorted(taken[epoch * blocks : (epoch + 1) * blocks]) == list(range(blocks))
    # one that is asked in the middle, as after a break, says the same
    for place, number in enumerate(taken):
        assert Order(blocks, seed).take(place, 1).tolist() == [number]


def test_epochs_and_seeds_differ() -> None:
    orders = [Order(50, seed).take(0, 100).tolist() for seed in (0, 1)]
    assert len({tuple(part) for order in orders for part in (order[:50], order[50:])}) == 4


def test_a_block_that_is_not_there_counts_nothing() -> None:
    blocks = pack(np.arange(9), 4)
    tokens, counted = blocks.take(np.asarray([1, -1]))
    assert tokens.shape == (2, 5)
    assert counted.tolist() == [[True] * 4, [False] * 4]


def test_texts_are_joined_as_the_tokenizer_wants() -> None:
    stories = Tokenizer.from_folder(STORIES)
    assert stories.adds_bos
    ids = token_stream(stories, ["Once upon", "a time"], 512).tolist()
    eos = stories.eos_token_id
    assert ids == [*stories.encode("Once upon"), eos, *stories.encode("a time"), eos]
    assert ids[0] == ids[ids.index(eos) + 1] == stories.bos_id
    plain = ByteTokenizer()
    assert token_stream(plain, ["ab", "c"], 300).tolist() == [97, 98, 257, 99, 257]  # nothing before a text
    assert token_stream(plain, ["ab<|eos|>"], 300).tolist() == [97, 98, 257]  # and no second end


def test_files_are_read_by_their_kind(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("grün\r\nblau\n".encode())
    lines = [json.dumps({"text": text}) for text in ("eins", "", "drei\n")]
    (tmp_path / "b.jsonl").write_text("\n".join([*lines, ""]))
    assert read_texts([tmp_path / "a.txt", tmp_path / "b.jsonl"]) == ["grün\r\nblau\n", "eins", "drei\n"]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_byte_order_mark_is_no_text(tmp_path: Path, name: str) -> None:
    content = "eins" if name == "a.txt" else json.dumps({"text": "eins"})
    (tmp_path / name).write_text(content, encoding="utf-8-sig")
    assert read_texts([tmp_path / name]) == ["eins"]
    assert read_text(str(tmp_path / name)).content == "eins"
    assert Texts(tmp_path, tmp_path / "kept").text(TextPart(name)) == "eins"


def test_what_is_measured_is_what_is_learnt(tmp_path: Path) -> None:
    """Of a .jsonl file the texts, and not the JSON around them."""
    lines = [json.dumps({"text": text}) for text in ("eins\r\n", "", "zwei", "drei", "vier")]
    (tmp_path / "a.jsonl").write_text("\n".join([lines[0], "", *lines[1:]]), newline="")
    learnt = read_texts([tmp_path / "a.jsonl"])
    assert read_text(str(tmp_path / "a.jsonl")).content == "\n\n".join(learnt)
    assert read_text(str(tmp_path / "a.jsonl")).content == "eins\r\n\n\nzwei\n\ndrei\n\nvier"
    texts = Texts(tmp_path, tmp_path / "kept")
    assert texts.text(TextPart("a.jsonl")) == "\n\n".join(learnt)
    parts = [TextPart("a.jsonl", a, b) for a, b in ((0.0, 0.6), (0.6, 1.0))]
    assert [text for part in parts for text in read_texts([texts.path(part)])] == learnt
    assert texts.text(parts[1]) == texts.text_path(parts[1]).read_text() == "drei\n\nvier"
    assert texts.text_path(parts[1]) != texts.path(parts[1])


def test_a_line_that_is_no_text_is_told_before_any_is_measured(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n\n{"txt": "b"}\n')
    with pytest.raises(RequestError, match=r"a\.jsonl:3: expected an object"):
        read_text(str(tmp_path / "a.jsonl"))
    with pytest.raises(RequestError, match=r"a\.jsonl:3: expected an object"):
        Texts(tmp_path, tmp_path / "kept").digest(TextPart("a.jsonl", 0.9))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "no text in"),
        ("a.txt", b"ab\xff", "byte 2 is not valid UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"txt": "b"}', "a.jsonl:2: expected an object"),
        ("a.jsonl", b'{"text": "a"}\n{', "a.jsonl:2: expected an object"),
        ("a.jsonl", b'["text"]', "a.jsonl:1: expected an object"),
        ("a.jsonl", b'{"text": 3}', "a.jsonl:1: expected an object"),
        ("a.jsonl", b'{"text": "\\ud800"}', "a.jsonl:1: 'text' has half of a surrogate pair"),
    ],
)
def test_a_file_that_is_none_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RequestError, match=message):
        read_texts([tmp_path / name])


def test_tokens_must_be_the_models_and_more_than_one() -> None:
    with pytest.raises(RequestError, match=r"token 257 .*ends at 255"):
        token_stream(ByteTokenizer(), ["a"], 256)
    with pytest.raises(RequestError, match="1 tokens together"):
        pack(np.asarray([3]), 4)
