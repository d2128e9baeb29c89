"""Which wall binds at the extremes, where the balance turns, and what each remedy does and leaves alone."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from stated import costs_of, windowed

from jaxinfer.core import ConfigError
from jaxinfer.planner import DEVICES, FLOOR, Plan, RooflineTime, Workload, device_sheet, plan, remedies
from jaxinfer.planner.plan import with_kv_of_pairs
from jaxinfer.presets import PRESETS

# ------------------------------------------------------------------------------------- remedies


def by_name(base: Plan) -> dict[str, Plan]:
    return {remedy.name: remedy.plan for remedy in remedies(base)}


@pytest.mark.parametrize("name", ["llama2-7b", "llama2-13b", "llama3.1-8b", "smollm2-135m"])
def test_fewer_kv_heads_divide_kv_bytes_exactly_and_leave_attention_as_it_was(name: str) -> None:
    base = plan(name, costs_of(name), DEVICES["a100-80g"], Workload(context=4096, batch=4))
    heads = base.costs.config.layers[0].num_kv_heads
    found = by_name(base)
    grouped = {remedy: other for remedy, other in found.items() if remedy.startswith(("GQA-", "MQA"))}
    assert "MQA" in grouped
    for remedy, other in grouped.items():
        k = 1 if remedy == "MQA" else int(remedy.removeprefix("GQA-"))
        assert other.costs.kv_bytes_per_token * heads == base.costs.kv_bytes_per_token * k
        assert other.prefill.attention_operations == base.prefill.attention_operations
        assert other.decode.floor_s < base.decode.floor_s


def test_no_fewer_kv_heads_than_devices_are_proposed() -> None:
    """Each device needs one of its own, so that fewer would change no byte of any device."""
    costs = costs_of("llama2-70b", tensor_parallel=4)
    found = by_name(plan("llama2-70b", costs, DEVICES["a100-80g"], Workload()))
    assert [name for name in found if name.startswith(("GQA-", "MQA"))] == ["GQA-4"]
    assert found["GQA-4"].costs.kv_bytes_per_token * 2 == costs.kv_bytes_per_token


def test_each_remedy_moves_what_it_is_for() -> None:
    base = plan("llama2-7b", costs_of("llama2-7b"), DEVICES["a100-80g"], Workload(context=8192, batch=8))
    found = by_name(base)
    assert found["fp8_e4m3 KV"].costs.kv_bytes_per_token * 2 == base.costs.kv_bytes_per_token
    assert found["int8 KV"].costs.kv_bytes_per_token * 256 == base.costs.kv_bytes_per_token * 132
    for name in ("fp8 weights", "int8 weights", "int4 weights"):
        assert found[name].memory.weight_bytes < 0.6 * base.memory.weight_bytes
        assert found[name].memory.num_pages > base.memory.num_pages
        assert found[name].decode.floor_s < base.decode.floor_s
        assert found[name].prefill.operations == base.prefill.operations
    assert found["half the batch"].decode.expected_s < base.decode.expected_s
    assert found["half the batch"].tokens_per_s < base.tokens_per_s
    assert found["twice the batch"].decode.expected_s > base.decode.expected_s
    assert found["twice the batch"].tokens_per_s > base.tokens_per_s
    quarter, four = found["a quarter of the chunk"], found["four times the chunk"]
    assert quarter.stall_s < base.stall_s < four.stall_s
    assert quarter.batch_ttft_s > base.batch_ttft_s > four.batch_ttft_s
    assert found["tensor parallel 2"].decode.floor_s == pytest.approx(base.decode.floor_s / 2, rel=1e-3)


def test_layers_that_share_hold_half_and_read_as_much() -> None:
    base = plan("llama2-7b", costs_of("llama2-7b"), DEVICES["a100-80g"], Workload(context=8192, batch=4))
    found = by_name(base)["CLA2"]
    assert found.costs.kv_bytes_per_token * 2 == base.costs.kv_bytes_per_token
    assert found.memory.weight_bytes == base.memory.weight_bytes - 16 * 2 * 4096 * 4096 * 2
    assert 0 < base.decode.floor_s - found.decode.floor_s < 0.1 * base.decode.floor_s
    odd = dataclasses.replace(base.costs.config, layers=base.costs.config.layers[:3])
    assert with_kv_of_pairs(odd).sharing_layers == (1,)
    windows = [
        dataclasses.replace(layer, window=64 * (index == 1) or None) for index, layer in enumerate(odd.layers)
    ]
    assert with_kv_of_pairs(dataclasses.replace(odd, layers=tuple(windows))).sharing_layers == (1,)
    assert with_kv_of_pairs(with_kv_of_pairs(odd)) == with_kv_of_pairs(odd)


def test_what_loses_accuracy_says_so() -> None:
    base = plan("llama2-7b", costs_of("llama2-7b"), DEVICES["h100"], Workload())
    lossy = [remedy for remedy in remedies(base) if remedy.name.endswith(("KV", "weights"))]
    assert len(lossy) == 5
    assert all("evaluate" in remedy.note for remedy in lossy)


# ---------------------------------------------------------------------------------------- walls


def walls(name: str, device: str, **workload: Any) -> Plan:
    return plan(name, costs_of(name), DEVICES[device], Workload(**workload))


def test_one_long_decode_is_bound_by_bandwidth() -> None:
    got = walls("llama3.1-8b", "h200", context=100_000, batch=1)
    assert got.walls[0] == got.decode.wall == "bandwidth"
    assert got.decode.intensity < 0.1 * got.sheet.ridge("bfloat16")


@pytest.mark.parametrize("device", ["a100-80g", "h100", "h200", "b200", "l4"])
def test_a_prompt_of_2k_is_bound_by_compute(device: str) -> None:
    got = walls("llama3.1-8b", device, context=2048, batch=1)
    assert got.prefill.wall == "compute"
    assert got.prefill.intensity > got.sheet.ridge("bfloat16")


def test_a_tiny_model_waits_for_its_host() -> None:
    got = walls("smollm2-135m", "h100", context=128, batch=1)
    assert got.walls == ("scheduling", "scheduling")
    assert got.decode.expected_s == pytest.approx(1e-3)


def test_too_many_long_sequences_do_not_fit() -> None:
    got = walls("llama2-7b", "a100-80g", context=32_768, batch=16)
    assert got.walls[0] == "capacity"
    assert got.memory.largest_batch < 16
    assert walls("llama2-70b", "a100-80g", context=128, batch=1).walls[0] == "capacity"
    assert not walls("llama2-70b", "a100-80g", context=128, batch=1).memory.fits


def test_a_slow_link_binds_what_is_split() -> None:
    costs = costs_of("llama3.1-70b", tensor_parallel=8)
    over = plan("llama3.1-70b", costs, DEVICES["l40s"], Workload(context=8192, batch=8))
    assert over.prefill.wall == "exchange"
    assert (
        plan("llama3.1-70b", costs, DEVICES["h100"], Workload(context=8192, batch=8)).prefill.wall
        == "compute"
    )


@pytest.mark.parametrize("device", ["a100-80g", "h100", "l4"])
@pytest.mark.parametrize("name", ["llama2-7b", "llama3.1-70b", "llama3.2-1b"])
def test_the_critical_batch_is_where_the_weights_products_turn(name: str, device: str) -> None:
    """Below it a step's linear part takes the time of reading the weights, whatever the batch; above it, the
    time of the products."""
    costs, sheet = costs_of(name), DEVICES[device]
    critical = plan(name, costs, sheet, Workload(context=16, batch=1)).critical_batch
    time = RooflineTime(costs, sheet, FLOOR)
    weights = (costs.layer_bytes + costs.head_bytes) / sheet.bandwidth

    def linear(batch: int) -> float:
        return time.parts(costs.decode_work([100] * batch)).linear

    assert linear(1) == linear(math.floor(critical * 0.999)) == pytest.approx(weights)
    above = math.ceil(critical * 1.001) + 1
    products = 2 * (costs.layer_params + costs.head_params) * above / sheet.rate("bfloat16")
    assert linear(above) == pytest.approx(products)
    assert products > weights
    assert linear(2 * above) == pytest.approx(2 * linear(above))


def test_the_critical_batch_at_context_balances_the_whole_step() -> None:
    """GQA with short contexts gets there later than without K/V; MHA never does (its attention is bound by
    bytes at any batch)."""
    costs, sheet = costs_of("llama3.1-8b"), DEVICES["h100"]
    got = plan("llama3.1-8b", costs, sheet, Workload(context=100, batch=1, output=1))
    assert got.critical_batch_at_context is not None
    assert got.critical_batch_at_context > got.critical_batch
    work = costs.work([(100, 1)] * round(got.critical_batch_at_context), round(got.critical_batch_at_context))
    moving, computing = (
        costs.moved_bytes(work) / sheet.bandwidth,
        costs.operations(work) / sheet.rate("bfloat16"),
    )
    assert moving == pytest.approx(computing, rel=5e-3)
    assert walls("llama2-7b", "a100-80g", context=4096, batch=1).critical_batch_at_context is None


# --------------------------------------------------------------------------------- even length


@pytest.mark.parametrize("name", PRESETS)
def test_the_even_length_is_where_attention_overtakes_the_layers(name: str) -> None:
    costs = costs_of(name)
    config = costs.config
    length = costs.even_length
    assert length is not None
    closed = costs.layer_params / (config.num_layers * config.num_heads * config.head_dim)
    assert length == pytest.approx(closed, rel=1e-3)
    for n, more in ((length, True), (length - 1, False)):
        attention = costs.prefill_operations(n)[1]
        assert (attention >= 2 * costs.layer_params * n) is more


def test_windows_put_the_even_length_off_or_away() -> None:
    costs = costs_of("llama2-7b")
    assert windowed(costs, 4096).even_length is None
    half, whole = windowed(costs, 4096, every=2).even_length, costs.even_length
    assert half is not None
    assert whole is not None
    assert half > whole


# ------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"context": 0}, "context must be at least 1"),
        ({"batch": 3000}, "cannot decode within max_num_batched_tokens 2048"),
        ({"memory_utilization": 1.5}, "memory_utilization must lie in"),
    ],
)
def test_a_workload_that_cannot_be_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Workload(**changes)


def test_an_unknown_device_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"'a1000'.*a100-80g"):
        device_sheet("a1000")
