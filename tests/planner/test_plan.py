"""What must hold of every plan, whatever the model, the device and the load: times and memory."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stated import costs_of, windowed

from jaxinfer.core import ConfigError, Limits
from jaxinfer.engine.pages import PagePool
from jaxinfer.planner import (
    DEVICES,
    FLOOR,
    DeviceSheet,
    ModelCosts,
    RooflineTime,
    Steps,
    Workload,
    device_sheet,
    plan,
    plan_memory,
    predict,
    remedies,
    tokens_per_s,
    tpot_s,
    ttft_s,
)
from jaxinfer.planner.plots import longest_that_fits
from jaxinfer.planner.report import as_text
from jaxinfer.presets import PRESETS

EXACT = Steps(padded=False)
"""Steps without padding, as a floor wants them."""


@st.composite
def models(draw: st.DrawFn) -> ModelCosts:
    costs = costs_of(
        draw(st.sampled_from(sorted(PRESETS))),
        kv_dtype=draw(st.sampled_from(["bfloat16", "int8", "fp8_e4m3"])),
        quantization=draw(st.sampled_from([None, "int8", "int4", "fp8"])),
    )
    costs = windowed(costs, draw(st.sampled_from([None, None, 100, 4096])), draw(st.sampled_from([1, 2])))
    try:
        return dataclasses.replace(costs, tensor_parallel=draw(st.sampled_from([1, 1, 2, 8])))
    except ConfigError:  # nine heads
        return costs


sheets = st.sampled_from(sorted(DEVICES)).map(device_sheet)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    budget = draw(st.integers(1, 5000))
    return Workload(
        context=draw(st.integers(1, 20_000)),
        batch=draw(st.integers(1, min(budget, 40))),
        output=draw(st.integers(1, 600)),
        max_num_batched_tokens=max(budget, 200),
        memory_utilization=draw(st.floats(0.1, 1.0)),
    )


# --------------------------------------------------------------------------------------- times


@given(models(), sheets, workloads())
def test_nothing_is_expected_to_be_faster_than_the_floor(
    costs: ModelCosts, sheet: DeviceSheet, workload: Workload
) -> None:
    got = plan("a model", costs, sheet, workload)
    for phase in (got.prefill, got.decode):
        assert 0 < phase.floor_s <= phase.expected_s
        assert phase.floor_s * sheet.bandwidth >= phase.moved_bytes * (1 - 1e-9)
        assert phase.floor_s * sheet.rate(costs.dtype) >= phase.operations * (1 - 1e-9)
    assert got.batch_ttft_s >= got.prefill.expected_s * (1 - 1e-9)
    assert 0 < got.mbu <= 1 + 1e-9
    assert 0 < got.mfu <= 1 + 1e-9
    assert 0 < got.prefill_mfu <= 1 + 1e-9
    # A batch that always decodes is the most that can come of it.
    assert got.tokens_per_s <= workload.batch / min(got.decode.expected_s, got.batch_ttft_s) * (1 + 1e-9)


@given(models(), sheets, st.integers(1, 20_000), st.integers(1, 3000), st.integers(16, 5000))
def test_a_longer_prompt_never_has_its_first_token_sooner(
    costs: ModelCosts, sheet: DeviceSheet, length: int, more: int, budget: int
) -> None:
    for time in (RooflineTime(costs, sheet), RooflineTime(costs, sheet, FLOOR)):
        for padded in (True, False):
            steps = Steps(8, budget, padded=padded)
            short, long = (ttft_s(time, [n], steps)[0] for n in (length, length + more))
            assert short <= long * (1 + 1e-9)


@given(
    models(), sheets, st.integers(1, 200), st.integers(0, 55), st.integers(1, 30_000), st.integers(0, 9999)
)
def test_a_token_never_takes_less_with_more_sequences_or_longer_ones(
    costs: ModelCosts, sheet: DeviceSheet, batch: int, more: int, context: int, longer: int
) -> None:
    for time in (RooflineTime(costs, sheet), RooflineTime(costs, sheet, FLOOR)):
        for steps in (Steps(), EXACT):
            base = tpot_s(time, batch, context, 100, steps)
            assert base <= tpot_s(time, batch + more, context, 100, steps)
            assert base <= tpot_s(time, batch, context + longer, 100, steps)


@given(models(), sheets, workloads(), st.floats(1.0, 8.0), st.floats(1.0, 8.0))
def test_a_better_device_is_never_slower(
    costs: ModelCosts, sheet: DeviceSheet, workload: Workload, bandwidth: float, rate: float
) -> None:
    base = plan("a model", costs, sheet, workload)
    rates = {name: value * rate for name, value in sheet.rates.items()}
    for changes in ({"bandwidth": sheet.bandwidth * bandwidth}, {"rates": rates}):
        better = plan("a model", costs, dataclasses.replace(sheet, **changes), workload)
        for name in ("prefill", "decode"):
            assert getattr(better, name).floor_s <= getattr(base, name).floor_s * (1 + 1e-9)
            assert getattr(better, name).expected_s <= getattr(base, name).expected_s * (1 + 1e-9)
        assert better.batch_ttft_s <= base.batch_ttft_s * (1 + 1e-9)
        assert better.stall_s <= base.stall_s * (1 + 1e-9)
        assert better.tokens_per_s >= base.tokens_per_s * (1 - 1e-9)


def test_the_stall_is_that_of_the_last_chunk() -> None:
    """Which sees the whole prompt before it: at 32K it takes more than the mean chunk, not as long as the
    first one, which sees nothing."""
    costs, sheet = costs_of("llama2-7b"), DEVICES["a100-80g"]
    long = plan("llama2-7b", costs, sheet, Workload(context=32768, batch=1))
    assert long.stall_s > long.prefill.expected_s / (32768 / 2048)
    short = plan("llama2-7b", costs, sheet, Workload(context=2048, batch=1))
    assert long.stall_s > 1.5 * short.stall_s


@given(st.lists(st.integers(1, 700), min_size=1, max_size=40), st.integers(40, 600))
def test_first_tokens_come_in_the_order_of_arrival(lengths: list[int], budget: int) -> None:
    """Whatever the lengths, the steps fit the engine's buckets, and no later prompt is served before."""
    time = RooflineTime(costs_of("llama3.2-1b"), DEVICES["l4"])
    firsts = ttft_s(time, lengths, Steps(40, budget))
    assert firsts == sorted(firsts)
    assert firsts[0] > 0


