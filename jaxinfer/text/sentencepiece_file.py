"""Reading SentencePiece's `tokenizer.model`, for folders that have no tokenizer.json (Llama 2, Mistral v0.1).

The file is a protocol buffer, `ModelProto` of sentencepiece_model.proto. Of it this reads, by field number:

    ModelProto      1 pieces (repeated SentencePiece), 2 trainer_spec, 3 normalizer_spec, 5 denormalizer_spec
    SentencePiece   1 piece (text), 2 score (float), 3 type: 1 normal, 2 unknown, 3 control, 4 user-defined,
                    5 unused, 6 byte (the numbers that llama.cpp took over)
    TrainerSpec     3 model_type: 1 unigram, 2 BPE, 3 word, 4 char; 24 treat_whitespace_as_suffix;
                    35 byte_fallback; 46 bos_piece; 47 eos_piece
    NormalizerSpec  1 name; 2 precompiled_charsmap; 3 add_dummy_prefix; 4 remove_extra_whitespaces;
                    5 escape_whitespaces

What would change the ids and is not implemented is refused by name: plausible ids that are not the model's
are worse than none. A file is a stranger's: sizes are checked before anything is made of them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken

from jaxinfer.text.errors import TokenizerError

MAX_BYTES = 32 << 20
"""Longest file; the one of Gemma's 256 000 pieces has 4 MB."""
MAX_PIECES = 1 << 20

_BYTE, _UNKNOWN, _CONTROL = 6, 2, 3
_MODEL_TYPES = {1: "UNIGRAM", 2: "BPE", 3: "WORD", 4: "CHAR"}
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True, eq=False)
class SentencePieceFile:
    """A SentencePiece BPE model in the shape of a GGUF "llama" tokenizer (`sources.GGUFSource`).

    tokens, scores float32 and token_types are parallel, one per id.
    """

    tokens: tuple[str, ...]
    scores: np.ndarray | None
    token_types: np.ndarray | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    unknown_token_id: int | None
    add_space_prefix: bool | None
    model: str = "llama"
    pre: str | None = None
    merges: tuple[str, ...] = ()
    add_bos: bool | None = True
    add_eos: bool | None = False
    chat_template: str | None = None


def read_sentencepiece(path: Path) -> SentencePieceFile:
    """Read a `tokenizer.model`.

    Raises TokenizerError, naming the file, when it is damaged, too large, or of a kind that is not supported.
    """
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise TokenizerError(f"{path}: {size} bytes; a SentencePiece model has at most {MAX_BYTES}")
        data = path.read_bytes()
    except OSError as error:
        raise TokenizerError(f"{path}: cannot be read ({error.strerror or error})") from error
    try:
        return _read_model(memoryview(data))
    except _Damaged as error:
        raise TokenizerError(f"{path}: not a SentencePiece model: {error}") from None
    except _Unsupported as error:
        raise TokenizerError(
            f"{path}: {error}; add the model's tokenizer.json, which transformers can write"
        ) from None


class _Damaged(Exception):
    """The bytes are not what the format says."""


class _Unsupported(Exception):
    """A model of a kind that is not implemented."""


def _read_model(data: memoryview) -> SentencePieceFile:
    pieces: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(data):
        if number == 1:
            if len(pieces) == MAX_PIECES:
                raise _Damaged(f"more than {MAX_PIECES} pieces")
            piece = dict(_fields(_message(value, "piece")))
            pieces.append(_text(piece.get(1), f"piece {len(pieces)}"))
            scores.append(_float(piece.get(2, 0.0), f"score of piece {len(scores)}"))
            types.append(_integer(piece.get(3, 1), f"type of piece {len(types)}"))
        elif number == 2:
            trainer = dict(_fields(_message(value, "trainer_spec")))
        elif number == 3:
            normalizer = dict(_fields(_message(value, "normalizer_spec")))
        elif number == 5 and dict(_fields(_message(value, "denormalizer_spec"))).get(2):
            raise _Unsupported("a denormalizer is not supported")
    if not pieces:
        raise _Damaged("it holds no pieces")
    _check_kind(trainer, normalizer)
    return _checked(pieces, scores, types, trainer, normalizer)


def _check_kind(trainer: dict[int, Any], normalizer: dict[int, Any]) -> None:
    """Refuse what the BPE path with the identity normalizer would encode differently."""
    kind = _integer(trainer.get(3, 1), "model_type")
    if kind != 2:
        raise _Unsupported(f"model_type {_MODEL_TYPES.get(kind, kind)} is not supported; allowed: BPE")
    if normalizer.get(2):
        name = _text(normalizer.get(1, b""), "normalizer name", empty=True)
        raise _Unsupported(f"normalizer {name[:40]!r} is not supported; allowed: identity")
    for spec, number, default, wanted, name in (
        (trainer, 24, False, False, "treat_whitespace_as_suffix"),
        (normalizer, 4, True, False, "remove_extra_whitespaces"),
        (normalizer, 5, True, True, "escape_whitespaces"),
    ):
        if bool(_integer(spec.get(number, default), name)) is not wanted:
            raise _Unsupported(f"{name} {not wanted} is not supported; allowed: {wanted}")


