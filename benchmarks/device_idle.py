"""How long the device waits for Python in each step, found in two ways that need nothing beside jax.

by_dispatch     the programs of one step, with its own arguments, queued back to back: what the device needs
                for a step without a host. The rest of a real step's time is idle. Where queueing them takes
                as long as that, the device waits for Python here too, and nothing is known: "launch-bound".
by_trace        jax's profiler over some real steps: gaps between what ran on the device. XLA takes command
                buffers (CUDA graphs) apart while it is profiled, so the gaps within a step are longer than in
                use.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxinfer import LLM
from jaxinfer.config import SampleShape, StepShape


class _Recorded:
    """A program that remembers the arguments of its last call."""

    def __init__(self, program: Any):
        self.program = program
        self.arguments: tuple[Any, ...] = ()

    def __call__(self, *arguments: Any) -> Any:
        self.arguments = arguments
        return self.program(*arguments)


LAUNCH_BOUND = 0.9
"""Share of a step's time that queueing it may take, and the device still be what is measured."""


class Queued(NamedTuple):
    """`seconds` that the device needs for a step, None with the `reason`; `dispatch` is what Python took to
    queue one of the first three: a queue that is full makes it wait for the device."""

    seconds: float | None
    dispatch: float | None
    reason: str

    @classmethod
    def of(cls, seconds: float, dispatch: float) -> Queued:
        bound = dispatch > LAUNCH_BOUND * seconds
        return cls(None if bound else seconds, dispatch, "launch-bound" if bound else "")

    def idle(self, step: float) -> float | None:
        """Of a real step's seconds."""
        return None if self.seconds is None else max(0.0, step - self.seconds)


def by_dispatch(llm: LLM, step: Callable[[], object], count: int) -> Queued:
    """What the device needs for one step like the next ones that `step()` runs. What is queued again writes
    to the pages what is there already."""
    runner: Any = llm.engine.runner
    compiled = runner.programs.compiled
    recorded = {bucket: _Recorded(program) for bucket, program in compiled.items()}
    compiled.update(recorded)
    try:
        for _ in range(3):
            step()
    finally:
        for bucket, record in recorded.items():
            if compiled[bucket] is record:
                compiled[bucket] = record.program
    called = [(bucket, record) for bucket, record in recorded.items() if record.arguments]
    forwards = [record for bucket, record in called if isinstance(bucket, StepShape)]
    samplers = [record for bucket, record in called if isinstance(bucket, SampleShape)]
    if len(forwards) != 1 or len(samplers) != 1:
        return Queued(None, None, "the steps call other programs than a forward and a sampler")
    (forward,), (sampler,) = forwards, samplers
    leaves, _, *rest = forward.arguments
    jax.block_until_ready(runner.kv)
    began = queued = time.perf_counter()
    chosen: Any = None
    first = min(3, count)
    for index in range(count + 1):
        if index == 1:  # the first one warms up
            jax.block_until_ready(chosen)
            began = time.perf_counter()
        _, _, runner.kv = forward.program(leaves, runner.kv, *rest)
        chosen = sampler.program(*sampler.arguments)
        if index == first:
            queued = time.perf_counter()
    jax.block_until_ready((chosen, runner.kv))
    return Queued.of((time.perf_counter() - began) / count, (queued - began) / first)


def by_trace(step: Callable[[], object], count: int) -> dict[str, Any]:
    """{"idle_s", "busy_s"} per step over `count` calls of `step`, or {"reason"} where the trace cannot be
    read."""
    try:
        from jax.profiler import ProfileData

        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                for _ in range(count):
                    step()
            (path,) = Path(folder).rglob("*.xplane.pb")
            intervals = device_intervals(ProfileData.from_file(str(path)))
    except Exception as error:
        return {"reason": f"{type(error).__name__}: {error}"[:200]}
    if not intervals:
        return {"reason": "the trace has no events of the device"}
    busy = covered(intervals)
    span = max(end for _, end in intervals) - min(start for start, _ in intervals)
    return {"idle_s": (span - busy) / count / 1e9, "busy_s": busy / count / 1e9}


def device_intervals(profile: Any) -> list[tuple[float, float]]:
    """(start, end) in nanoseconds of what ran on the device: of a GPU what its streams did, on CPU (where
    this is only tried out) what XLA's threads did."""
    planes = list(profile.planes)
    gpus = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    lines = [line for plane in gpus for line in plane.lines if line.name.startswith("Stream")]
    if gpus and not lines:
        lines = [line for plane in gpus for line in plane.lines]
    if not gpus:
        lines = [line for plane in planes for line in plane.lines if "XLA" in line.name]
    return [(event.start_ns, event.start_ns + event.duration_ns) for line in lines for event in line.events]


def covered(intervals: list[tuple[float, float]]) -> float:
    """The length of the union.

    >>> covered([(0, 2), (1, 3), (5, 6)])
    4.0
    """
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