@given(models(), sheets, st.integers(1, 60), st.integers(1, 3000), st.integers(1, 200))
def test_output_never_exceeds_a_batch_a_step(
    costs: ModelCosts, sheet: DeviceSheet, batch: int, context: int, output: int
) -> None:
    time = RooflineTime(costs, sheet)
    rate = tokens_per_s(time, batch, context, output)
    whole = ttft_s(time, [context] * batch)[-1] + (output - 1) * tpot_s(time, batch, context, output)
    assert rate == pytest.approx(batch * output / whole)


# -------------------------------------------------------------------------------------- memory


@given(models(), sheets, st.integers(2, 40_000), st.sampled_from([1, 16, 64]), st.floats(0.1, 1.0))
def test_the_pool_stays_within_its_share_and_the_largest_batch_fits(
    costs: ModelCosts, sheet: DeviceSheet, length: int, page_size: int, share: float
) -> None:
    """The largest batch is allocated from the engine's own pool; one sequence more finds no pages."""
    costs = dataclasses.replace(costs, page_size=page_size)
    got = plan_memory(
        costs, sheet.memory_bytes, max_model_len=length, max_num_seqs=64, memory_utilization=share
    )
    free = max(0, sheet.memory_bytes - got.weight_bytes)
    assert got.num_pages * got.page_bytes == got.pool_bytes <= share * free
    assert got.page_bytes == costs.kv_bytes_per_token * page_size
    limits = Limits(
        num_pages=max(2, got.num_pages), page_size=page_size, max_num_seqs=64, max_num_batched_tokens=2048,
        max_model_len=length, vocab_size=costs.config.vocab_size, window=costs.config.window,
    )  # fmt: skip
    assert limits.pages_per_sequence == got.pages_per_sequence
    assert got.largest_batch <= 64
    if got.num_pages < 2:
        assert got.largest_batch == 0
        return
    pool = PagePool(limits.num_pages)
    for _ in range(got.largest_batch):
        assert pool.allocate(limits.pages_per_sequence) is not None
    assert got.largest_batch == 64 or pool.allocate(limits.pages_per_sequence) is None


def test_a_pool_is_no_larger_than_the_sequences_can_use() -> None:
    """Page 0 belongs to nobody, so that all of them need one page more than theirs."""
    got = plan_memory(costs_of("smollm2-135m"), 80 * 2**30, max_model_len=100, max_num_seqs=4)
    assert (got.num_pages, got.largest_batch) == (4 * 7 + 1, 4)


