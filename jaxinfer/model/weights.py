"""From Hugging Face tensor names to the parameters of `Llama`.

Names live here, beside the model; files live in `checkpoints`, which this room does not know: a `Source`
is anything that lists, measures and reads tensors by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfer.config import ModelConfig
from jaxinfer.core import ConfigError
from jaxinfer.model.linear import RowMajor, layout_for
from jaxinfer.model.llama import Build, abstract_model


class Source(Protocol):
    """Tensors by Hugging Face name, in its layout ([out, in] for a weight)."""

    def names(self) -> tuple[str, ...]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str) -> np.ndarray: ...


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
    q, kv = config.num_heads * h, config.num_kv_heads * h

    def linear(path: tuple, names: tuple[str, ...], outs: tuple[int, ...], inputs: int, bias: bool):
        yield Parameter(
            (*path, "weight"), tuple(f"{n}.weight" for n in names), tuple((o, inputs) for o in outs)
        )
        if bias:
            yield Parameter((*path, "bias"), tuple(f"{n}.bias" for n in names), tuple((o,) for o in outs))

    yield Parameter(("embedding", "weight"), ("model.embed_tokens.weight",), ((config.vocab_size, d),))
    for i in range(config.num_layers):
        hf, at = f"model.layers.{i}", ("layers", i)
        attention, mlp = f"{hf}.self_attn", f"{hf}.mlp"
        yield Parameter((*at, "attention_norm", "weight"), (f"{hf}.input_layernorm.weight",), ((d,),))
        names = tuple(f"{attention}.{x}_proj" for x in "qkv")
        yield from linear((*at, "attention", "qkv"), names, (q, kv, kv), d, config.attention_bias)
        name = (f"{attention}.o_proj",)
        yield from linear((*at, "attention", "output"), name, (d,), q, config.attention_output_bias)
        yield Parameter((*at, "mlp_norm", "weight"), (f"{hf}.post_attention_layernorm.weight",), ((d,),))
        names = (f"{mlp}.gate_proj", f"{mlp}.up_proj")
        yield from linear((*at, "mlp", "gate_up"), names, (f, f), d, config.mlp_bias)
        yield from linear((*at, "mlp", "down"), (f"{mlp}.down_proj",), (d,), f, config.mlp_bias)
    yield Parameter(("norm", "weight"), ("model.norm.weight",), ((d,),))
    if not config.tie_word_embeddings:
        yield Parameter(("head", "weight"), ("lm_head.weight",), ((config.vocab_size, d),))


# Tensors that checkpoints carry though the model derives them: tied heads, old rotary buffers.
_DERIVED_SUFFIXES = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


def check_names(config: ModelConfig, source: Source) -> None:
    """Every parameter must be in the source with its shape, and nothing else may be there unread.

    Raises ConfigError naming the tensor.
    """
    present = set(source.names())
    wanted: set[str] = set()
    for parameter in parameters(config):
        for name, shape in zip(parameter.tensors, parameter.shapes, strict=True):
            wanted.add(name)
            if name not in present:
                raise ConfigError(f"the checkpoint has no tensor {name!r}, which this model needs")
            if tuple(source.shape(name)) != shape:
                raise ConfigError(f"tensor {name!r} has shape {tuple(source.shape(name))}, expected {shape}")
    extra = {n for n in present - wanted if not n.endswith(_DERIVED_SUFFIXES)}
    if config.tie_word_embeddings:
        extra.discard("lm_head.weight")
    if extra:
        shown = ", ".join(sorted(extra)[:5])
        raise ConfigError(f"the checkpoint has {len(extra)} tensors that this model does not use: {shown}")


def load_params(
    config: ModelConfig,
    build: Build,
    source: Source,
    *,
    device: Any = None,
    on_tensor: Callable[[int], None] = lambda count: None,
) -> tuple[nnx.GraphDef, nnx.State]:
    """Read every parameter once, put it in its layout and dtype, and hand it to the device at once.

    Host memory above the loaded parameters stays within three times the largest one: what was read, its
    cast and its packed copy. `on_tensor(1)` is called per parameter. Raises ConfigError for a missing,
    extra or mis-shaped tensor.
    """
    check_names(config, source)

    def read(parameter: Parameter) -> jax.Array:
        parts = [np.asarray(source.read(name)) for name in parameter.tensors]
        value = parts[0] if len(parts) == 1 else np.concatenate(parts)
        value = value.astype(build.dtype, copy=False)
        layout = layout_for(build.platform, parameter.outputs) if value.ndim == 2 else RowMajor()
        packed = layout.pack(value)
        if not packed.flags.owndata:  # a view of the file: on CPU the parameter would keep it mapped
            packed = packed.copy()
        on_tensor(1)
        return jax.device_put(packed, device)

    return _fill(config, build, read)


def random_params(
    config: ModelConfig, build: Build, seed: int = 0, *, on_tensor: Callable[[int], None] = lambda count: None
) -> tuple[nnx.GraphDef, nnx.State]:
    """Parameters drawn at the scale of a trained model (for benchmarks and tests): normal, 0.02; norms 1."""
    generator = np.random.default_rng(seed)

    def draw(parameter: Parameter) -> jax.Array:
        shape = (parameter.outputs, *parameter.shapes[0][1:])
        if "norm" in str(parameter.path[-2]):
            on_tensor(1)
            return jnp.ones(shape, build.dtype)
        value = (generator.standard_normal(shape, np.float32) * 0.02).astype(build.dtype)
        layout = layout_for(build.platform, parameter.outputs) if value.ndim == 2 else RowMajor()
        on_tensor(1)
        return jax.device_put(layout.pack(value))

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
