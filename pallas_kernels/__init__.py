"""Attention over paged KV: one public function per operation, a jnp reference that is its specification.

A leaf package: it imports jax and numpy only, and knows no model, request or file.
"""

from pallas_kernels.attention import BACKENDS, backends, paged_attention, query_tiles, resolve_backend
from pallas_kernels.batch import RaggedBatch
from pallas_kernels.device import CPU, KV_DTYPES, Backend, Device, Geometry
from pallas_kernels.pages import Pages, QuantizedPages, copy_pages, create_pages, write_kv
from pallas_kernels.rule import Rule

__all__ = [
    "BACKENDS",
    "CPU",
    "KV_DTYPES",
    "Backend",
    "Device",
    "Geometry",
    "Pages",
    "QuantizedPages",
    "RaggedBatch",
    "Rule",
    "backends",
    "copy_pages",
    "create_pages",
    "paged_attention",
    "query_tiles",
    "resolve_backend",
    "write_kv",
]
