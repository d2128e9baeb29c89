"""What is compiled: kernels alone, and the engine's own programs for Llama 3 8B. A new kernel is a line."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from gpu_check.aot import Program
from gpu_check.budgets import Budget
from gpu_check.targets import CHECKED, Target
from jaxinfer.config import ModelConfig, SampleShape, shape_ladder
from jaxinfer.model.kv import create_kv
from jaxinfer.model.llama import Build, abstract_model
from jaxinfer.presets import PRESETS
from jaxinfer.runtime.programs import COPY, SCORE, Bucket, Programs
from pallas_kernels.batch import tile_capacity
from pallas_kernels.matmul import quant_matmul, resolve_matmul
from pallas_kernels.quantized import Format, QuantizedWeight, int4_group

MODEL = "llama3-8b"
MOST_ROWS, MOST_TOKENS, PAGE_SIZE, MAX_MODEL_LEN = 64, 2048, 16, 8192
"""Of the engine whose steps are compiled."""
POOL_PAGES = {"l4": 2048}
"""Pages of that engine where 4096 (8 GiB beside 15 GiB of weights) are too many."""


@dataclass(frozen=True, slots=True)
class Case:
    """`program` makes what is compiled for a target, within `budget`, on each of `targets`."""

    name: str
    program: Callable[[Target], Program]
    budget: Budget
    targets: tuple[str, ...] = CHECKED


def device_of(target: Target) -> pallas_kernels.Device:
    return pallas_kernels.Device("gpu", target.capability, target.kind, target.cores)


# ------------------------------------------------------------------------------------ kernels alone

HEADS, KV_HEADS, WIDTH = 32, 8, 128  # N, K, H of Llama 3 8B


@dataclass(frozen=True, slots=True)
class Load:
    """A batch for attention alone: `decode_rows` rows of one query and `chunks` rows that share
    `chunk_tokens`, each with up to `context` keys, in pages of `page_size`."""

    name: str
    decode_rows: int
    chunk_tokens: int
    chunks: int
    context: int
    page_size: int = 64


LOADS = (
    Load("decode-64x8k", 64, 0, 0, 8192),
    Load("decode-1x128k", 1, 0, 0, 131072),
    Load("prefill-2048", 0, 2048, 1, 8192),
    Load("prefill-8192", 0, 8192, 4, 32768),
    Load("mixed-64+512", 64, 512, 2, 8192, page_size=16),
)


@dataclass(frozen=True, slots=True)
class Kernel:
    """An attention backend, the types of pages that it must serve, each on which targets, and with which of
    LOADS. `launches` and `temp_mib` are its budget for one call."""

    backend: str
    kv_dtypes: dict[str, tuple[str, ...]]
    launches: int
    temp_mib: float
    loads: tuple[str, ...] = tuple(load.name for load in LOADS)


ALL_KV = ("bfloat16", "int8", "float8_e4m3fn")
NO_FLOAT8 = {"a100"}  # an instruction of 8.9 and above

KERNELS = (
    Kernel("pallas_mosaic", {"bfloat16": CHECKED}, launches=12, temp_mib=96),
    Kernel(
        "pallas_triton",
        {
            "bfloat16": CHECKED,
            "int8": CHECKED,
            "float8_e4m3fn": tuple(name for name in CHECKED if name not in NO_FLOAT8),
        },
        launches=6,
        temp_mib=96,
    ),
    # In bfloat16 it is what whole steps are compiled with.
    Kernel(
        "xla", dict.fromkeys(ALL_KV[1:], CHECKED), launches=76, temp_mib=320,
        loads=("decode-64x8k", "prefill-8192"),
    ),
)  # fmt: skip


def attention(backend: str, load: Load, kv_dtype: str, target: Target) -> Program:
    """Attention alone. Raises NotImplementedError where the backend refuses."""
    device = device_of(target)
    geometry = pallas_kernels.Geometry(HEADS, KV_HEADS, WIDTH, load.page_size, "bfloat16", kv_dtype)
    chosen = pallas_kernels.resolve_backend(backend, device, geometry)
    sizes = pallas_kernels.query_tiles(chosen, geometry)
    capacity = tile_capacity(load.chunk_tokens, load.chunks, sizes)
    rows, tokens = load.decode_rows + load.chunks, load.decode_rows + load.chunk_tokens
    table = load.context // load.page_size
    num_pages = 1 + rows * table
    batch = pallas_kernels.RaggedBatch(
        integers(tokens), integers(tokens), integers(rows, table), integers(rows),
        tuple(integers(room, 3) for room in capacity), integers(len(sizes)), sizes,
    )  # fmt: skip
    function = functools.partial(
        pallas_kernels.paged_attention,
        decode_rows=load.decode_rows, rule=pallas_kernels.Rule(WIDTH**-0.5), backend=chosen,
    )  # fmt: skip
    pages = pages_of(num_pages, load.page_size, kv_dtype)
    q = jax.ShapeDtypeStruct((tokens, HEADS, WIDTH), jnp.bfloat16)
    # The queries of a long chunk may be larger than the pool, and are no pool: moving them is no copy.
    return Program(function, (q, pages, pages, batch), least=max(values_bytes(pages), size_of(q) + 1))


FORMATS: dict[Format, tuple[str, ...]] = {
    "int8": CHECKED,
    "int4": CHECKED,
    "fp8": tuple(name for name in CHECKED if name not in NO_FLOAT8),
}
"""Of weights, each with the targets that must multiply them."""


def product(format: Format, rows: int, target: Target) -> Program:
    """x times the quantised gate and up weight of Llama 3 8B."""
    outputs, inputs = 28672, 4096
    weight = jax.eval_shape(lambda: _weight(format, outputs, inputs))
    function = functools.partial(quant_matmul, backend=resolve_matmul(format, device_of(target)))
    x = jax.ShapeDtypeStruct((rows, inputs), jnp.bfloat16)
    return Program(function, (x, weight), least=size_of(weight.values))


def _weight(format: Format, outputs: int, inputs: int) -> QuantizedWeight:
    """Zeros, laid out as pallas_kernels.quantized tells."""
    if format == "int4":
        group = int4_group(inputs)
        assert group is not None
        values = jnp.zeros((outputs, inputs // 2), jnp.uint8)
        return QuantizedWeight(values, jnp.zeros((inputs // group, outputs), jnp.float32))
    dtype = jnp.int8 if format == "int8" else jnp.float8_e4m3fn
    return QuantizedWeight(jnp.zeros((outputs, inputs), dtype), jnp.zeros((outputs,), jnp.float32))


def writing(kv_dtype: str, tokens: int, target: Target) -> Program:
    """This step's K into a donated pool."""
    pages = pages_of(4096, PAGE_SIZE, kv_dtype)
    new = jax.ShapeDtypeStruct((tokens, KV_HEADS, WIDTH), jnp.bfloat16)
    arguments = (pages, new, integers(tokens), integers(tokens))
    return Program(pallas_kernels.write_kv, arguments, donate=(0,), pool=(0,), least=values_bytes(pages))


