"""What a model on a device will do, from numbers alone: bytes and operations, memory, time, which wall binds.

Pure Python: no weights, no jax. The engine counts its own steps with the same `ModelCosts`, the simulator
runs the real scheduler on a `StepTime`, so that what is predicted and measured shares its arithmetic.
"""

from jaxinfer.planner.costs import ModelCosts, StepWork
from jaxinfer.planner.devices import DEVICES, DeviceSheet, device_sheet, measured_sheet
from jaxinfer.planner.memory import MemoryPlan, activation_bytes, logits_bytes, plan_memory
from jaxinfer.planner.plan import Phase, Plan, Remedy, Workload, plan, remedies, with_kv_heads
from jaxinfer.planner.predict import Steps, tokens_per_s, tpot_s, ttft_s
from jaxinfer.planner.step_time import (
    FLOOR,
    MEASURED,
    Efficiency,
    RooflineTime,
    StepParts,
    StepTime,
    Wall,
    binding_wall,
)
from jaxinfer.planner.views import KeyView, keys_of

__all__ = [
    "DEVICES",
    "FLOOR",
    "MEASURED",
    "DeviceSheet",
    "Efficiency",
    "KeyView",
    "MemoryPlan",
    "ModelCosts",
    "Phase",
    "Plan",
    "Remedy",
    "RooflineTime",
    "StepParts",
    "StepTime",
    "StepWork",
    "Steps",
    "Wall",
    "Workload",
    "activation_bytes",
    "binding_wall",
    "device_sheet",
    "keys_of",
    "logits_bytes",
    "measured_sheet",
    "plan",
    "plan_memory",
    "remedies",
    "tokens_per_s",
    "tpot_s",
    "ttft_s",
    "with_kv_heads",
]
