"""What runs: a decoder of the Llama family as numbers. One module (`model.llama`) runs every variant."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxinfer.config.favor import Favor
from jaxinfer.config.rope import DynamicRope, LinearRope, Rope
from jaxinfer.config.spans import AttentionSpan, PageSpan, TopPages, WindowSpan
from jaxinfer.core import ConfigError


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What may differ from layer to layer.

    `num_kv_heads` K: KV heads of this layer, whose pages are as large as it needs and no larger.
    `window`: a query at position p sees the keys p - window + 1 .. p; None sees all up to p.
    `rotary`: whether q and k are rotated (SmolLM3 leaves some layers without: NoPE, 2305.19466).
    `sinks` first keys are seen beside a window; `top_pages`: queries choose pages. No checkpoint has these
    two: see `config.spans`.
    `favor`: linear attention in place of softmax's (None), over a state of fixed size; such a layer has no
    pages, and sees all.
    `kv_from`: the earlier layer whose K/V this layer attends to (cross-layer attention, 2405.12981), without
    projections of K and V and without pages. None: it has its own.
    """

    num_kv_heads: int
    window: int | None = None
    rotary: bool = True
    sinks: int = 0
    top_pages: TopPages | None = None
    favor: Favor | None = None
    kv_from: int | None = None

    @property
    def projected_kv_heads(self) -> int:
        """KV heads whose K/V this layer makes: 0 where it reads those of an earlier one."""
        return self.num_kv_heads if self.kv_from is None else 0

    @property
    def paged_kv_heads(self) -> int:
        """KV heads that its own pages hold: 0 for linear attention, too."""
        return self.projected_kv_heads if self.favor is None else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A Llama-family decoder. Sizes in the alphabet of docs/shapes.md:

    vocab_size V, hidden_size D, intermediate_size F, num_layers L = len(layers), num_heads N, head_dim H.
    `max_position` is the longest text the position embedding is made for, in tokens. `qkv_bias` and
    `output_bias` belong to attention's projections; `qk_norm` normalises each head of q and k (Qwen3).
    `page_span`: which pages the queries of a page see, in every layer; None: all up to their own.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    max_position: int
    rms_norm_eps: float
    rope: Rope
    tie_word_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    page_span: PageSpan | None = None

    def __post_init__(self) -> None:
        sizes = "vocab_size", "hidden_size", "intermediate_size", "num_heads", "head_dim", "max_position"
        for name in sizes:
            _check_size(name, getattr(self, name))
        if not 1 <= len(self.layers) <= MAX_LAYERS:
            raise ConfigError(f"model config: got {len(self.layers)} layers; 1 to {MAX_LAYERS} can be run")
        for layer in set(self.layers):
            _check_size("num_key_value_heads", layer.num_kv_heads)
            if layer.window is not None:
                _check_size("sliding_window", layer.window)
            assert layer.window is not None or not layer.sinks, f"{layer.sinks} sinks without a window"
            others = layer.window is not None or layer.top_pages is not None
            assert not (others and self.page_span), f"{self.page_span} beside what {layer} sees"
            assert not (layer.window and layer.top_pages), f"{layer.top_pages} beside a window"
            assert not (layer.favor and (others or self.page_span)), f"{layer} sees all, whatever spans say"
            if self.num_heads % layer.num_kv_heads:
                raise ConfigError(
                    f"model config: num_attention_heads {self.num_heads} is not a multiple of "
                    f"num_key_value_heads {layer.num_kv_heads}"
                )
        for index, layer in enumerate(self.layers):
            if layer.kv_from is not None:
                _check_shared(self.layers, index, layer.kv_from)
        if self.head_dim % 2:
            raise ConfigError(
                f"model config: head_dim must be even for rotary embeddings, got {self.head_dim}"
            )
        if isinstance(self.rope, DynamicRope) and self.head_dim < 4:
            raise ConfigError("model config: dynamic rope needs a head_dim of at least 4")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def window(self) -> int | None:
        """The largest window of all layers with pages: K/V further back are never read again. None: one of
        them sees all, or there is none."""
        windows = [layer.window for layer in self.layers if layer.favor is None]
        return None if None in windows else max((w for w in windows if w is not None), default=None)

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """Which layers keep a state for each sequence, and no pages."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.favor is not None)

    @property
    def sharing_layers(self) -> tuple[int, ...]:
        """Which layers read the K/V of an earlier one, and have none of their own."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.kv_from is not None)

    @property
    def sinks(self) -> int:
        """The most first keys that a layer sees beside its window."""
        return max(layer.sinks for layer in self.layers)

    def spanned(self, span: AttentionSpan) -> ModelConfig:
        """The same model with every layer's queries seeing what `span` says, to be served or trained. Layers
        of linear attention have no keys to choose from: they go on to see all.

        Raises ConfigError for a model whose layers have windows of their own: a span is one for all layers;
        for one of linear attention alone, or beside pages of BigBird, which cut texts into rows; and for
        queries that choose among pages of a layer of which nothing is kept to choose by.
        """
        windows = [layer.window for layer in self.layers]
        if any(windows) or self.page_span is not None:
            shown = ", ".join("all" if w is None else str(w) for w in windows[:8])
            raise ConfigError(
                f"attention_span: the layers of this model have spans of their own (windows: {shown}), and a "
                "span is one for all layers; leave attention_span out"
            )
        linear = self.linear_layers
        if len(linear) == self.num_layers or (linear and isinstance(span, PageSpan)):
            raise ConfigError(
                f"attention_span: layers {shown_layers(linear)} have linear attention, which sees all of a "
                "text in its order; take a window for the other layers, or leave attention_span out"
            )
        if isinstance(span, PageSpan):
            return dataclasses.replace(self, page_span=span)
        layers = list(self.layers)
        for index, layer in enumerate(layers):
            if layer.favor is not None:
                continue
            if isinstance(span, WindowSpan):
                layers[index] = dataclasses.replace(layer, window=span.window, sinks=span.sinks)
            elif index >= span.skip:
                layers[index] = dataclasses.replace(layer, top_pages=span.pages)
        if tuple(layers) == self.layers:
            raise ConfigError(
                f"attention_span: skip {span} leaves none of the {len(layers)} layers to choose"
            )
        for index, layer in enumerate(layers):
            if layer.kv_from is not None and layer.top_pages != layers[layer.kv_from].top_pages:
                raise ConfigError(
                    f"attention_span: layer {index} would choose among the pages of layer {layer.kv_from}, "
                    "which it shares and which is skipped: nothing is kept there to choose by; let skip end "
                    "between layers that share no K/V"
                )
        return dataclasses.replace(self, layers=tuple(layers))

    @property
    def longest_position(self) -> int:
        """The longest text that may be asked for. Of linear scaling some configs state the length before it
        and some after, so that `max_position` is only what is safe to assume."""
        if isinstance(self.rope, LinearRope):
            return max(self.max_position, math.floor(self.rope.factor * self.max_position))
        return self.max_position

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of K and V of one token: 2 · H · itemsize · (K summed over layers with pages)."""
        return 2 * sum(layer.paged_kv_heads for layer in self.layers) * self.head_dim * itemsize

    @property
    def state_bytes(self) -> int:
        """Bytes that each running sequence keeps in layers of linear attention, however long it is: float32,
        r features of (H + 2) numbers for each KV head."""
        numbers = (
            layer.num_kv_heads * layer.favor.features for layer in self.layers if layer.favor is not None
        )
        return sum(numbers) * (self.head_dim + 2) * 4

    @property
    def num_params(self) -> int:
        """Parameters, tied embeddings counted once."""
        d, f, h, q = self.hidden_size, self.intermediate_size, self.head_dim, self.num_heads * self.head_dim
        count = self.vocab_size * d * (1 if self.tie_word_embeddings else 2) + d
        for layer in self.layers:
            qkv = q + 2 * layer.projected_kv_heads * h
            count += d * qkv + q * d + 3 * d * f + 2 * d
            count += qkv * self.qkv_bias + d * self.output_bias
            count += (2 * f + d) * self.mlp_bias + (1 + (layer.kv_from is None)) * h * self.qk_norm
        return count

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read a Hugging Face `config.json`, as a dict.

        Raises ConfigError naming the key for what is missing, or changes the arithmetic and is not
        implemented here (an unknown architecture, activation, rope kind, quantization, ...).
        """
        from jaxinfer.config.hugging_face import model_config

        return model_config(config)


