"""Compile one case for one target in this process, which is a child of `gpu_check`.

    python -m gpu_check.aot CASE TARGET FOLDER    (environment and folder as `gpu_check.child` makes them)

A wrong instruction for an architecture ends the process from within LLVM, and dumps are asked for by
environment variables: so every compile has a process of its own. The report goes to FOLDER/report.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from gpu_check import hlo, report
from gpu_check.child import NAME
from gpu_check.report import Report
from gpu_check.targets import TARGETS, Target

SHARED_MEMORY = (
    "Shared memory size limit exceeded",
    "exceeds available shared memory",
    "out of shared memory",
)


@dataclass(frozen=True, slots=True)
class Program:
    """What is compiled: as `runtime.programs.Source`, from ShapeDtypeStructs. The arguments `pool` must come
    back in place. `least` bytes make an argument one that must not be copied, and a buffer made of it a copy:
    see `least_copy`."""

    function: Any
    arguments: tuple[Any, ...]
    donate: tuple[int, ...] = ()
    pool: tuple[int, ...] = ()
    least: int = 1 << 20


def least_copy(*large: Any) -> int:
    """`least` for a program with these pages and matrices: half of the smallest array. Half, because to
    gather nearly all pages, or to widen one half of a weight, costs what a copy does."""
    return min(x.size * x.dtype.itemsize for x in jax.tree.leaves(large)) // 2


def toolkit() -> Path | None:
    """The folder of ptxas that jax has found: the wheel's, CUDA_ROOT, or the system's."""
    from jax._src.lib import cuda_path

    places = [Path(cuda_path) / "bin"] if cuda_path else []
    places += [Path(part) for part in os.environ.get("PATH", "").split(os.pathsep)]
    return next((place / "ptxas" for place in places if (place / "ptxas").exists()), None)


@contextlib.contextmanager
def lowering_for(target: Target) -> Generator[jax.sharding.NamedSharding]:
    """Within this, lowering and compiling are for `target`; gives the sharding that arguments must have."""
    topology = topologies.get_topology_desc(platform="cuda", target_config=target.text, topology="1x1x1")
    mesh = topologies.make_mesh(topology, (1,), ("x",))
    device = jax.sharding.AbstractDevice(device_kind=target.kind, num_cores=target.cores, platform="gpu")
    abstract = jax.sharding.AbstractMesh((), (), abstract_device=device)
    from jax.experimental.mosaic.gpu import utils

    # An abstract device does not say its compute capability, and Mosaic takes it for 9.0.
    infer, utils._infer_arch = utils._infer_arch, lambda: target.capability
    try:
        with jax.sharding.use_abstract_mesh(abstract):
            yield jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    finally:
        utils._infer_arch = infer


def _seconds() -> tuple[float, float]:
    """Of the clock, and of the processors in this process and its children."""
    return time.perf_counter(), sum(os.times()[:4])


def compile_program(program: Program, target: Target) -> tuple[jax.stages.Compiled, float]:
    """The program as the engine compiles it, and the seconds that tracing, lowering and compiling took: by
    the clock, or by the processors where those are fewer, as they are on a busy machine."""
    from jaxinfer.runtime import steps

    with lowering_for(target) as sharding:
        arguments = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), program.arguments
        )
        start = _seconds()
        compiled = steps.compile_program(NAME, program.function, arguments, "gpu", donate=program.donate)
        return compiled, min(now - then for now, then in zip(_seconds(), start, strict=True))


def examine(case: str, program: Program, target: Target, folder: Path) -> Report:
    """Compile and read everything that the compiler says; dumps must go to `folder`."""
    found = Report(case, target.name, jax.__version__)
    try:
        compiled, found.compile_s = compile_program(program, target)
    except Exception as error:
        text = str(error)
        found.error_kind = "shared memory" if any(known in text for known in SHARED_MEMORY) else "error"
        found.error = f"{type(error).__name__}: {text[-2000:]}"
        return found
    memory = compiled.memory_analysis()
    assert memory is not None, "XLA gives no memory analysis"
    found.argument_bytes, found.temp_bytes = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    found.aliased_bytes = memory.alias_size_in_bytes
    pool = [program.arguments[index] for index in program.pool]
    found.pool_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pool))
    text = compiled.as_text()
    assert text is not None, "XLA gives no HLO text"
    module = hlo.parse(text)
    found.copies = [str(copy) for copy in hlo.copies(module, program.least)]
    ptxas = toolkit()
    assert ptxas is not None, "no ptxas"
    thunks, found.kernels = report.read_dump(folder, ptxas, target.architecture)
    found.kinds, found.loops = thunks.kinds, thunks.loops
    return found


def main(programs: Mapping[str, Callable[[Target], Program]]) -> None:
    """The child's side, for one of `programs`."""
    name, target, folder = sys.argv[1], TARGETS[sys.argv[2]], Path(sys.argv[3])
    made = examine(name, programs[name](target), target, folder)
    (folder / "report.json").write_text(json.dumps(made.to_json()))


if __name__ == "__main__":
    from gpu_check.cases import CASES

    main({name: case.program for name, case in CASES.items()})
