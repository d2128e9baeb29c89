"""Attention of chunks over paged keys and values by Pallas Mosaic GPU kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.device import Backend, Device, Geometry
from pallas_kernels.pallas_mosaic import prefill_common as planning
from pallas_kernels.pallas_mosaic import prefill_mma, prefill_wgmma
from pallas_kernels.pallas_mosaic.common import Target
from pallas_kernels.pallas_mosaic.prefill_common import Layout
from pallas_kernels.rule import Rule


def _uses_wgmma(device: Device) -> bool:
    return device.capability is not None and device.capability[0] == 9


def _layout(group: int, device: Device) -> Layout:
    return Layout(group, prefill_wgmma.CONSUMERS if _uses_wgmma(device) else 1)


def query_tile(geometry: Geometry, device: Device) -> int:
    """Tokens of a query tile: with all query heads of a KV head they fill 128 rows of wgmma, or 64 of mma."""
    return _layout(geometry.group, device).tile


def prefill(
    q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, page_table: jax.Array, positions: jax.Array,
    kv_len: jax.Array, tiles: jax.Array, num_tiles: jax.Array, *, rule: Rule, backend: Backend, tile: int,
) -> jax.Array:  # fmt: skip
    """Attention of the tokens of `tiles`; all others give zeros.

    q [T, N, H]; k_pages, v_pages [M, K, Z, H]; page_table [B, P], positions [T], kv_len [B] as in
    RaggedBatch; tiles int32 [C, 3] (row, first packed token, at most `tile` tokens), num_tiles [1]; `tile` is
    at most `query_tile`, which layers of another G may have made smaller.
    Returns [T, N, H] in q's dtype. Positions of a tile's tokens are consecutive, as those of a chunk are.
    `common.unsupported_shapes` says for which shapes there are kernels.

    A NaN that is nobody's reaches no one, and a row's own reaches no other row. A row's own NaN key reaches
    the tokens that see it, as in the reference; its own NaN value may reach all tokens of those of the row's
    tiles that read its block of keys, also tokens before it or past whose window it lies: a weight of 0 is
    multiplied by the value. Tiles that read no key of the block are as they were.
    """
    tokens, heads, width = q.shape
    kv_heads, page_size = k_pages.shape[1:3]
    layout = _layout(heads // kv_heads, backend.device)
    assert tile <= layout.tile, f"tiles of {tile} tokens for kernels of {layout.tile}"
    wgmma = _uses_wgmma(backend.device)
    blocks = (prefill_wgmma if wgmma else prefill_mma).blocks_of(width, page_size)
    work = planning.plan_work(
        tiles, num_tiles, positions, kv_len, page_table, rule=rule, layout=layout, blocks=blocks
    )
    flat = jnp.pad(q.reshape(tokens, heads * width), ((0, max(0, layout.tile - tokens)), (0, 0)))
    target = Target.of(backend)
    if wgmma:
        # Stores of a part of a tile by TMA go straight to their tokens; the rest keep these zeros.
        out = jax.new_ref(jnp.zeros((tokens, heads * width), q.dtype))
        prefill_wgmma.prefill(
            flat, k_pages, v_pages, work, out, rule=rule, layout=layout, blocks=blocks, target=target
        )
        return out[...].reshape(tokens, heads, width)
    rows = prefill_mma.prefill(
        flat, k_pages, v_pages, work, rule=rule, layout=layout, blocks=blocks, target=target
    )
    return planning.gather_rows(rows, work, tokens, layout, kv_heads)
