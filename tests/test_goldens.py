"""SmolLM2-135M against greedy continuations that transformers computed from the same float32 weights.

golden_smollm2.json: four prompts, their tokens and logprobs, and the smallest gap between the two best
logits on the way (0.0028 at the least), so an exact float32 implementation must give the same tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import GOLDEN, assert_idle, engine_over

from jaxinfer import LLM, SamplingParams
from jaxinfer.config import StepShape
from jaxinfer.core import CompletionOutput
from jaxinfer.runtime import JaxRunner

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("compile_cache")]

CASES: list[dict[str, Any]] = json.loads((GOLDEN / "golden_smollm2.json").read_text())
PROMPTS = [case["prompt_token_ids"] for case in CASES]
SAMPLING = [SamplingParams(temperature=0.0, max_tokens=64, logprobs=5) for _ in CASES]
LOGPROB_ERROR = 2e-3
LADDER = (StepShape(1, 1, 0), StepShape(4, 4, 0), StepShape(20, 4, 4), StepShape(132, 4, 4))
"""Buckets for budgets of 16 and up: few, because each takes seconds to compile."""


@pytest.fixture(scope="module")
def front_door(smollm2_path: Path) -> LLM:
    """As a user loads it, with pages of 16 and a budget of 64."""
    return LLM(
        str(smollm2_path),
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=512,
        num_pages=129,
        progress=False,
    )


@pytest.fixture(scope="module")
def runner_of(front_door: LLM) -> Any:
    """Runners of other page sizes over the same weights."""
    first = front_door.engine.runner
    assert isinstance(first, JaxRunner)
    made: dict[int, JaxRunner] = {}

    def runner(page_size: int) -> JaxRunner:
        if page_size not in made:
            made[page_size] = JaxRunner(
                first.config, first._graph, first._state, LADDER, num_pages=1 + 2048 // page_size,
                page_size=page_size, max_model_len=512, kv_dtype=first.kv_dtype, platform=first.platform,
            )  # fmt: skip
        return made[page_size]

    return runner


def check(case: dict[str, Any], answer: CompletionOutput) -> None:
    assert answer.token_ids == tuple(case["token_ids"]), case["name"]
    assert answer.finish_reason == case["finish_reason"]
    assert answer.logprobs is not None
    for place, token in enumerate(answer.token_ids):
        found = answer.logprobs[place]
        assert found[token].logprob == pytest.approx(case["logprobs"][place], abs=LOGPROB_ERROR)
        assert found[token].rank == 1
        assert set(case["top5"][place][:2]) <= set(found)


def check_batch(llm: LLM) -> None:
    for case, output in zip(CASES, llm.generate(PROMPTS, SAMPLING), strict=True):
        check(case, output.outputs[0])
    assert_idle(llm)


def check_alone(llm: LLM) -> None:
    for case, prompt, sampling in zip(CASES, PROMPTS, SAMPLING, strict=True):
        check(case, llm.generate(prompt, sampling)[0].outputs[0])
    assert_idle(llm)


def test_alone(front_door: LLM) -> None:
    check_alone(front_door)


def test_all_four_together(front_door: LLM) -> None:
    check_batch(front_door)


def test_text_and_chat(front_door: LLM) -> None:
    """From text, through the tokenizer and the chat template, to text."""
    for case in CASES[:2]:
        sampling = SamplingParams(temperature=0.0, max_tokens=len(case["token_ids"]))
        if "messages" in case:
            output = front_door.chat(case["messages"], sampling)[0]
        else:
            output = front_door.generate(case["prompt"], sampling)[0]
        assert output.prompt_token_ids == tuple(case["prompt_token_ids"])
        assert output.outputs[0].text == case["text"]


@pytest.mark.parametrize(("page_size", "budget"), [(8, 16), (32, 128)])
def test_page_sizes_and_budgets(runner_of: Any, page_size: int, budget: int) -> None:
    check_batch(
        engine_over(runner_of(page_size), max_num_batched_tokens=budget, eos_token_ids=frozenset({2}))
    )


def test_preempted(runner_of: Any) -> None:
    """Room for the four prompts and little more: some give way, wait and come back."""
    llm = engine_over(runner_of(8), num_pages=20, max_num_batched_tokens=128, eos_token_ids=frozenset({2}))
    check_batch(llm)
    assert llm.stats()["preemptions"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("budget", [16, 64, 2048])
@pytest.mark.parametrize("page_size", [8, 16, 32])
def test_every_page_size_and_budget(front_door: LLM, smollm2_path: Path, page_size: int, budget: int) -> None:
    """Each with a ladder of its own, alone and together."""
    llm = LLM(
        str(smollm2_path), max_num_seqs=4, max_num_batched_tokens=budget, max_model_len=512, num_pages=257,
        page_size=page_size, progress=False,
    )  # fmt: skip
    check_alone(llm)
    check_batch(llm)


GAP = 1e-3
"""Where the two best logits are nearer than this, rounding may choose; what follows is not compared."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_sixty_four_mixed_requests_are_the_same_one_by_one(smollm2_path: Path) -> None:
    """Prompts of 1 to 900 tokens and outputs of 1 to 64, through a pool that does not hold them all."""
    generator = np.random.default_rng(0)
    lengths = np.unique(np.geomspace(1, 900, 48).astype(int)).tolist()
    lengths += generator.integers(1, 900, 64 - len(lengths)).tolist()
    text = [token for case in CASES for token in (*case["prompt_token_ids"], *case["token_ids"])]
    prompts = []
    for index, length in enumerate(lengths):
        drawn = generator.integers(3, 49152, length)
        start = int(generator.integers(0, len(text)))
        sliced = np.resize(np.roll(text, -start), length)
        prompts.append((drawn if index % 2 else sliced).tolist())
    sampling = [
        SamplingParams(temperature=0.0, max_tokens=int(n), ignore_eos=True, logprobs=2)
        for n in generator.integers(1, 65, 64)
    ]
    llm = LLM(
        str(smollm2_path), max_num_seqs=8, max_num_batched_tokens=256, max_model_len=1024, num_pages=180,
        warmup="full", progress=False,
    )  # fmt: skip
    before = llm.stats()["compiles_after_warmup"]
    together = llm.generate(prompts, sampling)
    assert_idle(llm)
    compared = left_out = 0
    for prompt, params, output in zip(prompts, sampling, together, strict=True):
        got, single = output.outputs[0], llm.generate(prompt, params)[0].outputs[0]
        assert got.logprobs is not None
        assert single.logprobs is not None
        assert len(got.token_ids) == len(single.token_ids) == params.max_tokens
        for place, token in enumerate(single.token_ids):
            best = sorted((p.logprob for p in single.logprobs[place].values()), reverse=True)
            if best[0] - best[1] < GAP and got.token_ids[place] != token:
                left_out += len(single.token_ids) - place
                break
            assert got.token_ids[place] == token, (len(prompt), place)
            difference = got.logprobs[place][token].logprob - single.logprobs[place][token].logprob
            assert abs(difference) < LOGPROB_ERROR
            compared += 1
    print(f"\n{compared} tokens compared, {left_out} after a near tie that went the other way")
    assert left_out < compared / 20
    assert_idle(llm)
    assert llm.stats()["compiles_after_warmup"] == before
