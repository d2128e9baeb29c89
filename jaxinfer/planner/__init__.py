"""What a model on a device will do, from numbers alone: bytes and operations, memory, time, which wall binds.

Pure Python: no weights, no jax. The engine counts its own steps with the same `ModelCosts`, the simulator
runs the real scheduler on a `StepTime`, so that what is predicted and measured shares its arithmetic.
"""

from jaxinfer.planner.costs import ModelCosts, StepWork, keys_of
from jaxinfer.planner.devices import DEVICES, DeviceSheet, device_sheet
from jaxinfer.planner.step_time import FLOOR, Efficiency, RooflineTime, StepParts, StepTime

__all__ = [
    "DEVICES",
    "FLOOR",
    "DeviceSheet",
    "Efficiency",
    "ModelCosts",
    "RooflineTime",
    "StepParts",
    "StepTime",
    "StepWork",
    "device_sheet",
    "keys_of",
]
