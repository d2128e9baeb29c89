"""Multiple choice by likelihood: the choice with the highest logprob after its context is the model's.

Four formats of JSON lines are known by their keys, and turned into text as lm_eval's tasks of the same data
do: PIQA (goal, sol1, sol2; labels one a line in NAME-labels.lst beside NAME.jsonl, or a key `label`), BLiMP
(sentence_good, sentence_bad: minimal pairs, no context), HellaSwag (activity_label, ctx_a, ctx_b, endings,
label) and a plain one (context, choices, answer: the index of the right one).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from jaxinfer.core import RequestError
from jaxinfer.lab.evaluate.estimate import Estimate, mean
from jaxinfer.lab.evaluate.examples import index_of, lines_of, objects_of, text_at, texts_at
from jaxinfer.lab.evaluate.scoring import Span, continuation_span, score_spans
from jaxinfer.llm import LLM


@dataclass(frozen=True, slots=True)
class Question:
    """A context, its choices, and the index of the right one. A space stands between context and choice."""

    where: str
    context: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    name: str
    format: str
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """How many of `count` questions are answered rightly, by the choice with the highest sum of logprobs
    (`acc`), by that sum over the choice's length in characters (`acc_norm`, as lm_eval defines it) and over
    its length in UTF-8 bytes (`acc_bytes`). Of equal choices the first counts as chosen. `logprobs` has the
    sums, of each question and choice. `shortened` counts choices whose context lost its beginning.
    """

    name: str
    format: str
    count: int
    acc: Estimate
    acc_norm: Estimate
    acc_bytes: Estimate
    shortened: int
    logprobs: tuple[tuple[float, ...], ...]


# ---------------------------------------------------------------------------------------------- files


def read_questions(file: str, limit: int | None = None) -> Questions:
    """The first `limit` questions of a file. Raises OSError, and RequestError (file and line) for a format
    that is not known, a line that is not of the format of the first, and labels that do not fit."""
    formats: set[str] = set()
    questions = []
    for where, value, name in islice(_rows(file), limit):
        formats.add(name)
        if len(formats) > 1:
            raise RequestError(f"{where}: {name} in a file that began as {(formats - {name}).pop()}", "file")
        questions.append(FORMATS[name].read(value, where))
    return Questions(name=Path(file).stem, format=formats.pop(), questions=tuple(questions))


def _rows(file: str) -> Iterator[tuple[str, dict[str, Any], str]]:
    labels: list[tuple[str, str]] | None = None
    number = 0
    for number, (where, value) in enumerate(objects_of(file), 1):
        name = next((name for name, known in FORMATS.items() if known.keys <= value.keys()), None)
        if name is None:
            expected = "; ".join(f"{n}: {', '.join(sorted(f.keys))}" for n, f in FORMATS.items())
            raise RequestError(f"{where}: keys {', '.join(value)[:80]}; known are {expected}", "file")
        if name == "piqa" and "label" not in value:
            if labels is None:
                labels = list(lines_of(_labels_beside(file)))
            if number > len(labels):
                raise RequestError(f"{where}: {_labels_beside(file)} has {len(labels)} labels only", "file")
            at, label = labels[number - 1]
            value = {**value, "label": index_of(label, 2, at, "the label")}
        yield where, value, name
    if labels is not None and len(labels) != number:
        raise RequestError(f"{_labels_beside(file)}: {len(labels)} labels for {number} questions", "file")


def _labels_beside(file: str) -> str:
    return str(Path(file).with_suffix("")) + "-labels.lst"


def _piqa(value: dict[str, Any], where: str) -> Question:
    choices = text_at(value, "sol1", where), text_at(value, "sol2", where)
    answer = index_of(value["label"], 2, where, "'label'")
    return Question(where, f"Question: {text_at(value, 'goal', where)}\nAnswer:", choices, answer)


def _blimp(value: dict[str, Any], where: str) -> Question:
    choices = text_at(value, "sentence_good", where), text_at(value, "sentence_bad", where)
    return Question(where, "", choices, 0)


def _hellaswag(value: dict[str, Any], where: str) -> Question:
    opening = text_at(value, "ctx_a", where), text_at(value, "ctx_b", where, empty=True).capitalize()
    context = f"{text_at(value, 'activity_label', where)}: {' '.join(opening)}"
    choices = tuple(map(_without_brackets, texts_at(value, "endings", where)))
    if not all(choices):
        raise RequestError(f"{where}: an ending of 'endings' is brackets alone", "file")
    answer = index_of(value["label"], len(choices), where, "'label'")
    return Question(where, _without_brackets(context), choices, answer)


def _without_brackets(text: str) -> str:
    """HellaSwag's WikiHow part has "[title]", "[step]" and the like in it; lm_eval's way to take them out."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def _plain(value: dict[str, Any], where: str) -> Question:
    choices = texts_at(value, "choices", where)
    context = text_at(value, "context", where, empty=True)
    return Question(where, context, choices, index_of(value["answer"], len(choices), where, "'answer'"))


