"""Multiple choice and last words, by hand; and files that are not what they should be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dense import dense_logits
from hypothesis import given
from hypothesis import strategies as st
from small_models import LENGTH, byte_llm, logprobs_of
from tiny import TINY, random_tensors

from jaxinfer.core import RequestError
from jaxinfer.lab.evaluate import (
    Question,
    Questions,
    evaluate_choices,
    evaluate_last_word,
    read_passages,
    read_questions,
)
from jaxinfer.lab.evaluate.choices import judged
from jaxinfer.lab.evaluate.scoring import continuation_span

BOS = 256


@pytest.fixture(scope="module")
def llm(compile_cache):
    return byte_llm()


def sum_by_hand(before: list[int], after: list[int]) -> tuple[float, bool]:
    """The logprob of `after` behind `before`, and whether each of its tokens is the most likely one."""
    logprobs = logprobs_of(dense_logits(TINY, random_tensors(TINY), before + after))
    rows = logprobs[len(before) - 1 : -1]
    return sum(row[i] for row, i in zip(rows, after, strict=True)), all(
        row.argmax() == i for row, i in zip(rows, after, strict=True)
    )


def written(path: Path, *lines: object) -> str:
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return str(path)


def questions(*choices: tuple[str, ...], answer: int = 0) -> Questions:
    return Questions(
        name="q",
        format="plain",
        questions=tuple(Question(f"q:{i}", "c", c, answer) for i, c in enumerate(choices)),
    )


def test_accuracies_are_of_sums_and_of_sums_over_characters_and_bytes() -> None:
    task = questions(("aa", "bbbb"), ("éé", "xxx"))
    found = judged(task, ((-2.0, -3.0), (-3.9, -4.0)))
    # -1 and -0.75 a character; -1.95 and -1.33 a character, -0.975 and -1.33 a byte
    assert (found.acc.value, found.acc_norm.value, found.acc_bytes.value) == (1.0, 0.0, 0.5)
    assert found.acc_bytes.stderr == pytest.approx(0.5)
    assert judged(questions(("a", "b"), answer=1), ((-1.0, -1.0),)).acc.value == 0.0  # of equals, the first


@given(st.lists(st.floats(-50, -0.1), min_size=2, max_size=5), st.integers(0, 4))
def test_choices_of_one_length_are_judged_alike(sums: list[float], answer: int) -> None:
    task = questions(("same",) * len(sums), answer=answer % len(sums))
    found = judged(task, (tuple(sums),))
    right = float(sums.index(max(sums)) == answer % len(sums))
    assert found.acc.value == right
    if len({value / 4 for value in sums}) == len(set(sums)):
        assert found.acc_norm.value == found.acc_bytes.value == right


def test_choices_are_scored_after_their_context(llm, tmp_path: Path) -> None:
    piqa = written(
        tmp_path / "p.jsonl",
        {"goal": "g", "sol1": "ab", "sol2": "cde"},
        {"goal": "h", "sol1": "x", "sol2": "y"},
    )
    written(tmp_path / "p-labels.lst", "1", "0")
    blimp = written(tmp_path / "b.jsonl", {"sentence_good": "He is.", "sentence_bad": "He are."})
    found = evaluate_choices(llm, [read_questions(piqa), read_questions(blimp)])
    assert [(task.name, task.format, task.count) for task in found] == [("p", "piqa", 2), ("b", "blimp", 1)]
    by_hand = [
        sum_by_hand(list(b"Question: g\nAnswer:"), list(b" ab"))[0],
        sum_by_hand(list(b"Question: g\nAnswer:"), list(b" cde"))[0],
        sum_by_hand([BOS], list(b" He is."))[0],
        sum_by_hand([BOS], list(b" He are."))[0],
    ]
    sums = [*found[0].logprobs[0], *found[1].logprobs[0]]
    assert sums == pytest.approx(by_hand, rel=1e-4)
    assert found[1].acc.value == float(by_hand[2] > by_hand[3])


def test_files_of_one_format_have_an_all(llm, tmp_path: Path) -> None:
    pair = {"sentence_good": "a", "sentence_bad": "b"}
    files = [
        read_questions(written(tmp_path / name, *[pair] * n)) for name, n in (("x.jsonl", 1), ("y.jsonl", 2))
    ]
    assert [(task.name, task.count) for task in evaluate_choices(llm, files)] == [
        ("x", 1),
        ("y", 2),
        ("all", 3),
    ]


def test_the_last_word_is_right_when_greedy_decoding_says_it(llm, tmp_path: Path) -> None:
    context = "one two"
    word = []
    for _ in range(3):  # what the model would say, if it can be said
        logits = dense_logits(TINY, random_tensors(TINY), [*context.encode(), 32, *word])[-1]
        word.append(int(logits[33:127].argmax()) + 33)
    texts = f"{context} {bytes(word).decode()}", f"{context} zq"
    for name, lines in (("t.jsonl", [{"text": text} for text in texts]), ("t.txt", texts)):
        task = read_passages(written(tmp_path / name, *lines))
        found = evaluate_last_word(llm, task)
        expected = [
            sum_by_hand(list(context.encode()), list(text[len(context) :].encode())) for text in texts
        ]
        assert found.logprobs == pytest.approx([value for value, _ in expected], rel=1e-4)
        assert list(found.right) == [greedy for _, greedy in expected]
        assert found.acc.value == sum(found.right) / 2


def test_a_greedy_continuation_is_right() -> None:
    """With text whose tokens are the model's own, planted by its sampled continuation."""
    llm = byte_llm()
    start = "the"
    told = (
        llm.generate(start, {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True})[0].outputs[0].token_ids
    )
    from jaxinfer.lab.evaluate.scoring import Span, score_spans

    spans = [
        Span((*start.encode(), *told), 3, "told"),
        Span((*start.encode(), *told[:-1], (told[-1] + 1) % 256), 3, "n"),
    ]
    assert [score.greedy for score in score_spans(llm, spans)] == [True, False]


