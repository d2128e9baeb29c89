"""What is compiled: kernels alone, and the engine's own programs for Llama 3 8B. A new kernel is a line."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gpu_check.aot import Program
from gpu_check.budgets import Budget
from gpu_check.programs import (
    MOST_ROWS,
    MOST_TOKENS,
    Engine,
    Load,
    attention,
    copying,
    other,
    product,
    step,
    writing,
)
from gpu_check.report import Expected
from gpu_check.targets import CHECKED, Target
from jaxinfer.config import SampleShape
from jaxinfer.config.steps import FEW_CHANGES
from jaxinfer.runtime.programs import COPY, SCORE
from pallas_kernels.quantized import Format


@dataclass(frozen=True, slots=True)
class Case:
    """`program` makes what is compiled for a target, within `budget`, on each of `targets`; `kernels` gives
    those that must be found in it."""

    name: str
    program: Callable[[Target], Program]
    budget: Budget
    targets: tuple[str, ...] = CHECKED
    kernels: Callable[[Target], tuple[Expected, ...]] = lambda target: ()


def attention_kernels(backend: str, decodes: bool, chunks: bool, target: Target) -> tuple[Expected, ...]:
    """What a batch with rows of one query, with chunks, or with both launches on a target."""
    hopper = target.capability[0] == 9
    names: dict[str, tuple[str, str]] = {
        "pallas_mosaic": ("paged_decode", "ragged_prefill_wgmma" if hopper else "ragged_prefill_mma"),
        "pallas_triton": ("paged_decode", "paged_prefill"),
    }
    if backend not in names:
        return ()  # XLA's own
    maker = "mosaic" if backend == "pallas_mosaic" else "triton"
    wanted = zip(names[backend], (decodes, chunks), strict=True)
    return tuple(Expected(maker, name) for name, is_wanted in wanted if is_wanted)


# ------------------------------------------------------------------------------------ kernels alone

LOADS = (
    Load("decode-64x8k", 64, 0, 0, 8192),
    Load("decode-1x128k", 1, 0, 0, 131072),
    Load("prefill-8192", 0, 8192, 4, 32768),
    Load("mixed-64+512", 64, 512, 2, 8192, page_size=16),
)

FLOAT8 = tuple(name for name in CHECKED if name != "a100")  # an instruction of 8.9 and above
FEW = ("h200", "l4")


@dataclass(frozen=True, slots=True)
class Kernel:
    """An attention backend, the types of pages that it must serve, each on which targets, and what one call
    may cost with each of LOADS that it is compiled for."""

    backend: str
    kv_dtypes: dict[str, tuple[str, ...]]
    budgets: dict[str, Budget]


KERNELS = (
    Kernel(
        "pallas_mosaic",
        {"bfloat16": CHECKED},
        {
            "decode-64x8k": Budget(2, temp_mib=4),
            "decode-1x128k": Budget(2, temp_mib=2),
            "prefill-8192": Budget(10, temp_mib=70, on={"h200": Budget(7, temp_mib=1)}),
            "mixed-64+512": Budget(11, temp_mib=8, on={"h200": Budget(9, temp_mib=8)}),
        },
    ),
    Kernel(
        "pallas_triton",
        {"bfloat16": CHECKED, "int8": CHECKED, "float8_e4m3fn": FLOAT8},
        {
            "decode-64x8k": Budget(2, temp_mib=4),
            "decode-1x128k": Budget(2, temp_mib=2),
            "prefill-8192": Budget(2, temp_mib=1),
            "mixed-64+512": Budget(6, temp_mib=4, on=dict.fromkeys(("a100", "l4"), Budget(4, temp_mib=1))),
        },
    ),
    # In bfloat16 it is what whole steps are compiled with.
    Kernel(
        "xla",
        {"int8": FEW, "float8_e4m3fn": FEW},
        {"decode-64x8k": Budget(32, temp_mib=25), "prefill-8192": Budget(82, temp_mib=300)},
    ),
)

FORMATS: dict[Format, tuple[str, ...]] = {"int8": CHECKED, "int4": CHECKED, "fp8": FLOAT8}
"""Of weights, each with the targets that must multiply them."""
PRODUCT = Budget(1, temp_mib=8)
"""Of a product with a weight of few bits: no number of rows needs any memory, and a whole copy of the weight
in bfloat16 is 224 MiB."""
WRITES = {"bfloat16": (1, 2), "int8": (4, 4), "float8_e4m3fn": (1, 2)}
"""Most launches of write_kv and of copy_pages by type of pages: scales are arrays of their own."""


def _kernels() -> Iterator[Case]:
    loads = {load.name: load for load in LOADS}
    for kernel in KERNELS:
        for kv_dtype, targets in kernel.kv_dtypes.items():
            for name, budget in kernel.budgets.items():
                load = loads[name]
                yield Case(
                    f"attention/{kernel.backend}/{kv_dtype}/{name}",
                    functools.partial(attention, kernel.backend, load, kv_dtype),
                    budget,
                    targets,
                    functools.partial(
                        attention_kernels, kernel.backend, load.decode_rows > 0, load.chunk_tokens > 0
                    ),
                )
    for kv_dtype, (writes, copies) in WRITES.items():
        written = functools.partial(writing, kv_dtype, MOST_TOKENS)
        yield Case(f"write_kv/{kv_dtype}", written, Budget(writes, temp_mib=1))
        copied = functools.partial(copying, kv_dtype)
        yield Case(f"copy_pages/{kv_dtype}", copied, Budget(copies, temp_mib=3))
    for format, targets in FORMATS.items():
        names = (Expected("triton", "int4_matmul"),) if format == "int4" else ()
        for rows in (1, 64, 2048):
            yield Case(
                f"quant_matmul/{format}/{rows}",
                functools.partial(product, format, rows),
                PRODUCT,
                targets,
                lambda target, names=names: names,
            )


# ------------------------------------------------------------------------------------ the engine's programs

STEPS: dict[str, tuple[int, int]] = {
    "decode-1": (1, 1),
    "decode-64": (64, 64),
    "decode-256": (MOST_ROWS, MOST_ROWS),
    "prefill-2048": (MOST_TOKENS, 0),
    "full": (MOST_TOKENS + MOST_ROWS, MOST_ROWS),
}
"""Buckets of forward passes by (T, decode rows); full is the largest that there is."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A step of an engine, and (launches, temporary MiB) `measured` on each target that it is compiled for.
    What no GPU would choose for itself is compiled for fewer: each takes some ten seconds of CI."""

    step: str
    engine: Engine
    measured: dict[str, tuple[int, float]]

    @property
    def budget(self) -> Budget:
        each = {target: Budget.measured(*needed) for target, needed in self.measured.items()}
        return Budget(0, temp_mib=0, on=each)


MOSAIC, TRITON, XLA = Engine("pallas_mosaic"), Engine("pallas_triton"), Engine("xla")
TRITON_INT8, TRITON_FLOAT8 = Engine("pallas_triton", "int8"), Engine("pallas_triton", "float8_e4m3fn")
INT8_WEIGHTS, INT4_WEIGHTS = Engine("pallas_mosaic", weights="int8"), Engine("pallas_mosaic", weights="int4")

WHOLE = (
    Whole("decode-1", MOSAIC, {"h200": (515, 0.2), "a100": (484, 0.1), "l4": (486, 0.1), "b200": (483, 0.2)}),
    Whole("decode-64", MOSAIC, {
        "h200": (452, 9.1), "a100": (419, 12.6), "l4": (421, 5.6), "b200": (452, 9.1),
    }),
    Whole("decode-256", MOSAIC, {"h200": (387, 31.2), "l4": (359, 21.2)}),
    Whole("prefill-2048", MOSAIC, {
        "h200": (391, 168.6), "a100": (397, 168.1), "l4": (399, 168.2), "b200": (395, 168.7),
    }),
    Whole("full", MOSAIC, {
        "h200": (455, 190.3), "a100": (428, 189.4), "l4": (430, 189.9), "b200": (426, 190.4),
    }),
    Whole("decode-1", TRITON, {"h200": (516, 0.2), "l4": (487, 0.1)}),
    Whole("full", TRITON, {"h200": (455, 191.2), "l4": (521, 190.7)}),
    Whole("decode-64", TRITON_INT8, {"h200": (583, 9.2)}),
    Whole("full", TRITON_INT8, {"h200": (585, 191.2)}),
    Whole("decode-64", TRITON_FLOAT8, {"h200": (454, 9.2)}),
    Whole("decode-64", XLA, {"h200": (1002, 10.2)}),
    Whole("prefill-2048", XLA, {"h200": (2410, 169.6)}),
    Whole("decode-1", INT8_WEIGHTS, {"h200": (515, 0.2)}),
    Whole("decode-1", INT4_WEIGHTS, {"h200": (515, 0.2)}),
)  # fmt: skip


def step_kernels(whole: Whole, target: Target) -> tuple[Expected, ...]:
    tokens, decode_rows = STEPS[whole.step]
    found = attention_kernels(whole.engine.backend, decode_rows > 0, decode_rows < tokens, target)
    return (*found, Expected("triton", "int4_matmul")) if whole.engine.weights == "int4" else found


def _programs() -> Iterator[Case]:
    for whole in WHOLE:
        yield Case(
            f"step/{whole.engine}/{whole.step}",
            functools.partial(step, *STEPS[whole.step], whole.engine),
            whole.budget,
            tuple(whole.measured),
            functools.partial(step_kernels, whole),
        )
    for rows, changes, budget in (
        (1, 0, Budget(92, temp_mib=4)),
        (MOST_ROWS, 0, Budget(98, temp_mib=780)),
        (MOST_ROWS, MOST_ROWS * FEW_CHANGES, Budget(103, temp_mib=780)),
    ):
        program = functools.partial(other, SampleShape(rows, changes))
        yield Case(f"choose/{rows}x{changes}", program, budget, FEW)
    yield Case("score", functools.partial(other, SCORE), Budget(50, temp_mib=100), FEW)
    yield Case("copy", functools.partial(other, COPY), Budget(70, temp_mib=400), FEW)


CASES = {case.name: case for case in (*_kernels(), *_programs())}
