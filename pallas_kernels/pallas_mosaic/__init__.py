"""Paged attention in Pallas Mosaic GPU: wgmma on Hopper, mma elsewhere from compute capability 8.0 on."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.batch import RaggedBatch
from pallas_kernels.device import Backend, Device, Geometry
from pallas_kernels.pages import Pages, QuantizedPages
from pallas_kernels.pallas_mosaic import prefill as prefill_kernels
from pallas_kernels.pallas_mosaic.common import unsupported_device, unsupported_shapes
from pallas_kernels.pallas_mosaic.decode import decode
from pallas_kernels.pallas_mosaic.decode_plan import candidates as decode_candidates
from pallas_kernels.rule import Rule


def unsupported(device: Device, geometry: Geometry, interpret: bool) -> str:
    """Why the kernels do not serve this device or these shapes, in one line; "" when they do."""
    return unsupported_device(device, interpret) or unsupported_shapes(device, geometry)


def candidates(device: Device, geometry: Geometry, operation: str) -> tuple[dict[str, int], ...]:
    """What `python -m pallas_kernels.bench --tune` tries: sizes of the decode kernel."""
    return decode_candidates(device, geometry) if operation == "decode" else ()


def query_tiles(device: Device, geometry: Geometry) -> tuple[int, ...]:
    """Tokens of a query tile of the prefill kernel."""
    return (prefill_kernels.query_tile(geometry, device),)


@functools.partial(jax.jit, static_argnames=("decode_rows", "rule", "backend"))
def paged_attention(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    batch: RaggedBatch,
    *,
    decode_rows: int,
    rule: Rule,
    backend: Backend,
) -> jax.Array:
    """See `pallas_kernels.attention.paged_attention`. Jitted so that equal layers are lowered once:
    lowering a Mosaic kernel takes a second."""
    assert not isinstance(k_pages, QuantizedPages), "`unsupported` refuses quantised pages"
    assert not isinstance(v_pages, QuantizedPages)
    tokens = q.shape[0]
    parts = []
    if decode_rows:
        table, kv_len = batch.page_table[:decode_rows], batch.kv_len[:decode_rows]
        parts.append(decode(q[:decode_rows], k_pages, v_pages, table, kv_len, rule=rule, backend=backend))
    if decode_rows < tokens:
        batch.check_tiles(*query_tiles(backend.device, Geometry.of(q, k_pages)))
        chunks = prefill_kernels.prefill(
            q, k_pages, v_pages, batch.page_table, batch.positions, batch.kv_len, batch.tiles[0],
            batch.num_tiles,
            rule=rule, backend=backend, tile=batch.tile_sizes[0],
        )  # fmt: skip
        parts.append(chunks[decode_rows:])
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)
