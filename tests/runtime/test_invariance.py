"""Batch-invariant runs: ids, logprobs, ranks and alternatives are equal bit for bit whatever runs beside a
sequence, however it is cut into chunks, and whether its K/V was computed now or before."""

from __future__ import annotations

import dataclasses
import functools
import random
from array import array
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from driving import Text, run, texts
from tiny import prompts, tiny_config, tiny_runner

from jaxinfer.config import EngineConfig, StepShape, invariant_ladder, is_invariant, shape_ladder
from jaxinfer.core import LogitChanges, SamplingParams, StepPlan
from jaxinfer.model.linear import Blocked, RowMajor
from jaxinfer.runtime import JaxRunner, load, steps

pytestmark = pytest.mark.usefixtures("compile_cache")

SEQS, BUDGET, NEW = 4, 32, 8
ONE = invariant_ladder(SEQS, BUDGET)
FEW = invariant_ladder(SEQS, BUDGET, rows_are_independent=True)
BATCH = prompts([5, 30, 1, 44])
SAMPLING = [
    SamplingParams(temperature=0, logprobs=5, prompt_logprobs=2),
    SamplingParams(temperature=0.8, top_p=0.9, logprobs=3, prompt_logprobs=0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0, logprobs=3, prompt_logprobs=4),
]


@functools.cache
def runner_of(ladder: tuple[StepShape, ...], window: int | None = None) -> JaxRunner:
    config = tiny_config(window=window) if window else tiny_config()
    return tiny_runner(config, ladder=ladder, num_pages=129, max_model_len=128)


@functools.cache
def alone(ladder: tuple[StepShape, ...], window: int | None = None) -> list[Text]:
    """Each text by itself, its prompt in as few chunks as there can be."""
    done = []
    for index in range(len(BATCH)):
        text = texts(runner_of(ladder, window), BATCH, SAMPLING)[index]
        run(runner_of(ladder, window), [text], NEW, budget=BUDGET)
        done.append(text)
    return done


