"""The last word of a passage, as LAMBADA asks for it (Paperno et al. 2016, 1606.06031).

A file has a passage a line: JSON objects with a `text` (NAME.jsonl), or plain text. The context is what
stands before the last space, the continuation that space and the word behind it (lm_eval's lambada tasks).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from jaxinfer.core import RequestError
from jaxinfer.lab.evaluate.estimate import Estimate, exponential, mean
from jaxinfer.lab.evaluate.examples import lines_of, objects_of, text_at
from jaxinfer.lab.evaluate.scoring import continuation_span, score_spans
from jaxinfer.llm import LLM


@dataclass(frozen=True, slots=True)
class Passage:
    """`word` has no space in front; `context` none at its end."""

    where: str
    context: str
    word: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Passages:
    name: str
    passages: tuple[Passage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LastWord:
    """`acc`: the share of passages whose greedy continuation is the tokens of the last word. `perplexity`:
    exp of the mean -logprob of a word (all of its tokens together, as lm_eval has it). `logprobs` and `right`
    are those of each passage."""

    name: str
    count: int
    acc: Estimate
    perplexity: Estimate
    logprobs: tuple[float, ...]
    right: tuple[bool, ...]


def read_passages(file: str, limit: int | None = None) -> Passages:
    """The first `limit` passages of a file. Raises OSError, and RequestError (file and line) for a line that
    is no passage of two words or more."""
    rows = (
        ((where, text_at(value, "text", where)) for where, value in objects_of(file))
        if Path(file).suffix in (".jsonl", ".json")
        else lines_of(file)
    )
    passages = []
    for where, text in islice(rows, limit):
        context, space, word = text.rstrip().rpartition(" ")
        if not space or not context.strip():
            raise RequestError(f"{where}: a passage has two words at least, got {text[:60]!r}", "file")
        passages.append(Passage(where, context.rstrip(), word))
    return Passages(name=Path(file).stem, passages=tuple(passages))


def evaluate_last_word(llm: LLM, task: Passages) -> LastWord:
    """Whether the model would end the passages as they end. Raises RequestError, having run nothing, for a
    word that is longer than the model can score."""
    spans = [continuation_span(llm, p.context, f" {p.word}", p.where) for p in task.passages]
    scores = score_spans(llm, spans, f"last words of {task.name}")
    logprobs = tuple(math.fsum(score.logprobs) for score in scores)
    right = tuple(score.greedy for score in scores)
    return LastWord(
        name=task.name,
        count=len(spans),
        acc=mean([float(value) for value in right]),
        perplexity=exponential(mean([-value for value in logprobs])),
        logprobs=logprobs,
        right=right,
    )
