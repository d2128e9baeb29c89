"""Attention over paged KV: one public function per operation, a jnp reference that is its specification.

A leaf package: it imports jax and numpy only, and knows no model, request or file.
"""

from pallas_kernels.attention import backends, paged_attention, resolve_backend
from pallas_kernels.batch import RaggedBatch
from pallas_kernels.pages import copy_pages, write_kv

__all__ = ["RaggedBatch", "backends", "copy_pages", "paged_attention", "resolve_backend", "write_kv"]
