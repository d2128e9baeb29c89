"""Fits a calibration to measured steps: non-negative least squares on relative errors (Lawson & Hanson 1974).

Every term of the model is a cost, so that no coefficient is negative; dividing by what was measured makes an
error of a millisecond count for more in a step of 10 ms than in one of a second.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls

from jaxinfer.calibration.measure import MeasuredStep
from jaxinfer.planner.calibration import CalibratedTime, Calibration, Curve
from jaxinfer.planner.costs import ModelCosts


def fit(costs: ModelCosts, steps: Sequence[MeasuredStep], **about: object) -> Calibration:
    """The calibration that is nearest to `steps` of the model of `costs`. `about`: the fields that say what
    was measured where (device, platform, model, date, versions, bandwidth, matmul_rate)."""
    places = sorted({step.work.places for step in steps})
    heads = sorted({step.work.head_places for step in steps if step.work.head_places})
    names = 5 + len(places) + len(heads)
    matrix = np.zeros((len(steps), names))
    for row, step in zip(matrix, steps, strict=True):
        work = step.work
        row[0] = 1.0
        row[1] = work.decode_rows * costs.config.num_layers
        row[2], row[3], row[4] = work.decode_kv_bytes, work.chunk_kv_bytes, work.chunk_operations
        row[5 + places.index(work.places)] = costs.layer_params
        if work.head_places:
            row[5 + len(places) + heads.index(work.head_places)] = costs.head_params
    measured = np.asarray([step.seconds for step in steps])
    matrix /= measured[:, None]
    scale = np.abs(matrix).max(axis=0)
    scale[scale == 0.0] = 1.0  # a term that no step has
    found = nnls(matrix / scale, np.ones(len(steps)))[0] / scale
    step_s, decode_row_s, decode_byte_s, chunk_byte_s, chunk_operation_s = map(float, found[:5])
    # More tokens never take less time: what noise has turned round is levelled.
    linear = np.maximum.accumulate(found[5 : 5 + len(places)])
    head = np.maximum.accumulate(found[5 + len(places) :]) if heads else np.zeros(1)
    calibration = Calibration(
        dtype=costs.dtype, kv_dtype=costs.kv_dtype, quantization=costs.quantization,
        step_s=step_s, decode_row_s=decode_row_s, decode_byte_s=decode_byte_s,
        chunk_byte_s=chunk_byte_s, chunk_operation_s=chunk_operation_s,
        linear=Curve(tuple(places), tuple(map(float, linear))),
        head=Curve(tuple(heads or [1]), tuple(map(float, head))),
        residual=0.0, steps=len(steps), **about,  # type: ignore[arg-type]
    )  # fmt: skip
    return _with_residual(calibration, costs, steps)


def errors(time: CalibratedTime, steps: Sequence[MeasuredStep]) -> list[float]:
    """Relative error of each step: predicted / measured - 1."""
    return [time.seconds(step.work) / step.seconds - 1.0 for step in steps]


def _with_residual(calibration: Calibration, costs: ModelCosts, steps: Sequence[MeasuredStep]) -> Calibration:
    import dataclasses

    found = errors(CalibratedTime(costs, calibration), steps)
    return dataclasses.replace(calibration, residual=float(np.median(np.abs(found))))
