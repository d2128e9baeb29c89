"""What attention runs on and is asked to do: the facts by which a backend says yes or no."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

DTYPES = ("float32", "bfloat16", "float16")
KV_DTYPES = (*DTYPES, "int8", "float8_e4m3fn")


@dataclass(frozen=True, slots=True)
class Device:
    """`platform` "cpu" or "gpu"; of an NVIDIA GPU its compute `capability` (9.0 is (9, 0)), its name and its
    number of multiprocessors."""

    platform: str
    capability: tuple[int, int] | None = None
    kind: str = ""
    num_cores: int = 1

    @classmethod
    def of(cls, device: Any) -> Device:
        """The facts of a jax.Device; `capability` None for a GPU that is not NVIDIA's."""
        if device.platform != "gpu":
            return cls(device.platform, None, device.device_kind)
        text = str(getattr(device, "compute_capability", ""))
        parts = text.split(".")
        numeric = len(parts) == 2 and all(part.isdigit() for part in parts)
        capability = (int(parts[0]), int(parts[1])) if numeric else None
        return cls("gpu", capability, device.device_kind, int(getattr(device, "core_count", 1)))


CPU = Device("cpu")


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shapes and types that a backend must serve, in the letters of docs/shapes.md: `heads` N,
    `kv_heads` K of a layer, head `width` H, `page_size` Z; `dtype` of queries, `kv_dtype`
    of pages (one of KV_DTYPES)."""

    heads: int
    kv_heads: int
    width: int
    page_size: int
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"

    @classmethod
    def of(cls, q: Any, pages: Any) -> Geometry:
        """That of queries [T, N, H] over pages [M, K, Z, H]."""
        _, heads, width = q.shape
        _, kv_heads, page_size, _ = pages.shape
        return cls(heads, kv_heads, width, page_size, q.dtype.name, pages.dtype.name)

    @property
    def group(self) -> int:
        """G, query heads per KV head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class Backend:
    """An implementation of attention, and the device that it is built for. `interpret` runs a GPU kernel in
    JAX's interpreter, on any device, slowly."""

    name: str
    device: Device = CPU
    interpret: bool = False