def test_a_long_context_loses_its_beginning_and_a_long_choice_is_refused(llm) -> None:
    span = continuation_span(llm, "x" * 100, " ab", "here")
    assert (len(span.token_ids), span.first, span.lost) == (LENGTH - 1, LENGTH - 4, 100 - (LENGTH - 4))
    assert continuation_span(llm, "ab  ", "c", "here").token_ids == tuple(b"ab  c")
    assert continuation_span(llm, "ab  ", "c", "here").first == 2
    with pytest.raises(RequestError, match="here: a continuation of 80 tokens"):
        continuation_span(llm, "x", "a" * 80, "here")
    with pytest.raises(RequestError, match="no token of its own"):
        continuation_span(llm, "x", "", "here")


def test_hellaswag_is_written_as_its_task_writes_it(tmp_path: Path) -> None:
    row = {
        "activity_label": "Roof", "ctx_a": "A man is.", "ctx_b": "he", "label": "2",
        "endings": ["is [step] up.", " b", "c [title] d", "e"],
    }  # fmt: skip
    (question,) = read_questions(written(tmp_path / "h.jsonl", row)).questions
    assert question.context == "Roof: A man is. He"
    assert question.choices == ("is up.", "b", "c. d", "e")
    assert question.answer == 2


GOOD = {"context": "c", "choices": ["a", "b"], "answer": 0}
PAIR = {"sentence_good": "a", "sentence_bad": "b"}


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([GOOD, "{"], r"f\.jsonl:2: not JSON"),
        ([GOOD, "", "[1]"], r"f\.jsonl:3: a JSON object"),
        ([GOOD, PAIR], r"f\.jsonl:2: blimp in a file that began as plain"),
        ([{"a": 1}], r"f\.jsonl:1: keys a; known are piqa"),
        ([{**GOOD, "answer": 2}], r"f\.jsonl:1: 'answer' must be 0 to 1, got 2"),
        ([{**GOOD, "answer": True}], r"f\.jsonl:1: 'answer'"),
        ([{**GOOD, "choices": ["a"]}], r"f\.jsonl:1: 'choices' must be a list of two"),
        ([{**GOOD, "choices": ["a", 3]}], r"f\.jsonl:1: 'choices\[1\]' must be a text, got 3"),
        ([{**PAIR, "sentence_bad": " "}], r"f\.jsonl:1: 'sentence_bad' must be a text"),
        (['{"sentence_good": "\\ud800", "sentence_bad": "b"}'], r"f\.jsonl:1: .*surrogate"),
        ([], r"f\.jsonl: no example"),
    ],
)
def test_malformed_questions_are_refused_with_file_and_line(tmp_path: Path, lines, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        read_questions(written(tmp_path / "f.jsonl", *lines))


WRONG_LABELS = (
    (["0"], r"p\.jsonl:2: .*p-labels\.lst has 1 labels"),
    (["0", "2"], r"p-labels\.lst:2: the label must be"),
    (["0", "1", "1"], r"3 labels for 2 questions"),
    (["0", "x"], r"p-labels\.lst:2: the label must be"),
)


@pytest.mark.parametrize(("labels", "said"), WRONG_LABELS)
def test_labels_that_do_not_fit_are_refused(tmp_path: Path, labels: list[str], said: str) -> None:
    row = {"goal": "g", "sol1": "a", "sol2": "b"}
    file = written(tmp_path / "p.jsonl", row, row)
    written(tmp_path / "p-labels.lst", *labels)
    with pytest.raises(RequestError, match=said):
        read_questions(file)


def test_malformed_passages_are_refused_with_file_and_line(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"t\.txt:2: a passage has two words"):
        read_passages(written(tmp_path / "t.txt", "a b", "alone"))
    with pytest.raises(RequestError, match=r"t\.jsonl:1: 'text' must be a text"):
        read_passages(written(tmp_path / "t.jsonl", {"words": "a b"}))
    (tmp_path / "bytes.txt").write_bytes(b"a b\nc \xff\n")
    with pytest.raises(RequestError, match=r"bytes\.txt:2: byte 6 is not valid UTF-8"):
        read_passages(str(tmp_path / "bytes.txt"))
    with pytest.raises(OSError, match=r"none\.txt"):
        read_passages(str(tmp_path / "none.txt"))
