"""Layers that read the K/V of others under the engine: whatever the chunks, the batch, the pool, the span and
the kernels, what is told of every token is what the plain forward pass in float64 says."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from in_place import check_updated_in_place
from tiny import GOLDEN, assert_idle, engine_over, greedy, prompts, random_tensors, tiny_runner, token_ids

import pallas_kernels
from jaxinfer import LLM
from jaxinfer.cli import main
from jaxinfer.config import PageSpan, StepShape, TopPages, TopPagesSpan, WindowSpan
from jaxinfer.convert import convert
from jaxinfer.core import ConfigError, RequestOutput, SamplingParams
from jaxinfer.heads import SharePlan
from jaxinfer.model.kv import create_kv
from jaxinfer.planner import ModelCosts
from jaxinfer.runtime import JaxRunner
from jaxinfer.runtime.programs import COPY, Programs
from pallas_kernels import CPU, Backend, Geometry

sys.path.append(str(Path(__file__).parent / "model"))
from dense import check_told, dense_logprobs
from span_masks import mask_of
from test_shared_kv import sharing

pytestmark = [
    pytest.mark.usefixtures("compile_cache"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

SIZE, LONGEST = 8, 96
MODEL = sharing(None, 0, 0)
TENSORS = random_tensors(MODEL)
XLA = Backend("xla")
SPANS: dict[str, Any] = {
    "everything": None,
    "sinks": WindowSpan(13, 5),
    "pages": PageSpan(SIZE, 2, 1, 1, seed=3),
    "chosen in prompts": TopPagesSpan(TopPages(1, start=10)),
}


@functools.cache
def runner_of(name: str = "everything", kv_dtype: str = "float32", backend: Backend = XLA) -> JaxRunner:
    span = SPANS[name]
    config = MODEL if span is None else MODEL.spanned(span)
    geometry = Geometry(8, 2, 16, SIZE, "float32", kv_dtype)
    tiles, cut = pallas_kernels.query_tiles(backend, geometry), SIZE if isinstance(span, PageSpan) else None
    ladder = tuple(StepShape(*sizes, tiles=tiles, cut=cut) for sizes in ((4, 4, 0), (36, 4, 4)))
    return tiny_runner(
        config, ladder=ladder, page_size=SIZE, num_pages=1 + 4 * LONGEST // SIZE, max_model_len=LONGEST,
        tensors=TENSORS, backend=backend, kv_dtype=kv_dtype,
    )  # fmt: skip


def engine(runner: JaxRunner, options: dict[str, Any] | None = None, **limits: Any) -> LLM:
    own = {"max_model_len": LONGEST, "window": runner.config.window, "sinks": runner.config.sinks}
    return engine_over(runner, options, **{**own, **limits})


@functools.cache
def expected(name: str, tokens: tuple[int, ...], num_prompt: int) -> np.ndarray:
    mask = None if SPANS[name] is None else mask_of(SPANS[name], SIZE, num_prompt)
    return dense_logprobs(MODEL, TENSORS, list(tokens), mask)


def check(output: RequestOutput, name: str = "everything") -> None:
    assert len(output.outputs) == 1
    check_told(output, functools.partial(expected, name), 1e-4, name)


def scored(max_tokens: int) -> SamplingParams:
    return greedy(max_tokens, logprobs=0, prompt_logprobs=0)


@pytest.mark.parametrize("name", SPANS)
def test_a_long_prompt_and_a_long_answer(name: str) -> None:
    llm = engine(runner_of(name))
    (output,) = llm.generate(prompts([53], 1), scored(30))
    check(output, name)
    assert_idle(llm)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_chunks_any_batch_any_pool(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=6), label="prompts")
    most = data.draw(st.sampled_from([1, 5, 20]), label="answer")
    least = 1 + -(-(max(lengths) + most) // SIZE)
    llm = engine(
        runner_of(),
        {"async_scheduling": data.draw(st.booleans()), "enable_prefix_caching": data.draw(st.booleans())},
        max_num_batched_tokens=data.draw(st.integers(2, 32), label="budget"),
        max_num_seqs=data.draw(st.integers(1, 4), label="max_num_seqs"),
        num_pages=data.draw(st.integers(least, least + 12), label="num_pages"),
    )
    for output in llm.generate(prompts(lengths, 2), scored(most)):
        check(output)
    assert_idle(llm)


@pytest.mark.parametrize("ahead", [False, True])
def test_preempted_is_not_preempted(ahead: bool) -> None:
    llm = engine(runner_of(), {"async_scheduling": ahead, "enable_prefix_caching": False}, num_pages=8)
    for output in llm.generate(prompts([9, 10], 3), scored(30)):
        check(output)
    assert llm.stats()["preemptions"] > 0


def test_what_the_prefix_cache_holds_is_what_would_be_computed() -> None:
    """Whole pages, and pages that go on in a copy."""
    llm = engine(runner_of())
    (first,) = prompts([50], 4)
    for prompt in (first, first, first[:45] + prompts([8], 5)[0]):
        (output,) = llm.generate([prompt], greedy(6, logprobs=0))
        check(output)
    assert output.metrics.cached_tokens >= 40
    assert_idle(llm)


@pytest.mark.parametrize(("kv_dtype", "bound"), [("int8", 0.15), ("float8_e4m3fn", 0.6)])
def test_narrow_pages_are_shared_alike(kv_dtype: str, bound: float) -> None:
    llm = engine(runner_of(kv_dtype=kv_dtype))
    (output,) = llm.generate(prompts([40], 6), scored(1))
    prompt, told = output.prompt_token_ids, output.prompt_logprobs
    assert told is not None
    answer = expected("everything", tuple(prompt), len(prompt))
    errors = [
        abs(told[at][prompt[at]].logprob - answer[at - 1, prompt[at]])  # type: ignore[index]
        for at in range(1, len(prompt))
    ]
    assert 0 < np.mean(errors) < bound
    cold, warm = (llm.generate(prompts([64], 7), greedy(6))[0] for _ in range(2))
    assert warm.metrics.cached_tokens > 0
    assert token_ids([warm]) == token_ids([cold])


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_a_gpu_kernel_reads_the_pages_of_another_layer(kv_dtype: str) -> None:
    """In JAX's interpreter."""
    triton = runner_of(kv_dtype=kv_dtype, backend=Backend("pallas_triton", CPU, interpret=True))
    ids = [
        token_ids(engine(runner).generate(prompts([20, 5], 8), greedy(4)))
        for runner in (triton, runner_of(kv_dtype=kv_dtype))
    ]
    assert ids[0] == ids[1]
    if kv_dtype == "float32":
        check(engine(triton).generate(prompts([20], 8), scored(3))[0])


