"""TextStream against a simple oracle: decode everything, then cut at the first stop string."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import tokenizers
from cpu_time import cpu_time
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import GOLDEN, small_source

from jaxinfer.text import ByteTokenizer, Tokenizer, TokenizerError

SMALL = Tokenizer.from_gguf(small_source())
BYTES = ByteTokenizer()
PIECES = Tokenizer.from_folder(GOLDEN / "stories260k")
KINDS = {"bpe": SMALL, "bytes": BYTES, "pieces": PIECES}

TEXTS = (
    st.text(max_size=40) | st.text("abc \n", max_size=40) | st.text("é日本🤗👩\u200d👧e\u0301 x", max_size=20)
)
STOPS = st.lists(st.text("abc \n日🤗", min_size=1, max_size=4), max_size=4)


def cut(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """The oracle: the stop string that starts first wins, the shorter of two that start together."""
    found = min(((text.find(stop), len(stop), stop) for stop in stops if stop in text), default=None)
    if found is None:
        return text, None
    start, length, stop = found
    return text[: start + length * include], stop


def run(tokenizer: Tokenizer, ids: Sequence[int], **settings_of_stream: object) -> tuple[str, str | None]:
    """Push everything; checks that what came out piece by piece is what `text` says."""
    stream = tokenizer.stream(**settings_of_stream)  # type: ignore[arg-type]
    parts: list[str] = []
    for token_id in ids:
        parts.append(stream.push(token_id))
        if stream.stopped:
            break
    parts += [stream.finish(), stream.finish()]
    assert "".join(parts) == stream.text
    assert stream.stopped == (stream.matched is not None)
    return stream.text, stream.matched


@pytest.mark.parametrize("kind", KINDS)
@given(ids=st.lists(st.integers(0, 520), max_size=40), skip=st.booleans())
def test_any_ids_equal_the_one_shot_decode(kind: str, ids: list[int], skip: bool) -> None:
    tokenizer = KINDS[kind]
    expected = tokenizer.decode(ids, skip_special_tokens=skip)
    assert run(tokenizer, ids, skip_special_tokens=skip) == (expected, None)


@given(ids=st.lists(st.integers(0, 511), max_size=40), skip=st.booleans())
def test_pieces_equal_the_library(ids: list[int], skip: bool) -> None:
    library = tokenizers.Tokenizer.from_file(str(GOLDEN / "stories260k" / "tokenizer.json"))
    assert run(PIECES, ids, skip_special_tokens=skip)[0] == library.decode(ids, skip_special_tokens=skip)


def with_decoder(decoder: object) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    """The tokenizer of stories260k with another decoder, ours and the library's."""
    spec = json.loads((GOLDEN / "stories260k" / "tokenizer.json").read_text())
    text = json.dumps(spec | {"decoder": decoder})
    return Tokenizer(tokenizers.Tokenizer.from_str(text)), tokenizers.Tokenizer.from_str(text)


REPLACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
METASPACE = {"type": "Metaspace", "replacement": "▁", "split": True}
DECODERS = {
    "none": None,
    "metaspace first": METASPACE | {"prepend_scheme": "first"},
    "metaspace always": METASPACE | {"prepend_scheme": "always"},
    "metaspace never": METASPACE | {"prepend_scheme": "never"},
    "gemma": {"type": "Sequence", "decoders": [REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}]},
    "strip two": {
        "type": "Sequence",
        "decoders": [REPLACE, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 2, "stop": 0}],
    },
    "byte level": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
}
OTHERS = {name: with_decoder(decoder) for name, decoder in DECODERS.items()}


@pytest.mark.parametrize("name", OTHERS)
@given(ids=st.lists(st.integers(0, 511) | st.integers(255, 270), max_size=30), skip=st.booleans())
def test_other_decoders_equal_the_library(name: str, ids: list[int], skip: bool) -> None:
    tokenizer, library = OTHERS[name]
    assert run(tokenizer, ids, skip_special_tokens=skip)[0] == library.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["bpe", "bytes"])
@given(data=st.binary(max_size=40), stops=STOPS, include=st.booleans())
def test_any_bytes_with_stop_strings(kind: str, data: bytes, stops: list[str], include: bool) -> None:
    tokenizer = KINDS[kind]
    byte_ids = {tokenizer.token_bytes(token_id): token_id for token_id in range(256)}
    ids = [byte_ids[bytes([byte])] for byte in data]
    expected = cut(data.decode("utf-8", errors="replace"), stops, include)
    assert run(tokenizer, ids, stop=stops, include_stop=include) == expected


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS, stops=STOPS, include=st.booleans())
def test_any_text_with_stop_strings(kind: str, text: str, stops: list[str], include: bool) -> None:
    tokenizer = KINDS[kind]
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    expected = cut(tokenizer.decode(ids, skip_special_tokens=False), stops, include)
    assert run(tokenizer, ids, stop=stops, include_stop=include, skip_special_tokens=False) == expected


@given(text=st.text("ab", max_size=30), stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4))
@settings(max_examples=300)
def test_overlapping_stop_strings(text: str, stops: list[str]) -> None:
    assert run(BYTES, list(text.encode()), stop=stops) == cut(text, stops, False)
    merged = SMALL.encode(text)
    assert run(SMALL, merged, stop=stops) == cut(text, stops, False)


