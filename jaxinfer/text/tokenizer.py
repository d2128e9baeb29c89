"""Text to token ids and back, with the ids of the Hugging Face `tokenizers` library."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from jaxinfer.text.detokenize import TextStream
from jaxinfer.text.errors import TokenizerError, require_unicode
from jaxinfer.text.gguf_tokenizer import adds_bos_and_eos, build_from_gguf
from jaxinfer.text.pieces import (
    ByteDecoder,
    ByteLevel,
    DecodeRule,
    PieceDecoder,
    byte_level_bytes,
    fallback_byte,
    gpt2_alphabet,
    read_decoder,
)
from jaxinfer.text.sentencepiece_file import add_tokens, read_sentencepiece
from jaxinfer.text.sources import FolderFiles, FolderSource, GGUFSource, flag, present, read_json


class Tokenizer:
    """A tokenizer that any number of threads may use at once.

    `vocab_size` is one more than the largest id that stands for something; `base_vocab_size` the same without
    tokens that were only added to the trained vocabulary.

    The library's object raises "Already borrowed" when one thread changes its settings while another encodes
    (huggingface/tokenizers#537), so its settings are never changed after construction: text in which special
    tokens are plain text is encoded by a second object, made when it is first needed.
    """

    def __init__(
        self, core: tokenizers.Tokenizer, *, bos_id: int | None = None, eos_ids: Iterable[int] = ()
    ) -> None:
        """core: a complete tokenizer that nobody else changes; eos_ids: the first is the one chat templates
        call eos_token. Raises TokenizerError when its decoder is of an unknown kind.
        """
        # A truncation or padding rule stored in tokenizer.json belongs to training.
        core.no_truncation()
        core.no_padding()
        self._core = core
        self._spec_lock = threading.Lock()
        self._plain_cores: dict[bool, tokenizers.Tokenizer] = {}
        self._decode_rule = read_decoder(_decoder_spec(core))
        self.added_tokens: dict[int, AddedToken] = core.get_added_tokens_decoder()
        ordered = list(dict.fromkeys(eos_ids))
        self.bos_id = bos_id
        self.eos_ids: frozenset[int] = frozenset(ordered)
        self.special_ids: frozenset[int] = frozenset(
            token_id for token_id, token in self.added_tokens.items() if token.special
        )
        # Not their number: a vocabulary may have gaps (unused ids of a GGUF file, amid the others).
        self.base_vocab_size: int = 1 + max(core.get_vocab(with_added_tokens=False).values(), default=-1)
        self.vocab_size: int = max(self.base_vocab_size, 1 + max(self.added_tokens, default=-1))
        self.bos_token = self._text_or_empty(bos_id)
        self.eos_token = self._text_or_empty(ordered[0] if ordered else None)
        start = core.encode("").ids
        self.adds_bos: bool = bos_id is not None and bool(start) and start[0] == bos_id
        self._bytes: dict[int, bytes] = {}
        self._tokens: dict[int, str | None] = {}

    @classmethod
    def from_folder(cls, source: FolderSource | str | Path) -> Tokenizer:
        """From tokenizer.json and tokenizer_config.json of a Hugging Face folder (its path, or its source).

        An explicit add_bos_token or add_eos_token in tokenizer_config.json replaces the post-processor, as in
        transformers. A folder that has SentencePiece's tokenizer.model alone is read from that. Raises
        TokenizerError when there is neither, or it cannot be read.
        """
        files = FolderFiles.of(source) if isinstance(source, str | Path) else source
        if files.tokenizer_json is None and files.sentencepiece_model is not None:
            return cls._from_sentencepiece(files, files.sentencepiece_model)
        if files.tokenizer_json is None:
            raise TokenizerError(f"{source}: no tokenizer.json")
        try:
            core = tokenizers.Tokenizer.from_file(str(files.tokenizer_json))
        except Exception as error:  # the library raises plain Exception
            raise TokenizerError(f"{files.tokenizer_json}: not a tokenizer ({error})") from error
        config = read_json(files.tokenizer_config)
        bos_id = _token_id(core, config.get("bos_token"))
        if bos_id is None:
            bos_id = files.bos_token_id
        eos_id = _token_id(core, config.get("eos_token"))
        add_bos, add_eos = (flag(config, f"add_{x}_token", files.tokenizer_config) for x in ("bos", "eos"))
        if add_bos is not None or add_eos is not None:
            set_post_processor(core, bos_id if add_bos else None, eos_id if add_eos else None)
        eos_ids = ([] if eos_id is None else [eos_id]) + list(files.eos_token_ids)
        return cls(core, bos_id=bos_id, eos_ids=eos_ids)

    @classmethod
    def _from_sentencepiece(cls, files: FolderSource, path: Path) -> Tokenizer:
        """From a tokenizer.model, with the rules of transformers' LlamaTokenizer: BOS before every text
        unless tokenizer_config.json says otherwise, and `legacy` (true when absent) decides
        `prefix_everywhere`."""
        config = read_json(files.tokenizer_config)
        model = read_sentencepiece(path)
        switches = ("add_prefix_space", "legacy", "add_bos_token", "add_eos_token")
        prefix, legacy, add_bos, add_eos = (flag(config, key, files.tokenizer_config) for key in switches)
        if prefix is not None:
            model = replace(model, add_space_prefix=prefix)
        core = build_from_gguf(model, prefix_everywhere=legacy is not False)
        add_tokens(core, config, read_json(present(path.with_name("added_tokens.json"))), path)
        bos_id, eos_id = _token_id(core, config.get("bos_token")), _token_id(core, config.get("eos_token"))
        bos_id = model.bos_token_id if bos_id is None else bos_id
        eos_ids = model.eos_token_ids if eos_id is None else (eos_id,)
        set_post_processor(
            core, None if add_bos is False else bos_id, eos_ids[0] if add_eos is True and eos_ids else None
        )
        return cls(core, bos_id=bos_id, eos_ids=(*eos_ids, *files.eos_token_ids))

    @classmethod
    def from_gguf(cls, source: GGUFSource) -> Tokenizer:
        """From the tokenizer keys of a GGUF file: byte-level BPE ("gpt2") or SentencePiece ("llama").

        Raises TokenizerError for an unknown kind of tokenizer or pre-tokenizer, by name.
        """
        core = build_from_gguf(source)
        eos_id = source.eos_token_ids[0] if source.eos_token_ids else None
        add_bos, add_eos = adds_bos_and_eos(source)
        set_post_processor(core, source.bos_token_id if add_bos else None, eos_id if add_eos else None)
        return cls(core, bos_id=source.bos_token_id, eos_ids=source.eos_token_ids)

    @property
    def bos_token_id(self) -> int | None:
        """`bos_id`, as transformers calls it."""
        return self.bos_id

    @property
    def eos_token_id(self) -> int | None:
        """The id of the end that chat templates call eos_token; None without one."""
        return self._core.token_to_id(self.eos_token) if self.eos_token else None

    def get_vocab(self) -> dict[str, int]:
        """The tokens as the vocabulary spells them, added ones included, and their ids."""
        return self._core.get_vocab(with_added_tokens=True)

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """The tokens as the vocabulary spells them; "" for an id past it."""
        return [self._token(token_id) or "" for token_id in ids]

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Ids of `text`.

        add_special_tokens: add what the model's post-processor adds (BOS, for most that have one).
        parse_special: special-token text in `text` becomes that token; otherwise it is plain text.
        Raises TokenizerError for a lone surrogate.
        """
        core = self._core if parse_special else self._plain_core(continued=False)
        return self._encode(core, text, add_special_tokens)

    def encode_segment(self, text: str, continued: bool) -> list[int]:
        """Ids of a piece cut out of a longer text, in which special-token text is plain text.

        continued: text came before it, so a space that a tokenizer puts before a whole text is not added.
        """
        return self._encode(self._plain_core(continued), text, False)

    def spellings(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """The ids that write each word, as it starts a text and as it follows a space. A word that is more
        than one token may be written in further ways, by tokens that no encoding of it would choose."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word.lstrip(), " " + word.lstrip()):
                for continued in (False, True):
                    if ids := tuple(self.encode_segment(text, continued=continued)):
                        found[ids] = None
        return list(found)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`, bytes that are not UTF-8 as U+FFFD; ids past the tokenizer are nothing."""
        known = [token_id for token_id in ids if 0 <= token_id < self.vocab_size]
        return self._core.decode(known, skip_special_tokens=skip_special_tokens)

    def stream(
        self,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> TextStream:
        """An incremental `decode` that ends at stop strings; see `TextStream`."""
        left_out = self.special_ids if skip_special_tokens else frozenset()
        if isinstance(self._decode_rule, ByteLevel):
            decoder = ByteDecoder(lambda item: b"" if item in left_out else self.token_bytes(item))
        else:
            decoder = PieceDecoder(
                self._decode_rule, lambda item: None if item in left_out else self._token(item)
            )
        return TextStream(decoder, stop, include_stop, min_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for, wherever it stands; empty for an id past the tokenizer."""
        known = self._bytes.get(token_id)
        if known is not None:
            return known
        token, rule = self._token(token_id), self._decode_rule
        if token is None:
            result = b""
        elif isinstance(rule, ByteLevel):
            result = byte_level_bytes(token)
        elif rule.byte_fallback and (byte := fallback_byte(token)) is not None:
            result = bytes([byte])
        else:
            for old, new in rule.replacements:
                token = token.replace(old, new)
            result = token.encode("utf-8")
        self._bytes[token_id] = result
        return result

    @property
    def decode_rule(self) -> DecodeRule:
        """How tokens become text: bytes one after the other, or SentencePiece's pieces."""
        return self._decode_rule

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text for display; bytes that are not UTF-8 on their own are U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    @cached_property
    def special_texts(self) -> SpecialTexts:
        """The texts of all special tokens, ready for searching."""
        return SpecialTexts({self.added_tokens[token_id].content: token_id for token_id in self.special_ids})

    def _encode(self, core: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        require_unicode(text, "text")
        return core.encode(text, add_special_tokens=add_special_tokens).ids

    def _plain_core(self, continued: bool) -> tokenizers.Tokenizer:
        with self._spec_lock:
            if continued not in self._plain_cores:
                spec = json.loads(self._core.to_str())
                if continued:
                    _never_prepend(spec.get("pre_tokenizer"))
                core = tokenizers.Tokenizer.from_str(json.dumps(spec))
                core.encode_special_tokens = True
                self._plain_cores[continued] = core
            return self._plain_cores[continued]

    def _token(self, token_id: int) -> str | None:
        if token_id not in self._tokens:
            inside = 0 <= token_id < self.vocab_size
            self._tokens[token_id] = self._core.id_to_token(token_id) if inside else None
        return self._tokens[token_id]

    def _text_or_empty(self, token_id: int | None) -> str:
        return "" if token_id is None else self._core.id_to_token(token_id) or ""


class ByteTokenizer(Tokenizer):
    """One token per byte (ids 0-255), then "<|bos|>" 256, "<|eos|>" 257 and "<|pad|>" 258.

    Nothing is added to a text. For models of random weights, whose vocabulary may have any size: ids from 259
    on are no text.
    """

    def __init__(self) -> None:
        vocabulary = gpt2_alphabet()
        core = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        core.decoder = decoders.ByteLevel()
        names = ("<|bos|>", "<|eos|>", "<|pad|>")
        core.add_special_tokens([AddedToken(name, special=True) for name in names])
        super().__init__(core, bos_id=256, eos_ids=[257])


class SpecialTexts:
    """Search structures over the texts of special tokens."""

    def __init__(self, ids: dict[str, int]) -> None:
        self.ids = ids
        # Longest first: the library matches the longest of several that start together.
        choices = sorted((text for text in ids if text), key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, choices)) or r"(?!)")
        self.prefixes = frozenset(text[:size] for text in choices for size in range(1, len(text)))
        self.suffixes = frozenset(text[-size:] for text in choices for size in range(1, len(text)))
        self.longest = max(map(len, choices), default=0)


def load_tokenizer(source: FolderSource | GGUFSource) -> Tokenizer | None:
    """The tokenizer of `Checkpoint.tokenizer_source()`; None for a folder that has no tokenizer file."""
    if hasattr(source, "tokens"):
        return Tokenizer.from_gguf(source)  # type: ignore[arg-type]
    if source.tokenizer_json is None and source.sentencepiece_model is None:  # type: ignore[union-attr]
        return None
    return Tokenizer.from_folder(source)  # type: ignore[arg-type]


def set_post_processor(core: tokenizers.Tokenizer, bos_id: int | None, eos_id: int | None) -> None:
    """Make `core` add exactly these tokens before and after a text (None: nothing)."""
    bos = None if bos_id is None else core.id_to_token(bos_id)
    eos = None if eos_id is None else core.id_to_token(eos_id)
    special = {token: core.token_to_id(token) for token in (bos, eos) if token is not None}
    single = [f"{bos}:0"] if bos else []
    single += ["$A:0"] + ([f"{eos}:0"] if eos else [])
    core.post_processor = processors.TemplateProcessing(single=single, special_tokens=list(special.items()))  # type: ignore[arg-type]


def _decoder_spec(core: tokenizers.Tokenizer) -> dict[str, Any] | None:
    # The state of a decoder is its JSON; the JSON of the whole tokenizer would take 50 ms to write.
    return None if core.decoder is None else json.loads(core.decoder.__getstate__())


def _token_id(core: tokenizers.Tokenizer, token: Any) -> int | None:
    """Id of a token given as in tokenizer_config.json: text, or an object with "content"."""
    text = token.get("content") if isinstance(token, dict) else token
    return core.token_to_id(text) if isinstance(text, str) and text else None


def _never_prepend(spec: dict[str, Any] | None) -> None:
    """Edit a pre-tokenizer's JSON so that a text that continues another gets no space put before it."""
    if spec is None:
        return
    if spec.get("type") == "Metaspace" and spec.get("prepend_scheme") == "first":
        spec["prepend_scheme"] = "never"
    for item in spec.get("pretokenizers", []):
        _never_prepend(item)
