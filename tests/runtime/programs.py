"""Reading a compiled step: is every page of KV updated in place, and is no pool copied on the way?"""

from __future__ import annotations

import math
import re
from collections import Counter

import jax

from jaxinfer.model.kv import KVState

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = \w+\[([\d,]*)\]\S* ([\w\-]+)\((.*)$")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_CALLS = re.compile(r"calls=%?([\w.\-]+)")
_IN_PLACE = {"parameter", "bitcast", "reshape", "get-tuple-element", "scatter"}


def pool_problems(program: jax.stages.Compiled, kv: KVState) -> list[str]:
    """What keeps this program from updating `kv` in place, one sentence each; empty when nothing does.

    Whatever in it is as large as one layer's pool must be a view of a pool, or the scatter that writes this
    step's K/V: a fusion counts as what its last instruction is. Anything else moves a whole pool.
    """
    text = program.as_text()
    assert text is not None
    pools = jax.tree.leaves(kv)
    memory = program.memory_analysis()
    assert memory is not None
    problems = []
    pool_bytes = sum(math.prod(pool.shape) * pool.dtype.itemsize for pool in pools)
    if memory.alias_size_in_bytes != pool_bytes:
        problems.append(f"{memory.alias_size_in_bytes} bytes are aliased, the pool has {pool_bytes}")
    problems += _unaliased(text, pools[0].shape, len(pools))
    elements = math.prod(pools[0].shape)
    roots = _roots(text)
    scatters = 0
    for line in text.splitlines():
        found = _INSTRUCTION.match(line)
        if not found or math.prod(int(n) for n in found[1].split(",") if n) < elements or not found[1]:
            continue
        operation = found[2]
        if operation == "fusion":
            called = _CALLS.search(line)
            operation = roots.get(called[1], "fusion") if called else "fusion"
            scatters += operation == "scatter"
        if operation == "parameter":
            continue
        if operation not in _IN_PLACE:
            problems.append(f"{operation} gives something as large as a pool: {line.strip()[:160]}")
    if scatters > len(pools):
        problems.append(f"{scatters} scatters for {len(pools)} pools")
    return problems


def _unaliased(text: str, shape: tuple[int, ...], count: int) -> list[str]:
    """Parameters of a pool's shape that are not the storage of an output."""
    header = text.splitlines()[0]
    layout = header.split("entry_computation_layout={(", 1)[1].split(")->")[0]
    parameters = re.findall(r"\w+\[([\d,]*)\]", layout)
    pools = [i for i, dims in enumerate(parameters) if dims == ",".join(map(str, shape))]
    aliases = re.findall(r"\{\d*\}: \((\d+), \{\}", header)
    repeated = [number for number, times in Counter(aliases).items() if times > 1]
    missing = sorted(set(pools) - {int(number) for number in aliases})
    problems = [f"parameter {number} is not aliased" for number in missing]
    problems += [f"parameter {number} is aliased twice" for number in repeated]
    if len(pools) != count:
        problems.append(f"{len(pools)} parameters have a pool's shape, {count} pools were given")
    return problems


def _roots(text: str) -> dict[str, str]:
    """The operation of the last instruction of every computation, by the computation's name."""
    roots, name = {}, ""
    for line in text.splitlines():
        if found := _COMPUTATION.match(line):
            name = found[1]
        elif line.lstrip().startswith("ROOT ") and (found := _INSTRUCTION.match(line)):
            roots[name] = found[2]
    return roots
