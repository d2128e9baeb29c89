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
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from jaxinfer.config import Favor, PageSpan
from jaxinfer.model import favor as linear
from jaxinfer.model import kv as kv_state
from jaxinfer.model.kv import LayerKV, WriteSlots
from pallas_kernels import Backend, Rule


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

    def attend_shared(
        self, q: jax.Array, shared: Any, kept: Any, rule: Rule, backend: Backend
    ) -> tuple[jax.Array, Any]:
        """The same over the K/V of an earlier layer: `shared` is what the step kept of that in this pass."""
        ...

    def attend_linearly(
        self, q: jax.Array, k: jax.Array, v: jax.Array, kept: Any, favor: Favor, scale: float
    ) -> tuple[jax.Array, Any]:
        """The same by linear attention; `scale` is that of q·k."""
        ...


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["batch", "slots", "cos", "sin", "choice"],
    meta_fields=["decode_rows"],
)
@dataclass(frozen=True)
class PagedStep:
    """Attention over pages; a layer keeps its LayerKV. K/V are written first, then attended to. `choice`:
    what layers with page bounds need to choose by; None where there are none."""

    batch: pallas_kernels.RaggedBatch
    slots: WriteSlots
    cos: jax.Array
    sin: jax.Array
    choice: pallas_kernels.PageChoice | None
    decode_rows: int

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        kept: LayerKV,
        rule: Rule,
        backend: Backend,
    ) -> tuple[jax.Array, LayerKV]:
        k_pages = kv_state.write_layer(kept.k, k, self.slots)
        v_pages = kv_state.write_layer(kept.v, v, self.slots)
        bounds = kept.bounds
        if bounds is not None:
            assert self.choice is not None, "page bounds without a choice"
            bounds = pallas_kernels.update_bounds(bounds, k_pages, self.choice)
        written = LayerKV(k_pages, v_pages, bounds)
        return self._over(q, written, rule, backend), written

    def attend_shared(
        self, q: jax.Array, shared: LayerKV, kept: LayerKV, rule: Rule, backend: Backend
    ) -> tuple[jax.Array, LayerKV]:
        return self._over(q, shared, rule, backend), kept

    def _over(self, q: jax.Array, pages: LayerKV, rule: Rule, backend: Backend) -> jax.Array:
        """What queries see of pages that hold this step's K/V already."""
        if pages.bounds is not None:
            assert self.choice is not None, "page bounds without a choice"
            return pallas_kernels.attend_chosen(
                q, pages.k, pages.v, pages.bounds, self.batch, self.choice,
                decode_rows=self.decode_rows, rule=rule, backend=backend,
            )  # fmt: skip
        return pallas_kernels.paged_attention(
            q, pages.k, pages.v, self.batch, decode_rows=self.decode_rows, rule=rule, backend=backend
        )

    def attend_linearly(
        self, q: jax.Array, k: jax.Array, v: jax.Array, kept: LayerKV, favor: Favor, scale: float
    ) -> tuple[jax.Array, LayerKV]:
        places = self.slots.state_places
        assert kept.state is not None, "linear attention without a state"
        assert places is not None, "linear attention, and no row has a place for its state"
        attended, state = linear.attend_rows(
            q, k, v, kept.state, self.batch, places,
            decode_rows=self.decode_rows, favor=favor, scale=scale,
        )  # fmt: skip
        return attended, kept._replace(state=state)


class Tap(NamedTuple):
    """What one layer's attention was given, packed [T, heads, H], rotated as attention takes it."""

    q: jax.Array
    k: jax.Array
    v: jax.Array


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["cos", "sin"], meta_fields=["span", "texts", "tapped"]
)
@dataclass(frozen=True)
class DenseStep:
    """`texts` texts of one length, packed one after the other, each from its own position 0; causal. Nothing
    is kept, or where `tapped` a Tap of each layer, by which others share its K/V."""

    cos: jax.Array
    sin: jax.Array
    span: PageSpan | None
    texts: int
    tapped: bool = False

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, kept: None, rule: Rule, backend: Backend
    ) -> tuple[jax.Array, Tap | None]:
        assert rule.soft_cap is None, "dense attention has no soft cap"
        window = None if rule.window is None or rule.sinks else (rule.window - 1, 0)
        apart = [x.reshape(self.texts, -1, *x.shape[1:]) for x in (q, k, v)]  # [texts, S, heads, H]
        mask = seen(apart[0].shape[1], rule, self.span)
        attended = jax.nn.dot_product_attention(
            *apart, mask=mask, scale=rule.scale, is_causal=True, local_window_size=window
        )
        return attended.reshape(q.shape), Tap(q, k, v) if self.tapped else None

    def attend_shared(
        self, q: jax.Array, shared: Tap, kept: None, rule: Rule, backend: Backend
    ) -> tuple[jax.Array, Tap | None]:
        return self.attend(q, shared.k, shared.v, kept, rule, backend)

    def attend_linearly(
        self, q: jax.Array, k: jax.Array, v: jax.Array, kept: None, favor: Favor, scale: float
    ) -> tuple[jax.Array, Tap | None]:
        q_texts, k_texts, v_texts = (x.reshape(self.texts, -1, *x.shape[1:]) for x in (q, k, v))
        attended = linear.attend_texts(q_texts, k_texts, v_texts, favor, scale)
        return attended.reshape(q.shape), Tap(q, k, v) if self.tapped else None


def seen(length: int, rule: Rule, span: PageSpan | None) -> jax.Array | None:
    """bool [1, 1, S, S] over queries and keys, causality apart: what sinks or a span let be seen, as their
    `sees` in jaxinfer.config.spans; None where attention needs no such mask."""
    if span is not None:
        pages = -(-length // span.page_size)
        table = np.zeros((pages, pages), bool)
        for page in range(pages):
            table[page, list(span.pages(page))] = True
        whole = table.repeat(span.page_size, axis=0).repeat(span.page_size, axis=1)
        return jnp.asarray(whole[None, None, :length, :length])
    if not rule.sinks:
        return None
    assert rule.window is not None
    query, key = jnp.arange(length)[:, None], jnp.arange(length)[None, :]
    return ((key > query - rule.window) | (key < rule.sinks))[None, None]
