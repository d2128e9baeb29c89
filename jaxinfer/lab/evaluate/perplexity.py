"""Perplexity of texts that may be longer than the model's context, with the windows stated.

A text is cut into windows of `window` tokens, each of which begins `stride` tokens after the one before, and
a token is counted in the first window that has it together with a token before it (the sliding window of
Hugging Face's guide "Perplexity of fixed-length models"). With a stride below the window, every token but
the first is counted once, and those of a later window have at least window - stride tokens of context. With
stride == window the windows are disjoint, and the first token of each is context only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from jaxinfer.core import ConfigError, RequestError
from jaxinfer.lab.evaluate.estimate import Estimate, exponential, ratio
from jaxinfer.lab.evaluate.scoring import Span, require_tokenizer, score_spans, starts_with_bos
from jaxinfer.llm import LLM
from jaxinfer.text.files import one_text, read_content, texts_in

Bos = Literal["first", "every", "none"]

DEFAULT_WINDOW = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Windowing:
    """How a text is cut: sizes in tokens.

    bos "first": BOS before the text, where the model's tokenizer puts one there (SmolLM2's does not).
    "every": BOS at the beginning of every window, as one of its tokens; then the first token of a window
    follows something and can be counted. "none": no BOS at all. `limit`: the first windows of each text only.
    """

    window: int = DEFAULT_WINDOW
    stride: int = DEFAULT_WINDOW // 2
    bos: Bos = "first"
    limit: int | None = None

    def __post_init__(self) -> None:
        most = self.window - (self.bos == "every")
        if self.window < 2:
            raise ConfigError(f"window {self.window}: a window has 2 tokens at least")
        if not 1 <= self.stride <= most:
            raise ConfigError(
                f"stride {self.stride} with windows of {self.window} (bos {self.bos!r}): it goes from 1 to "
                f"{most}, or tokens between the windows would be left out"
            )
        if self.bos not in ("first", "every", "none"):
            raise ConfigError(f"bos {self.bos!r}: it is first, every or none")
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit {self.limit}: at least one window is scored")

    @classmethod
    def fitting(
        cls, llm: LLM, window: int | None = None, stride: int | None = None, bos: Bos = "first",
        limit: int | None = None,
    ) -> Windowing:  # fmt: skip
        """With what is not stated: windows of DEFAULT_WINDOW, or what the model runs at a time if that is
        less, and a stride of half a window. Raises ConfigError for a window that the model cannot run."""
        most = llm.limits.max_model_len - 1
        if window is not None and window > most:
            raise ConfigError(
                f"window {window} is more than the {most} tokens that are scored at a time "
                f"(max_model_len {most + 1}, less the one that is generated)"
            )
        window = min(DEFAULT_WINDOW, most) if window is None else window
        return cls(
            window=window, stride=max(1, window // 2) if stride is None else stride, bos=bos, limit=limit
        )


class Window(NamedTuple):
    """Tokens [start, end) of a text are run; [counted, end) are counted."""

    start: int
    counted: int
    end: int


def windows_of(length: int, size: int, stride: int, *, first_follows: bool = False) -> list[Window]:
    """The windows of a text of `length` tokens, those that count nothing left out. `first_follows`: something
    stands before each window, so that its first token can be counted."""
    found, reached = [], 0
    for start in range(0, length, stride):
        end = min(start + size, length)
        counted = max(reached, start + (not first_follows))
        if counted < end:
            found.append(Window(start, counted, end))
        reached = end
        if end == length:
            break
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A text to measure, and what it is called."""

    name: str
    content: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Perplexity:
    """`nll` is the sum of -ln p over the `counted` tokens of `windows` windows; `words` (separated by white
    space) and `bytes` (UTF-8) are those of the text up to the last window, which has `tokens` tokens.

    per_token = exp(nll / counted). The other two give each of the tokens that are not counted the mean of
    those that are: per_word = exp(nll / counted · tokens / words), per_byte alike, bits_per_byte = log2 of
    it. They compare models whose tokenizers differ. Standard errors take windows as the units.
    """

    name: str
    windowing: Windowing
    windows: int
    tokens: int
    counted: int
    words: int
    bytes: int
    nll: float
    nll_per_token: Estimate
    per_token: Estimate
    per_word: Estimate
    per_byte: Estimate
    bits_per_byte: Estimate


