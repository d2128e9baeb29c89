"""Attention spans under the engine: whatever the chunks, the batch and the pool, what is told of every token
is what the dense reference says, with the mask that the span's specification gives.

One comparison holds them all: any chunking = one shot, any batch = alone, preempted = not, all pages chosen =
everything, a window as long as the text = everything.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np
import pytest
from dense import check_told, dense_logprobs
from hypothesis import given, settings
from hypothesis import strategies as st
from span_masks import mask_of
from tiny import (
    GOLDEN,
    TINY,
    assert_idle,
    engine_over,
    first_layers,
    greedy,
    prompts,
    random_tensors,
    tiny_runner,
)

import pallas_kernels
from jaxinfer.config import PageSpan, StepShape, TopPages, TopPagesSpan, WindowSpan, invariant_ladder
from jaxinfer.core import ConfigError, RequestOutput, SamplingParams
from jaxinfer.llm import LLM
from jaxinfer.model.kv import page_bytes
from jaxinfer.runtime import JaxRunner, inputs
from pallas_kernels import CPU, Backend, Geometry

pytestmark = [
    pytest.mark.usefixtures("compile_cache"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

SIZE, LONGEST = 8, 96
SPANS: dict[str, Any] = {
    "everything": None,
    "window": WindowSpan(11),
    "sinks": WindowSpan(13, 5),
    "pages": PageSpan(SIZE, 2, 1, 1, seed=3),
    "chosen after the prompt": TopPagesSpan(TopPages(2)),
    "chosen in prompts": TopPagesSpan(TopPages(1, start=10), skip=1),
    "a window as long as the text": WindowSpan(LONGEST, 4),
    "all pages": PageSpan(SIZE, LONGEST // SIZE, 0, 0),
    "all pages chosen": TopPagesSpan(TopPages(LONGEST // SIZE, start=0)),
}
HIDING = ("window", "sinks", "pages", "chosen after the prompt", "chosen in prompts")
TENSORS = random_tensors(TINY)
XLA = Backend("xla")


def config_of(name: str) -> Any:
    return TINY if SPANS[name] is None else TINY.spanned(SPANS[name])


@functools.cache
def runner_of(name: str, backend: Backend = XLA) -> JaxRunner:
    cut = SIZE if isinstance(SPANS[name], PageSpan) else None
    tiles = pallas_kernels.query_tiles(backend, Geometry(8, 2, 16, SIZE, "float32", "float32"))
    ladder = tuple(StepShape(*sizes, tiles=tiles, cut=cut) for sizes in ((4, 4, 0), (36, 4, 4)))
    return tiny_runner(
        config_of(name), ladder=ladder, page_size=SIZE, num_pages=1 + 4 * LONGEST // SIZE,
        max_model_len=LONGEST, tensors=TENSORS, backend=backend,
    )  # fmt: skip


def engine(name: str, options: dict[str, Any] | None = None, *, runner: Any = None, **limits: Any) -> LLM:
    config = config_of(name)
    own = {"max_model_len": LONGEST, "window": config.window, "sinks": config.sinks}
    return engine_over(runner or runner_of(name), options, **{**own, **limits})


@functools.cache
def expected(name: str, tokens: tuple[int, ...], num_prompt: int) -> np.ndarray:
    """[T, V] logprobs of the dense reference under the mask of `sees`."""
    return dense_logprobs(TINY, TENSORS, list(tokens), mask_of(SPANS[name], SIZE, num_prompt))


def check(name: str, output: RequestOutput) -> None:
    check_told(output, functools.partial(expected, name), 1e-3, name)


def scored(max_tokens: int) -> SamplingParams:
    return greedy(max_tokens, logprobs=0, prompt_logprobs=0)


# ------------------------------------------------------------------------------------- against the reference


@pytest.mark.parametrize("name", SPANS)
def test_a_long_prompt_and_a_long_answer(name: str) -> None:
    """A prompt in chunks that end anywhere, beside a short one whose answer leaves its pages behind."""
    llm = engine(name, max_num_batched_tokens=21)
    outputs = llm.generate(prompts([61, 3]), [scored(9), scored(40)])
    for output in outputs:
        check(name, output)
    assert_idle(llm)


@pytest.mark.parametrize("name", HIDING)
@settings(max_examples=6)
@given(data=st.data())
def test_any_chunks_any_batch_any_pool(name: str, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.sampled_from([1, 7, 8, 9, 24, 33, 50]), min_size=1, max_size=4))
    answers = data.draw(st.lists(st.integers(1, 14), min_size=len(lengths), max_size=len(lengths)))
    least = -(-max(map(sum, zip(lengths, answers, strict=True))) // SIZE)
    llm = engine(
        name,
        {"async_scheduling": data.draw(st.booleans(), label="ahead")},
        max_num_batched_tokens=data.draw(st.integers(2, 32), label="budget"),
        max_num_seqs=data.draw(st.integers(1, 4), label="seqs"),
        num_pages=1 + data.draw(st.integers(least, least + 8), label="pages"),
    )
    params = [scored(count) if count % 2 else greedy(count, logprobs=0, n=2) for count in answers]
    for output in llm.generate(prompts(lengths), params):
        check(name, output)
    assert_idle(llm)


@pytest.mark.parametrize("name", HIDING)
def test_preempted_is_not_preempted(name: str) -> None:
    """Pages for one and a half: what has been generated is computed again, in chunks."""
    pages = {"window": 4, "sinks": 5}.get(name, 7)
    llm = engine(name, num_pages=1 + pages, max_num_batched_tokens=16)
    for output in llm.generate(prompts([6, 7], seed=4), [greedy(40, logprobs=0)] * 2):
        check(name, output)
    assert llm.stats()["preemptions"] > 0
    assert_idle(llm)


@pytest.mark.parametrize("name", ["pages", "chosen in prompts", "chosen after the prompt"])
def test_what_the_prefix_cache_holds_is_what_would_be_computed(name: str) -> None:
    """It stays on where K/V depend on the text alone, and a page continued in a copy has bounds of its
    own."""
    llm = engine(name)
    stem, found = prompts([45])[0], 0
    for keep, more in ((45, 0), (45, 5), (37, 9), (45, 0), (44, 7)):
        prompt = stem[:keep] + prompts([more], seed=keep)[0]
        (output,) = llm.generate(prompt, greedy(6, logprobs=0))
        check(name, output)
        found += output.metrics.cached_tokens
    assert (found == 0) == (name == "chosen after the prompt")
    assert_idle(llm)


@pytest.mark.parametrize("name", HIDING)
def test_the_spans_hide_something(name: str) -> None:
    """The comparisons above would be empty if every mask were the causal one."""
    tokens = tuple(prompts([70])[0])
    assert np.abs(expected(name, tokens, 40) - expected("everything", tokens, 40)).max() > 0.1


# ----------------------------------------------------------------------------------------- pages given back


@pytest.mark.parametrize(("name", "pages"), [("window", 3), ("sinks", 4)])
def test_a_long_answer_needs_no_more_pages_than_its_span(name: str, pages: int) -> None:
    """90 tokens are 12 pages; W - 1 keys and the token itself lie in 1 + ceil((W - 1) / Z), and the sinks in
    one."""
    llm, most = engine(name, num_pages=1 + pages), 0
    request = llm.prepare(prompts([5])[0], greedy(85, logprobs=0))
    llm.engine.add(request)
    told: list[int] = []
    while llm.engine.has_work:
        for event in llm.engine.step():
            told += event.token_ids
        most = max(most, llm.stats()["pages_live"])
        assert llm.engine.check() == []
    assert len(told) == 85
    assert most <= pages
    answer = expected(name, (*request.prompt_token_ids, *told), 5)
    assert all(answer[4 + i].max() - answer[4 + i, token] < 1e-3 for i, token in enumerate(told))


def test_bounds_are_counted_as_bytes_of_pages() -> None:
    """A layer that chooses keeps two keys of a page's dtype for its 2 * Z keys and values."""
    plain = page_bytes(TINY, SIZE, np.dtype("float32"))
    chosen = page_bytes(TINY.spanned(TopPagesSpan(TopPages(3))), SIZE, np.dtype("float32"))
    skipped = page_bytes(TINY.spanned(TopPagesSpan(TopPages(3), skip=1)), SIZE, np.dtype("float32"))
    assert (chosen - plain, skipped - plain) == (plain // SIZE, plain // SIZE // 2)
    assert runner_of("chosen after the prompt").stats()["kv_bytes"] == chosen * runner_of("window").num_pages


# -------------------------------------------------------------------------------------- other ways to run


@pytest.mark.parametrize("name", ["sinks", "pages", "chosen in prompts"])
def test_the_invariant_ladder_gives_the_same_bits(name: str) -> None:
    """Alone in one chunk, and together in chunks that end anywhere."""
    cut = SIZE if isinstance(SPANS[name], PageSpan) else None
    runner = tiny_runner(
        config_of(name), ladder=invariant_ladder(3, 48, cut=cut), page_size=SIZE, max_model_len=64,
        num_pages=65, tensors=TENSORS,
    )  # fmt: skip
    batch, asked = prompts([5, 41, 17]), scored(6)
    alone = [engine(name, runner=runner, max_model_len=64).generate(p, asked)[0] for p in batch]
    together = engine(name, runner=runner, max_model_len=64, max_num_batched_tokens=11).generate(batch, asked)
    for one, other in zip(together, alone, strict=True):
        assert one.outputs[0].logprobs == other.outputs[0].logprobs
        assert one.prompt_logprobs == other.prompt_logprobs
        check(name, one)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sinks", "pages", "chosen in prompts"])
def test_a_gpu_kernel_runs_on_compact_tables(name: str) -> None:
    runner = runner_of(name, Backend("pallas_triton", CPU, interpret=True))
    llm = engine(name, runner=runner, max_num_batched_tokens=21)
    for output in llm.generate(prompts([37, 3]), [scored(6), scored(20)]):
        check(name, output)


def test_a_checkpoint_with_windows_is_refused_with_its_reason(tmp_path: Any) -> None:
    keys = {
        "model_type": "mistral", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 8,
        "max_position_embeddings": 32, "architectures": ["MistralForCausalLM"],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(keys))
    with pytest.raises(ConfigError, match="attention_span: the layers of this model have spans of their own"):
        LLM(f"random:{tmp_path / 'config.json'}", attention_span="window:4", progress=False)


def test_the_engine_takes_a_span_by_its_name(tmp_path: Any) -> None:
    """Through EngineConfig: a window as long as the text changes nothing, the others do; and the books of
    their pages."""
    options: dict[str, Any] = {
        "max_model_len": 96, "max_num_seqs": 1, "max_num_batched_tokens": 16, "num_pages": 40, "page_size": 8,
        "warmup": "lazy", "progress": False,
    }  # fmt: skip
    answers, model = {}, first_layers(GOLDEN / "stories260k", tmp_path / "model", 2)
    for span in (None, "window:96", "window:6", "bigbird:16,global:0,random:0"):
        llm = LLM(str(model), attention_span=span, **options)
        assert llm.limits.window == {"window:96": 96, "window:6": 6}.get(span or "")
        (output,) = llm.generate(prompts([41], vocab_size=512), greedy(8, logprobs=0))[0].outputs
        told = zip(output.token_ids, output.logprobs or (), strict=True)
        answers[span] = np.array([each[token].logprob for token, each in told])
        llm.close()
    np.testing.assert_allclose(answers["window:96"], answers[None], atol=1e-4)
    spans = list(answers)
    for one, other in ((0, 2), (0, 3), (2, 3)):
        assert np.abs(answers[spans[one]] - answers[spans[other]]).max() > 0.02


def test_no_part_of_the_buffer_is_added_without_a_span() -> None:
    shape = StepShape(36, 4, 4)
    assert "text_positions" not in inputs.layout(shape, 12, 4).parts
    assert shape.rows == 8
