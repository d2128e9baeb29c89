"""Laws that hold of every simulation: of queues, of time; and that it is as fast as it says."""

from __future__ import annotations

import cProfile
import dataclasses
import pstats
import random
import time
from statistics import mean

import pytest
from hypothesis import given, settings
from worlds import VOCAB, World, ask, worlds

from jaxinfer.config import ModelConfig, shape_ladder
from jaxinfer.core import Limits, Request, RequestError, SamplingParams
from jaxinfer.planner import ModelCosts, RooflineTime, device_sheet
from jaxinfer.presets import PRESETS
from jaxinfer.simulator import Ask, Outcome, Simulation, Step, StepTimer, VirtualClock

LIMITS = Limits(
    num_pages=2000, page_size=8, max_num_seqs=16, max_num_batched_tokens=128, max_model_len=512,
    vocab_size=VOCAB,
)  # fmt: skip


def poisson(rate: float, count: int, prompt: int, output: int, seed: int = 0) -> tuple[Ask, ...]:
    draws, at_s, asks = random.Random(seed), 0.0, []
    for index in range(count):
        at_s += draws.expovariate(rate)
        asks.append(ask(f"r{index}", at_s, [index % 7] * prompt, output))
    return tuple(asks)


@given(world=worlds())
@settings(max_examples=60, deadline=None)
def test_time_only_goes_forward_and_every_request_ends(world: World) -> None:
    outcome = world.simulate()
    for served, asked in zip(outcome.served, world.asks, strict=True):
        if served.error is not None:
            assert not served.token_s
            continue
        assert len(served.token_s) == asked.request.sampling.max_tokens
        assert served.started_s is not None
        times = [served.arrived_s, served.sent_s, served.started_s, *served.token_s, served.ended_s]
        assert times == sorted(times)
        assert len(set(served.token_s)) == len(served.token_s)
        assert served.ended_s <= outcome.ended_s


def test_the_same_load_gives_the_same_run() -> None:
    world = World(LIMITS, poisson(30.0, 80, 40, 20))
    assert world.simulate() == world.simulate()


def test_without_steps_ahead_the_host_is_waited_for() -> None:
    world = World(LIMITS, (ask("alone", 0.0, [1] * 30, 20),))
    ahead, waiting = world.simulate(), dataclasses.replace(world, asynchronous=False).simulate()
    host = waiting.totals.host_s / waiting.totals.steps
    assert host == pytest.approx(1e-4)
    assert waiting.ended_s == pytest.approx(ahead.ended_s + 20 * host)


# ------------------------------------------------------------------------------------------- queues


def test_one_at_a_time_is_the_queue_of_the_books() -> None:
    """M/D/1: with Poisson arrivals and equal service of D seconds, utilised by rho, the mean wait is
    rho · D / (2 (1 - rho)) (Pollaczek and Khinchine)."""
    limits = dataclasses.replace(LIMITS, max_num_seqs=1)
    alone = World(limits, (ask("a", 0.0, [1] * 20, 1),), prefix_caching=False).simulate()
    service = alone.served[0].ended_s
    for rho in (0.4, 0.7):
        asks = poisson(rho / service, 12_000, 20, 1, seed=3)
        outcome = World(limits, asks, prefix_caching=False).simulate()
        waits = [served.ended_s - served.arrived_s - service for served in outcome.served]
        assert min(waits) > -1e-9 * outcome.ended_s
        assert mean(waits) == pytest.approx(rho * service / (2 * (1 - rho)), rel=0.1)


@pytest.mark.parametrize("seed", range(3))
def test_littles_law(seed: int) -> None:
    """Sequences in the scheduler, averaged over time, are arrivals a second times mean stay: the first is
    counted step by step, the second comes from the records."""
    world = World(LIMITS, poisson(60.0, 3000, 30, 20, seed))
    simulation = world.simulation()
    scheduler, clock = simulation.scheduler, simulation.clock
    plan, seen = scheduler.plan_step, [(0.0, 0)]
    area = [0.0]

    def counted() -> Step | None:
        step = plan()
        at_s, inside = seen[0]
        area[0] += inside * (clock() - at_s)
        seen[0] = clock(), len(scheduler.running) + len(scheduler.waiting)
        return step

    scheduler.plan_step = counted  # type: ignore[method-assign]
    outcome = simulation.run(world.asks)
    stays = mean(served.ended_s - served.sent_s for served in outcome.served)
    inside = area[0] / outcome.ended_s
    assert inside > 1
    assert inside == pytest.approx(len(outcome.served) / outcome.ended_s * stays, rel=0.01)


def test_twice_the_load_waits_longer() -> None:
    first = [
        mean(s.token_s[0] - s.arrived_s for s in World(LIMITS, poisson(rate, 300, 60, 30)).simulate().served)
        for rate in (5.0, 60.0, 240.0)
    ]
    assert first == sorted(first)


@pytest.mark.parametrize(
    ("limits", "held"),
    [
        ({"max_num_seqs": 2}, "max_num_seqs"),
        ({"num_pages": 20}, "num_pages"),
        ({"max_num_batched_tokens": 8}, "max_num_batched_tokens"),
    ],
)
def test_what_holds_requests_back_is_said(limits: dict, held: str) -> None:
    world = World(dataclasses.replace(LIMITS, **limits), poisson(300.0, 60, 60, 10), prefix_caching=False)
    shares = world.simulate().held_s
    assert max(shares, key=lambda name: shares[name]) == held
    assert not World(LIMITS, poisson(1.0, 10, 10, 2)).simulate().held_s


