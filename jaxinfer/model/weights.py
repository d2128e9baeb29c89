"""From Hugging Face tensor names to the parameters of `Llama`.

Names live here, beside the model; files live in `checkpoints`, which this room does not know: a `Source`
is anything that lists, measures and reads tensors by name.
"""

from __future__ import annotations

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
from jaxinfer.model.linear import Layout, RowMajor, layout_for
from jaxinfer.model.llama import Build, abstract_model

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
        hf, at = f"model.layers.{i}", ("layers", i)
        attention, mlp = f"{hf}.self_attn", f"{hf}.mlp"
        yield Parameter((*at, "attention_norm", "weight"), (f"{hf}.input_layernorm.weight",), ((d,),))
        names = tuple(f"{attention}.{x}_proj" for x in "qkv")
        yield from linear((*at, "attention", "qkv"), names, (q, kv, kv), d, config.qkv_bias)
        if config.qk_norm:
            for norm in ("q_norm", "k_norm"):
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
    of what is read. `on_tensor(1)` is called per parameter. Raises ConfigError for a missing,
    extra or mis-shaped tensor.
    """
    check_names(config, source)
    warn_of_another_head(config, source)

    def read(parameter: Parameter) -> jax.Array:
        outputs, shape = parameter.outputs, parameter.shapes[0]
        layout = layout_for(build.platform, outputs) if len(shape) == 2 else RowMajor()
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
        most_rows = max(1, READ_BYTES // (4 * max(1, len(columns))))
        rest = (slice(columns.start, columns.stop),)
    else:
        rows, most_rows, rest = range(parameter.outputs)[index[0]], parameter.outputs, ()
        packed = _aligned((len(rows),), dtype)
    first = 0  # of the tensor's rows among the parameter's
    for name, shape in zip(parameter.tensors, parameter.shapes, strict=True):
        begin, end = max(rows.start, first), min(rows.stop, first + shape[0])
        for start in range(begin, end, most_rows):
            stop = min(start + most_rows, end)
            part = source.read(name, (slice(start - first, stop - first), *rest))
            layout.store(packed, start - rows.start, part)
        first += shape[0]
    return packed


def _aligned(shape: tuple[int, ...], dtype: jnp.dtype) -> np.ndarray:
    """An array that begins at a multiple of 64 bytes: JAX takes it over on CPU, where it copies any other."""
    count = math.prod(shape) * dtype.itemsize
    memory = np.empty(count + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + count].view(dtype).reshape(shape)


def random_params(
    config: ModelConfig, build: Build, seed: int = 0, *, on_tensor: Callable[[int], None] = lambda count: None
) -> tuple[nnx.GraphDef, nnx.State]:
    """Parameters drawn at the scale of a trained model (for benchmarks and tests): normal, 0.02; norms 1."""
    generator = np.random.default_rng(seed)

    def draw(parameter: Parameter) -> jax.Array:
        shape = (parameter.outputs, *parameter.shapes[0][1:])
        on_tensor(1)
        if "norm" in str(parameter.path[-2]):
            return jnp.ones(shape, build.dtype)
        value = generator.standard_normal(shape, np.float32)
        value *= 0.02
        if value.ndim == 1:
            return jax.device_put(value.astype(build.dtype))
        layout = layout_for(build.platform, parameter.outputs)
        packed = _aligned(layout.shape(*shape), build.dtype)
        layout.store(packed, 0, value)
        return jax.device_put(packed)

    return _fill(config, build, draw)


def _fill(
    config: ModelConfig, build: Build, value_of: Callable[[Parameter], jax.Array]
) -> tuple[nnx.GraphDef, nnx.State]:
    graph, state = abstract_model(config, build)
    flat = dict(nnx.to_flat_state(state))
    filled = {}
    for parameter in parameters(config):
        variable = flat.pop(parameter.path)
        value = value_of(parameter)
        assert value.shape == variable.shape, f"{parameter.path}: {value.shape} is not {variable.shape}"
        filled[parameter.path] = variable.replace(value)
    assert not flat, f"parameters without a tensor: {list(flat)}"
    return graph, nnx.from_flat_state(filled)
