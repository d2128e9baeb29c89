"""Paged attention in Pallas Triton: every NVIDIA GPU of compute capability 8.0 and above, with 8-bit pages.

JAX has deprecated Pallas Triton since 0.11.0 in favour of Mosaic GPU, and says so with a DeprecationWarning
whenever one of these kernels is lowered. It is here for 8-bit pages and for GPUs that the Mosaic kernels do
not serve; jax 0.11.2 to 0.12.0.1 are the versions that it was compiled with.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.batch import RaggedBatch
from pallas_kernels.device import DTYPES, Backend, Device, Geometry
from pallas_kernels.pages import FLOAT8, Pages
from pallas_kernels.pallas_triton import decode, prefill
from pallas_kernels.pallas_triton.blocking import candidates, decode_blocking, prefill_blocking, tuned
from pallas_kernels.rule import Rule

__all__ = ["candidates", "most_pages", "paged_attention", "query_tiles", "unsupported"]

WIDEST = 256  # lanes of a head: beyond, a block's sums leave the registers


def unsupported(device: Device, geometry: Geometry, interpret: bool) -> str:
    """Why the kernels do not serve these shapes on this device; "" when they do."""
    g, capability = geometry, device.capability
    if g.dtype not in DTYPES:
        return f"queries of {g.dtype}: it takes {', '.join(DTYPES)}"
    if g.kv_dtype not in (g.dtype, "int8", FLOAT8):
        return f"pages of {g.kv_dtype} for queries of {g.dtype}: it takes the same type, int8 and {FLOAT8}"
    if g.width > WIDEST:
        return f"heads of width {g.width}: it takes at most {WIDEST}"
    if interpret:
        return ""
    if device.platform != "gpu":
        return f"it compiles for NVIDIA GPUs, not for {device.platform} (there the interpreter runs it)"
    if capability is None:
        return "it is checked on NVIDIA GPUs only"
    if capability < (8, 0):
        return f"it needs compute capability 8.0 (bfloat16, asynchronous copies), not {_text(capability)}"
    if g.kv_dtype == FLOAT8 and capability < (8, 9):
        return f"pages of {FLOAT8} need compute capability 8.9, not {_text(capability)}"
    return ""


def _text(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def query_tiles(device: Device, geometry: Geometry) -> tuple[int, ...]:
    """One size: as many tokens as fill a program's rows with the query heads of a group."""
    return (prefill.tile_tokens(geometry.group, prefill_blocking(device, geometry)),)


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
    """See `pallas_kernels.attention.paged_attention`. Jitted so that equal layers are lowered once."""
    tokens, num_pages, device = q.shape[0], k_pages.shape[0], backend.device
    geometry = Geometry.of(q, k_pages)
    most = most_pages(geometry)
    assert most is None or num_pages <= most, f"{num_pages} pages, Pallas Triton can index {most}"
    decoded = None
    if decode_rows:
        decoded = decode.attend(
            q[:decode_rows], k_pages, v_pages, batch.page_table, batch.kv_len, rule=rule,
            blocking=tuned("decode", decode_blocking(device, geometry), device, geometry, decode_rows),
            num_cores=device.num_cores,
            interpret=backend.interpret,
        )  # fmt: skip
        if decode_rows == tokens:
            return decoded
    batch.check_tiles(*query_tiles(device, geometry))
    out = jnp.zeros(q.shape, q.dtype)
    if decoded is not None:
        out = out.at[:decode_rows].set(decoded)
    return prefill.attend(
        out, q, k_pages, v_pages, batch, rule=rule,
        blocking=tuned("prefill", prefill_blocking(device, geometry), device, geometry),
        interpret=backend.interpret,
    )  # fmt: skip


def most_pages(geometry: Geometry) -> int | None:
    """Pallas Triton counts elements in 32 bits up to 2^32 bytes, although signed ones end at 2^31 (jax 0.11.2
    to 0.12.0.1): only elements of one byte can lie in between."""
    if jnp.dtype(geometry.kv_dtype).itemsize > 1:
        return None
    return 2**31 // (geometry.kv_heads * geometry.page_size * geometry.width)
