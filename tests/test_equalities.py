"""The equalities that hold the engine together, on a tiny model in float32.

any chunking = one shot · any batch = alone · preempted = not · any page size = any other · seeded draws
alone = in a batch · found in the prefix cache = computed · steps ahead = one after the other. The
programs are compiled once per page size; budgets, numbers of sequences and pools
below what they hold are limits of the engine alone, and cost nothing.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import assert_idle, engine_over, greedy, prompts, tiny_runner, token_ids

from jaxinfer.config import StepShape
from jaxinfer.core import RequestOutput, SamplingParams
from jaxinfer.runtime import JaxRunner

pytestmark = pytest.mark.usefixtures("compile_cache")

PAGE_SIZES = (8, 16, 32)
LADDER = (StepShape(1, 1, 0), StepShape(8, 8, 0), StepShape(24, 8, 2), StepShape(72, 8, 8))
LOGPROB_ERROR = 1e-4


@functools.cache
def runner_of(page_size: int) -> JaxRunner:
    return tiny_runner(ladder=LADDER, page_size=page_size, num_pages=1 + 1024 // page_size, max_model_len=128)


@dataclass(frozen=True)
class Asked:
    """One request, small enough to be remembered by: a length, the seed of its ids, how to sample."""

    length: int
    seed: int
    kind: str = "greedy"
    max_tokens: int = 6

    @property
    def prompt(self) -> list[int]:
        return prompts([self.length], self.seed)[0]

    @property
    def sampling(self) -> SamplingParams:
        if self.kind == "greedy":
            return greedy(self.max_tokens, logprobs=2)
        kinds: dict[str, dict[str, Any]] = {
            "plain": {"temperature": 1.0},
            "filtered": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
            "three": {"temperature": 1.2, "n": 3},
            "penalised": {
                "temperature": 0.9,
                "repetition_penalty": 1.3,
                "presence_penalty": 0.4,
                "frequency_penalty": 0.3,
                "logit_bias": {5: 4.0, 7: -5.0},
            },
            "scored": {"temperature": 0.0, "prompt_logprobs": 1},
            "held": {"temperature": 0.7, "min_tokens": 4, "stop_token_ids": tuple(range(20))},
        }
        return SamplingParams(
            seed=self.seed, max_tokens=self.max_tokens, ignore_eos=True, logprobs=2, **kinds[self.kind]
        )


@functools.cache
def cold(asked: Asked) -> RequestOutput:
    """The answer of a fresh engine that runs nothing else, in one chunk, step by step, over pages of 16."""
    plain = {"enable_prefix_caching": False, "async_scheduling": False}
    return engine_over(runner_of(16), plain).generate(asked.prompt, asked.sampling)[0]


def same(got: list[RequestOutput], requests: list[Asked]) -> None:
    """Tokens, ends and logprobs of every continuation are those of `cold`."""
    for output, asked in zip(got, requests, strict=True):
        expected = cold(asked)
        for part, other in zip(output.outputs, expected.outputs, strict=True):
            assert part.token_ids == other.token_ids, asked
            assert part.finish_reason == other.finish_reason
            assert part.logprobs is not None
            assert other.logprobs is not None
            for here, there in zip(part.logprobs, other.logprobs, strict=True):
                assert here.keys() == there.keys()
                for token in here:
                    assert abs(here[token].logprob - there[token].logprob) < LOGPROB_ERROR
                    assert here[token].rank == there[token].rank
        same_scores(output, expected)


def same_scores(output: RequestOutput, expected: RequestOutput) -> None:
    assert (output.prompt_logprobs is None) == (expected.prompt_logprobs is None)
    for here, there in zip(output.prompt_logprobs or (), expected.prompt_logprobs or (), strict=True):
        assert (here is None) == (there is None)
        for token in here or {}:
            assert there is not None
            assert abs(here[token].logprob - there[token].logprob) < LOGPROB_ERROR  # type: ignore[index]


def run(
    requests: list[Asked], page_size: int, options: dict[str, Any] | None = None, **limits: Any
) -> dict[str, Any]:
    """Run requests together under these limits, compare with `cold`, and return the engine's stats."""
    llm = engine_over(runner_of(page_size), options, **limits)
    same(llm.generate([r.prompt for r in requests], [r.sampling for r in requests]), requests)
    assert_idle(llm)
    return llm.stats()