# --------------------------------------------------------------------------------------------- door


def test_a_closed_loop_keeps_its_places_taken() -> None:
    asks = tuple(ask(f"r{i}", 0.0, [i % 5] * 20, 15) for i in range(40))
    outcome = World(LIMITS, asks, concurrency=4).simulate()
    assert outcome.peaks.running + outcome.peaks.waiting >= 4
    for served in outcome.served:
        inside = [s for s in outcome.served if s.arrived_s <= served.arrived_s < s.ended_s]
        assert len(inside) <= 4
    ends = sorted(s.ended_s for s in outcome.served)
    assert [s.arrived_s for s in outcome.served[4:]] == ends[: len(asks) - 4]


def test_what_the_engine_would_refuse_is_refused() -> None:
    asks = (ask("long", 0.0, [1] * 600, 5), ask("fine", 0.0, [1] * 10, 5))
    refused, fine = World(LIMITS, asks).simulate().served
    assert "600 tokens" in str(refused.error)
    assert fine.finish_reason == "length"


def test_a_request_is_made_when_it_arrives_and_once() -> None:
    made: list[tuple[int, float]] = []

    class Making:
        at_s = 0.0
        in_vocabulary = False

        def __init__(self, index: int):
            self.index, self.at_s = index, 2.0 * index

        @property
        def request(self) -> Request:
            made.append((self.index, simulation.clock()))
            return ask(f"r{self.index}", self.at_s, [1] * 20, 5).request

    class Load:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int, /) -> Making:
            return Making(index)

    simulation = World(LIMITS, ()).simulation()
    served = simulation.run(Load()).served
    assert [index for index, _ in made] == [0, 1, 2, 3]
    assert [at_s for _, at_s in made] == [one.sent_s for one in served]
    plain = World(LIMITS, tuple(ask(f"r{i}", 2.0 * i, [1] * 20, 5) for i in range(4)))
    assert served == plain.simulate().served


@pytest.mark.parametrize(
    ("name", "change"),
    [("timeout_s", {"timeout_s": 5.0}), ("n", {"sampling": SamplingParams(n=2, max_tokens=3)})],
)
def test_what_cannot_be_simulated_is_said(name: str, change: dict) -> None:
    request = dataclasses.replace(ask("a", 0.0, [1], 3).request, **change)
    with pytest.raises(RequestError, match=f"{name} is not simulated"):
        World(LIMITS, (Ask(0.0, request),)).simulate()


def test_progress_is_told() -> None:
    world = World(LIMITS, poisson(5.0, 12, 10, 3))
    told: list[float] = []
    world.simulation().run(world.asks, advance=told.append)
    assert sum(told) == 12


def test_a_clock_never_goes_back() -> None:
    clock = VirtualClock()
    clock.wait_until(2.0)
    clock.wait_until(1.0)
    assert clock() == clock.now() == 2.0


# -------------------------------------------------------------------------------------------- speed


def llama3_70b(rate: float, seconds: float) -> Outcome:
    """On 8 H200, prompts of 512 tokens in the mean and answers of 256."""
    simulation, asks = overloaded(rate, seconds)
    return simulation.run(asks)


def overloaded(rate: float, seconds: float) -> tuple[Simulation, list[Ask]]:
    config = ModelConfig.from_hf(PRESETS["llama3-70b"])
    times = RooflineTime(ModelCosts(config, tensor_parallel=8), device_sheet("h200"))
    limits = Limits(
        num_pages=100_000, page_size=16, max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=8192,
        vocab_size=config.vocab_size,
    )  # fmt: skip
    draws, at_s, asks = random.Random(0), 0.0, []
    while at_s < seconds:
        at_s += draws.expovariate(rate)
        prompt = tuple(draws.choices(range(config.vocab_size), k=draws.randint(256, 768)))
        sampling = SamplingParams(max_tokens=draws.randint(128, 384), ignore_eos=True, temperature=0.0)
        name = f"r{len(asks)}"
        asks.append(Ask(at_s, Request(request_id=name, prompt_token_ids=prompt, sampling=sampling)))
    timer = StepTimer(times, shape_ladder(256, 2048, platform="gpu"))
    return Simulation(limits, timer, prefix_caching=True), asks


def test_it_is_a_hundred_times_as_fast_as_the_device() -> None:
    """In CPU time, since tests share their machine; some 250 times on one that does nothing else."""
    best = 0.0
    for _ in range(3):
        began = time.process_time()
        outcome = llama3_70b(4.0, 60.0)
        best = max(best, outcome.ended_s / (time.process_time() - began))
        if best >= 100:
            break
    assert best >= 100


def test_what_an_overload_costs_is_bounded_in_calls() -> None:
    """With 256 rows, and an end and a prompt in nearly each step, calls of functions are the time. Their
    number is the same on every machine: 1342 a request before pages were registered and let go in runs."""
    simulation, asks = overloaded(60.0, 15.0)
    profile = cProfile.Profile()
    outcome = profile.runcall(simulation.run, asks)
    assert outcome.peaks.running == 256
    calls = pstats.Stats(profile).total_calls / len(asks)  # type: ignore[attr-defined]
    assert calls < 1000
