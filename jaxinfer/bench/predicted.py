"""What a load is foretold to give: the engine's own scheduler on a simulated device, in virtual time.

    predictor = Predictor.of(llm)
    records = predictor(load)            the same shape as what is measured

Nothing is fitted to the run that it is compared with. A step takes what a calibration of this machine says of
it, or else what the roofline does at the memory bandwidth and matmul rate that were measured beside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxinfer.bench.drive import GREEDY
from jaxinfer.bench.load import Load
from jaxinfer.bench.records import RequestRecord, Status
from jaxinfer.config import EngineConfig, StepShape, shape_ladder
from jaxinfer.core import ConfigError, Limits, Request, SamplingParams
from jaxinfer.llm import LLM
from jaxinfer.llm.caching import shares_prefixes
from jaxinfer.planner import (
    MEASURED,
    DeviceSheet,
    ModelCosts,
    RooflineTime,
    StepTime,
    measured_sheet,
    plan_memory,
)
from jaxinfer.planner.calibration import CalibratedTime, Calibration
from jaxinfer.simulator import Outcome, Served, Simulation, StepTimer


@dataclass(frozen=True, slots=True)
class Predictor:
    """An engine's decisions with the step times of a model. `basis` says where those come from; `sheet`, of
    the device, serves to say which wall binds."""

    limits: Limits
    time: StepTime
    ladder: tuple[StepShape, ...]
    policy: Any = "fcfs"
    prefix_caching: bool = False
    asynchronous: bool = True
    basis: str = ""
    sheet: DeviceSheet | None = None

    @classmethod
    def of(cls, llm: LLM, calibration: Calibration | None = None) -> Predictor | None:
        """For a loaded model, by a calibration or by what `LLM.measure_machine` measured; None without
        either.

        Raises ConfigError for a calibration of other numbers than the model's.
        """
        costs = costs_of(llm)
        time = None if costs is None else step_time(costs, llm.stats(), calibration)
        if time is None:
            return None
        config, (model_time, basis) = llm.engine_config, time
        limits = llm.limits
        ladder = getattr(llm.engine.runner, "ladder", None)
        return cls(
            limits=limits,
            time=model_time,
            ladder=ladder or shape_ladder(limits.max_num_seqs, limits.max_num_batched_tokens, platform="cpu"),
            policy=config.scheduling_policy,
            prefix_caching=llm.engine.scheduler.tables.cache is not None,
            asynchronous=llm.engine.asynchronous,
            basis=basis,
        )

    @classmethod
    def planned(
        cls,
        engine: EngineConfig,
        time: StepTime,
        sheet: DeviceSheet,
        basis: str,
        pool_limit_bytes: int | None = None,
        name: str = "model",
    ) -> Predictor:
        """For a model that is not loaded, as an engine of `engine` would run it on the device of `sheet`. As
        there, a warning says why prefix caching is off; `name` is the model's in it.

        Raises ConfigError where the weights leave no room for pages.
        """
        costs, on = time.costs, engine.on(sheet.platform)
        config = costs.config
        assert on.max_num_seqs is not None
        assert on.max_num_batched_tokens is not None
        length = on.max_model_len or config.max_position
        memory = plan_memory(
            costs, sheet.memory_bytes, max_model_len=length, max_num_seqs=on.max_num_seqs,
            max_num_batched_tokens=on.max_num_batched_tokens, memory_utilization=on.memory_utilization,
            pool_limit_bytes=pool_limit_bytes,
        )  # fmt: skip
        if memory.num_pages < 2 and on.num_pages is None:
            raise ConfigError(
                f"{memory.weight_bytes / 1e9:.1f} GB of weights leave no page on a device of "
                f"{memory.device_bytes / 1e9:.1f} GB: share the model (--tp), or quantise it (--weight-dtype)"
            )
        if on.num_pages is not None and on.num_pages * costs.page_bytes > sheet.memory_bytes:
            raise ConfigError(
                f"num_pages {on.num_pages} of {costs.page_bytes / 1e6:.2f} MB do not fit on a device of "
                f"{sheet.memory_bytes / 1e9:.1f} GB"
            )
        limits = Limits(
            num_pages=on.num_pages or memory.num_pages, page_size=on.page_size,
            max_num_seqs=on.max_num_seqs, max_num_batched_tokens=on.max_num_batched_tokens,
            max_model_len=length, vocab_size=config.vocab_size, window=config.window, sinks=config.sinks,
            stateful=bool(config.linear_layers),
        )  # fmt: skip
        return cls(
            limits=limits, time=time,
            ladder=shape_ladder(limits.max_num_seqs, limits.max_num_batched_tokens, platform=sheet.platform),
            policy=on.scheduling_policy,
            prefix_caching=shares_prefixes(on.enable_prefix_caching, limits, config, name),
            asynchronous=on.async_scheduling, basis=basis, sheet=sheet,
        )  # fmt: skip

    def __call__(self, load: Load) -> list[RequestRecord]:
        """The records of a load, from an idle engine with an empty prefix cache."""
        return records_of(load, self.simulate(load))

    def simulate(self, load: Load, advance: Callable[[float], None] | None = None) -> Outcome:
        """All that the simulation tells of a load; `advance(1)` is called at the end of each request."""
        timer = StepTimer(self.time, self.ladder, asynchronous=self.asynchronous, sheet=self.sheet)
        simulation = Simulation(self.limits, timer, policy=self.policy, prefix_caching=self.prefix_caching)
        return simulation.run(Drawn(load, self.limits), concurrency=load.concurrency, advance=advance)


class Drawn:
    """The requests of a load for an engine of `limits`, each drawn when it arrives: all prompts together may
    be gigabytes."""

    def __init__(self, load: Load, limits: Limits):
        self.load, self.limits = load, limits
        self._samplings: dict[int, SamplingParams] = {}  # by `max_tokens`

    def __len__(self) -> int:
        return len(self.load.arrivals)

    def __getitem__(self, index: int, /) -> DrawnAsk:
        return DrawnAsk(self, index)

    def draw(self, index: int) -> Request:
        """Raises RequestError, as `Load.request` does."""
        most = self.load.arrivals[index].output_tokens
        sampling = self._samplings.get(most, GREEDY)
        request = self.load.request(index, f"foretold-{index}", sampling, self.limits)
        self._samplings[most] = request.sampling
        return request


@dataclass(frozen=True, slots=True)
class DrawnAsk:
    """An `Ask` whose request is drawn when it is asked for."""

    of: Drawn
    index: int

    @property
    def at_s(self) -> float:
        return self.of.load.arrivals[self.index].at_s

    @property
    def request(self) -> Request:
        return self.of.draw(self.index)

    @property
    def in_vocabulary(self) -> bool:
        arrival = self.of.load.arrivals[self.index]
        return isinstance(arrival.prompt_tokens, int) and arrival.num_prompt > 0


def records_of(load: Load, outcome: Outcome) -> list[RequestRecord]:
    """What was simulated of a load, as what is measured of one."""
    return [_record(load, served) for served in outcome.served]


def costs_of(llm: LLM) -> ModelCosts | None:
    """What the model's steps cost; None where it was put together by hand and nobody knows."""
    config, model = llm.engine_config, llm.model_config
    if model is None or config.dtype == "auto" or config.kv_cache_dtype == "auto":
        return None
    return ModelCosts(
        model, config.dtype, config.kv_cache_dtype, config.quantization, page_size=config.page_size
    )


