"""Weights of few bits in the model: which are, how they lie, and how they come about while a model loads.

The products inside of the layers are quantised (q, k, v, output, gate, up, down). Embeddings, an output head,
norms and biases keep the model's dtype: a look-up table is read by rows, the head decides between near ties,
and the others are small. The formats are those of `pallas_kernels.quantized`.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import pallas_kernels
from jaxinfer.config import ModelConfig
from jaxinfer.core import ConfigError
from jaxinfer.model.linear import Layout, RowMajor, layout_for
from pallas_kernels import Format, QuantizedWeight


@dataclass(frozen=True, slots=True)
class Quantization:
    """A kind of numbers, and which backend multiplies with it."""

    format: Format
    backend: pallas_kernels.Backend

    def check(self, config: ModelConfig) -> None:
        """Raise ConfigError when the model has a weight that the format cannot hold."""
        for inputs in {config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size}:
            if self.format == "int4" and pallas_kernels.int4_group(inputs) is None:
                raise ConfigError(
                    f"quantization 'int4' needs weights whose inputs are a multiple of "
                    f"{min(pallas_kernels.GROUPS)}; the model has one of {inputs} inputs; int8 takes any"
                )

    def layout(self, platform: str, outputs: int) -> QuantizedLayout:
        return QuantizedLayout(self.format, layout_for(platform, outputs))


@dataclass(frozen=True, slots=True)
class QuantizedLayout:
    """How a quantised weight lies: its values as a weight of `layout` does, its scales beside them."""

    format: Format
    layout: Layout

    def empty(self, outputs: int, inputs: int) -> QuantizedWeight:
        """The shapes and dtypes of a weight [out, in]."""
        one = pallas_kernels.quantize(np.zeros((1, inputs), np.float32), self.format)
        scales: tuple[int, ...] = (outputs,)
        if one.scales.ndim == 2:
            groups = one.scales.shape[0]
            rows = isinstance(self.layout, RowMajor)
            scales = (groups, outputs) if rows else self.layout.shape(outputs, groups)
        values = self.layout.shape(outputs, one.values.shape[1])
        return QuantizedWeight(
            jax.ShapeDtypeStruct(values, one.values.dtype), jax.ShapeDtypeStruct(scales, one.scales.dtype)
        )

    def store(self, packed: QuantizedWeight, start: int, rows: np.ndarray) -> None:
        """Quantise rows float [n, in] and put them at start .. start + n - 1 of `packed`, of numpy arrays."""
        new = pallas_kernels.quantize(np.asarray(rows, np.float32), self.format)
        self.layout.store(packed.values, start, new.values)
        if new.scales.ndim == 2 and not isinstance(self.layout, RowMajor):
            self.layout.store(packed.scales, start, new.scales.T)
        else:
            packed.scales[..., start : start + len(rows)] = new.scales


class QuantizedLinear(nnx.Module):
    """y = x W^T (+ b) with W of few bits."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        quantization: Quantization,
        platform: str,
        dtype: jnp.dtype,
        *,
        bias: bool = False,
    ):
        self.backend = quantization.backend
        empty = quantization.layout(platform, outputs).empty(outputs, inputs)
        self.weight = nnx.Param(jnp.zeros(empty.values.shape, empty.values.dtype))
        self.scales = nnx.Param(jnp.zeros(empty.scales.shape, empty.scales.dtype))
        self.bias = nnx.Param(jnp.zeros((outputs,), dtype)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        weight = QuantizedWeight(self.weight[...], self.scales[...])
        y = pallas_kernels.quant_matmul(x, weight, backend=self.backend)
        return y if self.bias is None else y + self.bias[...]
