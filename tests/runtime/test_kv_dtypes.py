"""Pools of narrower types: how much they take, how far they move the model, and that the engine's equalities
hold over them as they do over float32."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from tiny import GOLDEN, TINY, assert_idle, engine_over, greedy, prompts, tiny_runner, token_ids

from jaxinfer import LLM
from jaxinfer.config import StepShape
from jaxinfer.core import ConfigError, RequestOutput
from jaxinfer.model.kv import create_kv, page_bytes
from jaxinfer.runtime import JaxRunner
from pallas_kernels import QuantizedPages

pytestmark = pytest.mark.usefixtures("compile_cache")

NARROW = ("bfloat16", "int8", "float8_e4m3fn")
LADDER = (StepShape(4, 4, 0), StepShape(24, 8, 2), StepShape(72, 8, 8))
LENGTHS = [5, 40, 17, 33]


@functools.cache
def runner_of(kv_dtype: str) -> JaxRunner:
    return tiny_runner(ladder=LADDER, kv_dtype=kv_dtype, num_pages=129)


def scored(llm: LLM, max_tokens: int = 6) -> list[RequestOutput]:
    return llm.generate(prompts(LENGTHS), greedy(max_tokens, prompt_logprobs=0, logprobs=0))


def logprobs(outputs: list[RequestOutput]) -> np.ndarray:
    """Of every prompt token but the first."""
    found = []
    for output in outputs:
        assert output.prompt_logprobs is not None
        for token, entry in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True):
            if entry is not None:
                found.append(entry[token].logprob)
    return np.asarray(found)


@pytest.mark.parametrize(("kv_dtype", "bound"), [("bfloat16", 0.05), ("int8", 0.1), ("float8_e4m3fn", 0.5)])
def test_how_far_a_narrow_pool_moves_the_model(kv_dtype: str, bound: float) -> None:
    """Logits have a standard deviation of 3 here: the bound is on the mean of the logprobs' errors."""
    wide = logprobs(scored(engine_over(runner_of("float32"))))
    narrow = logprobs(scored(engine_over(runner_of(kv_dtype))))
    error = np.abs(narrow - wide)
    assert 0 < error.mean() < bound, f"{kv_dtype}: mean error {error.mean()}, largest {error.max()}"


@pytest.mark.parametrize("kv_dtype", NARROW)
def test_chunks_batches_and_the_cache_change_nothing(kv_dtype: str) -> None:
    """A token's K/V is rounded by itself: what runs beside it, in which chunks, and whether it is found in
    the cache or computed, moves it only where float32 rounding tips a narrow one over."""
    runner = runner_of(kv_dtype)
    whole = scored(engine_over(runner))
    small = scored(engine_over(runner, max_num_batched_tokens=16, max_num_seqs=2))
    np.testing.assert_allclose(logprobs(small), logprobs(whole), atol=0.02)
    llm = engine_over(runner)
    cold, warm = (llm.generate(prompts([64]), greedy(6))[0] for _ in range(2))
    assert warm.metrics.cached_tokens > 0
    assert token_ids([warm]) == token_ids([cold])
    assert_idle(llm)


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
def test_shared_pages_are_copied_with_all_that_belongs_to_them(kv_dtype: str) -> None:
    """Three continuations share a half-full page and write into it: each as if it were alone."""
    llm = engine_over(runner_of(kv_dtype))
    sampling = greedy(6, n=3)
    [three] = llm.generate(prompts([13]), sampling)
    [one] = llm.generate(prompts([13]), greedy(6))
    assert {part.token_ids for part in three.outputs} == {one.outputs[0].token_ids}
    assert_idle(llm)


def test_preempted_requests_are_computed_again() -> None:
    runner = runner_of("int8")
    tight = engine_over(runner, num_pages=14)
    assert token_ids(scored(tight, 20)) == token_ids(scored(engine_over(runner), 20))
    assert tight.stats()["preemptions"] > 0


def test_bytes_of_a_page() -> None:
    """2 layers, 2 KV heads, width 16, K and V, pages of 8; int8 has a float32 scale a token and head."""
    vectors = 2 * 2 * 2 * 8
    for kv_dtype, size in (("float32", 64), ("bfloat16", 32), ("float8_e4m3fn", 16), ("int8", 20)):
        assert page_bytes(TINY, 8, kv_dtype) == vectors * size
        assert runner_of(kv_dtype).stats()["kv_bytes"] == 129 * vectors * size
    pool = jax.eval_shape(lambda: create_kv(TINY, 3, 8, "int8"))
    assert all(isinstance(pages, QuantizedPages) for pages in (*pool.k, *pool.v))
    assert (pool.num_pages, pool.page_size) == (3, 8)


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8_e4m3", "float16"])
def test_through_the_front_door(kv_cache_dtype: str) -> None:
    options = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 32, "num_pages": 20}
    llm = LLM(str(GOLDEN / "stories260k"), kv_cache_dtype=kv_cache_dtype, progress=False, **options)
    [output] = llm.generate([[1, 2, 3, 4]], greedy(4))
    assert len(output.outputs[0].token_ids) == 4
    llm.close()


def test_a_type_that_no_pool_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype 'int4' is not one of auto, float32, bfloat16"):
        LLM("random:smollm2-135m", kv_cache_dtype="int4")
