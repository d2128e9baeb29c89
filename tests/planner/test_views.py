"""What the planner counts of keys, against which keys each query sees."""

from __future__ import annotations

import dataclasses

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import TINY

from jaxinfer.config import LayerConfig, ModelConfig, PageSpan, TopPages, TopPagesSpan, attention_span
from jaxinfer.model import kv
from jaxinfer.planner import KeyView, ModelCosts, plan_memory

PAGED = dataclasses.replace(TINY, layers=(LayerConfig(2), LayerConfig(4)))
SPANS = [
    "window:5",
    "window:7,sinks:3",
    "longformer:6,global:2",
    "bigbird:8,global:1,random:1",
    "topk-pages:2",
]
slices = st.tuples(st.integers(0, 90), st.integers(1, 40))


def spanned(text: str, page_size: int = 4) -> ModelConfig:
    return PAGED.spanned(attention_span(text, page_size))


@given(slices, st.integers(1, 4), st.none() | st.integers(0, 60))
def test_queries_that_choose_read_their_own_page_and_the_chosen(
    piece: tuple[int, int], count: int, start: int | None
) -> None:
    """A slice of several tokens is a prompt's, one token alone comes after it."""
    position, length = piece
    prompt = position + length if length > 1 else position
    top = TopPages(count, start)
    view = KeyView(top=top, page_size=4)
    read = seen = looked_at = 0
    whole: set[int] = set()
    for query in range(position, position + length):
        if top.chooses(query, prompt):
            keys = 4 * len(top.chosen([0.0] * (query // 4))) + query % 4 + 1
            read, seen, looked_at = read + keys, seen + keys, looked_at + query // 4
        else:
            whole |= set(range(query + 1))
            seen += query + 1
    assert view.keys_of(position, length) == (read + len(whole), seen)
    assert view.bounds_of(position, length) == looked_at


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8", "fp8_e4m3"])
def test_pages_hold_the_bounds_by_which_queries_choose(kv_dtype: str) -> None:
    config = PAGED.spanned(TopPagesSpan(TopPages(2), skip=1))
    dtype = jax.numpy.dtype({"fp8_e4m3": "float8_e4m3fn"}.get(kv_dtype, kv_dtype))
    assert ModelCosts(config, kv_dtype=kv_dtype, page_size=4).page_bytes == kv.page_bytes(config, 4, dtype)


@pytest.mark.parametrize("text", [None, *SPANS])
@given(positions=st.lists(st.integers(0, 200), min_size=1, max_size=5))
def test_rates_of_a_query_add_up_to_its_attention(text: str | None, positions: list[int]) -> None:
    """Exactly where keys are counted one by one; less than a page and its bounds over where pages are."""
    config = PAGED if text is None else spanned(text)
    costs = ModelCosts(config, page_size=4)
    exact = costs.attention([(position, 1) for position in positions])
    rated = [0.0, 0.0]
    for most, *rate in costs.key_rates:
        for position in positions:
            keys = position + 1 if most is None else min(position + 1, most)
            rated = [sum_ + each * keys for sum_, each in zip(rated, rate, strict=True)]
    if text is None or text.startswith(("window", "longformer")):
        assert tuple(rated) == exact
        return
    page = len(positions) * costs.attention([(3, 1)])[0]
    assert exact[0] <= rated[0] <= exact[0] + 1.5 * page


@pytest.mark.parametrize("text", SPANS)
def test_a_span_reads_less_and_computes_less(text: str) -> None:
    full, costs = ModelCosts(PAGED, page_size=4), ModelCosts(spanned(text), page_size=4)
    for span in ((200, 1), (150, 50)):
        some, everything = costs.attention([span]), full.attention([span])
        if text.startswith("topk-pages") and span[1] > 1:
            assert some == everything  # prompts see all
        else:
            assert some[1] < everything[1]
            assert span[1] > 1 or some[0] < everything[0]


def test_sinks_are_kept_beside_the_window() -> None:
    with_sinks, without = (
        plan_memory(
            ModelCosts(spanned(text), page_size=4), 10**9, max_model_len=512, max_num_batched_tokens=4
        ).pages_per_sequence
        for text in ("window:8,sinks:8", "window:8")
    )
    assert with_sinks == without + 2


def test_a_view_of_pages_has_no_window() -> None:
    span = PageSpan(4, 2, 1, 1)
    assert KeyView.of(LayerConfig(2), span, 4) == KeyView(span=span, page_size=4)
    assert KeyView.of(LayerConfig(2, 9), None, 4) == KeyView(window=9)
