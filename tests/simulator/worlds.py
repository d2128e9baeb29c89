"""Small simulated worlds, and the engine put through the same: what the tests of the simulator share."""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from jaxinfer.config import LayerConfig, LinearRope, ModelConfig, shape_ladder
from jaxinfer.core import Limits, Request, RequestError, SamplingParams
from jaxinfer.engine import Engine
from jaxinfer.planner import Efficiency, ModelCosts, RooflineTime, device_sheet
from jaxinfer.simulator import Ask, Outcome, SimulatedRunner, Simulation, StepTimer, VirtualClock

VOCAB = 1000
IDS = 20  # prompts hold ids below; what is sampled is above (`token_of`)


def model(*windows: int | None) -> ModelConfig:
    """A small model with a layer for each of `windows`."""
    return ModelConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_heads=4,
        head_dim=16,
        layers=tuple(LayerConfig(2, window) for window in windows or (None,)),
        max_position=4096,
        rms_norm_eps=1e-5,
        rope=LinearRope(theta=1e4, factor=1.0),
        tie_word_embeddings=True,
    )


SLOW = dataclasses.replace(device_sheet("l4"), bandwidth=1e7, rates={"bfloat16": 1e9})
"""On which each key that is read shows in the time of a small model's step."""


@dataclass(frozen=True)
class World:
    """What is simulated, and how."""

    limits: Limits
    asks: tuple[Ask, ...]
    policy: Any = "fcfs"
    prefix_caching: bool = True
    asynchronous: bool = True
    concurrency: int | None = None
    windows: tuple[int | None, ...] = (None,)

    def timer(self) -> StepTimer:
        ladder = shape_ladder(self.limits.max_num_seqs, self.limits.max_num_batched_tokens)
        times = RooflineTime(ModelCosts(model(*self.windows)), SLOW, Efficiency(host_step_s=1e-4))
        return StepTimer(times, ladder, asynchronous=self.asynchronous)

    def simulation(self, *, cruise: bool = True) -> Simulation:
        return Simulation(
            self.limits,
            self.timer(),
            policy=self.policy,
            prefix_caching=self.prefix_caching,
            cruise=cruise,
        )

    def simulate(self, *, cruise: bool = True) -> Outcome:
        return self.simulation(cruise=cruise).run(self.asks, concurrency=self.concurrency)


@dataclass
class Heard:
    """What the engine told of one request."""

    arrived_s: float
    token_s: list[float]
    ended_s: float = 0.0
    cached_tokens: int = 0
    preemptions: int = 0
    reason: str | None = None


def through_the_engine(world: World, runner: Any = None) -> tuple[list[Heard], dict[str, Any]]:
    """The same world with a real Engine over a SimulatedRunner: what each request heard, and the engine's
    `stats`. `runner(timer, limits, clock)` makes another runner."""
    clock = VirtualClock()
    device = (runner or SimulatedRunner)(world.timer(), world.limits, clock)
    engine = Engine(
        device, world.limits, seed=0, clock=clock, policy=world.policy,
        prefix_caching=world.prefix_caching, asynchronous=world.asynchronous,
    )  # fmt: skip
    heard: dict[str, Heard] = {}
    waiting = deque(world.asks)
    free = None if world.concurrency is None else deque([0.0] * world.concurrency)
    while waiting or engine.has_work:
        while waiting and (free is None or free):
            arrived = free[0] if free else waiting[0].at_s
            if arrived > clock():
                break
            if free:
                free.popleft()
            request = waiting.popleft().request
            heard[request.request_id] = Heard(arrived, [])
            try:
                engine.add(request)
            except RequestError:
                heard[request.request_id].ended_s = clock()
                if free is not None:
                    free.append(clock())
        if not engine.has_work:
            if waiting:
                clock.wait_until(free[0] if free else waiting[0].at_s)
            continue
        for event in engine.step():
            one = heard[event.request_id]
            one.token_s += [clock()] * len(event.token_ids)
            if event.metrics is not None:
                one.ended_s, one.reason = clock(), event.finish_reason
                one.cached_tokens = event.metrics.cached_tokens
                one.preemptions = event.metrics.preemptions
                if free is not None:
                    free.append(clock())
        assert not engine.check()
    return [heard[ask.request.request_id] for ask in world.asks], engine.stats()


def ask(name: str, at_s: float, prompt: Seq[int], output: int, priority: int = 0) -> Ask:
    sampling = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0)
    request = Request(request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling, priority=priority)
    return Ask(at_s, request)


LIMITS = st.builds(
    Limits,
    num_pages=st.integers(3, 60),
    page_size=st.sampled_from([1, 2, 4, 8]),
    max_num_seqs=st.integers(1, 8),
    max_num_batched_tokens=st.one_of(st.integers(1, 8), st.integers(8, 64)),
    max_model_len=st.integers(8, 80),
    vocab_size=st.just(VOCAB),
    window=st.sampled_from([None, None, None, 5]),
)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Any small world. Prompts share beginnings, arrivals come in bursts and with gaps."""
    shared = [draw(st.lists(st.integers(0, IDS - 1), min_size=1, max_size=30)) for _ in range(2)]
    at_s, asks = 0.0, []
    concurrency = draw(st.sampled_from([None, None, 1, 3]))
    for index in range(draw(st.integers(1, 14))):
        if concurrency is None:
            at_s += draw(st.sampled_from([0.0, 0.0, 0.003, 0.05, 0.4]))
        prompt = draw(st.sampled_from(shared))[: draw(st.integers(0, 30))]
        prompt = [*prompt, *draw(st.lists(st.integers(0, IDS - 1), max_size=12))] or [1]
        asks.append(ask(f"r{index}", at_s, prompt, draw(st.integers(1, 50)), draw(st.integers(-1, 1))))
    limits = draw(LIMITS)
    return World(
        limits=limits,
        asks=tuple(asks),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        prefix_caching=draw(st.booleans()),
        asynchronous=draw(st.booleans()),
        concurrency=concurrency,
        windows=draw(st.sampled_from([(None,), (None, 6), (4, None, 9)])),
    )


def crowded(seed: int) -> World:
    """A world made to hurt: prompts alike that arrive together, and a pool in which they evict each other."""
    draw = random.Random(seed)
    size = draw.choice([1, 2, 4])
    stems = [
        [draw.randrange(IDS) for _ in range(draw.randint(size, 8 * size + 3))]
        for _ in range(draw.randint(1, 3))
    ]
    at_s, asks = 0.0, []
    for index in range(draw.randint(10, 60)):
        at_s += draw.choice([0, 0, 0, 0.01, 0.05, 0.2])
        stem = draw.choice(stems)
        stem = stem[: draw.choice([len(stem), len(stem), draw.randint(1, len(stem))])]
        prompt = stem + [draw.randrange(IDS) for _ in range(draw.choice([0, 0, 1, 5]))]
        asks.append(ask(f"r{index}", at_s, prompt, draw.randint(1, 40), draw.randint(-1, 1)))
    limits = Limits(
        num_pages=draw.randint(12, 70) * 4 // size,
        page_size=size,
        max_num_seqs=draw.choice([2, 4, 8, 16]),
        max_num_batched_tokens=draw.choice([4, 8, 16, 64]),
        max_model_len=120,
        vocab_size=VOCAB,
    )
    return World(
        limits=limits,
        asks=tuple(asks),
        policy=draw.choice(["fcfs", "fcfs", "priority"]),
        asynchronous=draw.choice([True, True, False]),
        concurrency=draw.choice([None, None, 6]),
    )