def _checked(
    pieces: list[str],
    scores: list[float],
    types: list[int],
    trainer: dict[int, Any],
    normalizer: dict[int, Any],
) -> SentencePieceFile:
    wrong = next((i for i, kind in enumerate(types) if not 1 <= kind <= 6), None)
    if wrong is not None:
        raise _Damaged(f"piece {wrong} is of type {types[wrong]}; allowed: 1 to 6")
    if types.count(_UNKNOWN) != 1:
        raise _Damaged(f"it holds {types.count(_UNKNOWN)} unknown pieces; exactly 1 is needed")
    if _integer(trainer.get(35, 0), "byte_fallback"):
        found = {piece for piece, kind in zip(pieces, types, strict=True) if kind == _BYTE}
        if found != {f"<0x{byte:02X}>" for byte in range(256)}:
            raise _Damaged(f"byte_fallback needs the 256 byte pieces; it holds {len(found)}")
    ids = {piece: i for i, (piece, kind) in enumerate(zip(pieces, types, strict=True)) if kind == _CONTROL}
    bos = ids.get(_text(trainer.get(46, b"<s>"), "bos_piece"))
    eos = ids.get(_text(trainer.get(47, b"</s>"), "eos_piece"))
    return SentencePieceFile(
        tokens=tuple(pieces),
        scores=np.array(scores, np.float32),
        token_types=np.array(types, np.int32),
        bos_token_id=bos,
        eos_token_ids=() if eos is None else (eos,),
        unknown_token_id=types.index(_UNKNOWN),
        add_space_prefix=bool(_integer(normalizer.get(3, 1), "add_dummy_prefix")),
    )


# --------------------------------------------------------------------------------------- protocol buffer


def _fields(data: memoryview) -> Iterator[tuple[int, Any]]:
    """(field number, value) of a message in the order of the file: int, 4 or 8 raw bytes, or a memoryview.

    A field that may occur once counts by its last value, as `dict` takes it.
    """
    position, end = 0, len(data)
    while position < end:
        key, position = _varint(data, position)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, position = _varint(data, position)
            yield number, value
            continue
        if wire == _BYTES:
            size, position = _varint(data, position)
        elif wire in (_FIXED32, _FIXED64):
            size = 4 if wire == _FIXED32 else 8
        else:
            raise _Damaged(f"field {number} has the wire type {wire}")
        if size > end - position:
            raise _Damaged(f"field {number} claims {size} bytes and {end - position} follow")
        value = data[position : position + size]
        yield number, value if wire == _BYTES else bytes(value)
        position += size


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if position >= len(data) or shift > 63:
            raise _Damaged("it ends within a number" if shift <= 63 else "a number has more than 10 bytes")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7


def _message(value: Any, what: str) -> memoryview:
    if not isinstance(value, memoryview):
        raise _Damaged(f"{what} is no message")
    return value


def _text(value: Any, what: str, empty: bool = False) -> str:
    if not isinstance(value, (memoryview, bytes)) or (not len(value) and not empty):
        raise _Damaged(f"{what} is no text")
    try:
        return str(value, "utf-8")
    except UnicodeDecodeError:
        raise _Damaged(f"{what} is not UTF-8") from None


def _integer(value: Any, what: str) -> int:
    if not isinstance(value, int):
        raise _Damaged(f"{what} is no integer")
    return value


def _float(value: Any, what: str) -> float:
    if isinstance(value, float):  # the default
        return value
    if not isinstance(value, bytes) or len(value) != 4:
        raise _Damaged(f"{what} is no float")
    (number,) = struct.unpack("<f", value)
    if not np.isfinite(number):
        raise _Damaged(f"{what} is {number}")
    return number


# ------------------------------------------------------------------------------------------ added tokens


def add_tokens(
    core: tokenizers.Tokenizer, config: Mapping[str, Any], added: Mapping[str, Any], where: Path
) -> None:
    """Add what lies beside a tokenizer.model, with the ids stated there: `added_tokens_decoder` of
    tokenizer_config.json (id -> token) and added_tokens.json (text -> id).

    Raises TokenizerError naming the token when an id is taken, or leaves a gap after the ones before it.
    """
    wanted: dict[int, AddedToken] = {}
    special = {_content(config.get(f"{name}_token")) for name in ("bos", "eos", "unk", "pad", "cls", "sep")}
    listed = config.get("additional_special_tokens")
    special |= {_content(token) for token in listed} if isinstance(listed, list) else set()
    for text, token_id in added.items():
        wanted[_token_id(token_id, where)] = AddedToken(text, special=text in special, normalized=False)
    decoder = config.get("added_tokens_decoder")
    for key, token in (decoder if isinstance(decoder, Mapping) else {}).items():
        if not isinstance(token, Mapping) or not isinstance(token.get("content"), str):
            raise TokenizerError(f"{where}: added_tokens_decoder[{key!r:.20}] has no content")
        names = ("single_word", "lstrip", "rstrip", "normalized", "special")
        flags = {name: bool(token.get(name, False)) for name in names}
        wanted[_token_id(key, where)] = AddedToken(token["content"], **flags)
    for token_id, token in sorted(wanted.items()):
        (core.add_special_tokens if token.special else core.add_tokens)([token])
        got = core.token_to_id(token.content)
        if got != token_id:
            raise TokenizerError(
                f"{where}: the added token {token.content[:40]!r} should have the id {token_id}, not {got}"
            )


def _content(token: Any) -> str | None:
    """The text of a token given as text or as an object with "content"."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def _token_id(value: Any, where: Path) -> int:
    if isinstance(value, str) and value.isdecimal() and len(value) < 10:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TokenizerError(f"{where}: {value!r:.40} is no id of an added token")
    return value
