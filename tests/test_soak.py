"""Twenty thousand short requests of every kind through one engine: nothing is lost, nothing grows."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from tiny import TINY, assert_idle, engine_over, tiny_runner

from jaxinfer.config import StepShape
from jaxinfer.core import RequestError, SamplingParams
from jaxinfer.runtime.trace import release_freed_memory

pytestmark = [pytest.mark.usefixtures("compile_cache"), pytest.mark.slow]

REQUESTS = 20_000
LADDER = (StepShape(8, 8, 0), StepShape(40, 8, 8))


def resident_bytes() -> int:
    release_freed_memory()  # what the allocator keeps of other tests' models is not ours
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def test_twenty_thousand_requests() -> None:
    """With cancels, preemptions, timeouts, bad requests, penalties, continuations and shared prefixes."""
    runner = tiny_runner(ladder=LADDER, page_size=8, num_pages=41, max_model_len=64)
    llm = engine_over(runner, {"scheduling_policy": "priority"}, max_num_seqs=8)
    runner.warm_up()
    engine, draw = llm.engine, random.Random(0)
    stems = [[draw.randrange(TINY.vocab_size) for _ in range(24)] for _ in range(6)]
    asked, refused, after_some = 0, 0, 0
    ends: Counter[str] = Counter()
    unfinished: dict[str, int] = {}
    while asked < REQUESTS or engine.has_work:
        while asked < REQUESTS and len(unfinished) < 24:
            asked += 1
            prompt = [
                *draw.choice(stems)[: draw.randint(0, 24)],
                *(draw.randrange(300) for _ in range(draw.randint(0, 8))),
            ]
            if draw.random() < 0.02:
                prompt = draw.choice([[], [300], [-1], [1] * 64])
            try:
                sampling = SamplingParams(
                    max_tokens=draw.randint(1, 6), n=draw.choice([1, 1, 1, 2]), ignore_eos=True,
                    temperature=draw.choice([0, 1]), top_p=draw.choice([1.0, 0.9]),
                    repetition_penalty=draw.choice([1.0, 1.0, 1.2]), logprobs=draw.choice([None, 3]),
                    presence_penalty=draw.choice([0.0, 0.0, 0.5]),
                    prompt_logprobs=draw.choice([None] * 9 + [1]),
                    logit_bias=draw.choice([None, None, {5: 4.0}]),
                )  # fmt: skip
                request = llm.prepare(
                    prompt, sampling, priority=draw.randint(-2, 2),
                    timeout_s=draw.choice([None] * 20 + [0.001]), cache_salt=draw.choice([None, None, "a"]),
                )  # fmt: skip
                engine.add(request)
            except RequestError:
                refused += 1
                continue
            unfinished[request.request_id] = sampling.n
        if unfinished and draw.random() < 0.02:
            engine.cancel(draw.choice(list(unfinished)))
        for event in engine.step():
            if event.finish_reason is not None:
                ends[event.finish_reason] += 1
                unfinished[event.request_id] -= 1
                if not unfinished[event.request_id]:
                    del unfinished[event.request_id]
        if not after_some and asked > REQUESTS // 4:
            after_some = resident_bytes()
    assert not unfinished
    assert refused > 100
    assert ends["length"] > REQUESTS / 2
    assert ends["abort"] > 100
    assert not ends["error"]
    stats = llm.stats()
    assert stats["preemptions"] > 10
    assert stats["cached_tokens"] > REQUESTS
    assert stats["compiles_after_warmup"] == 0
    assert stats["invariant_failures"] == 0
    assert resident_bytes() - after_some < 30e6, "memory grows"
    assert_idle(llm)
