"""From Hugging Face tensor names to the parameters of `Llama`.

Names live here, beside the model; files live in `checkpoints`, which this room does not know: a `Source`
is anything that lists, measures and reads tensors by name.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfer.config import ModelConfig
from jaxinfer.core import ConfigError
from jaxinfer.model.linear import Layout, RowMajor
from jaxinfer.model.llama import Build, abstract_model
from jaxinfer.model.quantized import QuantizedLayout
from pallas_kernels import QuantizedWeight

logger = logging.getLogger(__name__)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Source(Protocol):
    """Tensors by Hugging Face name, in its layout ([out, in] for a weight)."""

    @property
    def path(self) -> Path:
        """What messages call the source."""
        ...

    def names(self) -> tuple[str, ...]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray: ...


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter: its path in the module, the tensors it is stacked from (along outputs), their shapes."""

    path: tuple[str | int, ...]
    tensors: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def outputs(self) -> int:
        return sum(shape[0] for shape in self.shapes)

    @property
    def quantizable(self) -> bool:
        """Whether it is a weight inside of a layer: see `jaxinfer.model.quantized`."""
        return self.path[0] == "layers" and len(self.shapes[0]) == 2


def parameters(config: ModelConfig) -> Iterator[Parameter]:
    """Every parameter of the model, in the order of a forward pass."""
    d, f, h = config.hidden_size, config.intermediate_size, config.head_dim
    q = config.num_heads * h

    def linear(path: tuple, names: tuple[str, ...], outs: tuple[int, ...], inputs: int, bias: bool):
        yield Parameter(
            (*path, "weight"), tuple(f"{n}.weight" for n in names), tuple((o, inputs) for o in outs)
        )
        if bias:
            yield Parameter((*path, "bias"), tuple(f"{n}.bias" for n in names), tuple((o,) for o in outs))

    yield Parameter(("embedding", "weight"), (EMBEDDING,), ((config.vocab_size, d),))
    for i, layer in enumerate(config.layers):
        kv = layer.num_kv_heads * h
        own = layer.kv_from is None  # else: queries alone, over the K/V of another layer
        hf, at = f"model.layers.{i}", ("layers", i)
        attention, mlp = f"{hf}.self_attn", f"{hf}.mlp"
        yield Parameter((*at, "attention_norm", "weight"), (f"{hf}.input_layernorm.weight",), ((d,),))
        names = tuple(f"{attention}.{x}_proj" for x in ("qkv" if own else "q"))
        outputs = (q, kv, kv) if own else (q,)
        yield from linear((*at, "attention", "qkv"), names, outputs, d, config.qkv_bias)
        if config.qk_norm:
            for norm in ("q_norm", "k_norm") if own else ("q_norm",):
                yield Parameter((*at, "attention", norm, "weight"), (f"{attention}.{norm}.weight",), ((h,),))
        name = (f"{attention}.o_proj",)
        yield from linear((*at, "attention", "output"), name, (d,), q, config.output_bias)
        yield Parameter((*at, "mlp_norm", "weight"), (f"{hf}.post_attention_layernorm.weight",), ((d,),))
        names = (f"{mlp}.gate_proj", f"{mlp}.up_proj")
        yield from linear((*at, "mlp", "gate_up"), names, (f, f), d, config.mlp_bias)
        yield from linear((*at, "mlp", "down"), (f"{mlp}.down_proj",), (d,), f, config.mlp_bias)
    yield Parameter(("norm", "weight"), ("model.norm.weight",), ((d,),))
    if not config.tie_word_embeddings:
        yield Parameter(("head", "weight"), (HEAD,), ((config.vocab_size, d),))


# Buffers that old checkpoints carry though the model derives them, of all layers or of one.
_ROTARY_BUFFER = re.compile(
    r"model\.(layers\.\d{1,4}\.(self_attn\.)?)?rotary_emb\.(inv_freq|cos_cached|sin_cached)"
)


def check_names(config: ModelConfig, source: Source) -> None:
    """Every parameter must be in the source with its shape, and nothing else may be there unread.

    Raises ConfigError naming the source and the tensor.
    """
    present = set(source.names())
    wanted: set[str] = set()
    for parameter in parameters(config):
        for name, shape in zip(parameter.tensors, parameter.shapes, strict=True):
            wanted.add(name)
            if name not in present:
                raise ConfigError(f"{source.path}: no tensor {name!r}, which this model needs")
            if tuple(source.shape(name)) != shape:
                raise ConfigError(
                    f"{source.path}: tensor {name!r} has shape {tuple(source.shape(name))}, expected {shape}"
                )
    extra = {name for name in present - wanted if not _is_rotary_buffer(config, source, name)}
    if config.tie_word_embeddings and HEAD in extra:
        extra.remove(HEAD)
        shape = (config.vocab_size, config.hidden_size)
        if tuple(source.shape(HEAD)) != shape:
            raise ConfigError(
                f"{source.path}: tensor {HEAD!r} has shape {tuple(source.shape(HEAD))}, expected {shape}"
            )
    if extra:
        shown = ", ".join(sorted(extra)[:5])
        raise ConfigError(f"{source.path}: {len(extra)} tensors that this model does not use: {shown}")


