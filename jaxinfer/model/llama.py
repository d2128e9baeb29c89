"""The Llama family as Flax NNX modules: arrays in, arrays out; it knows no requests and no files.

One call runs packed tokens of many sequences: prefill, decode and everything between are the same code.
Shapes in the alphabet of docs/shapes.md: T packed tokens, D model width, N query heads, K KV heads, H head
width, F MLP width, V vocabulary, E emitted positions.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import pallas_kernels
from jaxinfer.config import LayerConfig, ModelConfig
from jaxinfer.model import kv as kv_state
from jaxinfer.model import rope
from jaxinfer.model.kv import KVState, WriteSlots
from jaxinfer.model.linear import Layout, layout_for
from jaxinfer.model.quantized import Quantization, QuantizedLinear
from pallas_kernels import Pages


@dataclass(frozen=True, slots=True)
class Build:
    """How the module is built: what its parameters are, where attention runs, and to what the weights of its
    layers are rounded (None: `dtype`)."""

    dtype: jnp.dtype
    platform: str
    attention_backend: pallas_kernels.Backend
    quantization: Quantization | None = None


class StepContext(NamedTuple):
    """What every layer of one step reads besides its input. cos, sin float32 [T, 1, H / 2]."""

    batch: pallas_kernels.RaggedBatch
    slots: WriteSlots
    cos: jax.Array
    sin: jax.Array


class Linear(nnx.Module):
    """y = x W^T (+ b). `weight` lies as `layout` says."""

    def __init__(self, inputs: int, outputs: int, build: Build, *, bias: bool = False):
        self.layout: Layout = layout_for(build.platform, outputs)
        self.weight = nnx.Param(jnp.zeros(self.layout.shape(outputs, inputs), build.dtype))
        self.bias = nnx.Param(jnp.zeros((outputs,), build.dtype)) if bias else None

    def __call__(self, x: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
        y = self.layout.matmul(x, self.weight[...], dtype)
        return y if self.bias is None else y + self.bias[...]


def layer_linear(inputs: int, outputs: int, build: Build, *, bias: bool = False) -> Linear | QuantizedLinear:
    """A product inside of a layer, quantised when the build says so."""
    if build.quantization is None:
        return Linear(inputs, outputs, build, bias=bias)
    return QuantizedLinear(inputs, outputs, build.quantization, build.platform, build.dtype, bias=bias)


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in float32 (1910.07467)."""

    def __init__(self, width: int, eps: float, build: Build):
        self.eps = eps
        self.weight = nnx.Param(jnp.ones((width,), build.dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * scale).astype(x.dtype) * self.weight[...]


class Embedding(nnx.Module):
    """Token vectors, and the same table as output head when tied."""

    def __init__(self, vocab_size: int, width: int, build: Build):
        self.layout: Layout = layout_for(build.platform, vocab_size)
        self.weight = nnx.Param(jnp.zeros(self.layout.shape(vocab_size, width), build.dtype))

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """token_ids int32 [T] -> [T, D]"""
        return self.layout.rows(self.weight[...], token_ids)

    def logits(self, x: jax.Array, dtype: jnp.dtype) -> jax.Array:
        return self.layout.matmul(x, self.weight[...], dtype)


class Attention(nnx.Module):
    """Grouped-query attention (2305.13245) over pages. Query head i reads KV head i // G."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, build: Build):
        self.heads, self.kv_heads, self.head_dim = config.num_heads, layer.num_kv_heads, config.head_dim
        self.rotary = layer.rotary
        self.rule = pallas_kernels.Rule(self.head_dim**-0.5, layer.window)
        self.backend = build.attention_backend
        outputs = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = layer_linear(config.hidden_size, outputs, build, bias=config.qkv_bias)
        head_norm = functools.partial(RMSNorm, config.head_dim, config.rms_norm_eps, build)
        self.q_norm = head_norm() if config.qk_norm else None
        self.k_norm = head_norm() if config.qk_norm else None
        self.output = layer_linear(
            self.heads * self.head_dim, config.hidden_size, build, bias=config.output_bias
        )

    def __call__(
        self, x: jax.Array, k_pages: Pages, v_pages: Pages, step: StepContext, decode_rows: int
    ) -> tuple[jax.Array, Pages, Pages]:
        """x [T, D] -> (y [T, D], k_pages, v_pages) with this step's K/V written first, then attended to."""
        tokens = x.shape[0]
        heads = self.qkv(x).reshape(tokens, -1, self.head_dim)  # [T, N + 2 K, H]
        q, k, v = jnp.split(heads, (self.heads, self.heads + self.kv_heads), axis=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary:
            q = rope.rotate(q, step.cos, step.sin)
            k = rope.rotate(k, step.cos, step.sin)
        k_pages = kv_state.write_layer(k_pages, k, step.slots)
        v_pages = kv_state.write_layer(v_pages, v, step.slots)
        attended = pallas_kernels.paged_attention(
            q, k_pages, v_pages, step.batch,
            decode_rows=decode_rows, rule=self.rule, backend=self.backend,
        )  # fmt: skip
        return self.output(attended.reshape(tokens, -1)), k_pages, v_pages


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x)) (SwiGLU, 2002.05202); gate and up are one product of 2 F outputs."""

    def __init__(self, config: ModelConfig, build: Build):
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_up = layer_linear(width, 2 * inner, build, bias=config.mlp_bias)
        self.down = layer_linear(inner, width, build, bias=config.mlp_bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(jax.nn.silu(gate) * up)


class Layer(nnx.Module):
    def __init__(self, config: ModelConfig, layer: LayerConfig, build: Build):
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, build)
        self.attention = Attention(config, layer, build)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, build)
        self.mlp = MLP(config, build)

    def __call__(
        self, x: jax.Array, k_pages: Pages, v_pages: Pages, step: StepContext, decode_rows: int
    ) -> tuple[jax.Array, Pages, Pages]:
        y, k_pages, v_pages = self.attention(self.attention_norm(x), k_pages, v_pages, step, decode_rows)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), k_pages, v_pages


@functools.partial(jax.jit, static_argnames=("graph", "decode_rows"))
def _run_layer(graph, state, x, k_pages, v_pages, step, *, decode_rows):
    """One layer as a function of arrays: equal layers are traced and lowered once, and XLA inlines them."""
    return nnx.merge(graph, state)(x, k_pages, v_pages, step, decode_rows)


class Output(nnx.Module):
    """What follows the layers: the last norm and the output head, which is the embedding when tied. Its
    parameters are the Llama's own, so that a program that only needs logits takes only them."""

    def __init__(self, norm: RMSNorm, head: Linear | Embedding):
        self.norm, self.head = norm, head

    def __call__(self, hidden: jax.Array) -> jax.Array:
        """hidden [E, D] -> float32 [E, V], accumulated and kept in float32: bfloat16 would make ties."""
        x, wide = self.norm(hidden), jnp.dtype(jnp.float32)
        return self.head.logits(x, wide) if isinstance(self.head, Embedding) else self.head(x, wide)


