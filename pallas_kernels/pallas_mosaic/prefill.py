"""Attention of chunks over paged keys and values by Pallas Mosaic GPU kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.device import Backend, Device, Geometry
from pallas_kernels.pallas_mosaic import prefill_common as planning
from pallas_kernels.pallas_mosaic import prefill_mma, prefill_wgmma
from pallas_kernels.pallas_mosaic.common import FLOAT_DTYPES, Target, async_copy_tile, shared_bytes
from pallas_kernels.pallas_mosaic.prefill_common import Layout
from pallas_kernels.rule import Rule


def unsupported_prefill(device: Device, geometry: Geometry) -> str:
    """Why chunks of `geometry` have no kernel on `device`, in one line; "" when they have."""
    group, width, page_size = geometry.group, geometry.width, geometry.page_size
    if geometry.heads % geometry.kv_heads or group > 16:
        return f"needs 1 to 16 query heads per KV head, got {geometry.heads} and {geometry.kv_heads}"
    if geometry.dtype not in FLOAT_DTYPES or geometry.kv_dtype != geometry.dtype:
        types = f"{geometry.dtype} and {geometry.kv_dtype}"
        return f"needs queries and pages both {' or '.join(FLOAT_DTYPES)}, got {types}"
    if width % 16 or not 64 <= width <= 256:
        return f"needs a head width of 64 to 256, a multiple of 16, got {width}"
    if page_size & (page_size - 1) or not 8 <= page_size <= 256:
        return f"needs pages of 8 to 256 tokens, a power of two, got {page_size}"
    if device.capability is not None and device.capability < (9, 0):
        copied = prefill_mma.blocks_of(width, page_size).copied
        if copied < 16 or async_copy_tile(copied, width) < 32:
            return f"needs larger pages for cp.async: {page_size} tokens of width {width} are no whole tiles"
    if device.platform == "gpu" and not _uses_wgmma(device):
        needed = prefill_mma.shared_bytes(width, prefill_mma.blocks_of(width, page_size))
        if needed > shared_bytes(device):
            return f"needs {needed} bytes of shared memory for width {width}, has {shared_bytes(device)}"
    return ""


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
    at most `query_tile`.
    Returns [T, N, H] in q's dtype. Positions of a tile's tokens are consecutive, as those of a chunk are.
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
