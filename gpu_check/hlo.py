"""Copies of large arguments in a compiled program, found in its HLO text.

An argument (weights, pages of K and V) is followed from the entry through tuples, loops and calls. Whatever
makes a buffer of `least` bytes or more out of it alone, by moving, converting or slicing, is a copy: it costs
the traffic of reading and writing it, in every step. In-place updates (scatter, dynamic-update-slice) and
what computes with it (dot, reduce, a kernel) are none.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

COMPUTES = {
    "dot", "scaled-dot", "reduce", "reduce-window", "convolution", "custom-call", "sort", "scatter",
    "dynamic-update-slice", "rng", "rng-bit-generator", "topk",
}  # fmt: skip
"""A fusion with one of these among its instructions makes something new out of its operands."""
IN_PLACE = {"scatter", "dynamic-update-slice"}
SAME = {"bitcast", "opt-barrier", "optimization-barrier", "domain"}
"""No new buffer: the result is the operand. So it is of what ends in -done, after its -start."""

_ARRAY = re.compile(r"([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_OPERAND = re.compile(r"%([\w.\-]+)(?:#(\d+))?")
_COMPUTATION = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\{$")
_CALLED = re.compile(
    r"(?:calls|body|to_apply|called_computations|branch_computations)=\{?(%[^,}\s]+(?:, %[^,}\s]+)*)"
)
_METADATA = re.compile(r"metadata=\{[^}]*\}")
_ALIASED = re.compile(r"\{(\d*)\}: \((\d+), \{\d*\}")


def type_bytes(text: str) -> int:
    """Bytes of a type as HLO writes it, those of all parts of a tuple.

    >>> type_bytes("bf16[4096,8]{1,0}"), type_bytes("(s32[], pred[3]{0})"), type_bytes("s4[10]")
    (65536, 7, 5)
    """
    return sum(
        math.ceil(_bits(dtype) * math.prod(int(n) for n in shape.split(",") if n) / 8)
        for dtype, shape in _ARRAY.findall(text)
    )


def _bits(dtype: str) -> int:
    if dtype == "pred":
        return 8
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 0


@dataclass(frozen=True, slots=True)
class Operand:
    """%name, or of a tuple the element %name#index."""

    name: str
    index: int | None = None


@dataclass(slots=True)
class Instruction:
    """One line of HLO. `parts` are the types of a tuple's elements, or the one type."""

    name: str
    opcode: str
    parts: tuple[str, ...]
    is_tuple: bool
    operands: tuple[Operand, ...]
    attributes: str
    parameter: int | None = None

    @property
    def called(self) -> list[str]:
        return [name for group in _CALLED.findall(self.attributes) for name in _NAME.findall(group)]

    @property
    def index(self) -> int:
        found = re.search(r"index=(\d+)", self.attributes)
        assert found, f"{self.name}: {self.opcode} without an index"
        return int(found[1])


@dataclass(slots=True)
class Computation:
    instructions: list[Instruction] = field(default_factory=list)
    root: str = ""

    @property
    def opcodes(self) -> set[str]:
        return {instruction.opcode for instruction in self.instructions}


@dataclass(frozen=True, slots=True)
class Module:
    computations: dict[str, Computation]
    entry: str


@dataclass(frozen=True, slots=True)
class Copy:
    """A buffer made of nothing but a large argument: `size` bytes of `type`, by the instruction `name`."""

    name: str
    opcode: str
    type: str
    size: int

    def __str__(self) -> str:
        return f"{self.opcode} {self.name} {self.type} {self.size / 2**20:.1f} MiB"


