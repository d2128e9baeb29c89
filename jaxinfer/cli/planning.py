"""What commands that predict share: which device, in which numbers, and how long its steps take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import arg

from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.core import ConfigError
from jaxinfer.planner import DEVICES, DeviceSheet, ModelCosts, RooflineTime, StepTime, device_sheet

if TYPE_CHECKING:
    from jaxinfer.bench.predicted import Predictor

SHEETS = ", ".join(DEVICES)
DETECT = ("detect", "cpu")
"""Devices that are measured: what is here, of any kind; or the CPU that is here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFlags:
    """On what a model is thought to run."""

    device: Annotated[
        str, arg(help=f"{SHEETS}; detect: what is here, measured; cpu: this CPU, measured.")
    ] = "detect"
    tp: int = 1
    """Devices that share the model, by tensor parallelism."""
    weight_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8", "int4", "fp8"] = "auto"
    """Of the weights; the last three quantise them."""
    kv_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8_e4m3"] = "auto"
    """Of the K/V pages; auto is that of arithmetic."""

    def costs(self, config: ModelConfig, platform: str, page_size: int) -> ModelCosts:
        """The arithmetic of a model in these numbers, and in pages of so many tokens. Raises ConfigError."""
        quantization = self.weight_dtype if self.weight_dtype in ("int8", "int4", "fp8") else None
        dtype = "auto" if quantization else self.weight_dtype
        engine = EngineConfig(
            dtype=dtype, kv_cache_dtype=self.kv_dtype, quantization=quantization,  # type: ignore[arg-type]
        ).on(platform)  # fmt: skip
        return ModelCosts(config, engine.dtype, engine.kv_cache_dtype, quantization, self.tp, page_size)

    def resolve(self, config: ModelConfig, engine: EngineConfig) -> Target:
        """The device, and what says how long steps take on it; of `engine` count the pages and the attention
        span. Raises ConfigError."""
        span = engine.span()
        config = config if span is None else config.spanned(span)
        if self.device not in DETECT:
            sheet = device_sheet(self.device)
            costs = self.costs(config, sheet.platform, engine.page_size)
            return Target(
                sheet, costs, lambda costs: RooflineTime(costs, sheet),
                "the device's sheet at assumed shares (jaxinfer.planner.Efficiency)", None,
            )  # fmt: skip
        if self.device == "cpu":
            import os

            os.environ["JAX_PLATFORMS"] = "cpu"
        from jaxinfer.calibration import detected

        return Target(*detected(lambda platform: self.costs(config, platform, engine.page_size)))


@dataclass(frozen=True, slots=True)
class Target:
    """A device and a model on it. `expectation`: whence the times come, in words."""

    sheet: DeviceSheet
    costs: ModelCosts
    time_of: Callable[[ModelCosts], StepTime]
    expectation: str
    pool_limit_bytes: int | None

    @property
    def time(self) -> StepTime:
        return self.time_of(self.costs)


def foretold(model: str, engine: EngineConfig, on: DeviceFlags, calibration: str | None = None) -> Predictor:
    """What foretells loads of a model as an engine of `engine` would run it there. `calibration`: a file, in
    place of what is known of the device. Raises ConfigError, CheckpointError, OSError."""
    from jaxinfer.bench.predicted import Predictor
    from jaxinfer.planner.calibration import CalibratedTime, Calibration
    from jaxinfer.shapes import model_shape

    read = None if calibration is None else Calibration.load(Path(calibration))
    target = on.resolve(model_shape(model), engine)
    time, basis = target.time, target.expectation
    if read is not None:
        time, basis = CalibratedTime(target.costs, read), f"calibration of {read.device}, {read.date}"
    return Predictor.planned(engine, time, target.sheet, basis, target.pool_limit_bytes, name=model)


def positive(name: str, value: int) -> int:
    """The value. Raises ConfigError below 1."""
    if value < 1:
        raise ConfigError(f"{name} must be at least 1, got {value}")
    return value
