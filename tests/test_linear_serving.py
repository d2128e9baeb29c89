"""Models with linear attention served: the equalities of the engine, on a tiny model in float32.

incremental = whole · any chunking, batch, order, pool = alone · what failed and ran again = what did not.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from in_place import check_updated_in_place
from tiny import assert_idle, engine_over, greedy, prompts, tiny_build, tiny_params, tiny_runner

from jaxinfer.config import StepShape
from jaxinfer.core import RequestOutput, SamplingParams
from jaxinfer.llm import LLM
from jaxinfer.model.kv import create_kv
from jaxinfer.runtime import JaxRunner
from jaxinfer.runtime.programs import COPY, Programs

sys.path.append(str(Path(__file__).parent / "model"))
from test_linear_layers import MIXED, MODELS

pytestmark = pytest.mark.usefixtures("compile_cache")

LADDER = (StepShape(4, 4, 0), StepShape(36, 4, 4))
MODEL = MODELS["one of two layers"]


@functools.cache
def runner_of(name: str = "one of two layers") -> JaxRunner:
    """Its places for states hold NaN: nobody may begin from what lies there."""
    runner = tiny_runner(MODELS[name], ladder=LADDER, num_pages=129, max_model_len=128)
    assert runner.kv is not None
    runner.kv = runner.kv._replace(states=jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), runner.kv.states))
    return runner


def sampling(kind: str, seed: int, max_tokens: int) -> SamplingParams:
    if kind == "greedy":
        return greedy(max_tokens, logprobs=1)
    if kind == "scored":
        return greedy(max_tokens, prompt_logprobs=0)
    return SamplingParams(seed=seed, max_tokens=max_tokens, ignore_eos=True, n=3 if kind == "three" else 1)


Asked = tuple[int, int, str, int]
"""(length of the prompt, seed of its ids, kind, max_tokens)"""


@functools.cache
def alone(asked: Asked) -> RequestOutput:
    length, seed, kind, most = asked
    llm = engine_over(runner_of(), {"async_scheduling": False})
    return llm.generate(prompts([length], seed)[0], sampling(kind, seed, most))[0]


def check(outputs: list[RequestOutput], requests: list[Asked]) -> None:
    for output, asked in zip(outputs, requests, strict=True):
        expected = alone(asked)
        assert [part.token_ids for part in output.outputs] == [part.token_ids for part in expected.outputs], (
            asked
        )
        assert [part.finish_reason for part in output.outputs] == ["length"] * len(output.outputs)
        for here, there in zip(output.prompt_logprobs or (), expected.prompt_logprobs or (), strict=True):
            for token in here or {}:
                assert abs(here[token].logprob - there[token].logprob) < 1e-3  # type: ignore[index]


def run(llm: LLM, requests: list[Asked]) -> list[RequestOutput]:
    batch = [prompts([length], seed)[0] for length, seed, _, _ in requests]
    return llm.generate(batch, [sampling(kind, seed, most) for _, seed, kind, most in requests])


@pytest.mark.parametrize("name", MODELS)
def test_a_text_is_what_a_whole_pass_over_it_says(name: str) -> None:
    """Token by token and scored in chunks of 32, against `Llama.dense`, whose equality with the definition is
    tested with the model."""
    config = MODELS[name]
    runner = runner_of(name)
    window = {"window": config.window} if config.window else {}
    llm = engine_over(runner, **window)
    prompt = prompts([45], 1)[0]
    (output,) = llm.generate(prompt, greedy(20, prompt_logprobs=0))
    text = prompt + list(output.outputs[0].token_ids)
    model = nnx.merge(*tiny_params(config, build=tiny_build()))
    hidden, _ = jax.jit(model.dense)(jnp.asarray([text]))
    logprobs = np.asarray(jax.nn.log_softmax(model.logits(hidden[0])))
    assert logprobs.argmax(axis=1)[44:-1].tolist() == text[45:]
    assert output.prompt_logprobs is not None
    for position in range(1, 45):
        scored = output.prompt_logprobs[position]
        assert scored is not None
        assert scored[text[position]].logprob == pytest.approx(
            logprobs[position - 1, text[position]], abs=2e-3
        )


asked = st.tuples(
    st.integers(1, 70), st.integers(0, 3), st.sampled_from(["greedy", "greedy", "plain", "three", "scored"]),
    st.sampled_from([1, 4, 9]),
)  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_load_under_any_limits_is_alone(data: st.DataObject) -> None:
    """Batches, chunks from one token on, pools that preempt; more requests than places."""
    requests = data.draw(st.lists(asked, min_size=1, max_size=6))
    least = 1 + max(-(-(length + most) // 8) for length, _, _, most in requests)
    options = {
        "async_scheduling": data.draw(st.booleans()), "enable_prefix_caching": data.draw(st.booleans())
    }  # fmt: skip
    llm = engine_over(
        runner_of(), options,
        max_num_batched_tokens=data.draw(st.one_of(st.integers(2, 9), st.integers(2, 32)), label="budget"),
        max_num_seqs=data.draw(st.integers(1, 4), label="max_num_seqs"),
        num_pages=data.draw(st.integers(least, least + 12), label="num_pages"),
    )  # fmt: skip
    check(run(llm, requests), requests)
    assert_idle(llm)


@pytest.mark.parametrize("ahead", [False, True])
def test_preempted_is_not_preempted(ahead: bool) -> None:
    requests: list[Asked] = [(2, 0, "greedy", 30), (3, 1, "plain", 30)]
    llm = engine_over(runner_of(), {"async_scheduling": ahead}, num_pages=6)
    check(run(llm, requests), requests)
    assert llm.stats()["preemptions"] > 0


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("where", ["dispatch", "sample", "fetch"])
@pytest.mark.parametrize("lost", [False, True])
def test_what_is_run_again_is_not_run_twice(
    monkeypatch: pytest.MonkeyPatch, where: str, lost: bool, ahead: bool
) -> None:
    """A call of the runner fails, having done its work or not; on the host alone, or with the pool."""
    runner, calls = runner_of(), 0
    call = getattr(runner, where)

    def failing(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:  # of several sequences: nobody is to blame
            if where == "sample" or lost:
                call(*arguments)  # the forward pass is on its way, or through
            error = RuntimeError("failed")
            error.kv_lost = lost  # type: ignore[attr-defined]
            if lost:
                runner._recover()
            raise error
        return call(*arguments)

    monkeypatch.setattr(runner, where, failing)
    requests: list[Asked] = [(20, 0, "greedy", 9), (40, 1, "plain", 9), (5, 2, "three", 9)]
    llm = engine_over(runner, {"async_scheduling": ahead})
    check(run(llm, requests), requests)
    assert llm.stats()["failed_steps"] >= 1


def test_states_and_pages_are_updated_in_place() -> None:
    """With 4096 places, of which a copy would show in what a step needs beside its arrays."""
    kv = jax.eval_shape(lambda: create_kv(MIXED, 65, 8, jnp.dtype("float32"), 4096))
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kv))
    programs = Programs(
        MIXED, *tiny_params(MIXED), kv, LADDER, table_width=16, platform="cpu", most_changes=600
    )
    check_updated_in_place(programs, (*LADDER, COPY), size)