def parse(text: str) -> Module:
    """Read a module as `compiled.as_text()` prints it."""
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        if heading := _COMPUTATION.match(line):
            current = computations.setdefault(heading[2], Computation())
            entry = heading[2] if heading[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and " = " in line:
            instruction = _instruction(line)
            current.instructions.append(instruction)
            if line.lstrip().startswith("ROOT "):
                current.root = instruction.name
    assert entry, "no ENTRY in this HLO text"
    return Module(computations, entry)


def _closing(text: str, start: int) -> int:
    """Where the bracket that opens at `start` closes."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place
    raise AssertionError(f"an open bracket: {text[start:][:100]}")


def _instruction(line: str) -> Instruction:
    left, _, right = line.partition(" = ")
    name = left.split("%")[-1].strip()
    is_tuple = right.startswith("(")
    end = _closing(right, 0) + 1 if is_tuple else right.index(" ")
    kind, rest = right[:end], right[end:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    opcode, inside = rest[:opening], rest[opening + 1 : closing]
    parts = tuple(match[0] for match in re.finditer(_ARRAY, kind)) if is_tuple else (kind,)
    operands = tuple(Operand(name, int(at) if at else None) for name, at in _OPERAND.findall(inside))
    parameter = int(inside) if opcode == "parameter" else None
    attributes = _METADATA.sub("", rest[closing + 1 :])
    return Instruction(name, opcode, parts, is_tuple, operands, attributes, parameter)


Origin = bool | list["Origin"]
"""Whether a value is a large argument, or part of one; of a tuple the origins of its elements."""


def _any(origin: Origin) -> bool:
    return any(_any(part) for part in origin) if isinstance(origin, list) else origin


def _join(a: Origin, b: Origin) -> Origin:
    if isinstance(a, list) and isinstance(b, list):
        return [_join(x, y) for x, y in zip(a, b, strict=True)]
    return _any(a) or _any(b)


def _element(origin: Origin, index: int | None) -> Origin:
    return origin[index] if isinstance(origin, list) and index is not None else origin


def copies(module: Module, least: int) -> list[Copy]:
    """Every copy, of at least `least` bytes, of an argument of at least `least` bytes."""
    found: dict[str, Copy] = {}
    entry = module.computations[module.entry]
    arguments: list[Origin] = [False] * sum(i.parameter is not None for i in entry.instructions)
    for instruction in entry.instructions:
        if instruction.parameter is not None:
            sizes = [type_bytes(part) >= least for part in instruction.parts]
            arguments[instruction.parameter] = list(sizes) if instruction.is_tuple else sizes[0]
    _follow(module, module.entry, arguments, least, found)
    return list(found.values())


def _follow(module: Module, name: str, arguments: list[Origin], least: int, found: dict[str, Copy]) -> Origin:
    """The origin of a computation's result; its copies go into `found`."""
    computation = module.computations[name]
    origins: dict[str, Origin] = {}
    sizes: dict[str, list[int]] = {}
    for each in computation.instructions:
        sizes[each.name] = [type_bytes(part) for part in each.parts]
        given = [_element(origins.get(operand.name, False), operand.index) for operand in each.operands]
        if each.parameter is not None:
            origin = arguments[each.parameter]
        elif each.opcode == "tuple":
            origin = list(given)
        elif each.opcode == "get-tuple-element":
            origin = _element(given[0], each.index)
        elif each.opcode in SAME or each.opcode.endswith(("-done", "-update")):
            origin = given[0]
        elif each.opcode == "while":
            origin = _loop(module, each, given[0], least, found)
        elif each.called and (each.opcode == "call" or each.opcode.endswith("-start")):
            origin = _follow(module, each.called[0], given, least, found)
        elif each.opcode == "conditional":
            results = [
                _follow(module, branch, [operand], least, found)
                for branch, operand in zip(each.called, given[1:], strict=False)
            ]
            origin = results[0] if results else False
            for other in results[1:]:
                origin = _join(origin, other)
        else:
            origin = _made(module, each, given, sizes, least, found)
        origins[each.name] = origin
    return origins.get(computation.root, False)


def _loop(module: Module, loop: Instruction, state: Origin, least: int, found: dict[str, Copy]) -> Origin:
    body = re.search(r"body=%([\w.\-]+)", loop.attributes)
    assert body, f"{loop.name} has no body"
    while True:
        joined = _join(state, _follow(module, body[1], [state], least, found))
        if joined == state:
            return state
        state = joined


def _made(
    module: Module,
    each: Instruction,
    given: list[Origin],
    sizes: dict[str, list[int]],
    least: int,
    found: dict[str, Copy],
) -> Origin:
    """What an instruction that makes a buffer makes of its operands."""
    opcodes = {each.opcode}
    if each.opcode == "fusion":
        opcodes = set().union(*(module.computations[name].opcodes for name in each.called))
    large = [
        size
        for operand, origin in zip(each.operands, given, strict=True)
        if _any(origin) and (size := _size(sizes, operand)) >= least
    ]
    if each.opcode == "custom-call":
        aliases = {int(out or 0): int(operand) for out, operand in _ALIASED.findall(each.attributes)}
        kept = [_any(given[aliases[i]]) if i in aliases else False for i in range(len(each.parts))]
        return list(kept) if each.is_tuple else kept[0]
    if opcodes & COMPUTES:
        in_place = bool(opcodes & IN_PLACE and large)
        kept = [in_place and type_bytes(part) >= least for part in each.parts]
        return list(kept) if each.is_tuple else kept[0]
    # Rows of the embedding, or pages that are read: a gather is a copy when it takes most of what there is.
    floor = max([least, *(size // 2 for size in large)]) if "gather" in opcodes else least
    made = [bool(large) and type_bytes(part) >= floor for part in each.parts]
    for part, is_copy in zip(each.parts, made, strict=True):
        if is_copy:
            what = each.opcode if each.opcode != "fusion" else "fusion of " + _moves(opcodes)
            found.setdefault(each.name, Copy(each.name, what, part, type_bytes(part)))
    return list(made) if each.is_tuple else made[0]


def _size(sizes: dict[str, list[int]], operand: Operand) -> int:
    parts = sizes.get(operand.name, [0])
    return sum(parts) if operand.index is None else parts[operand.index]


def _moves(opcodes: set[str]) -> str:
    return " ".join(sorted(opcodes - {"parameter", "bitcast", "constant", "tuple"})) or "nothing"
