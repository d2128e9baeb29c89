"""A `tokenizers.Tokenizer` from the tokenizer keys of a GGUF file.

A GGUF file stores the vocabulary and a name for the way text is cut before merging (`tokenizer.ggml.pre`),
not the rule itself. The rules below are those of the models' own tokenizer.json files; a name without a rule
is refused, because a wrong rule gives plausible ids that are not the model's.
"""

from __future__ import annotations

import logging
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from jaxinfer.text.errors import TokenizerError
from jaxinfer.text.sources import GGUFSource

logger = logging.getLogger(__name__)

# llama.cpp's token types
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE_MARK = "▁"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPLIT_PATTERNS = {
    "llama-bpe": _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "tekken": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
_SAME_AS = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "default": "gpt-2", "gpt2": "gpt-2"}
_SAME_AS |= {"starcoder": "smollm", "refact": "smollm"}
# Models whose tokenizer takes a whole word as one token when the vocabulary has it, merges or not.
_IGNORE_MERGES = {"llama-bpe", "tekken"}
PRE_KINDS = ("gpt-2", "smollm", *_SPLIT_PATTERNS)


MAX_PIECE = 256
"""Longest piece of a SentencePiece vocabulary, in characters: each is tried at every cut."""


def build_from_gguf(source: GGUFSource, *, prefix_everywhere: bool = True) -> tokenizers.Tokenizer:
    """The tokenizer of a GGUF file, or of what else has its shape, without a post-processor.

    prefix_everywhere: SentencePiece's space before a text is put after every control token too, as
    transformers does with `legacy`; otherwise at the start of the text alone.
    Raises TokenizerError naming an unknown kind of tokenizer or pre-tokenizer, or a damaged vocabulary.
    """
    if source.model == "gpt2":
        core = _byte_level(source)
    elif source.model == "llama":
        core = _sentence_piece(source, prefix_everywhere)
    else:
        raise TokenizerError(f"tokenizer.ggml.model {source.model!r} is not supported; allowed: gpt2, llama")
    special: list[AddedToken] = []
    plain: list[AddedToken] = []
    for token_id, (token, kind) in enumerate(zip(source.tokens, _types(source), strict=True)):
        if _is_padding(token_id, token, kind):
            continue
        if kind in (CONTROL, UNKNOWN):
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == USER_DEFINED:
            plain.append(AddedToken(token, special=False, normalized=False))
    core.add_special_tokens(special)
    core.add_tokens(plain)
    return core


def adds_bos_and_eos(source: GGUFSource) -> tuple[bool, bool]:
    """Whether a text gets BOS and EOS added; what the file leaves open follows from the kind (llama.cpp)."""
    by_default = source.model == "llama" or _pre_kind(source) in ("llama-bpe", "tekken")
    return by_default if source.add_bos is None else source.add_bos, bool(source.add_eos)


def _pre_kind(source: GGUFSource) -> str:
    kind = source.pre or "default"
    return _SAME_AS.get(kind, kind)


def _types(source: GGUFSource) -> list[int]:
    return [NORMAL] * len(source.tokens) if source.token_types is None else source.token_types.tolist()


def _is_padding(token_id: int, token: str, kind: int) -> bool:
    """Whether an id only pads the embedding matrix: the model's tokenizer does not have it. Older converters
    wrote such rows as user-defined tokens, named after their own id."""
    return kind == UNUSED or token == f"[PAD{token_id}]"


def _vocabulary(source: GGUFSource) -> dict[str, int]:
    vocabulary: dict[str, int] = {}
    for token_id, (token, kind) in enumerate(zip(source.tokens, _types(source), strict=True)):
        if _is_padding(token_id, token, kind):
            continue
        if token in vocabulary:
            raise TokenizerError(f"tokens {vocabulary[token]} and {token_id} are both {token!r}")
        vocabulary[token] = token_id
    return vocabulary


def _byte_level(source: GGUFSource) -> tokenizers.Tokenizer:
    kind = _pre_kind(source)
    if source.pre in (None, "default"):
        logger.warning("the GGUF file names no pre-tokenizer; GPT-2's is used, and may not be the model's")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=bool(source.add_space_prefix), use_regex=True)
    if kind == "gpt-2":
        pre_tokenizer: Any = byte_level
    elif kind == "smollm":
        pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    elif kind in _SPLIT_PATTERNS:
        split = pre_tokenizers.Split(Regex(_SPLIT_PATTERNS[kind]), "isolated")
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        pre_tokenizer = pre_tokenizers.Sequence([split, plain])
    else:
        allowed = ", ".join(PRE_KINDS)
        raise TokenizerError(f"tokenizer.ggml.pre {source.pre!r} is not supported; allowed: {allowed}")
    merges: list[tuple[str, str]] = []
    for index, merge in enumerate(source.merges):
        left, separator, right = merge.partition(" ")
        if not separator or not left or not right:
            raise TokenizerError(f"tokenizer.ggml.merges: item {index} is {merge!r}, expected two tokens")
        merges.append((left, right))
    core = _core(models.BPE, vocab=_vocabulary(source), merges=merges, ignore_merges=kind in _IGNORE_MERGES)
    if kind == "qwen2":
        core.normalizer = normalizers.NFC()
    core.pre_tokenizer = pre_tokenizer
    core.decoder = decoders.ByteLevel()
    return core


def _sentence_piece(source: GGUFSource, prefix_everywhere: bool) -> tokenizers.Tokenizer:
    if source.scores is None:
        raise TokenizerError("tokenizer.ggml.scores is missing; a SentencePiece tokenizer (llama) needs it")
    vocabulary = _vocabulary(source)
    unknown = source.tokens[source.unknown_token_id or 0]
    merges = _merges_from_scores(source, vocabulary)
    core = _core(
        models.BPE, vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    # The file leaves the flag out when it is the SentencePiece default, true.
    prefix = source.add_space_prefix is not False
    if prefix_everywhere or not prefix:
        steps: list[Any] = [normalizers.Prepend(SPACE_MARK)] if prefix else []
        core.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE_MARK)])
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace(SPACE_MARK, prepend_scheme="first", split=False)
    chain: list[Any] = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence(chain + ([decoders.Strip(" ", 1, 0)] if prefix else []))
    return core


def _merges_from_scores(source: GGUFSource, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """The merge list that makes BPE choose as SentencePiece does: the pair whose result scores highest first.

    Only normal pieces take part: SentencePiece never builds a control token out of text.
    """
    assert source.scores is not None
    ranked: list[tuple[float, int, int, str, str]] = []
    types, scores = _types(source), source.scores.tolist()
    pieces = {token for token, token_id in vocabulary.items() if types[token_id] == NORMAL}
    longest = max(map(len, pieces), default=0)
    if longest > MAX_PIECE:
        raise TokenizerError(f"a piece has {longest} characters; at most {MAX_PIECE} are supported")
    for piece in pieces:
        score = scores[vocabulary[piece]]
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                ranked.append((-score, vocabulary[left], vocabulary[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _core(model: Any, **settings: Any) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(model(**settings))
    except Exception as error:  # the library raises plain Exception (a merge of unknown tokens, for one)
        raise TokenizerError(f"the file's vocabulary and merges do not fit together ({error})") from error