@given(
    text=st.text("abc", max_size=20), stop=st.text("abc", min_size=1, max_size=3), first=st.integers(0, 12)
)
def test_min_tokens(text: str, stop: str, first: int) -> None:
    ends = [at + len(stop) for at in range(len(text)) if text.startswith(stop, at)]
    allowed = [end for end in ends if end > first]  # one token is one character
    expected = (text[: allowed[0] - len(stop)], stop) if allowed else (text, None)
    assert run(BYTES, list(text.encode()), stop=[stop], min_tokens=first) == expected


def pushes(tokenizer: Tokenizer, text: str, **settings_of_stream: object) -> list[str]:
    stream = tokenizer.stream(**settings_of_stream)  # type: ignore[arg-type]
    return [stream.push(token_id) for token_id in tokenizer.encode(text, add_special_tokens=False)]


def test_a_finished_character_is_sent_at_once() -> None:
    assert pushes(BYTES, "aé🤗b") == ["a", "", "é", "", "", "", "🤗", "b"]
    assert pushes(SMALL, "hell🤗")[0] == "hell"
    assert "".join(pushes(PIECES, "Once upon")) == "Once upon"
    assert pushes(PIECES, "Once upon")[0] == "Once"


def test_a_cut_character_is_one_replacement_at_the_end() -> None:
    stream = BYTES.stream()
    assert [stream.push(token_id) for token_id in "é🤗".encode()[:-1]] == ["", "é", "", "", ""]
    assert stream.finish() == "\ufffd"


def test_byte_runs_of_pieces_wait_for_their_end() -> None:
    byte = {value: PIECES._core.token_to_id(f"<0x{value:02X}>") for value in (0xE2, 0x82, 0xAC, 0xFF)}
    stream = PIECES.stream()
    assert [stream.push(byte[value]) for value in (0xE2, 0x82, 0xAC)] == ["", "", ""]
    assert stream.push(PIECES._core.token_to_id("▁the")) == "€ the"
    # The library turns a whole run with an invalid byte into U+FFFD, one for each byte.
    ids = [byte[value] for value in (0xE2, 0x82, 0xAC, 0xFF)]
    assert run(PIECES, ids)[0] == PIECES.decode(ids) == "\ufffd" * 4


def test_leading_space_of_pieces_is_dropped_once() -> None:
    space, word = PIECES._core.token_to_id("▁"), PIECES._core.token_to_id("▁the")
    for ids in ([word, word], [space, space, word], [space, word], [1, word, space]):
        assert run(PIECES, ids)[0] == PIECES.decode(ids)
    assert run(PIECES, [space, space, word])[0] == "  the"


def test_stop_string_over_several_tokens_is_never_emitted() -> None:
    stream = BYTES.stream(stop=["DEFGHIJ"])
    parts = [stream.push(token_id) for token_id in b"ABCDEFGHIJKL"]
    assert parts == ["A", "B", "C", *[""] * 9]
    assert (stream.stopped, stream.matched, stream.text, stream.pushed) == (True, "DEFGHIJ", "ABC", 10)
    assert stream.finish() == ""


def test_held_text_comes_out_when_it_is_no_stop_string() -> None:
    assert pushes(BYTES, "xDEFoDE", stop=["DEFG"]) == ["x", "", "", "", "DEFo", "", ""]
    assert run(BYTES, list(b"xDE"), stop=["DEFG"]) == ("xDE", None)


def test_include_stop() -> None:
    assert run(BYTES, list(b"one two three"), stop=["two"], include_stop=True) == ("one two", "two")
    assert run(SMALL, SMALL.encode("hell world"), stop=["l w"], include_stop=True) == ("hell w", "l w")


def test_a_decision_may_wait_for_an_earlier_stop_string() -> None:
    for text, expected in (("xabcd", ("x", "abcd")), ("xabce", ("xab", "c")), ("xabc", ("xab", "c"))):
        assert run(BYTES, list(text.encode()), stop=["abcd", "c"]) == expected


@pytest.mark.parametrize("stops", [[""], ["x", ""], [None]])
def test_empty_stop_strings_are_refused(stops: list) -> None:
    with pytest.raises(TokenizerError, match="stop string"):
        BYTES.stream(stop=stops)


def test_one_stop_string_may_be_given_as_text() -> None:
    assert run(BYTES, list(b"a. b"), stop="b") == ("a. ", "b")


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_output_stays_linear(kind: str) -> None:
    tokenizer = KINDS[kind]
    ids = tokenizer.encode("hello a world, 日本 " * 40, add_special_tokens=False)

    def seconds(count: int) -> float:
        stream = tokenizer.stream(stop=["</answer>", "aaaaaaaaab"])
        with cpu_time() as spent:
            for index in range(count):
                stream.push(ids[index % len(ids)])
            stream.finish()
            return spent()

    seconds(1000)
    short, long = min(seconds(4000) for _ in range(3)), seconds(32000)
    assert long < 8 * short * 4, (short, long)  # quadratic would be 64 times


@pytest.mark.model
@given(text=TEXTS, stops=STOPS, include=st.booleans())
def test_smollm2_text_with_stop_strings(
    smollm2: Tokenizer, text: str, stops: list[str], include: bool
) -> None:
    ids = smollm2.encode(text)
    assert run(smollm2, ids, stop=stops, include_stop=include) == cut(smollm2.decode(ids), stops, include)


@pytest.mark.model
@given(ids=st.lists(st.integers(0, 49151), max_size=40), skip=st.booleans())
def test_smollm2_any_ids(smollm2: Tokenizer, ids: list[int], skip: bool) -> None:
    expected = smollm2.decode(ids, skip_special_tokens=skip)
    assert run(smollm2, ids, skip_special_tokens=skip) == (expected, None)
