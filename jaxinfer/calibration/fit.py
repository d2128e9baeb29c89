"""Fits a calibration to measured steps: non-negative least squares on relative errors (Lawson & Hanson 1974).

Every term of the model is a cost, so that no coefficient is negative; dividing by what was measured makes an
error of a millisecond count for more in a step of 10 ms than in one of a second.

What each step costs whatever it does cannot be told from the weights that each step reads, with one model:
both are in the curve of the layers, and `step_s` is 0. A much smaller model is therefore foretold too fast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls

from jaxinfer.calibration.measure import MeasuredStep
from jaxinfer.planner.calibration import CalibratedTime, Calibration, Curve
from jaxinfer.planner.costs import ModelCosts

TERMS = 4
"""Coefficients beside the two curves."""


def fit(costs: ModelCosts, steps: Sequence[MeasuredStep], **about: object) -> Calibration:
    """The calibration that is nearest to `steps` of the model of `costs`. `about`: the fields that say what
    was measured where (device, platform, model, date, versions, bandwidth, matmul_rate)."""
    places = sorted({step.work.places for step in steps})
    heads = sorted({step.work.head_places for step in steps if step.work.head_places})
    names = TERMS + len(places) + len(heads)
    matrix = np.zeros((len(steps), names))
    for row, step in zip(matrix, steps, strict=True):
        work = step.work
        row[0] = work.decode_rows * costs.config.num_layers
        row[1], row[2], row[3] = work.decode_kv_bytes, work.chunk_kv_bytes, work.chunk_operations
        # More tokens never take less time: a curve is a sum of rises, and none of them is negative.
        row[TERMS : TERMS + places.index(work.places) + 1] = costs.layer_params
        if work.head_places:
            first = TERMS + len(places)
            row[first : first + heads.index(work.head_places) + 1] = costs.head_params
    measured = np.asarray([step.seconds for step in steps])
    matrix /= measured[:, None]
    scale = np.abs(matrix).max(axis=0)
    scale[scale == 0.0] = 1.0  # a term that no step has
    found = nnls(matrix / scale, np.ones(len(steps)))[0] / scale
    decode_row_s, decode_byte_s, chunk_byte_s, chunk_operation_s = map(float, found[:TERMS])
    linear = np.cumsum(found[TERMS : TERMS + len(places)])
    head = np.cumsum(found[TERMS + len(places) :]) if heads else np.zeros(1)
    calibration = Calibration(
        dtype=costs.dtype, kv_dtype=costs.kv_dtype, quantization=costs.quantization,
        step_s=0.0, decode_row_s=decode_row_s, decode_byte_s=decode_byte_s,
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
    found = errors(CalibratedTime(costs, calibration), steps)
    return dataclasses.replace(calibration, residual=float(np.median(np.abs(found))))
