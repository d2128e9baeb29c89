"""How long a step takes: by the roofline of a device sheet, at stated shares of what the sheet promises.

    linear      max(weight bytes / bandwidth, 2 · params · tokens / rate), the layers and the head each
    attention   max(K/V bytes / bandwidth, operations / rate), one-token slices and chunks each
    exchange    all-reduces over the link, with tensor parallelism
    host        launches of kernels and Python; it passes beside the device, so only what exceeds it counts

Parts that run one after the other are added: their kernels do not overlap. `jaxinfer.planner.calibration` has
the same interface, with coefficients fitted to measured steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from jaxinfer.planner.costs import ModelCosts, StepWork
from jaxinfer.planner.devices import DeviceSheet

LAUNCHES_PER_LAYER = 16
"""Kernels a layer of a compiled step: 515 launches for the 32 layers of Llama 3 8B (`make check-gpu`)."""


class StepParts(NamedTuple):
    """Seconds of one step by what they go to. `host` runs beside the other four."""

    linear: float
    decode_attention: float
    chunk_attention: float
    exchange: float
    host: float

    @property
    def device(self) -> float:
        return self.linear + self.decode_attention + self.chunk_attention + self.exchange

    @property
    def total(self) -> float:
        return max(self.device, self.host)


Wall = Literal["capacity", "bandwidth", "compute", "exchange", "scheduling"]


def binding_wall(parts: StepParts, moved_bytes: float, operations: float, ridge: float) -> Wall:
    """What binds a step that fits, on a device of that `ridge` (operations a byte)."""
    if parts.host > parts.device:
        return "scheduling"
    if parts.exchange > parts.device / 2:
        return "exchange"
    return "bandwidth" if moved_bytes * ridge >= operations else "compute"


class StepTime(Protocol):
    """Seconds of steps of one model on one device."""

    @property
    def costs(self) -> ModelCosts: ...

    def parts(self, work: StepWork) -> StepParts: ...

    def seconds(self, work: StepWork) -> float: ...


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Which shares of a sheet are reached, and what the host costs. The defaults are assumptions, not
    measurements: shares that kernels of other engines are commonly published at (decode at 70-90 % of the
    bandwidth, large products at 60-75 % of the dense rate; FlashAttention-2 at 50-70 % on A100, 2307.08691,
    and FlashAttention-3 at up to 75 % on H100, 2407.08608), 2 µs a launch, 20 µs an all-reduce."""

    bandwidth: float = 0.8
    compute: float = 0.65
    attention: float = 0.55
    launch_s: float = 2e-6
    host_step_s: float = 1e-3
    exchange_s: float = 20e-6


FLOOR = Efficiency(1.0, 1.0, 1.0, 0.0, 0.0, 0.0)
"""All that the sheet promises, and a host that costs nothing: no run is faster."""


MEASURED = Efficiency(1.0, 1.0, 1.0, 0.0, 0.0, 0.0)
"""Of limits that were not read from a sheet but measured, with programs such as those that run."""


@dataclass(frozen=True, slots=True)
class RooflineTime:
    """Steps of `costs` on a device of `sheet`."""

    costs: ModelCosts
    sheet: DeviceSheet
    efficiency: Efficiency = Efficiency()

    def parts(self, work: StepWork) -> StepParts:
        costs, sheet, share = self.costs, self.sheet, self.efficiency
        bandwidth = sheet.bandwidth * share.bandwidth
        # Quantised weights are widened on their way into a product: they save bytes, not operations.
        rate = sheet.rate(costs.dtype) * share.compute
        attention_rate = sheet.rate(costs.dtype) * share.attention
        linear = max(costs.layer_bytes / bandwidth, 2.0 * costs.layer_params * work.places / rate)
        if work.head_places:
            linear += max(costs.head_bytes / bandwidth, 2.0 * costs.head_params * work.head_places / rate)
        decode = max(work.decode_kv_bytes / bandwidth, work.decode_operations / attention_rate)
        chunk = max(work.chunk_kv_bytes / bandwidth, work.chunk_operations / attention_rate)
        exchange = 0.0
        if costs.tensor_parallel > 1:
            exchange = costs.exchanged_bytes(work) / sheet.link_bandwidth
            exchange += 2 * costs.config.num_layers * share.exchange_s
        host = max(share.host_step_s, LAUNCHES_PER_LAYER * costs.config.num_layers * share.launch_s)
        return StepParts(linear, decode, chunk, exchange, host)

    def seconds(self, work: StepWork) -> float:
        return self.parts(work).total

    def floor(self, work: StepWork) -> float:
        """No run is faster: the larger of all bytes over the bandwidth and all operations over the rate."""
        moved = self.costs.moved_bytes(work) / self.sheet.bandwidth
        return max(moved, self.costs.operations(work) / self.sheet.rate(self.costs.dtype))
