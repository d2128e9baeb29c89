"""The calibrations of this machine: made by `jaxinfer doctor --calibrate MODEL`, kept in the cache folder."""

from __future__ import annotations

import datetime
import re
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from jaxinfer.planner import ModelCosts
from jaxinfer.planner.calibration import Calibration
from jaxinfer.progress import phase

if TYPE_CHECKING:
    from jaxinfer.runtime import JaxRunner


def calibrate(runner: JaxRunner, costs: ModelCosts, model: str, most_context: int) -> Calibration:
    """Measure and fit; nothing is written. On a CPU of 2 cores about a minute for a model of 135 M.

    `most_context`: the longest context that steps are measured at, in tokens.
    """
    import jax

    from jaxinfer.calibration.fit import fit
    from jaxinfer.calibration.measure import measure_steps, step_kinds

    if runner.machine is None:
        runner.measure_machine()
    kinds = step_kinds(runner.ladder, (runner.num_pages - 1) * runner.page_size, most_context)
    with phase("measuring steps", total=len(kinds), wanted=True) as advance:
        steps = measure_steps(runner, costs, kinds, advance)
    machine = runner.machine
    return fit(
        costs, steps, device=jax.local_devices()[0].device_kind, platform=runner.platform, model=model,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        versions={name: metadata.version(name) for name in ("jaxinfer", "jax", "jaxlib")},
        bandwidth=machine.bandwidth if machine else 0.0, matmul_rate=machine.matmul_rate if machine else 0.0,
    )  # fmt: skip


def calibration_path(device: str, costs: ModelCosts) -> Path:
    """Where the calibration of a device and dtypes is kept."""
    numbers = (costs.dtype, costs.kv_dtype, costs.quantization or "plain")
    return _folder(device) / f"{'-'.join(numbers)}.json"


def _folder(device: str) -> Path:
    from checkpoints import cache_folder

    return cache_folder() / "calibration" / re.sub(r"[^A-Za-z0-9_.]+", "_", device)


def known_calibrations(device: str) -> dict[Path, Calibration]:
    """Those that are kept for a device. Raises ConfigError for a file that cannot be read."""
    return {path: Calibration.load(path) for path in sorted(_folder(device).glob("*.json"))}


def find_calibration(device: str, costs: ModelCosts) -> Calibration | None:
    """The one that is kept for this device and these dtypes; None where there is none.

    Raises ConfigError for a file that cannot be read.
    """
    path = calibration_path(device, costs)
    return Calibration.load(path) if path.exists() else None
