"""Attention over paged KV, products with weights of few bits: one public function per operation, with a jnp
reference that is its specification.

A leaf package: it imports jax and numpy only, and knows no model, request or file.
"""

from pallas_kernels.attention import (
    BACKENDS,
    backends,
    most_pages,
    paged_attention,
    query_tiles,
    resolve_backend,
)
from pallas_kernels.batch import RaggedBatch
from pallas_kernels.device import CPU, KV_DTYPES, Backend, Device, Geometry
from pallas_kernels.matmul import quant_matmul, resolve_matmul
from pallas_kernels.page_choice import (
    PageBounds,
    PageChoice,
    attend_chosen,
    create_bounds,
    page_choice,
    update_bounds,
)
from pallas_kernels.pages import Pages, QuantizedPages, copy_pages, create_pages, write_kv
from pallas_kernels.quantized import (
    FORMATS,
    GROUPS,
    Format,
    QuantizedWeight,
    dequantize,
    int4_group,
    quantize,
)
from pallas_kernels.rule import Rule

__all__ = [
    "BACKENDS",
    "CPU",
    "FORMATS",
    "GROUPS",
    "KV_DTYPES",
    "Backend",
    "Device",
    "Format",
    "Geometry",
    "PageBounds",
    "PageChoice",
    "Pages",
    "QuantizedPages",
    "QuantizedWeight",
    "RaggedBatch",
    "Rule",
    "attend_chosen",
    "backends",
    "copy_pages",
    "create_bounds",
    "create_pages",
    "dequantize",
    "int4_group",
    "most_pages",
    "page_choice",
    "paged_attention",
    "quant_matmul",
    "quantize",
    "query_tiles",
    "resolve_backend",
    "resolve_matmul",
    "update_bounds",
    "write_kv",
]
