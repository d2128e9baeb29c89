"""What the compiler says about a program: launches; registers, spills and shared memory of each kernel."""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

CONTAINERS = {
    "kAsyncDone", "kAsyncStart", "kCommandBuffer", "kConditional", "kDynamicSlice", "kDynamicSliceFusion",
    "kSequential", "kWaitForStreams", "kWhile",
}  # fmt: skip
"""Thunks that launch nothing themselves."""

_THUNK = re.compile(r"^\s*(\d+): (k\w+)\s+(?:\[[^\]]*\])?\s*(.*)$")
_SHARED = re.compile(r"(\S+) grid: .*shared_memory: (\d+) bytes")
_ENTRY = re.compile(r"Compiling entry function '([^']+)'")

_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


@dataclass(frozen=True, slots=True)
class Kernel:
    """`registers` a thread, `spill_bytes` stored to and loaded from local memory, `shared_bytes` a block.
    `maker` "xla" (its own and Triton's) or "mosaic"."""

    name: str
    maker: str
    registers: int
    spill_bytes: int
    shared_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Expected:
    """A kernel that a program must launch, as `pallas_call` or `plgpu.kernel` was told its name."""

    maker: Literal["triton", "mosaic"]
    name: str

    def is_it(self, kernel: Kernel) -> bool:
        """XLA assembles Triton's kernels with its own, and may number them; Mosaic's are NAME_0:NAME_..."""
        if self.maker == "mosaic":
            return kernel.maker == "mosaic" and re.match(rf"{self.name}_\d+:", kernel.name) is not None
        return kernel.maker == "xla" and re.fullmatch(rf"{self.name}([._]\d+)*", kernel.name) is not None

    def __str__(self) -> str:
        return f"{self.maker} {self.name}"


@dataclass(slots=True)
class Report:
    """One program compiled for one target. Bytes of its buffers; `kinds` counts launches by kind of thunk, a
    loop's body once; `copies` of large arguments; `error` when it did not compile."""

    case: str
    target: str
    jax: str = ""
    compile_s: float = 0.0
    argument_bytes: int = 0
    pool_bytes: int = 0
    aliased_bytes: int = 0
    temp_bytes: int = 0
    loops: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    copies: list[str] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    error: str = ""
    error_kind: str = ""
    failures: list[str] = field(default_factory=list)

    @property
    def launches(self) -> int:
        return sum(self.kinds.values())

    @property
    def spill_bytes(self) -> int:
        return sum(kernel.spill_bytes for kernel in self.kernels)

    @property
    def most_registers(self) -> int:
        return max((kernel.registers for kernel in self.kernels), default=0)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "launches": self.launches}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Report:
        fields = {name: value for name, value in fields.items() if name != "launches"}
        return cls(**{**fields, "kernels": [Kernel(**kernel) for kernel in fields["kernels"]]})


@dataclass(frozen=True, slots=True)
class Thunks:
    """`kinds`: launches by kind; `loops`: loops with a trip count of the data; `shared`: bytes of shared
    memory by kernel."""

    kinds: dict[str, int]
    loops: int
    shared: dict[str, int]


def read_thunks(text: str) -> Thunks:
    """Read XLA's list of what it launches (thunk_sequence.txt)."""
    kinds: Counter[str] = Counter()
    shared: dict[str, int] = {}
    for line in text.splitlines():
        if match := _THUNK.match(line):
            kinds[match[2]] += 1
            if kernel := _SHARED.search(match[3]):
                shared[kernel[1]] = int(kernel[2])
    launched = {kind: count for kind, count in sorted(kinds.items()) if kind not in CONTAINERS}
    return Thunks(launched, kinds["kWhile"], shared)


def read_ptxas(text: str, maker: str, shared: dict[str, int] | None = None) -> list[Kernel]:
    """Read what `ptxas -v` prints about each entry function (and the functions that it calls, whose spills
    count with it)."""
    kernels: list[Kernel] = []
    entry, spilled = "", 0
    for line in text.splitlines():
        if match := _ENTRY.search(line):
            entry, spilled = match[1], 0
        elif match := _SPILLS.search(line):
            spilled += int(match[1]) + int(match[2])
        elif (match := _REGISTERS.search(line)) and entry:
            smem = re.search(r"(\d+) bytes smem", line)
            static = int(smem[1]) if smem else 0
            kernels.append(
                Kernel(entry, maker, int(match[1]), spilled, max(static, (shared or {}).get(entry, 0)))
            )
            entry, spilled = "", 0
    return kernels


def assemble(files: Iterable[Path], ptxas: Path, architecture: str) -> str:
    """What `ptxas -v` says about PTX files."""
    said = []
    for file in files:
        done = subprocess.run(
            [ptxas, "-v", f"-arch={architecture}", "-o", os.devnull, file], capture_output=True, text=True
        )
        assert done.returncode == 0, f"{ptxas} refuses {file.name}: {done.stderr[-1000:]}"
        said.append(done.stderr + done.stdout)
    return "\n".join(said)


def read_dump(folder: Path, ptxas: Path, architecture: str) -> tuple[Thunks, list[Kernel]]:
    """Everything that XLA and Mosaic have left in the folders xla and mosaic of `folder`."""
    listing = sorted((folder / "xla").glob("*.thunk_sequence.txt"))
    assert listing, f"XLA has left no thunk_sequence.txt in {folder / 'xla'}"
    thunks = read_thunks("\n".join(path.read_text() for path in listing))
    said = assemble(sorted((folder / "xla").glob("*.ptx")), ptxas, architecture)
    kernels = read_ptxas(said, "xla", thunks.shared)
    mosaic = folder / "mosaic"
    for path in sorted(mosaic.glob("*.ptx")):
        resources = path.with_suffix(".resources.txt")
        shared = (
            re.search(r"smem_scratch_bytes\s*=\s*(\d+)", resources.read_text())
            if resources.exists()
            else None
        )
        made = read_ptxas(assemble([path], ptxas, architecture), "mosaic")
        size = int(shared[1]) if shared else 0
        kernels += [Kernel(f"{path.stem}:{k.name}", k.maker, k.registers, k.spill_bytes, size) for k in made]
    return thunks, kernels
