"""The Llama family as Flax NNX modules: arrays in, arrays out; it knows no requests and no files.

One call runs packed tokens of many sequences: prefill, decode and everything between are the same code.
Shapes in the alphabet of docs/shapes.md: T packed tokens, D model width, N query heads, K KV heads, H head
width, F MLP width, V vocabulary, E emitted positions.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import pallas_kernels
from jaxinfer.config import LayerConfig, ModelConfig
from jaxinfer.core import ConfigError
from jaxinfer.model import kv as kv_state
from jaxinfer.model import rope
from jaxinfer.model.kv import KVState, WriteSlots
from jaxinfer.model.linear import Layout, RowMajor, layout_for
from jaxinfer.model.quantized import Quantization, QuantizedLinear
from jaxinfer.model.step import DenseStep, PagedStep, Step, Tap


@dataclass(frozen=True, slots=True)
class Build:
    """How the module is built: what its parameters are, where attention runs, and to what the weights of its
    layers are rounded (None: `dtype`). `row_major` keeps weights as checkpoints have them on every platform:
    blocks make the products of a forward pass fast, and those of a backward pass slow."""

    dtype: jnp.dtype
    platform: str
    attention_backend: pallas_kernels.Backend
    quantization: Quantization | None = None
    row_major: bool = False

    def layout(self, outputs: int) -> Layout:
        """How a weight with this many outputs lies in memory."""
        return RowMajor() if self.row_major else layout_for(self.platform, outputs)


class Linear(nnx.Module):
    """y = x W^T (+ b). `weight` lies as `layout` says."""

    def __init__(self, inputs: int, outputs: int, build: Build, *, bias: bool = False):
        self.layout: Layout = build.layout(outputs)
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
        self.layout: Layout = build.layout(vocab_size)
        self.weight = nnx.Param(jnp.zeros(self.layout.shape(vocab_size, width), build.dtype))

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """token_ids int32 [T] -> [T, D]"""
        return self.layout.rows(self.weight[...], token_ids)

    def logits(self, x: jax.Array, dtype: jnp.dtype) -> jax.Array:
        return self.layout.matmul(x, self.weight[...], dtype)


class Attention(nnx.Module):
    """Grouped-query attention (2305.13245) over pages, or linear over a state of fixed size (2009.14794).
    Query head i reads KV head i // G. A layer that reads the K/V of an earlier one (2405.12981) projects
    queries alone: `qkv` is q then."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, build: Build):
        self.heads, self.kv_heads = config.num_heads, layer.projected_kv_heads
        self.head_dim = config.head_dim
        self.rotary = layer.rotary
        self.rule = pallas_kernels.Rule(self.head_dim**-0.5, layer.window, layer.sinks)
        self.backend, self.favor = build.attention_backend, layer.favor
        outputs = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = layer_linear(config.hidden_size, outputs, build, bias=config.qkv_bias)
        head_norm = functools.partial(RMSNorm, config.head_dim, config.rms_norm_eps, build)
        self.q_norm = head_norm() if config.qk_norm else None
        self.k_norm = head_norm() if config.qk_norm and self.kv_heads else None
        self.output = layer_linear(
            self.heads * self.head_dim, config.hidden_size, build, bias=config.output_bias
        )

    def __call__(self, x: jax.Array, kept: Any, step: Step, shared: Any = None) -> tuple[jax.Array, Any]:
        """x [T, D] -> (y [T, D], what the step keeps of this layer: its pages, when it serves). `shared`:
        what it has kept of the layer whose K/V this one reads; None for one with its own."""
        tokens = x.shape[0]
        heads = self.qkv(x).reshape(tokens, -1, self.head_dim)  # [T, N + 2 K, H]
        q, k, v = jnp.split(heads, (self.heads, self.heads + self.kv_heads), axis=1)
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.k_norm is not None:
            k = self.k_norm(k)
        if self.rotary:
            q = rope.rotate(q, step.cos, step.sin)
            k = rope.rotate(k, step.cos, step.sin)
        if shared is not None:
            attended, kept = step.attend_shared(q, shared, kept, self.rule, self.backend)
        elif self.favor is not None:
            attended, kept = step.attend_linearly(q, k, v, kept, self.favor, self.rule.scale)
        else:
            attended, kept = step.attend(q, k, v, kept, self.rule, self.backend)
        return self.output(attended.reshape(tokens, -1)), kept


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

    def __call__(self, x: jax.Array, kept: Any, step: Step, shared: Any = None) -> tuple[jax.Array, Any]:
        y, kept = self.attention(self.attention_norm(x), kept, step, shared)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), kept


