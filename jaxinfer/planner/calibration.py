"""Step times fitted to steps that were measured on a device: the interface of the roofline, other numbers.

    seconds =  step_s
             + layer parameters · linear(places)       a curve in the tokens of the step, padding included
             + head parameters · head(rows)            a curve in the rows of logits, the sampler included
             + decode rows · layers · decode_row_s
             + bytes of K/V · decode_byte_s            of one-token slices
             + bytes of K/V · chunk_byte_s + operations of attention · chunk_operation_s

A curve is seconds a parameter at some numbers of tokens, straight lines between them, and beyond the last one
in proportion to the tokens. That a device multiplies 8 rows in hardly more time than one, and 512 at a better
rate than 32, is in the curve; no peak rate is assumed.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxinfer.core import ConfigError
from jaxinfer.planner.costs import ModelCosts, StepWork
from jaxinfer.planner.step_time import StepParts

FORMAT = 1
"""Of the file; another one is refused."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds a parameter, at rising numbers of tokens (or rows). Raises ValueError for others."""

    at: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        rising = all(0 < a < b for a, b in zip((0.5, *self.at), self.at, strict=False))
        if not self.at or len(self.at) != len(self.seconds) or not rising:
            raise ValueError(f"a curve needs seconds at rising numbers, got {self.at} and {self.seconds}")
        for seconds in self.seconds:
            _check_number("seconds of a curve", seconds)

    def __call__(self, count: int) -> float:
        if count <= self.at[0]:
            return self.seconds[0]
        if count >= self.at[-1]:
            return self.seconds[-1] * count / self.at[-1]
        index = bisect_left(self.at, count)
        low, high = self.at[index - 1], self.at[index]
        share = (count - low) / (high - low)
        return self.seconds[index - 1] * (1 - share) + self.seconds[index] * share


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What was fitted, to which steps. `residual` is the median relative error over the steps it was fitted
    to; `bandwidth` (bytes/s) and `matmul_rate` (operations/s) are the limits measured beside."""

    device: str
    platform: str
    model: str
    dtype: str
    kv_dtype: str
    quantization: str | None
    date: str
    versions: dict[str, str]
    bandwidth: float
    matmul_rate: float
    step_s: float
    linear: Curve
    head: Curve
    decode_row_s: float
    decode_byte_s: float
    chunk_byte_s: float
    chunk_operation_s: float
    residual: float
    steps: int

    def __post_init__(self) -> None:
        """Raises ValueError for numbers that no measurement gives."""
        for name in (
            "bandwidth", "matmul_rate", "step_s", "decode_row_s", "decode_byte_s", "chunk_byte_s",
            "chunk_operation_s", "residual",
        ):  # fmt: skip
            _check_number(name, getattr(self, name))

    def save(self, path: Path) -> None:
        """Write it as JSON, whole or not at all. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_name(f"{path.name}.{os.getpid()}.part")
        written.write_text(json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1) + "\n")
        written.replace(path)

    @classmethod
    def load(cls, path: Path) -> Calibration:
        """Read what `save` wrote. Raises ConfigError for a file that is none, or of another format."""
        try:
            fields: dict[str, Any] = json.loads(path.read_text())
            if fields.pop("format") != FORMAT:
                raise ValueError("another format")
            linear, head = (
                Curve(**{name: tuple(values) for name, values in fields.pop(curve).items()})
                for curve in ("linear", "head")
            )
            return cls(linear=linear, head=head, **fields)
        except OSError as error:
            raise ConfigError(f"calibration {path} cannot be read ({error.strerror})") from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"{path} is no calibration of this version ({error}): calibrate again"
            ) from None

    def fits(self, costs: ModelCosts) -> bool:
        """Whether the model runs in the numbers that were measured."""
        return (self.dtype, self.kv_dtype, self.quantization) == (
            costs.dtype,
            costs.kv_dtype,
            costs.quantization,
        )


def _check_number(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}")


@dataclass(frozen=True, slots=True)
class CalibratedTime:
    """A `StepTime` of a model on a calibrated device.

    Raises ConfigError for dtypes that were not measured, and for tensor parallelism, which has an exchange.
    """

    costs: ModelCosts
    calibration: Calibration

    def __post_init__(self) -> None:
        costs, measured = self.costs, self.calibration
        if costs.tensor_parallel > 1:
            raise ConfigError("a calibration is of one device: no tensor parallelism")
        if not measured.fits(costs):
            raise ConfigError(
                f"the calibration is of dtype {measured.dtype}, pages {measured.kv_dtype}, quantization "
                f"{measured.quantization}; got {costs.dtype}, {costs.kv_dtype}, {costs.quantization}"
            )

    def parts(self, work: StepWork) -> StepParts:
        c, costs = self.calibration, self.costs
        linear = c.step_s + costs.layer_params * c.linear(work.places)
        if work.head_places:
            linear += costs.head_params * c.head(work.head_places)
        decode = work.decode_rows * costs.config.num_layers * c.decode_row_s
        decode += work.decode_kv_bytes * c.decode_byte_s
        chunk = work.chunk_kv_bytes * c.chunk_byte_s + work.chunk_operations * c.chunk_operation_s
        return StepParts(linear, decode, chunk, 0.0, 0.0)

    def seconds(self, work: StepWork) -> float:
        return self.parts(work).total