def _is_rotary_buffer(config: ModelConfig, source: Source, name: str) -> bool:
    """Whether a tensor is one of rotary embeddings as this model has them: of another width, they are not."""
    match, shape = _ROTARY_BUFFER.fullmatch(name), tuple(source.shape(name))
    if match is None:
        return False
    if match[3] == "inv_freq":
        return shape == (config.head_dim // 2,)
    return shape[-1:] == (config.head_dim,)


def load_params(
    config: ModelConfig,
    build: Build,
    source: Source,
    *,
    sharding: Callable[[Parameter], jax.sharding.Sharding] | None = None,
    on_tensor: Callable[[int], None] = lambda count: None,
) -> tuple[nnx.GraphDef, nnx.State]:
    """Read every parameter once, in its layout and dtype, straight to the device.

    `sharding` of a parameter says which part of it lies on which device (None: all on the default device);
    only the parts of this process's devices are read, each once, one after the other. Host memory above the
    loaded parameters stays within the part being placed (on CPU that is the parameter itself) and READ_BYTES
    of what is read, also where weights are quantised. `on_tensor(1)` is called per parameter. Raises
    ConfigError for a missing, extra or mis-shaped tensor, and for quantization together with `sharding`.
    """
    check_names(config, source)
    warn_of_another_head(config, source)
    if sharding is not None and build.quantization is not None:
        raise ConfigError(
            f"quantization {build.quantization.format!r} of weights that lie on several devices is not "
            "supported yet; leave it at None"
        )

    def read(parameter: Parameter) -> jax.Array | QuantizedWeight:
        outputs, shape = parameter.outputs, parameter.shapes[0]
        if build.quantization is not None and parameter.quantizable:
            quantized = build.quantization.layout(build.platform, outputs)
            value = _read_quantized(parameter, quantized, source)
            on_tensor(1)
            return value
        layout = build.layout(outputs) if len(shape) == 2 else RowMajor()
        if sharding is None:
            value = jax.device_put(_read(parameter, layout, build.dtype, source))
        else:
            whole = layout.shape(outputs, shape[1]) if len(shape) == 2 else (outputs,)
            value = _place(
                whole, sharding(parameter), lambda i: _read(parameter, layout, build.dtype, source, i)
            )
        on_tensor(1)
        return value

    return _fill(config, build, read)


def _place(
    shape: tuple[int, ...],
    sharding: jax.sharding.Sharding,
    read: Callable[[tuple[slice, ...]], np.ndarray],
) -> jax.Array:
    """An array whose parts are read and put on their devices one by one; replicas share a reading."""
    placed: dict[Any, jax.Array] = {}
    indices = sharding.addressable_devices_indices_map(shape)
    by_part: dict[tuple, list[Any]] = {}
    for device, index in indices.items():
        by_part.setdefault(tuple(range(n)[s] for n, s in zip(shape, index or (), strict=True)), []).append(
            device
        )
    for part, devices in by_part.items():
        value = read(tuple(slice(r.start, r.stop) for r in part))
        for device in devices:
            placed[device] = jax.block_until_ready(jax.device_put(value, device))
    return jax.make_array_from_single_device_arrays(shape, sharding, [placed[d] for d in indices])


def warn_of_another_head(config: ModelConfig, source: Source) -> None:
    """A tied model may carry an lm_head, which is not used; if it is another, implementations disagree."""
    if not config.tie_word_embeddings or HEAD not in source.names():
        return
    step = max(1, READ_BYTES // (4 * config.hidden_size))
    parts = [(slice(start, start + step),) for start in range(0, config.vocab_size, step)]
    if any(not np.array_equal(source.read(HEAD, at), source.read(EMBEDDING, at)) for at in parts):
        logger.warning(
            "tie_word_embeddings is true, but %s differs from %s: the embedding is used for both; "
            "set tie_word_embeddings to false in config.json to use it",
            HEAD,
            EMBEDDING,
        )


READ_BYTES = 16 << 20
"""Most float32 bytes that are read at once, while a large tensor is loaded."""


def _read(
    parameter: Parameter,
    layout: Layout,
    dtype: jnp.dtype,
    source: Source,
    index: tuple[slice, ...] = (),
) -> np.ndarray:
    """The part `index` of a parameter as it lies in its layout, put together from its tensors' rows."""
    index = (*index, *(slice(None),) * (3 - len(index)))
    width = parameter.shapes[0][1:]
    if width:
        rows, columns = layout.source(index, parameter.outputs, width[0])
        packed = _aligned(layout.shape(len(rows), len(columns)), dtype)
    else:
        rows, columns = range(parameter.outputs)[index[0]], None
        packed = _aligned((len(rows),), dtype)
    for start, part in _parts(parameter, rows, columns, source):
        layout.store(packed, start, part)
    return packed


def _read_quantized(parameter: Parameter, layout: QuantizedLayout, source: Source) -> QuantizedWeight:
    """A weight, quantised part by part as it is read: it is never whole in another dtype."""
    inputs = parameter.shapes[0][1]
    packed = _empty(layout, parameter.outputs, inputs)
    for start, part in _parts(parameter, range(parameter.outputs), range(inputs), source):
        layout.store(packed, start, part)
    return QuantizedWeight(*map(jax.device_put, packed))


def _empty(layout: QuantizedLayout, outputs: int, inputs: int) -> QuantizedWeight:
    return QuantizedWeight(*(_aligned(part.shape, part.dtype) for part in layout.empty(outputs, inputs)))


def _most_rows(columns: int) -> int:
    """Rows of so many float32 columns within READ_BYTES."""
    return max(1, READ_BYTES // (4 * max(1, columns)))


def _parts(
    parameter: Parameter, rows: range, columns: range | None, source: Source
) -> Iterator[tuple[int, np.ndarray]]:
    """Rows `rows` (and of a matrix, `columns`) of a parameter, in parts: (the first one's place among the
    wanted rows, what the checkpoint holds there)."""
    most_rows = parameter.outputs if columns is None else _most_rows(len(columns))
    rest = () if columns is None else (slice(columns.start, columns.stop),)
    first = 0  # of the tensor's rows among the parameter's
    for name, shape in zip(parameter.tensors, parameter.shapes, strict=True):
        begin, end = max(rows.start, first), min(rows.stop, first + shape[0])
        for start in range(begin, end, most_rows):
            stop = min(start + most_rows, end)
            yield start - rows.start, source.read(name, (slice(start - first, stop - first), *rest))
        first += shape[0]


def _aligned(shape: tuple[int, ...], dtype: jnp.dtype) -> np.ndarray:
    """An array that begins at a multiple of 64 bytes: JAX takes it over on CPU, where it copies any other."""
    count = math.prod(shape) * dtype.itemsize
    memory = np.empty(count + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + count].view(dtype).reshape(shape)


def random_params(
    config: ModelConfig, build: Build, seed: int = 0, *, on_tensor: Callable[[int], None] = lambda count: None
) -> tuple[nnx.GraphDef, nnx.State]:
    """Parameters drawn at the scale of a trained model (for benchmarks and tests): normal, 0.02; norms 1.

    A GPU draws for itself, one parameter after the other (numpy would take minutes for 16 GB): the
    distribution is the same, the numbers are others than on CPU. Quantised weights are drawn and quantised on
    the host.
    """
    generator = np.random.default_rng(seed)
    numbers = itertools.count()

    def draw(parameter: Parameter) -> jax.Array | QuantizedWeight:
        shape = (parameter.outputs, *parameter.shapes[0][1:])
        on_tensor(1)
        if "norm" in str(parameter.path[-2]):
            return jnp.ones(shape, build.dtype)
        quantized = build.quantization is not None and parameter.quantizable
        if build.platform == "gpu" and not quantized:
            return _normal(jax.random.key(seed), next(numbers), shape, build.dtype)
        if len(shape) == 1:
            return jax.device_put((generator.standard_normal(shape, np.float32) * 0.02).astype(build.dtype))
        outputs, inputs = shape
        if build.quantization is not None and parameter.quantizable:
            layout = build.quantization.layout(build.platform, outputs)
            packed = _empty(layout, outputs, inputs)
        else:
            layout = build.layout(outputs)
            packed = _aligned(layout.shape(outputs, inputs), build.dtype)
        step = _most_rows(inputs)
        for start in range(0, outputs, step):
            part = generator.standard_normal((min(step, outputs - start), inputs), np.float32)
            part *= 0.02
            layout.store(packed, start, part)  # type: ignore[arg-type]  # each layout stores what it made
        return jax.tree.map(jax.device_put, packed)

    return _fill(config, build, draw)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _normal(key: jax.Array, number: int, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """The `number`-th parameter's random numbers, made where they are used."""
    drawn = 0.02 * jax.random.normal(jax.random.fold_in(key, number), shape, jnp.float32)
    return drawn.astype(dtype)


def param_bytes(config: ModelConfig, build: Build) -> int:
    """What the parameters take on the device."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(abstract_model(config, build)[1]))


def _fill(
    config: ModelConfig, build: Build, value_of: Callable[[Parameter], jax.Array | QuantizedWeight]
) -> tuple[nnx.GraphDef, nnx.State]:
    graph, state = abstract_model(config, build)
    flat = dict(nnx.to_flat_state(state))
    filled = {}
    for parameter in parameters(config):
        value = value_of(parameter)
        if isinstance(value, QuantizedWeight):
            values = {parameter.path: value.values, (*parameter.path[:-1], "scales"): value.scales}
        else:
            values = {parameter.path: value}
        for path, array in values.items():
            variable = flat.pop(path)
            assert array.shape == variable.shape, f"{path}: {array.shape} is not {variable.shape}"
            filled[path] = variable.replace(array)
    assert not flat, f"parameters without a tensor: {list(flat)}"
    return graph, nnx.from_flat_state(filled)