class _Format(NamedTuple):
    keys: frozenset[str]
    read: Callable[[dict[str, Any], str], Question]


FORMATS = {
    "piqa": _Format(frozenset({"goal", "sol1", "sol2"}), _piqa),
    "blimp": _Format(frozenset({"sentence_good", "sentence_bad"}), _blimp),
    "hellaswag": _Format(frozenset({"activity_label", "ctx_a", "ctx_b", "endings", "label"}), _hellaswag),
    "plain": _Format(frozenset({"context", "choices", "answer"}), _plain),
}


# ------------------------------------------------------------------------------------------- evaluating


def evaluate_choices(llm: LLM, tasks: Seq[Questions]) -> list[Choices]:
    """The accuracy of each file, and of all files of a format together where there are several of one. The
    choices of all run in one go.

    Raises RequestError, having run nothing, for a choice that is longer than the model can score.
    """
    spans: list[Span] = []
    shortened: list[int] = []
    for task in tasks:
        shortened.append(0)
        for question in task.questions:
            for choice in question.choices:
                span = continuation_span(llm, question.context, f" {choice}", question.where)
                shortened[-1] += span.lost > 0
                spans.append(span)
    sums = iter([math.fsum(score.logprobs) for score in score_spans(llm, spans, "choices")])
    parts = []
    for task, cut in zip(tasks, shortened, strict=True):
        rows = tuple(tuple(next(sums) for _ in question.choices) for question in task.questions)
        parts.append((task, rows, cut))
    for name in dict.fromkeys(task.format for task in tasks):
        same = [part for part in parts if part[0].format == name]
        if len(same) > 1:
            questions = tuple(question for task, _, _ in same for question in task.questions)
            joined = Questions(name="all", format=name, questions=questions)
            parts.append((joined, sum((rows for _, rows, _ in same), ()), sum(cut for *_, cut in same)))
    return [judged(task, rows, cut) for task, rows, cut in parts]


def judged(task: Questions, logprobs: tuple[tuple[float, ...], ...], shortened: int = 0) -> Choices:
    """The accuracies, given the sum of logprobs of every choice."""

    def accuracy(length: Callable[[str], int]) -> Estimate:
        right = []
        for question, sums in zip(task.questions, logprobs, strict=True):
            scores = [value / length(c) for value, c in zip(sums, question.choices, strict=True)]
            right.append(float(scores.index(max(scores)) == question.answer))
        return mean(right)

    return Choices(
        name=task.name,
        format=task.format,
        count=len(task.questions),
        acc=accuracy(lambda _: 1),
        acc_norm=accuracy(len),
        acc_bytes=accuracy(lambda choice: len(choice.encode("utf-8"))),
        shortened=shortened,
        logprobs=logprobs,
    )