def read_text(file: str) -> Text:
    """A file as one text, read as training reads it, line ends as they are; the texts of a .jsonl file have a
    blank line between them. Raises OSError, or RequestError for one that is no UTF-8, is not what it should
    be, or has nothing in it."""
    path = Path(file)
    content = one_text(texts_in(read_content(path), path))
    if not content.strip():
        raise RequestError(f"{file}: no text in it", "prompt")
    return Text(name=path.name, content=content)


def text_spans(llm: LLM, text: Text, windowing: Windowing) -> tuple[list[Span], int]:
    """The windows of a text as spans to score, and how many of the text's tokens they reach.

    Raises RequestError for a text of too few tokens, and a BOS that the tokenizer does not have.
    """
    require_tokenizer(llm)
    ids = llm.encode(text.content, add_special_tokens=False)
    before: list[int] = []
    size = windowing.window
    if windowing.bos == "every":
        if llm.tokenizer.bos_id is None:
            raise RequestError(f"bos 'every': the tokenizer of {llm.model_name} has no BOS", "bos")
        before, size = [llm.tokenizer.bos_id], size - 1
    lead = starts_with_bos(llm) if windowing.bos == "first" else []
    ids = lead + ids
    windows = windows_of(len(ids), size, windowing.stride, first_follows=bool(before))[: windowing.limit]
    if not windows:
        raise RequestError(f"{text.name} has {len(ids)} tokens; nothing of it can be counted", "prompt")
    spans = [
        Span(
            (*before, *ids[start:end]), len(before) + counted - start, f"{text.name}, tokens {start} to {end}"
        )
        for start, counted, end in windows
    ]
    return spans, windows[-1].end - len(lead)


def evaluate_perplexity(llm: LLM, texts: Seq[Text], windowing: Windowing) -> list[Perplexity]:
    """The perplexity of each text, and one of all of them where there are several: its windows are those of
    every text, which are scored apart."""
    found, parts = [], []
    for text in texts:
        spans, reached = text_spans(llm, text, windowing)
        scores = score_spans(llm, spans, f"perplexity of {text.name}")
        words, size = _covered(llm, text, reached)
        nlls = tuple(-math.fsum(score.logprobs) for score in scores)
        parts.append(_Part(nlls, tuple(len(score.logprobs) for score in scores), reached, words, size))
        found.append(_perplexity(text.name, windowing, parts[-1:]))
    return [*found, _perplexity("all", windowing, parts)] if len(parts) > 1 else found


class _Part(NamedTuple):
    """The windows of a text: nll and counted tokens of each; and what of the text they reach."""

    nlls: tuple[float, ...]
    counts: tuple[int, ...]
    tokens: int
    words: int
    bytes: int


def _perplexity(name: str, windowing: Windowing, parts: Seq[_Part]) -> Perplexity:
    nlls = [nll for part in parts for nll in part.nlls]
    counts = [count for part in parts for count in part.counts]
    tokens, words, size = (sum(getattr(p, unit) for p in parts) for unit in ("tokens", "words", "bytes"))
    per_token = ratio(nlls, counts)
    per_word, per_byte = per_token.times(tokens / max(1, words)), per_token.times(tokens / size)
    return Perplexity(
        name=name,
        windowing=windowing,
        windows=len(nlls),
        tokens=tokens,
        counted=sum(counts),
        words=words,
        bytes=size,
        nll=math.fsum(nlls),
        nll_per_token=per_token,
        per_token=exponential(per_token),
        per_word=exponential(per_word),
        per_byte=exponential(per_byte),
        bits_per_byte=per_byte.times(1 / math.log(2)),
    )


def _covered(llm: LLM, text: Text, reached: int) -> tuple[int, int]:
    """Words and bytes of the text's first tokens."""
    ids = llm.encode(text.content, add_special_tokens=False)
    content = text.content
    if reached < len(ids):
        content = llm.tokenizer.decode(ids[:reached], skip_special_tokens=False)
    return len(content.split()), max(1, len(content.encode("utf-8")))
