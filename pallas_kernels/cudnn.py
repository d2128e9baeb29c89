"""cuDNN's attention: what JAX's public interface lets us reach of it, which is nothing paged."""

from __future__ import annotations

import jax

from pallas_kernels.batch import TILE_SIZES, RaggedBatch
from pallas_kernels.device import Backend, Device, Geometry
from pallas_kernels.pages import Pages
from pallas_kernels.rule import Rule

REASON = (
    "jax.nn.dot_product_attention(implementation='cudnn') takes dense keys and values; JAX has cuDNN's paged "
    "attention only in a private module"
)


def unsupported(device: Device, geometry: Geometry, interpret: bool) -> str:
    """Always the reason: jax 0.11.2 to 0.12.0.1 give no public function that takes a page table."""
    del device, geometry, interpret
    return REASON


def query_tiles(device: Device, geometry: Geometry) -> tuple[int, ...]:
    del device, geometry
    return TILE_SIZES


def paged_attention(
    q: jax.Array, k_pages: Pages, v_pages: Pages, batch: RaggedBatch, *,
    decode_rows: int, rule: Rule, backend: Backend,
) -> jax.Array:  # fmt: skip
    """Raises NotImplementedError."""
    del q, k_pages, v_pages, batch, decode_rows, rule, backend
    raise NotImplementedError(REASON)
