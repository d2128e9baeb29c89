"""cuDNN's attention: what JAX's public interface lets us reach of it, which is nothing paged."""

from __future__ import annotations

from pallas_kernels.device import Device, Geometry

REASON = (
    "jax.nn.dot_product_attention(implementation='cudnn') takes dense keys and values; JAX has cuDNN's paged "
    "attention only in a private module"
)


def unsupported(device: Device, geometry: Geometry, interpret: bool) -> str:
    """Always the reason: jax 0.11.2 to 0.12.0.1 give no public function that takes a page table."""
    del device, geometry, interpret
    return REASON
