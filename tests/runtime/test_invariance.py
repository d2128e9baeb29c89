"""Batch-invariant runs: ids, logprobs, ranks and alternatives are equal bit for bit whatever runs beside a
sequence, however it is cut into chunks, and whether its K/V was computed now or before."""

from __future__ import annotations

import dataclasses
import functools
import random
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from driving import Text, run, texts
from tiny import prompts, tiny_config, tiny_runner

from jaxinfer.config import EngineConfig, StepShape, invariant_ladder, is_invariant, shape_ladder
from jaxinfer.core import LogitChanges, SamplingParams, StepPlan
from jaxinfer.runtime import JaxRunner, load

pytestmark = pytest.mark.usefixtures("compile_cache")

SEQS, BUDGET, NEW = 4, 32, 8
ONE = invariant_ladder(SEQS, BUDGET)
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


def test_the_ladder() -> None:
    assert list(map(str, ONE)) == ["T32/D0/C4/uniform"]
    assert is_invariant(ONE)
    assert not is_invariant(shape_ladder(SEQS, BUDGET))


@pytest.mark.parametrize("seed", range(4))
def test_any_batch_and_any_chunking_is_alone(seed: int) -> None:
    generator = random.Random(seed)
    together = texts(runner_of(ONE), BATCH, SAMPLING, seed=seed + 1)  # and other pages
    generator.shuffle(together)
    run(
        runner_of(ONE), together, NEW, budget=BUDGET,
        chunk=lambda: generator.choice([1, 2, 3, 7, 16, 32]),
    )  # fmt: skip
    assert_equal_bits(sorted(together, key=lambda text: text.uid), alone(ONE))


@pytest.mark.parametrize(
    "changes",
    [
        {"intermediate_size": 172}, {"intermediate_size": 100}, {"num_layers": 5},
        {"head_dim": 8, "num_kv_heads": 4}, {"hidden_size": 72, "intermediate_size": 200},
    ],
    ids=str,
)  # fmt: skip
def test_other_sizes_too(changes: dict[str, Any]) -> None:
    """Sizes at which a step of 8 rows and one of 32 give other bits, on this project's first machine."""
    runner = tiny_runner(tiny_config(**changes), ladder=ONE, num_pages=129, max_model_len=128)
    singles = []
    for index in range(len(BATCH)):
        singles.append(texts(runner, BATCH, SAMPLING)[index])
        run(runner, singles[-1:], NEW, budget=BUDGET)
    generator = random.Random(0)
    together = texts(runner, BATCH, SAMPLING, seed=1)
    run(runner, together, NEW, budget=BUDGET, chunk=lambda: generator.choice([1, 5, 16, 32]))
    assert_equal_bits(together, singles)


def test_scores_of_a_prompt_do_not_depend_on_its_chunks() -> None:
    together = texts(runner_of(ONE), BATCH, SAMPLING, seed=9)
    run(runner_of(ONE), together, 1, budget=BUDGET, chunk=lambda: 10)
    for text, other in zip(together, alone(ONE), strict=True):
        wanted = max(0, len(BATCH[text.uid]) - 1) if text.sampling.prompt_logprobs is not None else 0
        assert len(text.scores) == len(other.scores) == wanted
        assert text.scores == other.scores


def test_recomputed_and_taken_from_pages_is_the_same() -> None:
    """Preempted: all tokens so far as one prompt. Cached: another text's pages serve the first 24 tokens."""
    runner = runner_of(ONE)
    first = alone(ONE)[3]
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


def test_changes_and_masks_of_others_change_nothing() -> None:
    """A neighbour with penalties takes the step to another program."""
    runner = runner_of(ONE)
    for changes, mask in (
        (LogitChanges(array("i", [3, 5]), array("f", [1.5, 1.0]), array("f", [0.0, -2.0])), None),
        (None, np.full(10, 0x55555555, np.int32).tobytes()),
    ):
        mine, other = texts(runner, [BATCH[0], BATCH[1][:20]], SAMPLING[:2], seed=3)
        plan = StepPlan(0, tuple(text.slice(len(text.tokens), runner.page_size) for text in (mine, other)))
        pending = runner.dispatch(plan)
        runner.sample(pending, [mine.draw(), dataclasses.replace(other.draw(), changes=changes, mask=mask)])
        assert runner.fetch(pending).sampled[0] == alone(ONE)[0].sampled[0]


@pytest.mark.parametrize("seed", range(2))
def test_windows_too(seed: int) -> None:
    """A tile starts at the block of its first query's first key, so a query's blocks vary with its tile."""
    generator = random.Random(seed)
    together = texts(runner_of(ONE, 19), BATCH, SAMPLING, seed=seed + 1)
    run(runner_of(ONE, 19), together, NEW, budget=BUDGET, chunk=lambda: generator.choice([1, 5, 32]))
    assert_equal_bits(together, alone(ONE, 19))


def test_the_other_ladder_does_not_promise_it() -> None:
    """What the invariant ladders are for; if this fails, they may no longer be needed on this device."""
    ladder = shape_ladder(SEQS, BUDGET)
    together = texts(runner_of(ladder), BATCH, SAMPLING)
    run(runner_of(ladder), together, NEW, budget=BUDGET, chunk=lambda: 7)
    assert any(a.sampled != b.sampled for a, b in zip(together, alone(ONE), strict=True))


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
