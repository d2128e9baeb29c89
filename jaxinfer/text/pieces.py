"""From token ids to text one token at a time, with exactly the result of decoding all at once.

tokenizers decodes by a chain of steps that is written in tokenizer.json under "decoder". `read_decoder` turns
the chains that Llama-family models use into one of two rules, and each rule has an incremental decoder whose
pushes, concatenated, equal the library's own decode of all ids:

- `ByteLevel`: a token is bytes; the text is the UTF-8 of all bytes, U+FFFD where they are not UTF-8.
- `Pieces` (SentencePiece): a token is text in which "▁" is a space, or a single byte such as "<0x0A>". A run
  of byte tokens is decoded as a whole: when the run is not UTF-8, every byte of it is one U+FFFD.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxinfer.text.errors import TokenizerError

REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class ByteLevel:
    """Byte-level BPE: every character of a token stands for one byte (the GPT-2 alphabet)."""


@dataclass(frozen=True)
class Pieces:
    """SentencePiece rules, in the order in which they are applied.

    replacements: (old, new) in each token; byte_fallback: "<0xNN>" is a byte; drop_in_first: a character
    removed from the first token; separator: written between tokens; strip: (character, how many at most)
    taken off the start of the text.
    """

    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    drop_in_first: str = ""
    separator: str = ""
    strip: tuple[str, int] = (" ", 0)


DecodeRule = ByteLevel | Pieces


def gpt2_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE (GPT-2): printable Latin-1 stands for itself, the other 68 bytes
    for the characters from U+0100 on, so that "Ġ" (U+0120) is the space (0x20) and "Ċ" the newline."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(kept)]
    alphabet = {chr(byte): byte for byte in kept}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(moved)})
    return alphabet


_ALPHABET = gpt2_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """Bytes of a byte-level token; one with a character outside the alphabet is its own UTF-8."""
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode("utf-8")


def fallback_byte(token: str) -> int | None:
    """The byte of a byte-fallback token ("<0x0A>" is 10), else None."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None


def read_decoder(spec: dict[str, Any] | None) -> DecodeRule:
    """The rule for the "decoder" object of a tokenizer.json.

    Raises TokenizerError naming a step, or an order of steps, that is not known.
    """
    if spec is None:
        return Pieces(separator=" ")
    steps = _flatten(spec)
    kinds = [step.get("type") for step in steps]
    if kinds in (["ByteLevel"], ["ByteLevel", "Fuse"]):
        return ByteLevel()
    replacements: list[tuple[str, str]] = []
    rule: dict[str, Any] = {}
    # Position in this list = position in the chain; a step may not come after a later one.
    order = ["Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"]
    stage = 0
    for step, kind in zip(steps, kinds, strict=True):
        if kind not in order or order.index(kind) < stage:
            allowed = f"ByteLevel, or {order} in this order"
            raise TokenizerError(f"decoder step {kind!r} in {kinds} is not supported; allowed: {allowed}")
        stage = order.index(kind)
        if kind == "Replace":
            pattern = step.get("pattern", {}).get("String")
            if not pattern:
                raise TokenizerError(f"decoder step Replace {step.get('pattern')!r} is not supported")
            replacements.append((pattern, step.get("content", "")))
        elif kind == "Metaspace":
            if "ByteFallback" in kinds:
                raise TokenizerError("decoder steps Metaspace and ByteFallback together are not supported")
            mark = step.get("replacement", "▁")
            replacements.append((mark, " "))
            if step.get("prepend_scheme", "always") != "never":
                rule["drop_in_first"] = mark
        elif kind == "ByteFallback":
            rule["byte_fallback"] = True
        elif kind == "Strip":
            if "Fuse" not in kinds or step.get("stop", 0):
                raise TokenizerError(
                    f"decoder step {step} is not supported; allowed: at the start, after Fuse"
                )
            rule["strip"] = (step["content"], int(step["start"]))
    return Pieces(replacements=tuple(replacements), **rule)


def _flatten(spec: dict[str, Any]) -> list[dict[str, Any]]:
    if spec.get("type") != "Sequence":
        return [spec]
    return [step for item in spec.get("decoders", []) for step in _flatten(item)]


class ByteDecoder:
    """Incremental decoder of byte-level tokens."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        """bytes_of: the bytes of a token id, empty for one that is left out."""
        self._bytes_of = bytes_of
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Characters that this token completes."""
        return self._utf8.decode(self._bytes_of(token_id))

    def finish(self) -> str:
        """U+FFFD when the last character was cut, else nothing."""
        return self._utf8.decode(b"", final=True)


class PieceDecoder:
    """Incremental decoder of SentencePiece tokens.

    Text tokens come out at once. Byte tokens wait for the end of their run, because the byte after a
    finished character may still turn that character into U+FFFD (see the top of this file).
    """

    def __init__(self, rule: Pieces, token_of: Callable[[int], str | None]) -> None:
        """token_of: the raw token of an id, None for one that is left out."""
        self._rule = rule
        self._token_of = token_of
        self._run = bytearray()
        self._strip_character, self._strip_left = rule.strip
        self._is_first = True

    def push(self, token_id: int) -> str:
        """Text that this token makes certain."""
        token = self._token_of(token_id)
        if token is None:
            return ""
        if self._rule.byte_fallback and (byte := fallback_byte(token)) is not None:
            self._run.append(byte)
            return ""
        if self._is_first and self._rule.drop_in_first:
            token = token.replace(self._rule.drop_in_first, "")
        elif not self._is_first and self._rule.separator:
            token = self._rule.separator + token
        self._is_first = False
        for old, new in self._rule.replacements:
            token = token.replace(old, new)
        return self._strip(self._end_run() + token)

    def finish(self) -> str:
        """Text of a run of bytes that the end of the output ends."""
        return self._strip(self._end_run())

    def _end_run(self) -> str:
        if not self._run:
            return ""
        run, self._run = bytes(self._run), bytearray()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _strip(self, text: str) -> str:
        while self._strip_left and text:
            if text[0] != self._strip_character:
                self._strip_left = 0
                break
            text = text[1:]
            self._strip_left -= 1
        return text
