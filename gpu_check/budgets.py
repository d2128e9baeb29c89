"""What a compiled program may cost, and the checks: each failure is one line that begins with its kind.

The limits are stated from what the programs compile to, with some room: they are there to notice a program
that has become worse, and are lowered when one has become better. Say why where one is raised.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpu_check.report import Report
from gpu_check.targets import TARGETS

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Budget:
    """Most launches: `launches` + `per_layer` of each layer; the body of a loop counts once. Most temporary
    memory in MiB, most seconds of tracing, lowering and compiling, most bytes spilled by all kernels."""

    launches: int
    per_layer: float = 0
    temp_mib: float = 64
    compile_s: float = 60
    spill_bytes: int = 0

    def most_launches(self, layers: int) -> int:
        return int(self.launches + self.per_layer * layers)


def failures(report: Report, budget: Budget) -> list[str]:
    """What is wrong with a program; empty when nothing is."""
    if report.error:
        return [f"{report.error_kind}: {report.error}"]
    found = []
    shared_per_block = TARGETS[report.target].shared_per_block
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
    most = budget.most_launches(report.layers)
    if report.launches > most:
        found.append(f"launches: {report.launches} of at most {most}")
    if report.temp_bytes > budget.temp_mib * MIB:
        found.append(f"temp: {report.temp_bytes / MIB:.1f} MiB of at most {budget.temp_mib:g}")
    if report.compile_s > budget.compile_s:
        found.append(f"slow: compiled in {report.compile_s:.1f} s of at most {budget.compile_s:g}")
    if not report.kernels:
        found.append("empty: no kernel was found in the compiler's dump")
    return found