options = st.fixed_dictionaries(
    {
        "enable_prefix_caching": st.booleans(),
        "async_scheduling": st.booleans(),
        "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
    }
)


lengths = st.one_of(
    st.sampled_from([1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96]), st.integers(1, 100)
)
asked = st.builds(
    Asked,
    lengths,
    st.integers(0, 5),
    st.sampled_from(["greedy", "greedy", "plain", "filtered", "three", "held", "penalised", "scored"]),
)


# -------------------------------------------------------------------------------------------- one by one


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("budget", [1, 2, 7, 8, 9, 16, 17, 33, 64])
def test_any_chunking_is_one_shot(page_size: int, budget: int) -> None:
    """Prompts of a chunk, a chunk and one token, several (B038, B043)."""
    for length in sorted({1, budget, budget + 1, 2 * budget + 1, 70} & set(range(1, 101))):
        run([Asked(length, 0, max_tokens=3)], page_size, max_num_batched_tokens=budget)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_any_pair_is_alone(page_size: int) -> None:
    """Two rows of every pair of lengths around a page's edge (B001)."""
    edges = [1, page_size - 1, page_size, page_size + 1, 2 * page_size]
    for first in edges:
        run([Asked(first, 0, max_tokens=3), Asked(page_size, 1, max_tokens=3)], page_size)
        run([Asked(page_size, 1, max_tokens=3), Asked(first, 0, max_tokens=3)], page_size)


@pytest.mark.parametrize("max_num_seqs", range(1, 9))
def test_any_number_of_sequences(max_num_seqs: int) -> None:
    """Eight rows that end one after the other (B004, B014)."""
    requests = [Asked(3 + 5 * i, i, "greedy" if i % 2 else "plain", max_tokens=1 + i) for i in range(8)]
    run(requests, 8, max_num_seqs=max_num_seqs)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("budget", [3, 16, 64])
def test_preempted_is_not_preempted(page_size: int, budget: int) -> None:
    """A pool for one and a half: both answers are those of an idle engine (B026, B027, B030)."""
    long = 2 * page_size + 10
    requests = [Asked(2, 0, max_tokens=long), Asked(3, 1, "plain", max_tokens=long)]
    stats = run(requests, page_size, num_pages=5, max_num_batched_tokens=budget)
    assert stats["preemptions"] > 0


def test_requests_that_come_while_others_run() -> None:
    """Events of three streams, begun one after the other, read in turns."""
    requests = [Asked(33, 0), Asked(5, 1, "plain"), Asked(64, 2, "filtered")]
    llm = engine_over(runner_of(8), max_num_batched_tokens=16)
    streams, answers = [], [[] for _ in requests]
    for request in requests:
        streams.append(llm.stream(request.prompt, request.sampling))
        for stream, answer in zip(streams, answers, strict=False):
            answer.extend(next(stream).token_ids)
    for stream, answer in zip(streams, answers, strict=True):
        for event in stream:
            answer.extend(event.token_ids)
    assert [tuple(a) for a in answers] == [cold(r).outputs[0].token_ids for r in requests]
    assert_idle(llm)


