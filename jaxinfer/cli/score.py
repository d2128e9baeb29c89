"""`jaxinfer score`: how likely a model finds texts."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from tyro.conf import Positional, arg

from jaxinfer import outputs
from jaxinfer.cli.flags import EngineFlags, Model
from jaxinfer.cli.terminal import UsageError, say_error, text_argument
from jaxinfer.config import no_scoring
from jaxinfer.core import JaxInferError, RequestError


class Text(NamedTuple):
    """A text to score, and where it stands: a file, or one line of it (from 1 on)."""

    file: str
    line: int | None
    text: str

    @property
    def name(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Score:
    """Perplexity and token log-probabilities of texts."""

    model: Model
    files: Annotated[Positional[tuple[str, ...]], arg(metavar="FILE...", help="Each is one text, in UTF-8.")]
    lines: bool = False
    """Each line of a file is a text of its own; blank ones are left out."""
    json: bool = False
    """One JSON object per text and line, with the log-probability of each token."""
    engine: EngineFlags = field(default_factory=EngineFlags)

    def run(self) -> int:
        if not self.files:
            raise UsageError("score needs at least one FILE")
        if reason := no_scoring(self.engine.span()):
            raise UsageError(f"--attention-span {self.engine.attention_span}: {reason}")
        texts = [text for file in self.files for text in read_texts(file, self.lines)]
        if not texts:
            raise RequestError(f"no line of {', '.join(self.files)} holds a text", "prompt")
        with self.engine.load(self.model) as llm:
            ids = [llm.scored_ids(text.text, text.name) for text in texts]
            answers = llm.generate(ids, outputs.SCORING)
        scores: list[tuple[Text, outputs.Score]] = []
        for text, answer in zip(texts, answers, strict=True):
            try:
                scores.append((text, outputs.score_of(answer)))
            except JaxInferError as error:
                say_error(f"{text.name}: {error}")
        for line in map(_json, scores) if self.json else _table(scores):
            print(line)
        return 0 if len(scores) == len(texts) else 1


def read_texts(file: str, by_line: bool) -> list[Text]:
    """The texts of a file. Raises OSError, or RequestError for one that is no UTF-8."""
    try:
        with Path(text_argument(file)).open(encoding="utf-8", newline="") as opened:  # line ends are text too
            content = opened.read()
    except UnicodeDecodeError as error:
        raise RequestError(f"{file}: byte {error.start} is not valid UTF-8", "prompt") from None
    if not by_line:
        return [Text(file, None, content)]
    lines = enumerate(content.replace("\r\n", "\n").split("\n"), 1)
    return [Text(file, number, line) for number, line in lines if line.strip()]


def _json(scored: tuple[Text, outputs.Score]) -> str:
    text, score = scored
    value: dict[str, Any] = {
        "file": text.file,
        "line": text.line,
        "token_ids": list(score.token_ids),
        "logprobs": list(score.logprobs),
        "nll": score.nll,
        "perplexity": score.perplexity if math.isfinite(score.perplexity) else None,
    }
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _table(scores: list[tuple[Text, outputs.Score]]) -> list[str]:
    """A line per text and, where there are several, one for all of them together."""
    rows = [("text", "tokens", "nll", "perplexity")]
    for text, score in scores:
        rows.append((text.name, str(len(score.token_ids)), f"{score.nll:.3f}", f"{score.perplexity:.4f}"))
    if len(scores) > 1:
        nll = math.fsum(score.nll for _, score in scores)
        tokens = sum(len(score.token_ids) for _, score in scores)
        mean = nll / (tokens - len(scores))  # the first token of a text is not scored
        perplexity = math.exp(mean) if mean < 700 else math.inf
        rows.append(("all", str(tokens), f"{nll:.3f}", f"{perplexity:.4f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
