"""What steps are said to move and compute, against counting it key by key; and the limits of the machine."""

from __future__ import annotations

import dataclasses
import itertools
import random
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from tiny import TINY, engine_over, greedy, prompts, random_tensors, tiny_config, tiny_runner

from jaxinfer.config import LayerConfig
from jaxinfer.core import Slice, StepPlan
from jaxinfer.planner import keys_of
from jaxinfer.runtime import JaxRunner, roofline
from jaxinfer.runtime import runner as runner_module
from jaxinfer.runtime.roofline import measure_machine

pytestmark = pytest.mark.usefixtures("compile_cache")


def piece(start: int, count: int, **more: Any) -> Slice:
    return Slice(0, start, (1,) * count, (1,), **{"emit": False, "num_prompt": 1, **more})


@pytest.mark.parametrize("window", [None, 1, 2, 5, 17, 1000])
def test_keys_are_those_that_the_queries_see(window: int | None) -> None:
    drawn = random.Random(5)
    for _ in range(200):
        slices = tuple(
            piece(drawn.randrange(30), drawn.choice([1, 1, 2, 7, 30])) for _ in range(drawn.randrange(1, 5))
        )
        read = seen = 0
        for one in slices:
            views = [
                set(range(0 if window is None else max(0, at - window + 1), at + 1))
                for at in range(one.start, one.start + one.count)
            ]
            read += len(set().union(*views))
            seen += sum(map(len, views))
        each = [keys_of(one.start, one.count, window) for one in slices]
        assert (sum(r for r, _ in each), sum(s for _, s in each)) == (read, seen)


def cost_of(runner: JaxRunner, *slices: Slice) -> tuple[float, float]:
    cost = runner._cost
    moved, operations = cost.moved_bytes, cost.operations
    cost.add(StepPlan(0, slices))
    return cost.moved_bytes - moved, cost.operations - operations


@pytest.mark.parametrize("tied", [False, True])
def test_the_parts_of_a_step_add_up(tied: bool) -> None:
    """By hand, for float32: TINY has 2 layers of 8 heads and 2 K/V heads, all of 16."""
    config = tiny_config(tie_word_embeddings=tied)
    runner = tiny_runner(config)
    d, v = config.hidden_size, config.vocab_size
    norms = 2 * config.num_layers * d
    layers = 4 * (config.num_params - (1 if tied else 2) * v * d - d)
    key, key_operations = 2 * 2 * 2 * 16 * 4, 2 * 4 * 8 * 16
    products = config.num_params - (1 if tied else 2) * v * d - d - norms
    assert runner.stats()["param_bytes"] == 4 * config.num_params

    prefill = cost_of(runner, piece(0, 6))
    assert prefill == (layers + 6 * key, 2 * products * 6 + 21 * key_operations)
    decode = cost_of(runner, piece(9, 1, emit=True), piece(4, 1, emit=True))
    head = 4 * (v * d + d)
    assert decode == (layers + head + 15 * key, 2 * (products * 2 + v * d * 2) + 15 * key_operations)
    scored = cost_of(runner, piece(0, 6, targets=(1, 1, 1)))
    assert scored[0] - prefill[0] == head
    assert scored[1] - prefill[1] == 2 * v * d * 3


def test_layers_with_a_window_read_less() -> None:
    layers = (LayerConfig(num_kv_heads=2, window=4), LayerConfig(num_kv_heads=4))
    runner = tiny_runner(dataclasses.replace(TINY, layers=layers))
    near, far = (cost_of(runner, piece(start, 1)) for start in (3, 63))
    assert far[0] - near[0] == 60 * 2 * 4 * 16 * 4, "of the layer without one alone"
    assert far[1] - near[1] == 60 * 4 * 8 * 16


def test_quantised_pages_and_weights_count_as_they_lie_in_memory() -> None:
    wide, narrow = tiny_runner(), tiny_runner(kv_dtype="int8")
    key = [cost_of(r, piece(64, 1))[0] - cost_of(r, piece(0, 1))[0] for r in (wide, narrow)]
    assert key[0] == 64 * 2 * 2 * 2 * 16 * 4
    assert 0.25 * key[0] <= key[1] < 0.4 * key[0], "a byte an element, and scales"


def test_an_engine_counts_its_real_tokens() -> None:
    runner = tiny_runner()
    llm = engine_over(runner)
    llm.generate(prompts([11], vocab_size=TINY.vocab_size), greedy(3), progress=False)
    stats = llm.stats()
    tokens = 11 + 2
    products = runner._cost.costs.layer_params * tokens + runner._cost.costs.head_params * 3
    keys = sum(range(1, tokens + 1))
    assert stats["operations"] == 2 * products + 2 * 4 * 8 * 16 * keys
    assert stats["moved_bytes"] > 3 * runner._cost.costs.layer_bytes


# ---------------------------------------------------------------------------------------- the machine


def test_the_machine_is_measured_and_is_no_compile_too_many() -> None:
    runner = tiny_runner()
    llm = engine_over(runner)
    before = llm.stats()
    assert before["bandwidth"] is before["matmul_rate"] is None
    jax.clear_caches()
    llm.measure_machine()
    stats = llm.stats()
    assert 1e8 < stats["bandwidth"] < 1e13
    assert 1e8 < stats["matmul_rate"] < 1e15
    assert stats["compiles_after_warmup"] == before["compiles_after_warmup"]
    assert stats["programs"] == before["programs"]
    assert llm.generate([[1, 2, 3]], greedy(2), progress=False)[0].outputs[0].finish_reason == "length"


def test_no_room_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def full(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(runner_module, "measure_machine", full)
    runner = tiny_runner()
    runner.measure_machine()
    assert runner.stats()["bandwidth"] is None
    assert "no MBU" in caplog.text


def test_the_weights_own_type_is_what_is_multiplied() -> None:
    assert measure_machine("cpu", "bfloat16").dtype == "bfloat16"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_measuring_beside_a_full_pool_takes_little_memory(dtype: str) -> None:
    """On a GPU the pool has its memory before: of 0.9 of what was free, the rest must do."""
    swept = jax.ShapeDtypeStruct((roofline.SWEPT_BYTES // 4,), jnp.float32)
    square = jax.ShapeDtypeStruct((roofline.SIDE, roofline.SIDE), dtype)
    for step, arguments in ((jnp.negative, (swept, 2)), (jnp.dot, (square, 2, square))):
        memory = roofline.repeated(step).lower(*arguments).compile().memory_analysis()
        taken = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        # XLA:CPU widens bfloat16 for its products; a GPU does not.
        assert taken + (memory.temp_size_in_bytes if dtype == "float32" else 0) < 280 << 20


def test_one_of_many_steps_is_timed_by_the_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    x = jnp.ones((1 << 20,), jnp.float32)
    seconds = roofline.seconds_of_one(jnp.negative, x)
    assert 1e-6 < seconds < 0.5
    assert x.is_deleted(), "it is swept in place"
    ticks = itertools.count()  # a clock that says the same of any number of steps
    monkeypatch.setattr(roofline, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    with pytest.raises(ArithmeticError):
        roofline.seconds_of_one(jnp.negative, jnp.ones(1))


def test_weights_in_random_tensors_are_all_counted() -> None:
    """The head and the layers are all that a step reads; the embedding is looked up."""
    runner = tiny_runner(tensors=random_tensors(TINY))
    cost = runner._cost.costs
    embedding = 4 * TINY.vocab_size * TINY.hidden_size
    assert cost.layer_bytes + cost.head_bytes + embedding == runner.stats()["param_bytes"]
