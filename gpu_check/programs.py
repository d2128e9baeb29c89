"""How what is compiled is made: kernels alone, and the programs of an engine for Llama 3 8B."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from gpu_check.aot import Program, least_copy
from gpu_check.targets import Target
from jaxinfer.config import EngineConfig, ModelConfig, shape_ladder
from jaxinfer.model.kv import create_kv
from jaxinfer.model.llama import Build, abstract_model
from jaxinfer.model.quantized import Quantization
from jaxinfer.presets import PRESETS
from jaxinfer.runtime.programs import COPY, Bucket, Programs
from pallas_kernels.batch import tile_capacity
from pallas_kernels.matmul import quant_matmul, resolve_matmul
from pallas_kernels.quantized import Format, QuantizedWeight, int4_group


def device_of(target: Target) -> pallas_kernels.Device:
    return pallas_kernels.Device("gpu", target.capability, target.kind, target.cores)


# ------------------------------------------------------------------------------------ kernels alone

HEADS, KV_HEADS, WIDTH = 32, 8, 128  # N, K, H of Llama 3 8B
WRITTEN_PAGES = 32768
"""Of the pool that is written to: half of its scales, in int8, is more than what is written."""


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
    least = least_copy(values_of(pages))
    assert size_of(q) < least, f"{load.name}: moving the queries would be taken for a copy of pages"
    return Program(function, (q, pages, pages, batch), least=least)


def product(format: Format, rows: int, target: Target) -> Program:
    """x times the quantised gate and up weight of Llama 3 8B."""
    outputs, inputs = 28672, 4096
    weight = jax.eval_shape(lambda: _weight(format, outputs, inputs))
    function = functools.partial(quant_matmul, backend=resolve_matmul(format, device_of(target)))
    x = jax.ShapeDtypeStruct((rows, inputs), jnp.bfloat16)
    return Program(function, (x, weight), least=least_copy(weight.values))


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
    pages = pages_of(WRITTEN_PAGES, PAGE_SIZE, kv_dtype)
    new = jax.ShapeDtypeStruct((tokens, KV_HEADS, WIDTH), jnp.bfloat16)
    least = least_copy(pages)
    assert size_of(new) < least, "rounding what is new would be taken for a copy of scales"
    arguments = (pages, new, integers(tokens), integers(tokens))
    return Program(pallas_kernels.write_kv, arguments, donate=(0,), pool=(0,), least=least)


def copying(kv_dtype: str, target: Target) -> Program:
    pages = pages_of(WRITTEN_PAGES, PAGE_SIZE, kv_dtype)
    arguments = (pages, integers(64), integers(64))
    least = least_copy(pages)
    return Program(pallas_kernels.copy_pages, arguments, donate=(0,), pool=(0,), least=least)


def integers(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def size_of(x: Any) -> int:
    return x.size * x.dtype.itemsize


def values_of(pages: Any) -> Any:
    """One layer's K or V without scales."""
    return pages.values if isinstance(pages, pallas_kernels.QuantizedPages) else pages


def pages_of(num_pages: int, page_size: int, kv_dtype: str) -> Any:
    return jax.eval_shape(
        lambda: pallas_kernels.create_pages(num_pages, KV_HEADS, page_size, WIDTH, kv_dtype)
    )


# ------------------------------------------------------------------------------------ the engine's programs

MODEL = "llama3-8b"
POOL_BYTES = {"l4": 4 << 30}
"""Of the pages of that engine, where 8 GiB beside 15 GiB of weights are too much."""
DEFAULTS = EngineConfig().on("gpu")
MAX_MODEL_LEN = 8192
assert DEFAULTS.max_num_seqs is not None
assert DEFAULTS.max_num_batched_tokens is not None
MOST_ROWS, MOST_TOKENS, PAGE_SIZE = (
    DEFAULTS.max_num_seqs, DEFAULTS.max_num_batched_tokens, DEFAULTS.page_size,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Engine:
    """What an engine for MODEL is made of, and everything else by default. `weights` None: bfloat16."""

    backend: str
    kv_dtype: str = "bfloat16"
    weights: Format | None = None

    def __str__(self) -> str:
        kind = "" if self.weights is None else f"/{self.weights}-weights"
        return f"{self.backend}/{self.kv_dtype}{kind}"


@functools.cache
def programs(engine: Engine, target: Target) -> Programs:
    """The programs of an engine on a target, as `runtime.loading.load` would make them."""
    config, device = ModelConfig.from_hf(PRESETS[MODEL]), device_of(target)
    geometry = pallas_kernels.Geometry(
        config.num_heads, config.layers[0].num_kv_heads, config.head_dim, PAGE_SIZE, "bfloat16",
        engine.kv_dtype,
    )  # fmt: skip
    backend = pallas_kernels.resolve_backend(engine.backend, device, geometry)
    quantization = engine.weights and Quantization(engine.weights, resolve_matmul(engine.weights, device))
    graph, state = abstract_model(config, Build(jnp.dtype("bfloat16"), "gpu", backend, quantization))
    kv_dtype = jnp.dtype(engine.kv_dtype)
    # A power of two, as many as the bytes hold without scales.
    page_bytes = 2 * config.num_layers * KV_HEADS * PAGE_SIZE * WIDTH * kv_dtype.itemsize
    pages = POOL_BYTES.get(target.name, 8 << 30) // page_bytes
    kv = jax.eval_shape(lambda: create_kv(config, pages, PAGE_SIZE, kv_dtype))
    ladder = shape_ladder(MOST_ROWS, MOST_TOKENS, pallas_kernels.query_tiles(backend, geometry), "gpu")
    return Programs(
        config, graph, state, kv, ladder, table_width=MAX_MODEL_LEN // PAGE_SIZE, platform="gpu",
        most_changes=MAX_MODEL_LEN, sampled_vocab=config.vocab_size,
    )  # fmt: skip


def step(tokens: int, decode_rows: int, engine: Engine, target: Target) -> Program:
    """The engine's forward pass of a bucket (T, decode rows)."""
    made = programs(engine, target)
    (bucket,) = [each for each in made.ladder if (each.tokens, each.decode_rows) == (tokens, decode_rows)]
    source = made.source(bucket)
    kv = source.arguments[1]
    least = least_copy(kv, matrices(source.arguments[0]))
    inputs = max(size_of(x) for x in source.arguments[2:])
    assert inputs < least, f"taking {inputs} bytes of inputs apart would be taken for a copy of {least}"
    return Program(source.function, source.arguments, source.donate, (1,), least)


def other(bucket: Bucket, target: Target) -> Program:
    """The engine's programs besides the forward pass."""
    source = programs(Engine("xla"), target).source(bucket)
    pool = (0,) if bucket == COPY else ()
    least = least_copy(matrices(source.arguments[0]))
    return Program(source.function, source.arguments, source.donate, pool, least)


def matrices(state: Any) -> list[Any]:
    """What is large in a model or a pool: everything but norms, biases and scales of outputs."""
    return [x for x in jax.tree.leaves(state) if x.ndim > 1]
