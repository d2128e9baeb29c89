"""What the engine would do under a load, on a device that is not here: the real scheduler in virtual time.

    timer = StepTimer(step_time, ladder)
    outcome = Simulation(limits, timer, prefix_caching=True).run([Ask(0.0, request), ...])

`Simulation` is the fast way: the scheduler alone, with steady decoders moved as a group, hundreds of times
faster than the device would be. `SimulatedRunner` and `VirtualClock` put the same device under a real Engine;
that the two agree in every time is tested.
"""

from jaxinfer.simulator.clock import VirtualClock
from jaxinfer.simulator.runner import SimulatedRunner
from jaxinfer.simulator.scheduler import CruisingScheduler, Step
from jaxinfer.simulator.simulation import Ask, Outcome, Peaks, Served, Simulation
from jaxinfer.simulator.timing import StepTimer, Totals

__all__ = [
    "Ask",
    "CruisingScheduler",
    "Outcome",
    "Peaks",
    "Served",
    "SimulatedRunner",
    "Simulation",
    "Step",
    "StepTimer",
    "Totals",
    "VirtualClock",
]
