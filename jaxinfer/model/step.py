"""What every layer of one pass reads besides its input, and over what its attention runs.

The modules of `jaxinfer.model.llama` project, rotate and mix; a Step says where keys and values come from and
where they stay. `PagedStep` serves: K/V go to the pages of a KVState, and attention reads pages. `DenseStep`
trains and looks inside: whole texts, no state, differentiable. There is one Llama for both.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax

import pallas_kernels
from jaxinfer.model import kv as kv_state
from jaxinfer.model.kv import WriteSlots
from pallas_kernels import Backend, Pages, Rule


class Step(Protocol):
    """cos, sin float32 [T, 1, H / 2]: the angles of every packed token."""

    @property
    def cos(self) -> jax.Array: ...

    @property
    def sin(self) -> jax.Array: ...

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, kept: Any, rule: Rule, backend: Backend
    ) -> tuple[jax.Array, Any]:
        """q [T, N, H], k and v [T, K, H], rotated -> (what the queries see [T, N, H], what is kept of one
        layer: `kept` with these k and v in it)."""
        ...


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["batch", "slots", "cos", "sin"],
    meta_fields=["decode_rows"],
)
@dataclass(frozen=True)
class PagedStep:
    """Attention over pages; a layer keeps its (k_pages, v_pages). K/V are written first, then attended to."""

    batch: pallas_kernels.RaggedBatch
    slots: WriteSlots
    cos: jax.Array
    sin: jax.Array
    decode_rows: int

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        kept: tuple[Pages, Pages],
        rule: Rule,
        backend: Backend,
    ) -> tuple[jax.Array, tuple[Pages, Pages]]:
        k_pages = kv_state.write_layer(kept[0], k, self.slots)
        v_pages = kv_state.write_layer(kept[1], v, self.slots)
        attended = pallas_kernels.paged_attention(
            q, k_pages, v_pages, self.batch, decode_rows=self.decode_rows, rule=rule, backend=backend
        )
        return attended, (k_pages, v_pages)


class Tap(NamedTuple):
    """What one layer's attention was given, packed [T, heads, H], rotated as attention takes it."""

    q: jax.Array
    k: jax.Array
    v: jax.Array


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["cos", "sin"], meta_fields=["texts", "tapped"]
)
@dataclass(frozen=True)
class DenseStep:
    """`texts` texts of one length, packed one after the other, each from its own position 0; causal. Nothing
    is kept, or where `tapped` a Tap of each layer."""

    cos: jax.Array
    sin: jax.Array
    texts: int
    tapped: bool = False

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, kept: None, rule: Rule, backend: Backend
    ) -> tuple[jax.Array, Tap | None]:
        assert rule.soft_cap is None, "dense attention has no soft cap"
        assert not rule.sinks, "dense attention has no sinks"
        window = None if rule.window is None else (rule.window - 1, 0)
        apart = [x.reshape(self.texts, -1, *x.shape[1:]) for x in (q, k, v)]  # [texts, S, heads, H]
        attended = jax.nn.dot_product_attention(
            *apart, scale=rule.scale, is_causal=True, local_window_size=window
        )
        return attended.reshape(q.shape), Tap(q, k, v) if self.tapped else None