# ------------------------------------------------------------------------------------------------ all at once


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@settings(max_examples=12)
@given(data=st.data())
def test_any_load_under_any_limits_is_alone(page_size: int, data: st.DataObject) -> None:
    """Batches of every kind of request, budgets from 1, 1 to 8 sequences, pools down to the least."""
    requests = data.draw(st.lists(asked, min_size=1, max_size=6))
    longest = max(r.length + r.max_tokens - 1 for r in requests)
    least = 1 + -(-longest // page_size)
    run(
        requests,
        page_size,
        data.draw(options, label="options"),
        max_num_batched_tokens=data.draw(st.one_of(st.integers(2, 12), st.integers(2, 64)), label="budget"),
        max_num_seqs=data.draw(st.integers(1, 8), label="max_num_seqs"),
        num_pages=data.draw(st.integers(least, least + 10), label="num_pages"),
    )


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("ahead", [False, True])
def test_what_is_found_in_the_cache_is_what_would_be_computed(page_size: int, ahead: bool) -> None:
    """Prompts that begin alike, one after the other and together, in a pool that has to evict."""
    llm = engine_over(runner_of(page_size), {"async_scheduling": ahead}, num_pages=1 + 256 // page_size)
    other = runner_of(32 if page_size == 8 else 8)  # not the same runner: it would write into pages we keep
    generator = np.random.default_rng(0)
    stem, found = Asked(96, 0).prompt, 0
    for _ in range(3):
        batch = []
        for _ in range(5):
            keep = int(generator.integers(0, 97))
            batch.append([*stem[:keep], *generator.integers(0, 300, 97 - keep).tolist()][: keep + 4])
        outputs = llm.generate(batch, greedy(4))
        for prompt, output in zip(batch, outputs, strict=True):
            alone = engine_over(other, {"enable_prefix_caching": False}).generate(prompt, greedy(4))
            assert output.outputs[0].token_ids == alone[0].outputs[0].token_ids
        found += sum(output.metrics.cached_tokens for output in outputs)
    assert found > 100
    assert_idle(llm)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@settings(max_examples=10)
@given(data=st.data())
def test_cancelled_at_any_point(page_size: int, data: st.DataObject) -> None:
    """A request cancelled after any step: what it said and what the others say is that of `cold`."""
    requests = data.draw(st.lists(asked, min_size=2, max_size=5))
    llm = engine_over(runner_of(page_size), data.draw(options), num_pages=1 + 256 // page_size)
    names = []
    for each in requests:
        request = llm.prepare(each.prompt, each.sampling)
        names.append(request.request_id)
        llm.engine.add(request)
    doomed = data.draw(st.sampled_from(names))
    after = data.draw(st.integers(0, 12))
    told: dict[tuple[str, int], list[int]] = {}
    while llm.engine.has_work:
        if after == 0:
            llm.engine.cancel(doomed)
        after -= 1
        for event in llm.engine.step():
            told.setdefault((event.request_id, event.index), []).extend(event.token_ids)
    for name, each in zip(names, requests, strict=True):
        for index, part in enumerate(cold(each).outputs):
            got = tuple(told.get((name, index), ()))
            assert got == (part.token_ids[: len(got)] if name == doomed else part.token_ids)
    assert_idle(llm)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@settings(max_examples=10)
@given(data=st.data())
def test_preempted_at_any_point(page_size: int, data: st.DataObject) -> None:
    """Any running sequence gives its pages back after any steps, also while a step of it is in flight."""
    requests = data.draw(st.lists(asked, min_size=1, max_size=4))
    llm = engine_over(runner_of(page_size), data.draw(options))
    engine, told = llm.engine, {}
    names = {}
    for each in requests:
        request = llm.prepare(each.prompt, each.sampling)
        names[request.request_id] = each
        engine.add(request)
    victims = data.draw(st.lists(st.tuples(st.integers(0, 25), st.integers(0, 5)), max_size=5))
    step = 0
    while engine.has_work:
        for when, which in victims:
            if when == step and engine.scheduler.running:
                running = engine.scheduler.running
                engine.scheduler._requeue(running[which % len(running)])
                assert engine.check() == []
        step += 1
        for event in engine.step():
            told.setdefault((event.request_id, event.index), []).extend(event.token_ids)
    for (name, index), tokens in told.items():
        assert tuple(tokens) == cold(names[name]).outputs[index].token_ids
    assert_idle(llm)


def test_the_kinds_of_sampling_are_told_apart() -> None:
    """The comparisons above would be empty if every answer were the same."""
    answers = {
        kind: token_ids([cold(Asked(17, 3, kind))])[0] for kind in ("greedy", "plain", "filtered", "three")
    }
    assert len({parts[0] for parts in answers.values()}) >= 3
    assert len(set(answers["three"])) == 3
    others = token_ids([cold(Asked(17, seed)) for seed in range(5)])
    assert len({parts[0] for parts in others}) == 5


def test_the_answer_depends_on_every_token_of_the_prompt() -> None:
    """Changing any one prompt token changes the logprobs by far more than the tolerance above."""
    llm = engine_over(runner_of(8))
    base = Asked(40, 0).prompt
    first = llm.generate(base, greedy(1, logprobs=1))[0].outputs[0]
    for place in (0, 7, 8, 20, 38):
        changed = [*base[:place], (base[place] + 1) % 300, *base[place + 1 :]]
        other = llm.generate(changed, greedy(1, logprobs=20))[0].outputs[0]
        assert first.logprobs is not None
        assert other.logprobs is not None
        before = next(iter(first.logprobs[0].values())).logprob
        after = next(iter(other.logprobs[0].values())).logprob
        assert not np.isclose(before, after, atol=100 * LOGPROB_ERROR) or first.token_ids != other.token_ids