def copying(kv_dtype: str, target: Target) -> Program:
    pages = pages_of(4096, PAGE_SIZE, kv_dtype)
    arguments = (pages, integers(64), integers(64))
    return Program(pallas_kernels.copy_pages, arguments, donate=(0,), pool=(0,), least=values_bytes(pages))


def integers(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def size_of(x: Any) -> int:
    return x.size * x.dtype.itemsize


def values_bytes(pages: Any) -> int:
    """Of one layer's K or V, without scales."""
    return size_of(pages.values if isinstance(pages, pallas_kernels.QuantizedPages) else pages)


def pages_of(num_pages: int, page_size: int, kv_dtype: str) -> Any:
    return jax.eval_shape(
        lambda: pallas_kernels.create_pages(num_pages, KV_HEADS, page_size, WIDTH, kv_dtype)
    )


# ------------------------------------------------------------------------------------ the engine's programs


@dataclass(frozen=True, slots=True)
class Step:
    """A forward pass by (T, decode rows), and what it may cost with each attention backend."""

    name: str
    tokens: int
    decode_rows: int
    budgets: dict[str, Budget]


PALLAS = ("pallas_mosaic", "pallas_triton")
STEPS = (
    Step("decode-1", 1, 1, {
        "xla": Budget(50, 38, temp_mib=8), **dict.fromkeys(PALLAS, Budget(50, 18, temp_mib=8)),
    }),
    Step("decode-64", 64, 64, {
        "xla": Budget(50, 38, temp_mib=32), **dict.fromkeys(PALLAS, Budget(50, 18, temp_mib=32)),
    }),
    Step("prefill-2048", 2048, 0, {
        "xla": Budget(80, 92, temp_mib=256), **dict.fromkeys(PALLAS, Budget(80, 18, temp_mib=384)),
    }),
    Step("mixed-64+512", 576, 64, {
        "xla": Budget(80, 120, temp_mib=128), **dict.fromkeys(PALLAS, Budget(80, 20, temp_mib=128)),
    }),
)  # fmt: skip
FEW = ("h200", "l4")
STEP_TARGETS = {"pallas_mosaic": CHECKED, "pallas_triton": FEW, "xla": ("h200",)}
"""What no GPU would choose for itself is compiled for fewer: each compile is some ten seconds of CI."""
KV_DTYPES = ("bfloat16",)
"""Of the pools of whole steps."""


@functools.cache
def programs(backend: str, kv_dtype: str, target: Target) -> Programs:
    """The programs of an engine for MODEL on a target, as `runtime.loading.load` would make them."""
    config = ModelConfig.from_hf(PRESETS[MODEL])
    geometry = pallas_kernels.Geometry(
        config.num_heads, config.layers[0].num_kv_heads, config.head_dim, PAGE_SIZE, "bfloat16", kv_dtype
    )
    chosen = pallas_kernels.resolve_backend(backend, device_of(target), geometry)
    graph, state = abstract_model(config, Build(jnp.dtype("bfloat16"), "gpu", chosen))
    pages = POOL_PAGES.get(target.name, 4096)
    kv = jax.eval_shape(lambda: create_kv(config, pages, PAGE_SIZE, jnp.dtype(kv_dtype)))
    tiles = pallas_kernels.query_tiles(chosen, geometry)
    ladder = shape_ladder(MOST_ROWS, MOST_TOKENS, tiles, "gpu")
    return Programs(
        config, graph, state, kv, ladder, table_width=MAX_MODEL_LEN // PAGE_SIZE, platform="gpu",
        most_changes=MAX_MODEL_LEN, sampled_vocab=config.vocab_size,
    )  # fmt: skip


def step(shape: tuple[int, int], backend: str, kv_dtype: str, target: Target) -> Program:
    made = programs(backend, kv_dtype, target)
    (bucket,) = [each for each in made.ladder if (each.tokens, each.decode_rows) == shape]
    source = made.source(bucket)
    pages = source.arguments[1].k[0]
    matrices = [size_of(x) for x in made.leaves if x.ndim > 1]
    least = min(values_bytes(pages), *matrices)
    return Program(source.function, source.arguments, source.donate, (1,), least, len(source.arguments[1].k))


def other(bucket: Bucket, target: Target) -> Program:
    """The engine's programs besides the forward pass."""
    made = programs("xla", "bfloat16", target)
    source = made.source(bucket)
    leaves = jax.tree.leaves(source.arguments[0])
    least = min(size_of(x) for x in leaves if x.ndim > 1)
    pool = (0,) if bucket == COPY else ()
    return Program(source.function, source.arguments, source.donate, pool, least)


# ------------------------------------------------------------------------------------ all of them


def _cases() -> Iterator[Case]:
    for kernel in KERNELS:
        for kv_dtype, targets in kernel.kv_dtypes.items():
            for load in (load for load in LOADS if load.name in kernel.loads):
                yield Case(
                    f"attention/{kernel.backend}/{kv_dtype}/{load.name}",
                    functools.partial(attention, kernel.backend, load, kv_dtype),
                    Budget(kernel.launches, temp_mib=kernel.temp_mib),
                    targets,
                )
    for kv_dtype in ALL_KV:
        yield Case(f"write_kv/{kv_dtype}", functools.partial(writing, kv_dtype, 2048), Budget(8, temp_mib=32))
        yield Case(f"copy_pages/{kv_dtype}", functools.partial(copying, kv_dtype), Budget(8, temp_mib=32))
    for format, targets in FORMATS.items():
        for rows in (1, 64, 2048):
            program = functools.partial(product, format, rows)
            yield Case(f"quant_matmul/{format}/{rows}", program, Budget(6, temp_mib=240), targets)
    for each in STEPS:
        for backend, budget in each.budgets.items():
            for kv_dtype in KV_DTYPES:
                shape = (each.tokens, each.decode_rows)
                program = functools.partial(step, shape, backend, kv_dtype)
                yield Case(f"step/{backend}/{kv_dtype}/{each.name}", program, budget, STEP_TARGETS[backend])
    for rows, changes in ((1, 0), (MOST_ROWS, 0), (MOST_ROWS, MOST_ROWS * 512)):
        program = functools.partial(other, SampleShape(rows, changes))
        yield Case(f"choose/{rows}x{changes}", program, Budget(100, temp_mib=256), FEW)
    yield Case("score", functools.partial(other, SCORE), Budget(60, temp_mib=128), FEW)
    yield Case("copy", functools.partial(other, COPY), Budget(80, temp_mib=128), FEW)


CASES = {case.name: case for case in _cases()}
