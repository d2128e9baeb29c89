"""`plan`: does it fit, which wall binds, how fast at best, how fast to expect, and what each remedy buys."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jaxinfer.config import LayerConfig, ModelConfig
from jaxinfer.core import ConfigError
from jaxinfer.planner.costs import BYTES, ModelCosts, StepWork
from jaxinfer.planner.devices import DeviceSheet
from jaxinfer.planner.memory import MemoryPlan, plan_memory
from jaxinfer.planner.predict import Steps, tpot_s, ttft_s
from jaxinfer.planner.step_time import FLOOR, RooflineTime, StepTime, Wall, binding_wall


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`batch` requests at once, each of `context` prompt tokens and `output` new ones; engine limits."""

    context: int = 2048
    batch: int = 8
    output: int = 256
    max_num_batched_tokens: int = 2048
    memory_utilization: float = 0.9

    def __post_init__(self) -> None:
        for name in ("context", "batch", "output", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0.0 < self.memory_utilization <= 1.0:
            raise ConfigError(f"memory_utilization must lie in (0, 1], got {self.memory_utilization}")
        if self.batch > self.max_num_batched_tokens:
            raise ConfigError(
                f"a batch of {self.batch} cannot decode within max_num_batched_tokens "
                f"{self.max_num_batched_tokens}"
            )

    @property
    def length(self) -> int:
        return self.context + self.output


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of the work: least bytes and operations on one device, and seconds. Of prefill they are those
    of one prompt, of decode those of one step of the batch at the middle of its output."""

    moved_bytes: float
    linear_operations: float
    attention_operations: float
    floor_s: float
    expected_s: float
    wall: Wall

    @property
    def operations(self) -> float:
        return self.linear_operations + self.attention_operations

    @property
    def intensity(self) -> float:
        """Operations per byte; against the device's ridge it says what could bind."""
        return self.operations / self.moved_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """All figures are of one device where several share the model. Seconds, bytes, operations."""

    model: str
    costs: ModelCosts
    sheet: DeviceSheet
    workload: Workload
    memory: MemoryPlan
    prefill: Phase
    decode: Phase
    batch_ttft_s: float
    """Until the last of the batch, arrived together, has its first token."""
    stall_s: float
    """The longest step of those that decode: beside them the prompts of as many more, as far as they fit."""
    tokens_per_s: float
    """New tokens of the whole batch, prefill included; of all devices together."""
    critical_batch: float
    """Sequences that decode before the weights' products are bound by compute, their K/V left out."""
    critical_batch_at_context: float | None
    """The same with each sequence's K/V and attention; None: more sequences never get there."""
    even_length: int | None
    """Prompt length at which attention computes as much as the layers' products."""
    expectation: str
    """Whence the expected times: assumptions about a sheet, or a calibration."""
    pool_limit_bytes: int | None
    """The most that the pool may take, whatever is free."""

    @property
    def mbu(self) -> float:
        """Share of the bandwidth that decoding is expected to use."""
        return self.decode.moved_bytes / self.decode.expected_s / self.sheet.bandwidth

    @property
    def mfu(self) -> float:
        """Share of the matmul rate that decoding is expected to use."""
        return self.decode.operations / self.decode.expected_s / self.sheet.rate(self.costs.dtype)

    @property
    def prefill_mfu(self) -> float:
        rate = self.sheet.rate(self.costs.dtype)
        return self.prefill.operations / self.prefill.expected_s / rate

    @property
    def walls(self) -> tuple[Wall, ...]:
        """What binds, the first first."""
        if not self.memory.fits or self.workload.batch > self.memory.largest_batch:
            return ("capacity", self.decode.wall, self.prefill.wall)
        return (self.decode.wall, self.prefill.wall)


def plan(
    model: str,
    costs: ModelCosts,
    sheet: DeviceSheet,
    workload: Workload,
    time: StepTime | None = None,
    *,
    expectation: str = "the sheet at assumed shares (jaxinfer.planner.Efficiency)",
    pool_limit_bytes: int | None = None,
) -> Plan:
    """The plan of a workload. `time` gives the expected step times (None: the roofline at assumed shares).

    Raises ConfigError for prompts of more steps than are worked out (`predict.MOST_STEPS`).
    """
    time, w = time or RooflineTime(costs, sheet), workload
    steps = _steps(sheet, w)
    exact = dataclasses.replace(steps, padded=False)
    prefill, decode = phases(costs, sheet, w, time)
    middle = w.context + (w.output - 1) // 2
    batch_ttft = ttft_s(time, [w.context] * w.batch, steps)[-1]
    room = w.max_num_batched_tokens - w.batch
    # The longest step is full of prompts; the last chunk of one sees all that is before it.
    beside = [(middle, 1)] * w.batch
    for _ in range(w.batch):
        if chunk := min(room, w.context):
            beside.append((w.context - chunk, chunk))
            room -= chunk
    rate, bandwidth = sheet.rate(costs.dtype), sheet.bandwidth
    weights, params = costs.layer_bytes + costs.head_bytes, costs.layer_params + costs.head_params
    key_bytes, key_operations = costs.attention([(middle, 1)])
    # n (2 params + operations) / rate = (weights + n bytes) / bandwidth
    slope = (2 * params + key_operations) / rate - key_bytes / bandwidth
    return Plan(
        model, costs, sheet, w,
        workload_memory(costs, sheet, w, pool_limit_bytes), prefill, decode,
        batch_ttft_s=batch_ttft,
        stall_s=time.seconds(exact.work(time, beside, w.batch)),
        tokens_per_s=w.batch * w.output / (batch_ttft + (w.output - 1) * decode.expected_s),
        critical_batch=weights / bandwidth * rate / (2 * params),
        critical_batch_at_context=weights / bandwidth / slope if slope > 0 else None,
        even_length=costs.even_length, expectation=expectation, pool_limit_bytes=pool_limit_bytes,
    )  # fmt: skip


def phases(costs: ModelCosts, sheet: DeviceSheet, workload: Workload, time: StepTime) -> tuple[Phase, Phase]:
    """Prefill of one prompt, and decode of the batch."""
    w, best, steps = workload, RooflineTime(costs, sheet, FLOOR), _steps(sheet, workload)
    expected = ttft_s(time, [w.context], steps)[0]
    # The bytes of a prompt are those of its chunks, each of which reads the weights and what is before it.
    linear, attention = costs.prefill_operations(w.context)
    starts = range(0, w.context, w.max_num_batched_tokens)
    spans = [(start, min(w.max_num_batched_tokens, w.context - start)) for start in starts]
    works = [costs.work([span], rows=span == spans[-1]) for span in spans]
    prefill = Phase(
        sum(costs.moved_bytes(work) for work in works), linear, attention,
        sum(best.floor(work) for work in works), expected,
        _wall(time, costs, sheet, works[len(works) // 2]),
    )  # fmt: skip
    middle = w.context + (w.output - 1) // 2
    work = costs.work([(middle, 1)] * w.batch, w.batch)
    decode = Phase(
        costs.moved_bytes(work), costs.operations(work) - work.decode_operations, work.decode_operations,
        best.floor(work), tpot_s(time, w.batch, w.context, w.output, steps), _wall(time, costs, sheet, work),
    )  # fmt: skip
    return prefill, decode


def _steps(sheet: DeviceSheet, workload: Workload) -> Steps:
    return Steps(workload.batch, workload.max_num_batched_tokens, sheet.platform)


def workload_memory(
    costs: ModelCosts, sheet: DeviceSheet, workload: Workload, pool_limit_bytes: int | None = None
) -> MemoryPlan:
    """Where the memory goes for a workload."""
    return plan_memory(
        costs, sheet.memory_bytes, max_model_len=workload.length, max_num_seqs=max(workload.batch, 256),
        max_num_batched_tokens=workload.max_num_batched_tokens,
        memory_utilization=workload.memory_utilization, pool_limit_bytes=pool_limit_bytes,
    )  # fmt: skip


def _wall(time: StepTime, costs: ModelCosts, sheet: DeviceSheet, work: StepWork) -> Wall:
    """What binds a step that fits."""
    ridge = sheet.ridge(costs.dtype)
    return binding_wall(time.parts(work), costs.moved_bytes(work), costs.operations(work), ridge)


# ------------------------------------------------------------------------------------------- remedies


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change, and the plan with it."""

    name: str
    plan: Plan
    note: str = ""


def with_kv_heads(config: ModelConfig, kv_heads: int) -> ModelConfig:
    """The model with that many KV heads in every layer that has more."""
    layers = tuple(
        dataclasses.replace(layer, num_kv_heads=min(layer.num_kv_heads, kv_heads)) for layer in config.layers
    )
    return dataclasses.replace(config, layers=layers)


def _alike(layer: LayerConfig, other: LayerConfig) -> bool:
    """But for what they see."""
    return dataclasses.replace(layer, window=other.window, sinks=other.sinks) == other


def with_kv_of_pairs(config: ModelConfig) -> ModelConfig:
    """The model in which every second layer reads the K/V of the layer before it, if that is its like
    (CLA2 of arXiv:2405.12981). As it is where layers share K/V already, or keep a state in place of pages."""
    if config.sharing_layers or config.linear_layers:
        return config
    layers = tuple(
        dataclasses.replace(layer, kv_from=index - 1)
        if index % 2 and _alike(layer, config.layers[index - 1])
        else layer
        for index, layer in enumerate(config.layers)
    )
    return dataclasses.replace(config, layers=layers)


def remedies(base: Plan, time_of: Callable[[ModelCosts], StepTime] | None = None) -> list[Remedy]:
    """What one change at a time buys. `time_of(costs)` gives step times as `plan` takes them. A change by
    which prompts take too many steps to be worked out is left out."""

    def again(costs: ModelCosts | None = None, **changes: Any) -> Plan:
        costs = costs or base.costs
        time = None if time_of is None else time_of(costs)
        workload = dataclasses.replace(base.workload, **changes)
        return plan(
            base.model, costs, base.sheet, workload, time, expectation=base.expectation,
            pool_limit_bytes=base.pool_limit_bytes,
        )  # fmt: skip

    found = []
    for name, costs, changes, note in _changes(base):
        with contextlib.suppress(ConfigError):
            found.append(Remedy(name, again(costs, **changes), note))
    return found


def _changes(base: Plan) -> Iterator[tuple[str, ModelCosts | None, dict[str, Any], str]]:
    costs, workload = base.costs, base.workload
    heads = max(layer.num_kv_heads for layer in costs.config.layers)
    of_which = " of the original" if costs.config.sharing_layers else ""
    for k in sorted({heads // 2, heads // 4, heads // 8, 8, 4, 1} & set(range(1, heads)), reverse=True):
        divides = all(
            min(k, layer.num_kv_heads) and layer.num_kv_heads % k == 0 for layer in costs.config.layers
        )
        if divides and k % costs.tensor_parallel == 0:  # fewer than devices are repeated: nothing is saved
            changed = dataclasses.replace(costs, config=with_kv_heads(costs.config, k))
            yield (
                f"GQA-{k}" if k > 1 else "MQA", changed, {},
                f"needs conversion{of_which} and uptraining; the prompt's attention computes as much as "
                "before",
            )  # fmt: skip
    shared = with_kv_of_pairs(costs.config)
    if shared != costs.config:
        note = (
            f"{len(shared.sharing_layers)} of {shared.num_layers} layers read the K/V of the one before; "
            "needs conversion and uptraining; attention reads as much as before"
        )
        yield "CLA2", dataclasses.replace(costs, config=shared), {}, note
    for name in ("fp8_e4m3", "int8"):
        if BYTES[name] < BYTES[costs.kv_dtype]:
            yield f"{name} KV", dataclasses.replace(costs, kv_dtype=name), {}, "lossy: evaluate"
    if costs.quantization is None:
        for name in ("fp8", "int8", "int4"):
            changed = dataclasses.replace(costs, quantization=name)
            try:
                _ = changed.layer_bytes
            except ConfigError:
                continue
            yield f"{name} weights", changed, {}, "lossy: evaluate"
    if workload.batch > 1:
        yield "half the batch", None, {"batch": workload.batch // 2}, "latency for throughput"
    budget = workload.max_num_batched_tokens
    if 2 * workload.batch <= budget:
        yield "twice the batch", None, {"batch": 2 * workload.batch}, "throughput for latency"
    for factor, name in ((0.25, "a quarter of the chunk"), (4, "four times the chunk")):
        size = int(budget * factor)
        if size >= max(workload.batch + 1, 64):
            note = "shorter stalls, a queue waits longer" if factor < 1 else "longer stalls, fewer steps"
            yield name, None, {"max_num_batched_tokens": size}, note
    more = 2 * costs.tensor_parallel
    try:
        yield f"tensor parallel {more}", dataclasses.replace(costs, tensor_parallel=more), {}, "more devices"
    except ConfigError:
        return