class Llama(nnx.Module):
    """A decoder of the Llama family (2302.13971). Layers are unrolled: each has its own weights and pages."""

    def __init__(self, config: ModelConfig, build: Build):
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.hidden_size, build)
        self.layers = nnx.List([Layer(config, layer, build) for layer in config.layers])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, build)
        self.head = (
            None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size, build)
        )

    def __call__(
        self,
        token_ids: jax.Array,
        kv: KVState,
        batch: pallas_kernels.RaggedBatch,
        slots: WriteSlots,
        num_prompt: jax.Array,
        *,
        decode_rows: int,
    ) -> tuple[jax.Array, KVState]:
        """token_ids int32 [T] -> (hidden [T, D] before the last norm, the KVState with this step written).

        num_prompt int32 [B]: the length of each row's prompt, for position embeddings that depend on it.
        """
        lengths = jnp.maximum(batch.positions + 1, num_prompt[batch.token_row])
        cos, sin = rope.rotation(self.config.rope, self.config.head_dim, batch.positions, lengths)
        step = StepContext(batch, slots, cos, sin)
        x = self.embedding(token_ids)
        k_pages, v_pages = list(kv.k), list(kv.v)
        for index, layer in enumerate(self.layers):
            with jax.named_scope(f"layer{index}"):
                graph, state = nnx.split(layer)
                x, k_pages[index], v_pages[index] = _run_layer(
                    graph, state, x, k_pages[index], v_pages[index], step, decode_rows=decode_rows
                )
        return x, KVState(tuple(k_pages), tuple(v_pages))

    def output(self) -> Output:
        return Output(self.norm, self.embedding if self.head is None else self.head)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [E, D] before the last norm -> float32 [E, V]."""
        return self.output()(hidden)


def abstract_model(config: ModelConfig, build: Build) -> tuple[nnx.GraphDef, nnx.State]:
    """The module's structure and its parameters as shapes: nothing is allocated."""
    return nnx.split(nnx.eval_shape(functools.partial(Llama, config, build)))