def test_windows_bound_what_a_sequence_holds_and_reads() -> None:
    costs = windowed(costs_of("mistral-7b"), 4096)
    short, long = (plan_memory(costs, 80 * 2**30, max_model_len=n) for n in (16_384, 131_072))
    assert short.pages_per_sequence == long.pages_per_sequence
    bound = 4096 + 2048 + 2 * 16  # the window, a chunk behind it, and the ends of both
    assert long.pages_per_sequence * 16 <= bound
    assert costs.attention([(20_000, 1)]) == costs.attention([(100_000, 1)])
    assert costs.attention([(100_000, 1)])[0] == 4096 * costs.kv_bytes_per_token
    # One layer that sees everything keeps every page; it alone reads more.
    mixed = windowed(costs, 4096, every=32)
    assert plan_memory(mixed, 80 * 2**30, max_model_len=131_072).pages_per_sequence == 131_072 // 16
    extra = mixed.attention([(100_000, 1)])[0] - costs.attention([(100_000, 1)])[0]
    assert extra == (100_001 - 4096) * costs.kv_bytes_per_token / 32


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("name", ["llama2-7b", "llama3.1-70b"])
def test_devices_share_what_there_is(name: str, devices: int) -> None:
    one, part = costs_of(name), costs_of(name, tensor_parallel=devices)
    assert part.kv_bytes_per_token * devices == one.kv_bytes_per_token
    assert part.weight_bytes == pytest.approx(one.weight_bytes / devices, rel=1e-3)  # norms are repeated
    assert sum(part.prefill_operations(5000)) * devices == sum(one.prefill_operations(5000))
    assert one.exchanged_bytes(one.work([(0, 5)], 1)) == 0 < part.exchanged_bytes(part.work([(0, 5)], 1))
    memory = plan_memory(part, 80 * 2**30, max_model_len=4096)
    assert memory.num_pages > plan_memory(one, 80 * 2**30, max_model_len=4096).num_pages


def test_a_limit_of_the_pool_leaves_room_for_one_sequence_as_the_engine_does() -> None:
    costs = costs_of("smollm2-135m")
    got = plan_memory(costs, 80 * 2**30, max_model_len=4096, pool_limit_bytes=10 * page_of(costs))
    assert (got.num_pages, got.largest_batch) == (257, 1)
    more = plan_memory(costs, 80 * 2**30, max_model_len=4096, pool_limit_bytes=600 * page_of(costs))
    assert (more.num_pages, more.largest_batch) == (600, 2)


def page_of(costs: ModelCosts) -> int:
    return round(costs.page_bytes)


def test_remedies_are_planned_under_the_same_limit_of_the_pool() -> None:
    """They showed batches that only a pool without the limit would hold."""
    costs, sheet = costs_of("smollm2-135m"), DEVICES["h200"]
    limit = 1000 * page_of(costs)
    base = plan("smollm2-135m", costs, sheet, Workload(context=1000, output=24), pool_limit_bytes=limit)
    assert base.memory.largest_batch == 999 // 64
    batches = {remedy.name: remedy.plan.memory.largest_batch for remedy in remedies(base)}
    assert batches["half the batch"] == batches["twice the batch"] == base.memory.largest_batch
    assert batches["MQA"] == (3 * 1000 - 1) // 64
    assert longest_that_fits(base) == 999 // 8 * 16 - 24


def test_prompts_of_too_many_steps_are_refused_before_they_are_worked_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costs, sheet = costs_of("llama3-8b"), DEVICES["h200"]
    with pytest.raises(ConfigError, match="1000000000 tokens take 488281 steps of 2048 tokens, and at most"):
        plan("llama3-8b", costs, sheet, Workload(context=10**9, batch=8))
    # A remedy that would take too many is left out, and the others stay.
    monkeypatch.setattr(predict, "MOST_STEPS", 100)
    large = plan("llama3-8b", costs, sheet, Workload(context=16_384, batch=10))
    assert {"a quarter of the chunk", "MQA"} & {remedy.name for remedy in remedies(large)} == {"MQA"}


def test_a_step_beside_those_that_decode_holds_no_more_than_their_prompts() -> None:
    """A chunk longer than the prompts counted attention to keys that are not there."""
    costs, sheet = costs_of("llama3-8b"), DEVICES["h200"]
    for tokens in (512, 8192):
        short = plan("m", costs, sheet, Workload(context=1, batch=8, max_num_batched_tokens=tokens))
        assert short.stall_s <= short.decode.expected_s * 1.1


def test_the_most_sequences_are_those_that_the_pool_is_for() -> None:
    workload = Workload(context=128, batch=512, max_num_batched_tokens=8192)
    made = plan("m", costs_of("llama3-8b"), DEVICES["h200"], workload)
    assert made.memory.largest_batch == made.memory.most_sequences == 512
    assert "at most 512 sequences" in as_text(made, [])
