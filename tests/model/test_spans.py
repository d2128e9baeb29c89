"""Attention spans: their specification, their text, and the dense pass that trains under them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense import dense_logits
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from span_masks import mask_of
from tiny import TINY, random_tensors, tiny_config, tiny_params

from jaxinfer.config import (
    EngineConfig,
    PageSpan,
    TopPages,
    TopPagesSpan,
    WindowSpan,
    attention_span,
    shape_ladder,
)
from jaxinfer.core import ConfigError
from jaxinfer.planner import keys_of

windows = st.builds(WindowSpan, st.integers(1, 40), st.integers(0, 20))
page_spans = st.builds(
    PageSpan, st.sampled_from([1, 4, 8]), st.integers(1, 5), st.integers(0, 4), st.integers(0, 4),
    st.integers(0, 3),
)  # fmt: skip

# ---------------------------------------------------------------------------------------- specification


@given(st.one_of(windows, page_spans), st.integers(0, 100))
def test_a_query_sees_itself_and_nothing_later(span: Any, query: int) -> None:
    assert span.sees(query, query)
    assert not any(span.sees(query, key) for key in range(query + 1, query + 30))


@given(windows, st.integers(0, 100))
def test_a_window_counts_tokens(span: WindowSpan, query: int) -> None:
    seen = {key for key in range(query + 1) if span.sees(query, key)}
    assert seen == {*range(min(span.sinks, query + 1)), *range(max(0, query - span.window + 1), query + 1)}


@given(page_spans, st.integers(0, 60))
def test_pages_are_near_global_and_as_many_random_ones_as_there_are(span: PageSpan, page: int) -> None:
    pages = span.pages(page)
    assert pages == tuple(sorted(set(pages)))
    assert pages[-1] == page
    fixed = {p for p in range(page + 1) if p > page - span.near or p < span.global_pages}
    assert fixed <= set(pages)
    assert len(pages) == min(page + 1, len(fixed) + span.random_pages)
    assert len(pages) <= span.most_pages
    assert dataclasses.replace(span).pages(page) == pages, "drawn again it is the same"


def test_the_draws_are_these_on_every_machine_and_differ_by_page_and_seed() -> None:
    span = PageSpan(16, 2, 1, 2)
    assert span.pages(11) == (0, 2, 3, 10, 11)
    assert len({span.pages(page)[1:3] for page in range(40, 60)}) > 10
    assert span.pages(40) != dataclasses.replace(span, seed=1).pages(40)


@given(page_spans, st.integers(0, 60), st.integers(1, 60))
def test_keys_are_counted_as_they_are_seen(span: PageSpan, start: int, count: int) -> None:
    _, seen = span.keys_of(start, count)
    assert seen == sum(span.sees(q, k) for q in range(start, start + count) for k in range(start + count))


@given(st.lists(st.floats(-3, 3), max_size=20), st.integers(1, 8))
def test_the_highest_bounds_are_chosen_and_of_equal_ones_the_first(bounds: list[float], count: int) -> None:
    chosen = TopPages(count).chosen(bounds)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == min(count, len(bounds))
    left = [page for page in range(len(bounds)) if page not in chosen]
    assert all((bounds[a], -a) > (bounds[b], -b) for a in chosen for b in left)


# ------------------------------------------------------------------------------------------------- text


@pytest.mark.parametrize(
    ("text", "span"),
    [
        ("window:9", WindowSpan(9)),
        ("window:9,sinks:4", WindowSpan(9, 4)),
        ("longformer:9,global:2", WindowSpan(9, 16)),
        ("bigbird:24,global:1,random:2", PageSpan(8, 3, 1, 2)),
        ("bigbird:24,random:0,seed:7,global:0", PageSpan(8, 3, 0, 0, 7)),
        ("topk-pages:3", TopPagesSpan(TopPages(3))),
        ("topk-pages:3,from:0,skip:1", TopPagesSpan(TopPages(3, 0), 1)),
    ],
)
def test_forms(text: str, span: Any) -> None:
    assert attention_span(text, 8) == span == EngineConfig(attention_span=text, page_size=8).span()


@pytest.mark.parametrize(
    "text",
    [
        "", "window", "window:0", "window:1.5", "window:-1", "window:9,sinks", "window:9,global:1", "sinks:4",
        "window:9,sinks:1,sinks:1", "longformer:9", "longformer:9,global:0", "bigbird:24,global:1",
        "bigbird:20,global:1,random:1", "topk-pages:0", "topk-pages:3,from:-1", "window:99999999999", 5,
    ],
)  # fmt: skip
def test_other_texts_are_refused(text: Any) -> None:
    with pytest.raises(ConfigError, match="attention_span"):
        EngineConfig(attention_span=text, page_size=8)


def test_a_model_with_spans_of_its_own_takes_no_other() -> None:
    mixed = dataclasses.replace(TINY, layers=(TINY.layers[0], dataclasses.replace(TINY.layers[0], window=5)))
    for model in (
        mixed,
        tiny_config(window=9),
        TINY.spanned(WindowSpan(4)),
        TINY.spanned(PageSpan(8, 1, 0, 0)),
    ):
        for span in (WindowSpan(8), PageSpan(8, 1, 1, 1), TopPagesSpan(TopPages(2))):
            if any(layer.window for layer in model.layers) or model.page_span:
                with pytest.raises(ConfigError, match="spans of their own"):
                    model.spanned(span)
    with pytest.raises(ConfigError, match="none of the 2 layers"):
        TINY.spanned(TopPagesSpan(TopPages(2), skip=2))


# ------------------------------------------------------------------------------------------ the dense pass

TEXTS = np.random.default_rng(5).integers(0, TINY.vocab_size, (2, 45))


def dense_pass(config: Any) -> np.ndarray:
    graph, state = tiny_params(config, random_tensors(TINY))
    model = nnx.merge(graph, state)
    hidden, _ = model.dense(jnp.asarray(TEXTS))
    return np.asarray(model.logits(hidden.reshape(-1, TINY.hidden_size))).reshape(*TEXTS.shape, -1)


@pytest.mark.parametrize(
    "span", [WindowSpan(7), WindowSpan(9, 3), WindowSpan(12, 16), PageSpan(8, 2, 1, 1), PageSpan(4, 1, 0, 3)]
)
def test_the_dense_pass_is_the_reference_with_the_mask_of_sees(span: Any) -> None:
    logits = dense_pass(TINY.spanned(span))
    for text, found in zip(TEXTS.tolist(), logits, strict=True):
        expected = dense_logits(TINY, random_tensors(TINY), text, mask_of(span, 8, len(text)))
        np.testing.assert_allclose(found, expected, atol=2e-4)
    full = dense_pass(TINY)
    assert np.abs(full - logits).max() > 0.1, "the span hides something"
    np.testing.assert_allclose(full[:, :4], logits[:, :4], atol=2e-4)


@pytest.mark.parametrize(
    "span", [WindowSpan(45), WindowSpan(44, 1), PageSpan(8, 6, 0, 0), PageSpan(8, 1, 1, 9)]
)
def test_a_span_as_long_as_the_text_hides_nothing(span: Any) -> None:
    np.testing.assert_allclose(dense_pass(TINY.spanned(span)), dense_pass(TINY), atol=2e-4)


def test_a_span_can_be_trained() -> None:
    """Keys that nobody may see get no gradient: here those of the first page, for the loss of the last."""
    config = TINY.spanned(PageSpan(8, 2, 0, 0))
    graph, state = tiny_params(config, random_tensors(TINY))
    model = nnx.merge(graph, state)
    embedded = model.embedding(jnp.asarray(TEXTS[0]))

    def last(offset: jax.Array) -> jax.Array:
        again = nnx.merge(graph, state)
        again.embedding = lambda ids: embedded + offset  # type: ignore[assignment]
        return again.dense(jnp.asarray(TEXTS[:1]))[0][0, -1].sum()

    gradient = np.abs(np.asarray(jax.grad(last)(jnp.zeros_like(embedded)))).sum(axis=1)
    reach = 5 * 8 - 2 * 8  # the last token's page is 5; two layers of one page back each
    assert not gradient[:reach].any()
    assert gradient[reach:].all()


def test_choosing_among_prompts_has_no_dense_pass_and_after_them_sees_all() -> None:
    with pytest.raises(ConfigError, match="no dense pass"):
        dense_pass(TINY.spanned(TopPagesSpan(TopPages(2, 0))))
    np.testing.assert_array_equal(dense_pass(TINY.spanned(TopPagesSpan(TopPages(2)))), dense_pass(TINY))


# ---------------------------------------------------------------------------------------------- buckets


@given(st.integers(1, 40), st.integers(1, 200), st.sampled_from([1, 4, 16, 64]), st.data())
def test_a_cut_bucket_has_rows_for_every_page_of_every_chunk(
    seqs: int, budget: int, size: int, data: st.DataObject
) -> None:
    for shape in shape_ladder(seqs, budget, cut=size):
        plain = dataclasses.replace(shape, cut=None)
        assert plain in shape_ladder(seqs, budget), "the same buckets otherwise"
        left, rows = shape.chunk_tokens, 0
        for _ in range(shape.chunk_rows):
            count = data.draw(st.integers(0, left))
            start = data.draw(st.integers(0, 3 * size))
            rows += len({position // size for position in range(start, start + count)})
            left -= count
        assert rows <= shape.table_rows


# ------------------------------------------------------------------------------------------------ costs


@given(windows, st.integers(0, 60), st.integers(1, 60))
def test_keys_of_sinks_are_counted_as_they_are_seen(span: WindowSpan, start: int, count: int) -> None:
    queries = range(start, start + count)
    seen = [{key for key in range(query + 1) if span.sees(query, key)} for query in queries]
    assert keys_of(start, count, span.window, span.sinks) == (len(set().union(*seen)), sum(map(len, seen)))