MAX_SIZE, MAX_LAYERS = 2**31 - 1, 4096
"""No dimension is larger (int32 indexes) and no model deeper: a damaged config.json may claim anything."""


def shown_layers(layers: Sequence[int]) -> str:
    """Layers as messages name them: the first eight."""
    return ", ".join(map(str, layers[:8])) + (", ..." if len(layers) > 8 else "")


def _check_shared(layers: Sequence[LayerConfig], index: int, owner: int) -> None:
    """Raises ConfigError unless layer `index` can attend to the K/V of layer `owner`."""
    layer, reason = layers[index], None
    if not isinstance(owner, int) or isinstance(owner, bool) or not 0 <= owner < index:
        reason = "only an earlier layer's are there when they are read"
    elif layers[owner].kv_from is not None:
        reason = f"that layer reads those of layer {layers[owner].kv_from}; name the layer that has them"
    elif layer.favor is not None or layers[owner].favor is not None:
        linear = index if layer.favor is not None else owner
        reason = f"layer {linear} has linear attention, which keeps a state and no K/V"
    elif layers[owner].num_kv_heads != layer.num_kv_heads:
        reason = f"it has {layer.num_kv_heads} KV heads, and that layer {layers[owner].num_kv_heads}"
    elif layers[owner].rotary != layer.rotary:
        one, other = ("", "not ") if layer.rotary else ("not ", "")
        reason = f"its queries are {one}rotated, and the keys of that layer are {other}rotated"
    if reason is not None:
        raise ConfigError(f"model config: layer {index} cannot read the K/V of layer {owner!r}: {reason}")


def _check_size(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_SIZE:
        raise ConfigError(f"model config: {name} must be a positive integer below 2^31, got {value!r}")
