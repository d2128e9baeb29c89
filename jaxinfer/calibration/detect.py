"""The device that is here, as the planner takes it: its sheet, and what is known best of its step times."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from jaxinfer.calibration.store import find_calibration
from jaxinfer.planner import (
    DEVICES,
    MEASURED,
    DeviceSheet,
    ModelCosts,
    RooflineTime,
    StepTime,
    measured_sheet,
)
from jaxinfer.planner.calibration import CalibratedTime, Calibration

logger = logging.getLogger(__name__)

KINDS = (
    ("A100-SXM4-40GB", "a100-40g"), ("A100-SXM4-80GB", "a100-80g"), ("H100 80GB HBM3", "h100"),
    ("H200", "h200"), ("B200", "b200"), ("L40S", "l40s"), ("L4", "l4"), ("A10", "a10"),
    ("RTX 4090", "rtx4090"),
)  # fmt: skip
"""Part of what the driver calls a device, and its sheet; the first that is found counts."""


class Detected(NamedTuple):
    """See `jaxinfer.cli.planning.Target`, which it becomes."""

    sheet: DeviceSheet
    costs: ModelCosts
    time_of: Callable[[ModelCosts], StepTime]
    expectation: str
    pool_limit_bytes: int | None


def detected(costs_of: Callable[[str], ModelCosts]) -> Detected:
    """The first device of jax's default platform. `costs_of(platform)` gives the model as it would run there.

    Step times are those of a calibration, where `jaxinfer doctor --calibrate` has made one for these dtypes;
    else of the roofline, at the limits of the device's sheet (a GPU that has one) or at measured ones.
    """
    import jax

    from jaxinfer.runtime.loading import CPU_POOL_BYTES, free_bytes

    device = jax.local_devices()[0]
    platform = device.platform
    costs = costs_of(platform)
    limit = CPU_POOL_BYTES if platform == "cpu" else None
    memory = free_bytes(platform)
    calibration = find_calibration(device.device_kind, costs)
    if calibration is not None:
        sheet = measured_sheet(
            device.device_kind, calibration.bandwidth, calibration.matmul_rate, memory, platform
        )
        said = (
            f"calibration of {calibration.model}'s steps here, {calibration.date} "
            f"(median error {100 * calibration.residual:.0f} % of the steps it was fitted to)"
        )
        return Detected(sheet, costs, lambda c: step_time(c, calibration, sheet), said, limit)
    known = next((DEVICES[name] for part, name in KINDS if part in device.device_kind), None)
    if known is not None:
        said = "the device's sheet at assumed shares (jaxinfer.planner.Efficiency)"
        return Detected(known, costs, lambda c: RooflineTime(c, known), said, limit)
    from jaxinfer.runtime.roofline import measure_machine

    machine = measure_machine(platform, costs.dtype)
    sheet = measured_sheet(device.device_kind, machine.bandwidth, machine.matmul_rate, memory, platform)
    said = (
        f"roofline at {machine.bandwidth / 1e9:.1f} GB/s and {machine.matmul_rate / 1e12:.3g} TFLOP/s, "
        "measured just now; jaxinfer doctor --calibrate MODEL makes it exact"
    )
    return Detected(sheet, costs, lambda c: RooflineTime(c, sheet, MEASURED), said, limit)


def step_time(costs: ModelCosts, calibration: Calibration, sheet: DeviceSheet) -> StepTime:
    """By the calibration where it was made in these numbers; by the measured roofline elsewhere (a remedy in
    other dtypes, or on several devices)."""
    if calibration.fits(costs) and costs.tensor_parallel == 1:
        return CalibratedTime(costs, calibration)
    return RooflineTime(costs, sheet, MEASURED)