def assert_equal_bits(got: list[Text], expected: list[Text]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert one.sampled == other.sampled, f"text {one.uid}"  # dataclasses of floats: equal to the last bit


LADDERS = pytest.mark.parametrize("ladder", [ONE, FEW], ids=["one shape", "few shapes"])


def test_the_ladders() -> None:
    assert list(map(str, ONE)) == ["T32/D0/C4/uniform"]
    assert [shape.tokens for shape in invariant_ladder(32, 512, rows_are_independent=True)] == [
        8,
        32,
        128,
        512,
    ]
    assert is_invariant(ONE)
    assert is_invariant(FEW)
    assert len(FEW) > 1
    assert not is_invariant(shape_ladder(SEQS, BUDGET))


@LADDERS
@pytest.mark.parametrize("seed", range(4))
def test_any_batch_and_any_chunking_is_alone(ladder: tuple[StepShape, ...], seed: int) -> None:
    generator = random.Random(seed)
    together = texts(runner_of(ladder), BATCH, SAMPLING, seed=seed + 1)  # and other pages
    generator.shuffle(together)
    run(
        runner_of(ladder), together, NEW, budget=BUDGET,
        chunk=lambda: generator.choice([1, 2, 3, 7, 16, 32]),
    )  # fmt: skip
    assert_equal_bits(sorted(together, key=lambda text: text.uid), alone(ladder))


def test_one_shape_and_few_are_equal() -> None:
    assert_equal_bits(alone(FEW), alone(ONE))


@LADDERS
def test_scores_of_a_prompt_do_not_depend_on_its_chunks(ladder: tuple[StepShape, ...]) -> None:
    together = texts(runner_of(ladder), BATCH, SAMPLING, seed=9)
    run(runner_of(ladder), together, 1, budget=BUDGET, chunk=lambda: 10)
    for text, other in zip(together, alone(ladder), strict=True):
        wanted = max(0, len(BATCH[text.uid]) - 1) if text.sampling.prompt_logprobs is not None else 0
        assert len(text.scores) == len(other.scores) == wanted
        assert text.scores == other.scores


@LADDERS
def test_recomputed_and_taken_from_pages_is_the_same(ladder: tuple[StepShape, ...]) -> None:
    """Preempted: all tokens so far as one prompt. Cached: another text's pages serve the first 24 tokens."""
    runner = runner_of(ladder)
    first = alone(ladder)[3]
    again = texts(runner, [first.tokens[:48]], [SAMPLING[3]], seed=5)[0]
    again.uid = first.uid
    run(runner, [again], NEW - 4, budget=BUDGET)
    assert again.sampled == first.sampled[4:]
    writer, reader = texts(runner, [BATCH[3], BATCH[3]], [SAMPLING[3]] * 2, seed=6)
    run(runner, [writer], 1, budget=BUDGET, chunk=lambda: 5)
    reader.uid, reader.computed = first.uid, 24
    reader.pages = (*writer.pages[:3], *reader.pages[3:])
    run(runner, [reader], NEW, budget=BUDGET)
    assert reader.sampled == first.sampled


@LADDERS
def test_changes_and_masks_of_others_change_nothing(ladder: tuple[StepShape, ...]) -> None:
    """A neighbour with penalties takes the step to another program."""
    runner = runner_of(ladder)
    for changes, mask in (
        (LogitChanges(array("i", [3, 5]), array("f", [1.5, 1.0]), array("f", [0.0, -2.0])), None),
        (None, np.full(10, 0x55555555, np.int32).tobytes()),
    ):
        mine, other = texts(runner, [BATCH[0], BATCH[1][:20]], SAMPLING[:2], seed=3)
        plan = StepPlan(0, tuple(text.slice(len(text.tokens), runner.page_size) for text in (mine, other)))
        pending = runner.dispatch(plan)
        runner.sample(pending, [mine.draw(), dataclasses.replace(other.draw(), changes=changes, mask=mask)])
        assert runner.fetch(pending).sampled[0] == alone(ladder)[0].sampled[0]


@pytest.mark.parametrize("seed", range(2))
def test_windows_too(seed: int) -> None:
    """A tile starts at the block of its first query's first key, so a query's blocks vary with its tile."""
    generator = random.Random(seed)
    together = texts(runner_of(FEW, 19), BATCH, SAMPLING, seed=seed + 1)
    run(runner_of(FEW, 19), together, NEW, budget=BUDGET, chunk=lambda: generator.choice([1, 5, 32]))
    assert_equal_bits(together, alone(FEW, 19))


def test_the_other_ladder_does_not_promise_it() -> None:
    """What the invariant ladders are for; if this fails, they may no longer be needed on this device."""
    ladder = shape_ladder(SEQS, BUDGET)
    together = texts(runner_of(ladder), BATCH, SAMPLING)
    run(runner_of(ladder), together, NEW, budget=BUDGET, chunk=lambda: 7)
    assert any(a.sampled != b.sampled for a, b in zip(together, alone(ladder), strict=True))


@pytest.mark.parametrize("layout", [Blocked(), RowMajor()], ids=["blocked", "row major"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_on_cpu_do_not_depend_on_the_number_of_rows(layout: Any, dtype: str) -> None:
    """What `rows_are_independent` says, at the sizes of SmolLM2 and beyond, from 8 rows on."""
    generator = np.random.default_rng(0)
    product = jax.jit(layout.matmul, compiler_options=steps.compile_options("cpu") or None)
    for inputs, outputs in ((576, 960), (1536, 576), (576, 4096), (4096, 256)):
        x = jnp.asarray(generator.standard_normal((512, inputs)), dtype)
        weight = np.zeros(layout.shape(outputs, inputs), np.float32)
        layout.store(weight, 0, generator.standard_normal((outputs, inputs)).astype(np.float32))
        weight = jnp.asarray(weight, dtype)
        whole = np.asarray(product(x, weight), np.float32)
        for rows in (8, 32, 64, 128):
            got = np.asarray(product(x[96 : 96 + rows], weight), np.float32)
            np.testing.assert_array_equal(got, whole[96 : 96 + rows], err_msg=f"{inputs} {outputs} {rows}")


@pytest.mark.model
def test_the_real_model(smollm2_path: Path) -> None:
    options = EngineConfig(
        max_num_seqs=8, max_num_batched_tokens=128, max_model_len=512, num_pages=129, batch_invariant=True
    )
    runner = load(str(smollm2_path), options, progress=False).runner
    batch = prompts([150, 3, 40, 1, 77], vocab_size=49152)
    sampling = [SamplingParams(temperature=t, logprobs=3) for t in (0, 0, 0.7, 0, 1)]
    singles = []
    for index in range(5):
        singles.append(texts(runner, batch, sampling)[index])
        run(runner, singles[-1:], 6, budget=128)
    generator = random.Random(0)
    together = texts(runner, batch, sampling, seed=1)
    run(runner, together, 6, budget=128, chunk=lambda: generator.choice([1, 9, 30, 64, 128]))
    assert_equal_bits(together, singles)
