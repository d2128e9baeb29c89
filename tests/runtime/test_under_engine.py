"""The runner under an engine: no compile after warm-up, failed steps, rows that are not finite."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny import (
    PLENTY,
    TINY,
    alone,
    assert_idle,
    engine_over,
    greedy,
    prompts,
    random_tensors,
    tiny_runner,
    token_ids,
)

from jaxinfer.config import SampleShape, StepShape
from jaxinfer.core import ConfigError, SamplingParams
from jaxinfer.llm import LLM
from jaxinfer.runtime import JaxRunner, inputs

pytestmark = pytest.mark.usefixtures("compile_cache")

CURSED = TINY.vocab_size - 1
"""A token whose embedding is NaN in the runner below."""


@pytest.fixture(scope="module")
def runner() -> JaxRunner:
    """Warmed up in full; its limits are 4 sequences and 32 tokens."""
    tensors = random_tensors(TINY)
    tensors["model.embed_tokens.weight"][CURSED] = np.nan
    made = tiny_runner(tensors=tensors, num_pages=PLENTY)
    made.warm_up()
    return made


BATCH = prompts([5, 30, 1, 44, 9, 17], vocab_size=CURSED)
SAMPLING = [
    greedy(9),
    SamplingParams(temperature=0.8, seed=3, max_tokens=9, ignore_eos=True, logprobs=4),
    greedy(12, logprobs=20),
    SamplingParams(top_k=5, top_p=0.9, min_p=0.01, seed=4, max_tokens=5, ignore_eos=True),
    SamplingParams(seed=6, max_tokens=7, min_tokens=3, stop_token_ids=(1, 2, 3), ignore_eos=True),
    greedy(4),
]


@pytest.fixture(scope="module")
def expected(runner: JaxRunner) -> list[Any]:
    outputs = token_ids(alone(engine_over(runner), BATCH, SAMPLING))
    assert not any(CURSED in part for parts in outputs for part in parts), "choose another seed"
    return outputs


# ------------------------------------------------------------------------------------------------ compiles


def test_nothing_is_compiled_or_traced_after_warm_up(runner: JaxRunner, expected: list[Any]) -> None:
    """A load with every parameter in it, in every mix of slices (B152)."""
    llm = engine_over(runner)
    assert llm.stats()["programs"] == llm.stats()["programs_in_manifest"] == len(runner.programs.planned)
    before = llm.stats()["compiles_after_warmup"]
    with jax.no_tracing(), jax.transfer_guard_host_to_device("disallow"):
        outputs = llm.generate(BATCH, SAMPLING)
        for prompt, sampling in zip(BATCH, SAMPLING, strict=True):
            llm.generate(prompt, sampling)
    assert llm.stats()["compiles_after_warmup"] == before
    assert token_ids(outputs) == expected
    assert_idle(llm)


@pytest.mark.parametrize("budget", [1, 5])
def test_budgets_that_are_no_power_of_two(budget: int) -> None:
    """Ladders of their own: every plan finds a bucket and warm-up makes them all (B151)."""
    llm = engine_over(
        tiny_runner(max_num_seqs=3, max_num_batched_tokens=budget), max_num_batched_tokens=budget
    )
    runner = llm.engine.runner
    assert isinstance(runner, JaxRunner)
    outputs = llm.generate(BATCH[:4], [greedy(3)] * 4)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [3] * 4
    manifest = runner.programs.manifest
    assert {record.reason.split(" at ")[0] for record in manifest} == {"first used"}
    assert len(manifest) == llm.stats()["programs"] <= len(runner.programs.planned)
    assert_idle(llm)


# -------------------------------------------------------------------------------------------- failed steps


class StepFailed(RuntimeError):
    pass


@pytest.fixture
def fail(runner: JaxRunner) -> Generator[Callable[..., None]]:
    """`fail(when)`: a step for which `when(tokens)` holds runs, KV donated and gone, and then raises."""
    programs = {b: p for b, p in runner.programs.compiled.items() if isinstance(b, StepShape)}
    samplers = {b: p for b, p in runner.programs.compiled.items() if isinstance(b, SampleShape)}
    poisoned = False

    def arm(when: Callable[[list[int]], bool], *, at_fetch: bool = False) -> None:
        class Unreadable:
            def __array__(self, *_: Any, **__: Any) -> Any:
                raise StepFailed("planted in fetch")

        def broken(shape: StepShape) -> Callable[..., Any]:
            def call(state: Any, kv: Any, buffer: Any, previous: Any) -> Any:
                nonlocal poisoned
                most = runner.programs.most_emitting
                view = inputs.layout(shape, runner.table_width, most).views(np.array(buffer))
                tokens = np.where(view["source"] >= 0, np.asarray(previous)[view["source"]], view["tokens"])
                outputs = programs[shape](state, kv, buffer, previous)
                if not when(tokens[view["token_row"] >= 0].tolist()):
                    return outputs
                if not at_fetch:
                    raise StepFailed("planted in dispatch")
                poisoned = True
                return outputs

            return call

        def choosing(shape: SampleShape) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                nonlocal poisoned
                output, tokens = samplers[shape](*args)
                if not poisoned:
                    return output, tokens
                poisoned = False
                return Unreadable(), tokens

            return call

        runner.programs.compiled.update({shape: broken(shape) for shape in programs})  # type: ignore[misc]
        runner.programs.compiled.update({shape: choosing(shape) for shape in samplers})  # type: ignore[misc]

    yield arm
    runner.programs.compiled.update(programs)
    runner.programs.compiled.update(samplers)


@pytest.mark.parametrize("at_fetch", [False, True])
@pytest.mark.parametrize("number", [0, 1, 4])
def test_one_failed_step_costs_nobody_his_answer(
    runner: JaxRunner, expected: list[Any], fail: Callable[..., None], number: int, at_fetch: bool
) -> None:
    """A step of several fails once, in the prompts or among decodes: all are recomputed (B150)."""
    steps = iter(range(1000))
    fail(lambda tokens: next(steps) == number, at_fetch=at_fetch)
    llm, before = engine_over(runner), runner.kv
    outputs = llm.generate(BATCH, SAMPLING)
    assert token_ids(outputs) == expected
    assert llm.stats()["failed_steps"] == 1
    assert all(pages.is_deleted() for pages in jax.tree.leaves(before))
    assert not any(pages.is_deleted() for pages in jax.tree.leaves(runner.kv))
    assert_idle(llm)


def test_the_request_that_fails_is_the_only_one_to_end(
    runner: JaxRunner, expected: list[Any], fail: Callable[..., None]
) -> None:
    """A prompt that breaks every step it is in ends with an error; sent again to a sound device, it runs."""
    culprit = BATCH[1]
    fail(lambda tokens: culprit[-1] in tokens and culprit[-2] in tokens)
    llm = engine_over(runner)
    outputs = llm.generate(BATCH, SAMPLING)
    assert outputs[1].outputs[0].finish_reason == "error"
    # The kind of the fault reaches the client, its text (paths, kilobytes of XLA) only the log.
    assert outputs[1].outputs[0].error == "the step failed on the device (StepFailed)"
    others = [i for i in range(len(BATCH)) if i != 1]
    assert [token_ids(outputs)[i] for i in others] == [expected[i] for i in others]
    assert_idle(llm)
    fail(lambda tokens: False)
    assert token_ids(llm.generate(culprit, SAMPLING[1])) == [expected[1]]
    assert_idle(llm)


# ------------------------------------------------------------------------------------- rows of NaN


def test_a_row_of_nan_ends_alone_and_leaves_its_pages_clean(runner: JaxRunner, expected: list[Any]) -> None:
    """B159. Its pages are full of NaN; page 0 and whoever gets them next must not notice (B002)."""
    cursed = [[CURSED] * 50, [*BATCH[0], CURSED], [CURSED]]
    llm = engine_over(runner, num_pages=25)  # few pages: they are handed on at once
    for _ in range(2):
        outputs = llm.generate([cursed[0], *BATCH[:3], *cursed[1:], *BATCH[3:]], [
            greedy(4), *SAMPLING[:3], greedy(4), greedy(4), *SAMPLING[3:]
        ])  # fmt: skip
        reasons = [o.outputs[0].finish_reason for o in outputs]
        assert [i for i, reason in enumerate(reasons) if reason == "error"] == [0, 4, 5]
        assert "not finite" in (outputs[0].outputs[0].error or "")
        assert outputs[0].outputs[0].token_ids == ()
        got = token_ids(outputs)
        assert [*got[1:4], *got[6:]] == expected
        assert_idle(llm)


# ------------------------------------------------------------------------------------------------ limits


def test_the_longest_request(runner: JaxRunner) -> None:
    """Every place of the page table in use, the last token included."""
    llm = engine_over(runner)
    longest = prompts([100], seed=9, vocab_size=CURSED)[0]
    answer = llm.generate(longest, greedy(28))[0].outputs[0]
    assert len(answer.token_ids) == 28
    parts = [*longest, *answer.token_ids[:14]]
    assert llm.generate(parts, greedy(14))[0].outputs[0].token_ids == answer.token_ids[14:]


def test_loading_random_models(tmp_path: Path) -> None:
    """random:PATH of a folder, through the front door; warm-up in full, and a request without tokenizer."""
    (tmp_path / "config.json").write_text(
        '{"vocab_size": 200, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,'
        ' "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}'
    )
    llm = LLM(
        f"random:{tmp_path}",
        max_num_seqs=1,
        max_num_batched_tokens=4,
        page_size=8,
        warmup="full",
        progress=False,
    )
    assert llm.tokenizer is None
    assert llm.limits.max_model_len == 64
    assert llm.limits.num_pages == 64 // 8 + 1
    stats = llm.stats()
    assert stats["programs"] == stats["programs_in_manifest"]
    outputs = llm.generate([[1, 2, 3, 4, 5], [6]], greedy(5))
    assert [len(o.outputs[0].token_ids) for o in outputs] == [5, 5]
    assert llm.stats()["compiles_after_warmup"] == stats["compiles_after_warmup"]
    with pytest.raises(ConfigError, match="max_model_len 65 is more than the model's own limit of 64"):
        LLM(f"random:{tmp_path}", max_model_len=65, progress=False)
    with pytest.raises(ConfigError, match="neither a built-in shape"):
        LLM("random:nonsense", progress=False)