def test_pages_are_updated_in_place() -> None:
    """With 20533 pages, of which a copy would show in what a step needs beside its arrays."""
    kv = jax.eval_shape(lambda: create_kv(MODEL, 20533, SIZE, np.dtype("float32")))
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kv))
    runner = runner_of()
    programs = Programs(
        MODEL, runner._graph, runner._state, kv, runner.ladder, table_width=12, platform="cpu",
        most_changes=600,
    )  # fmt: skip
    check_updated_in_place(programs, (*runner.ladder, COPY), size)


# -------------------------------------------------------------------------------------- from end to end


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared") / "model"
    sharing_plan = SharePlan(share=2, method="mean")
    return convert(GOLDEN / "stories260k", folder, to="safetensors", sharing=sharing_plan, progress=False)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8_e4m3"])
def test_it_is_served_at_what_it_is_planned(shared: Path, kv_cache_dtype: Any) -> None:
    """Pages of 3 of 5 layers: of the pool's arrays, of what the planner says, and of /metrics."""
    sizes = []
    for model in (GOLDEN / "stories260k", shared):
        options: dict[str, Any] = {"kv_cache_dtype": kv_cache_dtype, "num_pages": 40, "page_size": 8}
        with LLM(str(model), max_model_len=64, max_num_seqs=2, progress=False, **options) as llm:
            stats = llm.stats()
            held = sum(x.nbytes for x in jax.tree.leaves(llm.engine.runner.kv))  # type: ignore[attr-defined]
            kind = "float32" if kv_cache_dtype == "auto" else kv_cache_dtype
            costs = ModelCosts(llm.model_config, dtype="float32", kv_dtype=kind, page_size=8)
            assert stats["kv_bytes"] == held == 40 * costs.page_bytes
            assert stats["param_bytes"] == costs.weight_bytes
            sizes.append(held)
            assert len(llm.generate(["Once upon"], greedy(4))[0].outputs[0].token_ids) == 4
    assert sizes[1] == 0.6 * sizes[0]


def test_a_span_that_parts_them_is_refused(shared: Path) -> None:
    with pytest.raises(ConfigError, match="layer 1 would choose among the pages of layer 0"):
        LLM(str(shared), attention_span="topk-pages:2,skip:1", progress=False)


def test_convert_evaluate_uptrain_serve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """K and V of owners alone learn, towards the original; the result is as small as before, and better."""
    source, text = GOLDEN / "stories260k", tmp_path / "text.txt"
    text.write_text("Once upon a time there was a little girl who had a red ball. " * 40, encoding="utf-8")
    converted, trained = tmp_path / "converted", tmp_path / "trained"
    assert main(["convert", str(source), str(converted), "--share-kv", "2"]) == 0

    def nats(model: Path) -> float:
        capsys.readouterr()
        words = ["--perplexity", str(text), "--window", "64", "--stride", "64", "--limit", "4", "--json"]
        assert main(["lab", "evaluate", str(model), *words]) == 0
        return json.loads(capsys.readouterr().out)["model"]["perplexity"][0]["nll_per_token"]["value"]

    before = nats(converted)
    words = [
        "lab", "uptrain", str(converted), str(trained), "--data", str(text), "--steps", "6", "--batch", "2",
        "--sequence-length", "48", "--train", "kv", "--learning-rate", "3e-3", "--distill", str(source),
        "--save-every", "0",
    ]  # fmt: skip
    assert main(words) == 0
    report = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert report["trained_parameters"] == 3 * 2 * 4 * 8 * 64  # of three owners, 4 KV heads of width 8
    assert nats(trained) < before
    keys = [json.loads((folder / "config.json").read_text())["kv_from"] for folder in (converted, trained)]
    assert keys == [[None, 0, None, 2, None]] * 2
    assert (
        main(["generate", str(trained), "Once upon a time", "--max-tokens", "4", "--temperature", "0"]) == 0
    )
    assert capsys.readouterr().out.strip()
