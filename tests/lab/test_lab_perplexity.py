"""Perplexity: what the windows count, and that the figures are those of whole distributions."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dense import dense_logits
from hypothesis import given
from hypothesis import strategies as st
from small_models import LENGTH, byte_llm, logprobs_of
from tiny import TINY, random_tensors

from jaxinfer.core import ConfigError, RequestError
from jaxinfer.lab.compare import figures
from jaxinfer.lab.evaluate import (
    ModelResults,
    Report,
    Text,
    Windowing,
    evaluate_perplexity,
    perplexity,
    read_text,
)
from jaxinfer.lab.evaluate.estimate import mean, ratio
from jaxinfer.lab.evaluate.perplexity import text_spans, windows_of
from jaxinfer.lab.evaluate.scoring import Scored
from jaxinfer.text.tokenizer import ByteTokenizer, Tokenizer, set_post_processor

TEXT = "The cat sat on the mat, and thé dog did not. " * 4


@pytest.fixture(scope="module")
def llm(compile_cache):
    return byte_llm()


@given(st.integers(2, 300), st.integers(2, 40), st.data())
def test_every_token_but_the_first_is_counted_once_with_enough_before_it(length, size, data) -> None:
    stride = data.draw(st.integers(1, size - 1))
    windows = windows_of(length, size, stride)
    counted = [i for start, first, end in windows for i in range(first, end)]
    assert counted == list(range(1, length))
    for start, first, end in windows:
        assert 0 <= start < first < end <= min(length, start + size)
        assert start == 0 or first - start >= size - stride


@given(st.integers(1, 300), st.integers(1, 40), st.booleans())
def test_disjoint_windows_leave_out_their_first_tokens_unless_something_stands_before(
    length, size, follows
) -> None:
    counted = [
        i
        for start, first, end in windows_of(length, size, size, first_follows=follows)
        for i in range(first, end)
    ]
    assert counted == [i for i in range(length) if follows or i % size]


@pytest.mark.parametrize(("window", "stride", "bos"), [(20, 7, "first"), (16, 16, "none"), (16, 5, "every")])
def test_it_is_that_of_whole_distributions(llm, window: int, stride: int, bos: str) -> None:
    tensors = random_tensors(TINY)
    ids = list(TEXT.encode())
    lead, size = ([256], window - 1) if bos == "every" else ([], window)
    expected, seen, counted = [], 0, 0
    for start in range(0, len(ids), stride):
        end = min(start + size, len(ids))
        run = lead + ids[start:end]
        logprobs = logprobs_of(dense_logits(TINY, tensors, run))
        first = max(seen, start + (not lead))
        expected.append(
            -sum(logprobs[len(lead) + i - start - 1, ids[i]] for i in range(first, end)) if first < end else 0
        )
        counted += max(0, end - first)
        seen = end
        if end == len(ids):
            break
    (found,) = evaluate_perplexity(
        llm, [Text(name="t", content=TEXT)], Windowing(window=window, stride=stride, bos=bos)
    )
    assert found.counted == counted
    assert found.nll == pytest.approx(sum(expected), rel=2e-5)
    assert found.per_token.value == pytest.approx(math.exp(found.nll / counted))
    assert (found.tokens, found.bytes, found.words) == (len(ids), len(ids), len(TEXT.split()))
    assert found.per_byte.value == pytest.approx(found.per_token.value)  # a token is a byte
    assert found.bits_per_byte.value == pytest.approx(math.log2(found.per_byte.value))
    assert found.per_word.value == pytest.approx(math.exp(found.nll / counted * len(ids) / found.words))


def test_one_window_is_llm_score(llm) -> None:
    text = TEXT[: LENGTH - 4]
    score = llm.score(text)[0]
    for stride in (3, LENGTH - 1):
        windowing = Windowing(window=LENGTH - 1, stride=stride)
        (found,) = evaluate_perplexity(llm, [Text(name="t", content=text)], windowing)
        assert found.nll == score.nll
        assert found.per_token.value == pytest.approx(score.perplexity)
        assert found.windows == 1
        assert found.per_token.stderr is None


def test_bos_stands_before_the_text_only_where_the_tokenizer_puts_it(compile_cache) -> None:
    core = ByteTokenizer()._core
    set_post_processor(core, 256, None)
    with_bos = byte_llm(tokenizer=Tokenizer(core, bos_id=256, eos_ids=[257]))
    text = Text(name="t", content="abcdefgh")
    spans, reached = text_spans(with_bos, text, Windowing(window=4, stride=2))
    assert [(s.token_ids, s.first) for s in spans] == [
        ((256, 97, 98, 99), 1), ((98, 99, 100, 101), 2), ((100, 101, 102, 103), 2), ((102, 103, 104), 2)
    ]  # fmt: skip
    assert reached == 8
    spans, _ = text_spans(with_bos, text, Windowing(window=4, stride=3, bos="every", limit=2))
    assert [(s.token_ids, s.first) for s in spans] == [((256, 97, 98, 99), 1), ((256, 100, 101, 102), 1)]
    spans, _ = text_spans(with_bos, text, Windowing(window=4, stride=4, bos="none"))
    assert [(s.token_ids, s.first) for s in spans] == [((97, 98, 99, 100), 1), ((101, 102, 103, 104), 1)]


def test_limit_counts_the_words_and_bytes_that_it_reaches_and_texts_add_up(llm) -> None:
    windowing = Windowing(window=16, stride=8, limit=3)
    texts = [Text(name="a", content=TEXT), Text(name="b", content=TEXT[::-1])]
    a, b, both = evaluate_perplexity(llm, texts, windowing)
    assert (a.windows, a.tokens, a.bytes, a.words) == (3, 32, 32, len(TEXT[:32].split()))
    assert both.nll == pytest.approx(a.nll + b.nll)
    assert (both.counted, both.bytes, both.words) == (
        a.counted + b.counted,
        a.bytes + b.bytes,
        a.words + b.words,
    )


def test_standard_errors_are_those_of_means_ratios_and_paired_differences() -> None:
    draw = np.random.default_rng(1)
    x, y = draw.normal(size=(2, 50))
    assert mean(x).stderr == pytest.approx(x.std(ddof=1) / math.sqrt(50))
    assert mean(x).minus(mean(x + y)).stderr == pytest.approx(y.std(ddof=1) / math.sqrt(50))
    assert ratio(3 * np.ones(4), [1, 2, 1, 2]).value == 2
    weights = draw.integers(1, 9, 50)
    left_out = [(x.sum() - x[i]) / (weights.sum() - weights[i]) for i in range(50)]
    jackknife = math.sqrt(49 / 50 * sum((v - np.mean(left_out)) ** 2 for v in left_out))
    assert ratio(x, weights).stderr == pytest.approx(jackknife, rel=0.05)


WRONG_WINDOWS = (
    {"window": 1},
    {"stride": 0},
    {"window": 8, "stride": 9},
    {"window": 8, "stride": 8, "bos": "every"},
    {"bos": "always"},
    {"limit": 0},
)


@pytest.mark.parametrize("wrong", WRONG_WINDOWS)
def test_windows_that_cannot_be_are_refused(wrong) -> None:
    with pytest.raises(ConfigError):
        Windowing(**wrong)


@pytest.mark.parametrize("nats", [400.0, 700.0, 5000.0])
def test_a_bad_model_has_figures_that_are_json(llm, monkeypatch: pytest.MonkeyPatch, nats: float) -> None:
    """e^400 is a number and its square is none."""

    def bad(llm: Any, spans: list[Any], title: str) -> list[Scored]:
        sizes = [len(span.token_ids) - span.first for span in spans]
        return [
            Scored((-nats - place,) * size, (9,) * size) for place, size in enumerate(sizes)
        ]  # no two windows are equally bad

    monkeypatch.setattr(perplexity, "score_spans", bad)
    (found,) = evaluate_perplexity(llm, [Text(name="t", content=TEXT)], Windowing(window=32, stride=32))
    results = ModelResults(model="bad", parameters_dtype="f", kv_cache_dtype="f", perplexity=(found,))
    (written,) = json.loads(json.dumps(Report(results=results).as_json(), allow_nan=False))["model"][
        "perplexity"
    ]
    json.dumps(figures.plain(found.per_token), allow_nan=False)
    assert written["per_token"] == figures.plain(found.per_token)
    assert (written["per_token"]["value"] is None) == (nats > 709)
    if nats == 400.0:
        relative = found.nll_per_token.stderr
        assert relative is not None
        assert written["per_token"]["stderr"] == pytest.approx(relative * found.per_token.value)
    if nats > 709:
        assert written["per_token"]["stderr"] is None
    assert Report(results=results).as_table()


def test_texts_that_cannot_be_measured_are_refused(llm, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len 64"):
        Windowing.fitting(llm, LENGTH)
    with pytest.raises(RequestError, match="1 tokens"):
        evaluate_perplexity(llm, [Text(name="t", content="a")], Windowing.fitting(llm))
    (tmp_path / "bad").write_bytes(b"ab\xff")
    (tmp_path / "empty").write_bytes(b" \n")
    for name, said in (("bad", "byte 2"), ("empty", "no text")):
        with pytest.raises(RequestError, match=said):
            read_text(str(tmp_path / name))
