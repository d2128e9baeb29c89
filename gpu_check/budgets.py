"""What a compiled program may cost, and the checks: each failure is one line that begins with its kind.

How the limits were set: from what `python -m gpu_check --json` reported on 2026-11-30, with jax 0.12.0.1 and
the ptxas 13.0.88 of the extra [gpu-check].

    steps            `cases.WHOLE` states what was measured for each step, engine and target; ROOM is added
    kernels alone    the most over targets, and of launches at most one more where XLA's own fusions take
                     part in it; `on` where a target needs much less
    attention/xla,   the most over targets, and some 5 % more
    choose, score,
    copy

A change that launches one thing more in each layer is over every one of them. Set them lower when a program
has become better; say why in the commit where one is raised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpu_check.report import Expected, Report
from gpu_check.targets import TARGETS

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Budget:
    """Most launches, the body of a loop counted once; most temporary memory in MiB; most seconds of tracing,
    lowering and compiling; most bytes spilled by all kernels. `on`: targets where another budget holds."""

    launches: int
    temp_mib: float = 64
    compile_s: float = 60
    spill_bytes: int = 0
    on: Mapping[str, Budget] = field(default_factory=dict)

    def at(self, target: str) -> Budget:
        return self.on.get(target, self)

    @classmethod
    def measured(cls, launches: int, temp_mib: float) -> Budget:
        """What a whole step was measured to need, with ROOM."""
        return cls(launches + ROOM.launches, temp_mib * (1 + ROOM.temp_share) + ROOM.temp_mib)


@dataclass(frozen=True, slots=True)
class Room:
    """What a step may take more than was measured: launches, a share of its temporary memory and MiB."""

    launches: int
    temp_share: float
    temp_mib: float


ROOM = Room(launches=8, temp_share=0.05, temp_mib=1)
"""A launch more in each of the 32 layers is 32."""


def failures(report: Report, budget: Budget, expected: Sequence[Expected] = ()) -> list[str]:
    """What is wrong with a program, which must have the `expected` kernels; empty when nothing is."""
    budget = budget.at(report.target)
    if report.error:
        return [f"{report.error_kind}: {report.error}"]
    found = []
    target = TARGETS[report.target]
    shared_per_block = target.shared_per_block
    # What a dump leaves out would seem to spill nothing.
    missing = [kernel for kernel in expected if not any(map(kernel.is_it, report.kernels))]
    if missing:
        named = ", ".join(kernel.name for kernel in report.kernels) or "none"
        found.append(f"missing: {', '.join(map(str, missing))}; the kernels found: {named}")
    spilling = [kernel for kernel in report.kernels if kernel.spill_bytes]
    if report.spill_bytes > budget.spill_bytes:
        named = ", ".join(
            f"{kernel.name} {kernel.spill_bytes} B at {kernel.registers} registers" for kernel in spilling[:4]
        )
        found.append(f"spills: {len(spilling)} kernels spill registers: {named}")
    too_large = [kernel for kernel in report.kernels if kernel.shared_bytes > shared_per_block]
    if too_large:
        named = ", ".join(f"{kernel.name} {kernel.shared_bytes} B" for kernel in too_large[:4])
        found.append(f"shared memory: more than the {shared_per_block} B of a block here: {named}")
    if report.aliased_bytes < report.pool_bytes:
        found.append(
            f"alias: of the pool's {report.pool_bytes / MIB:.1f} MiB only {report.aliased_bytes / MIB:.1f} "
            "MiB are written in place"
        )
    if report.copies:
        found.append(f"copies: {len(report.copies)} of pool or weights: {'; '.join(report.copies[:3])}")
    if report.launches > budget.launches:
        found.append(f"launches: {report.launches} of at most {budget.launches}")
    if report.temp_bytes > budget.temp_mib * MIB:
        found.append(f"temp: {report.temp_bytes / MIB:.1f} MiB of at most {budget.temp_mib:g}")
    needed = report.argument_bytes + report.temp_bytes
    if needed > target.memory_bytes:
        found.append(
            f"memory: {needed / MIB:.0f} MiB of arguments and temporaries, {target.kind} has "
            f"{target.memory_bytes / MIB:.0f}"
        )
    if report.compile_s > budget.compile_s:
        found.append(f"slow: compiled in {report.compile_s:.1f} s of at most {budget.compile_s:g}")
    if not report.kernels:
        found.append("empty: no kernel was found in the compiler's dump")
    return found
