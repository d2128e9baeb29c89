"""Measures steps of a model on the device that is here, and fits the planner's step times to them."""

from jaxinfer.calibration.detect import Detected, detected
from jaxinfer.calibration.fit import fit
from jaxinfer.calibration.measure import MeasuredStep, StepKind, measure_steps, step_kinds
from jaxinfer.calibration.store import calibrate, calibration_path, find_calibration, known_calibrations

__all__ = [
    "Detected",
    "MeasuredStep",
    "StepKind",
    "calibrate",
    "calibration_path",
    "detected",
    "find_calibration",
    "fit",
    "known_calibrations",
    "measure_steps",
    "step_kinds",
]
