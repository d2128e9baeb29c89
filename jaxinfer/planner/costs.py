"""What a model's steps must move and compute, from its numbers alone: no weights, no device, no jax.

One arithmetic for the planner, the simulator and the engine's own MBU and MFU. A step reads the weights of
all layers once; the head once if it samples or scores; and for each slice the K/V that its queries see, its
own included, once. It computes 2 operations a weight and token (of the head: a row of logits), and in
attention 4 · H for each head, query and key seen (QK and PV; the causal half alone). Layers of linear
attention have no keys: they read and write the state of each slice, and compute 4 · r · H for each token and
head, query and KV (its features, and the sums that they read or add to). Rows of the embedding, the writing
of K/V, norms and the sampler are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from jaxinfer.config import LayerConfig, ModelConfig
from jaxinfer.core import ConfigError, StepPlan
from jaxinfer.planner.views import KeyView

BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "fp8_e4m3": 1.0}
"""Of one number."""
SCALE_BYTES = 4
"""Of a scale: int8 pages have one a token and head, quantised weights one an output or group."""
INT4_GROUPS = (64, 32)
"""Inputs that share a scale: the first that divides them (pallas_kernels.GROUPS)."""

Span = tuple[int, int]
"""(start, count): a slice that runs `count` tokens from position `start`."""


class StepWork(NamedTuple):
    """What one step asks of one device. Bytes and operations of attention are kept by kind of slice (one
    token or more), because kernels serve them at different shares of what a device can.

    `places` and `head_places` count with the padding of the buckets that run.
    """

    tokens: int
    rows: int
    places: int
    head_places: int
    decode_rows: int = 0
    decode_kv_bytes: float = 0.0
    decode_operations: float = 0.0
    chunk_kv_bytes: float = 0.0
    chunk_operations: float = 0.0


@dataclass(frozen=True)
class ModelCosts:
    """A model as it is run: dtype of weights and arithmetic, of the pages, quantised weights, and over how
    many devices (`tensor_parallel`: heads, MLP and vocabulary are split; KV heads are split as far as they
    go, then repeated), in pages of `page_size` tokens. All bytes and operations are those of ONE device.

    Raises ConfigError when the heads or the MLP cannot be split so.
    """

    config: ModelConfig
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    quantization: str | None = None
    tensor_parallel: int = 1
    page_size: int = 16

    def __post_init__(self) -> None:
        c, n = self.config, self.tensor_parallel
        for name, allowed in (
            ("dtype", ("float32", "bfloat16", "float16")), ("kv_dtype", tuple(BYTES)),
            ("quantization", (None, "int8", "int4", "fp8")),
        ):  # fmt: skip
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"{name} {getattr(self, name)!r} is not one of {', '.join(map(str, allowed))}"
                )
        if self.page_size < 1:
            raise ConfigError(f"page_size must be at least 1, got {self.page_size}")
        if n < 1 or c.num_heads % n or c.intermediate_size % n:
            raise ConfigError(
                f"{n} devices cannot share {c.num_heads} heads and an MLP of {c.intermediate_size} evenly"
            )
        for layer in c.layers:
            if layer.num_kv_heads % n and n % layer.num_kv_heads:
                raise ConfigError(f"{n} devices cannot share {layer.num_kv_heads} KV heads evenly")

    # -------------------------------------------------------------------------------------- weights

    def _kv_heads(self, layer: LayerConfig) -> int:
        return max(1, layer.num_kv_heads // self.tensor_parallel)

    def _products(self, layer: LayerConfig) -> list[tuple[int, int]]:
        """(outputs, inputs) of the weights of one layer on one device."""
        c, n = self.config, self.tensor_parallel
        d, f, q = c.hidden_size, c.intermediate_size // n, c.num_heads // n * c.head_dim
        kv = 0 if layer.kv_from is not None else 2 * self._kv_heads(layer) * c.head_dim
        return [(q + kv, d), (d, q), (2 * f, d), (d, f)]

    def _small(self, layer: LayerConfig) -> int:
        """Parameters of one layer that are no products: norms and biases."""
        c = self.config
        (qkv, _), _, (gate_up, _), _ = self._products(layer)
        normed = 1 if layer.kv_from is not None else 2  # of q alone, or of q and k
        count = 2 * c.hidden_size + normed * c.head_dim * c.qk_norm
        return (
            count + qkv * c.qkv_bias + c.hidden_size * c.output_bias + (gate_up + c.hidden_size) * c.mlp_bias
        )

    @cached_property
    def layer_params(self) -> int:
        """Weights that each token is multiplied with, all layers together."""
        return sum(o * i for layer in self.config.layers for o, i in self._products(layer))

    @cached_property
    def head_params(self) -> int:
        return -(-self.config.vocab_size // self.tensor_parallel) * self.config.hidden_size

    @cached_property
    def layer_bytes(self) -> float:
        """What a step reads of the layers, norms and scales included."""
        small = sum(self._small(layer) for layer in self.config.layers)
        products = sum(
            self._product_bytes(o, i) for layer in self.config.layers for o, i in self._products(layer)
        )
        return products + small * BYTES[self.dtype]

    @cached_property
    def head_bytes(self) -> float:
        """The head, with the norm before it."""
        return (self.head_params + self.config.hidden_size) * BYTES[self.dtype]

    @cached_property
    def weight_bytes(self) -> float:
        """All that is held: layers, embedding, and a head where it is not the embedding."""
        embedding = 0.0 if self.config.tie_word_embeddings else self.head_params * BYTES[self.dtype]
        return self.layer_bytes + self.head_bytes + embedding

    def _product_bytes(self, outputs: int, inputs: int) -> float:
        if self.quantization is None:
            return outputs * inputs * BYTES[self.dtype]
        if self.quantization == "int4":
            group = next((g for g in INT4_GROUPS if inputs % g == 0), None)
            if group is None:
                raise ConfigError(f"quantization 'int4' needs inputs that are a multiple of 32, got {inputs}")
            return outputs * inputs / 2 + outputs * (inputs // group) * SCALE_BYTES
        return outputs * inputs + outputs * SCALE_BYTES

    # ------------------------------------------------------------------------------------------- KV

    def kv_bytes_of(self, layer: LayerConfig) -> float:
        """Bytes of K and V of one token that one layer holds."""
        return self._kv_read_bytes(layer) if layer.paged_kv_heads else 0.0

    def _kv_read_bytes(self, layer: LayerConfig) -> float:
        """Bytes of K and V of one key that attention reads: a layer that shares those of another reads them
        again."""
        vector = self.config.head_dim * BYTES[self.kv_dtype] + (SCALE_BYTES if self.kv_dtype == "int8" else 0)
        return 2 * self._kv_heads(layer) * vector

    @cached_property
    def kv_bytes_per_token(self) -> float:
        """In all layers: 2 · layers · KV heads · H · bytes, where all layers are alike."""
        return sum(self.kv_bytes_of(layer) for layer in self.config.layers)

    def _bounds_bytes_of(self, layer: LayerConfig) -> float:
        """Bytes of the least and the largest key of one page, as a layer reads them whose queries choose
        pages."""
        if layer.top_pages is None:
            return 0.0
        number = BYTES["float32" if self.kv_dtype == "int8" else self.kv_dtype]
        return 2 * self._kv_heads(layer) * self.config.head_dim * number

    @cached_property
    def page_bytes(self) -> float:
        """Of one page in all layers: K/V, scales, and the bounds by which queries choose."""
        bounds = sum(self._bounds_bytes_of(layer) for layer in self.config.layers if layer.kv_from is None)
        return self.kv_bytes_per_token * self.page_size + bounds

    @cached_property
    def state_bytes(self) -> float:
        """Of one sequence, in layers of linear attention: no more for a longer one."""
        return sum(self._state_numbers) * (self.config.head_dim + 2) * BYTES["float32"]

    @cached_property
    def _state_numbers(self) -> list[int]:
        """KV heads times features, of each layer of linear attention."""
        layers = self.config.layers
        return [self._kv_heads(layer) * layer.favor.features for layer in layers if layer.favor is not None]

    @cached_property
    def _state_rates(self) -> tuple[float, float]:
        """(bytes of states read and written for a slice, operations for a token)."""
        features = sum(layer.favor.features for layer in self.config.layers if layer.favor is not None)
        heads = features * self.config.num_heads // self.tensor_parallel + sum(self._state_numbers)
        return 2 * self.state_bytes, 4.0 * heads * self.config.head_dim

    def linear_attention(self, slices: int, tokens: int) -> tuple[float, float]:
        """(bytes of states read and written, operations) of slices with so many tokens in all."""
        state_bytes, operations = self._state_rates
        return state_bytes * slices, operations * tokens

    @cached_property
    def _views(self) -> dict[KeyView, tuple[float, float, float]]:
        """Layers that see the same keys together: bytes a key, operations a query and key, bytes of a page's
        bounds. To bound a page's scores takes a query as many operations as to see a key."""
        views: dict[KeyView, tuple[float, float, float]] = {}
        operations = 4.0 * (self.config.num_heads // self.tensor_parallel) * self.config.head_dim
        for layer in self.config.layers:
            if layer.favor is None:
                view = KeyView.of(layer, self.config.page_span, self.page_size)
                key, count, bounds = views.get(view, (0.0, 0.0, 0.0))
                bounds += self._bounds_bytes_of(layer)
                views[view] = key + self._kv_read_bytes(layer), count + operations, bounds
        return views

    @cached_property
    def key_rates(self) -> tuple[tuple[int | None, float, float], ...]:
        """What a query after the prompt costs by the tokens up to it, as a sum of parts that are linear in
        them: (most, bytes, operations) each for min(tokens, most), None: for all of them.

        The pages that a span or a choice is made of count as full, which is less than a page too many.
        """
        rates: dict[int | None, tuple[float, float]] = {}
        for view, (key_bytes, operations, bounds_bytes) in self._views.items():
            parts = [(view.most, key_bytes, operations)]
            if view.top is not None:
                parts.append((None, bounds_bytes / view.page_size, operations / view.page_size))
            for most, more_bytes, more_operations in parts:
                moved, computed = rates.get(most, (0.0, 0.0))
                rates[most] = moved + more_bytes, computed + more_operations
        return tuple((most, *rate) for most, rate in rates.items())

    def attention(self, spans: Iterable[Span]) -> tuple[float, float]:
        """(bytes of K/V and states, operations) of the slices together."""
        spans = list(spans)
        ones = [start for start, count in spans if count == 1]
        chunks = [span for span in spans if span[1] > 1]
        moved, operations = self.linear_attention(len(spans), sum(count for _, count in spans))
        for view, (key_bytes, key_operations, bounds_bytes) in self._views.items():
            read = seen = view.keys_of_ones(ones)
            for start, count in chunks:
                r, s = view.keys_of(start, count)
                read += r
                seen += s
            bounds = 0 if view.top is None else sum(view.bounds_of(*span) for span in spans)
            moved += key_bytes * read + bounds_bytes * bounds
            operations += key_operations * (seen + bounds)
        return moved, operations

    # ---------------------------------------------------------------------------------------- steps

    def work(
        self, spans: Iterable[Span], rows: int, *, places: int | None = None, head_places: int | None = None
    ) -> StepWork:
        """Of a step with these slices, `rows` of which sample (or prompt tokens that are scored). `places`
        and `head_places`: tokens and rows with padding; None: there is none."""
        spans = list(spans)
        ones = [span for span in spans if span[1] == 1]
        decode_bytes, decode_operations = self.attention(ones)
        chunk_bytes, chunk_operations = self.attention(span for span in spans if span[1] > 1)
        tokens = sum(count for _, count in spans)
        return StepWork(
            tokens=tokens, rows=rows, places=places or tokens, head_places=head_places or rows,
            decode_rows=len(ones), decode_kv_bytes=decode_bytes, decode_operations=decode_operations,
            chunk_kv_bytes=chunk_bytes, chunk_operations=chunk_operations,
        )  # fmt: skip

    def work_of(
        self, plan: StepPlan, *, places: int | None = None, head_places: int | None = None
    ) -> StepWork:
        """Of a plan of the scheduler."""
        rows = sum(piece.emit + len(piece.targets) for piece in plan.slices)
        spans = ((piece.start, piece.count) for piece in plan.slices)
        return self.work(spans, rows, places=places, head_places=head_places)

    def decode_work(self, contexts: Iterable[int]) -> StepWork:
        """Of a step that decodes one token of each sequence; `contexts`: keys seen, its own included."""
        spans = [(context - 1, 1) for context in contexts]
        return self.work(spans, len(spans))

    def moved_bytes(self, work: StepWork) -> float:
        """The least that the step moves."""
        head = self.head_bytes if work.rows else 0.0
        return self.layer_bytes + head + work.decode_kv_bytes + work.chunk_kv_bytes

    def operations(self, work: StepWork) -> float:
        """The least that the step computes, padding left out."""
        linear = 2.0 * (self.layer_params * work.tokens + self.head_params * work.rows)
        return linear + work.decode_operations + work.chunk_operations

    def exchanged_bytes(self, work: StepWork) -> float:
        """What a device sends in the step's two ring all-reduces a layer (and gather of logits, left out)."""
        n = self.tensor_parallel
        vector = self.config.hidden_size * BYTES[self.dtype]
        return 2 * self.config.num_layers * work.places * vector * 2 * (n - 1) / n

    # --------------------------------------------------------------------------------- whole prompts

    def prefill_operations(self, length: int) -> tuple[float, float]:
        """(linear, attention) operations of one prompt of `length` tokens, from an empty cache; the head
        serves its last token."""
        linear = 2.0 * (self.layer_params * length + self.head_params)
        return linear, self.attention([(0, length)])[1]

    @cached_property
    def even_length(self) -> int | None:
        """The length of a prompt at which attention's operations equal those of the layers' products; None
        when windows keep attention below them for ever.

        2 · params · S = 2 · L · N · H · S² gives S = params / (L · N · H) where no layer has a window.
        """
        low, high = 1, 1 << 40
        if self._excess(high) < 0:
            return None
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._excess(middle) >= 0 else (middle + 1, high)
        return low

    def _excess(self, length: int) -> float:
        return self.attention([(0, length)])[1] - 2.0 * self.layer_params * length