def step_time(costs: ModelCosts, stats: Any, calibration: Calibration | None) -> tuple[StepTime, str] | None:
    """A model of step times, and where it is from; None where neither a calibration nor a measurement is.

    Raises ConfigError, as `Predictor.of` does.
    """
    if calibration is not None:
        basis = f"calibration of {calibration.device} with {calibration.model}, {calibration.date}"
        return CalibratedTime(costs, calibration), basis
    bandwidth, rate = stats.get("bandwidth"), stats.get("matmul_rate")
    if not bandwidth or not rate:
        return None
    sheet = measured_sheet("this machine", bandwidth, rate)
    shown = f"roofline at {bandwidth / 1e9:.1f} GB/s and {rate / 1e12:.3g} TFLOP/s, measured on this machine"
    return RooflineTime(costs, sheet, MEASURED), shown


def _record(load: Load, served: Served) -> RequestRecord:
    arrival = load.arrivals[served.index]
    status: Status = "ok"
    if served.finish_reason not in ("stop", "length"):
        status = "refused" if served.finish_reason is None else "failed"
    return RequestRecord(
        index=served.index,
        arrived_s=served.arrived_s,
        sent_s=served.sent_s,
        token_s=tuple(served.token_s),
        ended_s=served.ended_s,
        prompt_tokens=arrival.num_prompt,
        asked_tokens=arrival.output_tokens,
        cached_tokens=served.cached_tokens,
        status=status,
        finish_reason=served.finish_reason,
        error=served.error,
    )