@functools.partial(jax.jit, static_argnames=("graph",))
def _run_layer(graph, state, x, kept, step, shared):
    """One layer as a function of arrays: equal layers are traced and lowered once, and XLA inlines them."""
    return nnx.merge(graph, state)(x, kept, step, shared)


_run_layer_again = jax.checkpoint(_run_layer, static_argnums=(0,))
"""The same, computed again in the backward pass: what it made is not held (1604.06174)."""


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
        text_positions: jax.Array | None = None,
        *,
        decode_rows: int,
    ) -> tuple[jax.Array, KVState]:
        """token_ids int32 [T] -> (hidden [T, D] before the last norm, the KVState with this step written).

        num_prompt int32 [B]: the length of each row's prompt, for position embeddings that depend on it.
        text_positions int32 [T]: where tokens stand in their texts, if the batch's positions are those of
        compact tables.
        """
        positions = batch.positions if text_positions is None else text_positions
        lengths = jnp.maximum(positions + 1, num_prompt[batch.token_row])
        cos, sin = rope.rotation(self.config.rope, self.config.head_dim, positions, lengths)
        # One for all layers that choose: `ModelConfig.spanned` gives them the same.
        top = next((layer.top_pages for layer in self.config.layers if layer.top_pages is not None), None)
        choice = None
        if top is not None:
            choice = pallas_kernels.page_choice(
                batch, num_prompt, kv.page_size, decode_rows=decode_rows, count=top.count, start=top.start
            )
        step = PagedStep(batch, slots, cos, sin, choice, decode_rows)
        x, kept = self._run(token_ids, step, kv_state.by_layer(kv))
        return x, kv_state.from_layers(kept)

    def dense(
        self, token_ids: jax.Array, *, remat: bool = False, tapped: bool = False
    ) -> tuple[jax.Array, tuple[Tap, ...]]:
        """Whole texts int32 [texts, S] from position 0 -> (hidden [texts, S, D] before the last norm, and a
        Tap of each layer if `tapped`). Differentiable; `remat` holds no more than the layers' inputs, and K
        and V that other layers read. Spans that do not depend on what queries hold are masks; one that
        chooses among prompts raises ConfigError."""
        if any(
            layer.top_pages is not None and layer.top_pages.start is not None for layer in self.config.layers
        ):
            raise ConfigError(
                "attention_span: queries that choose pages of prompts (from:P) have no dense pass; without "
                "from:P, prompts see all"
            )
        texts, length = token_ids.shape
        positions = jnp.tile(jnp.arange(length), texts)
        lengths = jnp.full_like(positions, length)
        cos, sin = rope.rotation(self.config.rope, self.config.head_dim, positions, lengths)
        shares = bool(self.config.sharing_layers)
        step = DenseStep(cos, sin, self.config.page_span, texts, tapped or shares)
        x, kept = self._run(token_ids.reshape(-1), step, [None] * len(self.layers), remat=remat)
        return x.reshape(texts, length, -1), tuple(kept) if tapped else ()

    def _run(
        self, token_ids: jax.Array, step: Step, kept: list[Any], *, remat: bool = False
    ) -> tuple[jax.Array, list[Any]]:
        """token_ids int32 [T] -> (hidden [T, D], what the step keeps, by layer)."""
        x, run = self.embedding(token_ids), _run_layer_again if remat else _run_layer
        for index, layer in enumerate(self.layers):
            with jax.named_scope(f"layer{index}"):
                graph, state = nnx.split(layer)
                owner = self.config.layers[index].kv_from
                shared = None if owner is None else kept[owner]
                x, kept[index] = run(graph, state, x, kept[index], step, shared)
        return x, kept

    def output(self) -> Output:
        return Output(self.norm, self.embedding if self.head is None else self.head)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [E, D] before the last norm -> float32 [E, V]."""
        return self.output()(hidden)


def abstract_model(config: ModelConfig, build: Build) -> tuple[nnx.GraphDef, nnx.State]:
    """The module's structure and its parameters as shapes: nothing is allocated."""
    return nnx.split(nnx.eval_shape(functools.partial(Llama, config, build)))
