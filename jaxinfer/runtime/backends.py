"""What computes attention and quantised products on the device that is here: chosen, proven, logged."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass

import jax
import jax.numpy as jnp

import pallas_kernels
from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.core import ConfigError
from jaxinfer.model.quantized import Quantization
from pallas_kernels import self_test

logger = logging.getLogger(__name__)

_KV_DTYPES = {"fp8_e4m3": "float8_e4m3fn"}  # as EngineConfig names them, and as JAX does


@dataclass(frozen=True, slots=True)
class Attention:
    """The backend of every layer, the dtype of its pages, the query tiles that it wants, and the most pages
    of a pool that it can index (None: any number)."""

    backend: pallas_kernels.Backend
    kv_dtype: jnp.dtype
    tiles: tuple[int, ...]
    most_pages: int | None


def choose_attention(config: EngineConfig, model: ModelConfig) -> Attention:
    """The backend that serves every layer here, and on a GPU passes its test. `config` is one of a platform
    (`EngineConfig.on`). Raises ConfigError with the reason when the one that was named does not."""
    kv_dtype = jnp.dtype(_KV_DTYPES.get(config.kv_cache_dtype, config.kv_cache_dtype))
    geometries = [
        pallas_kernels.Geometry(
            model.num_heads, kv_heads, model.head_dim, config.page_size, config.dtype, kv_dtype.name
        )
        for kv_heads in sorted({layer.num_kv_heads for layer in model.layers})
    ]
    # Where queries choose pages, each KV head is attended by itself.
    by_head = [
        dataclasses.replace(geometry, heads=geometry.heads // geometry.kv_heads, kv_heads=1)
        for geometry in geometries
        if any(layer.top_pages for layer in model.layers)
    ]
    device = pallas_kernels.Device.of(jax.local_devices()[0])
    windows = {layer.window for layer in model.layers}
    failed: list[str] = []
    while True:
        try:
            backend = pallas_kernels.resolve_backend(
                config.attention_backend, device, *geometries, *by_head,
                interpret=config.interpret_kernels, without=tuple(failed),
            )  # fmt: skip
        except NotImplementedError as reason:
            raise ConfigError(str(reason)) from None
        reason = ""
        if device.platform == "gpu":
            reason = self_test.failures(backend, [*geometries, *by_head], windows, model.sinks)
        if not reason:
            break
        said = f"attention backend {backend.name!r} fails its test on {device.kind}: it {reason}"
        if config.attention_backend != "auto":
            raise ConfigError(said)
        logger.warning("%s; the next one is taken", said)
        failed.append(backend.name)
    logger.info("attention: %s on %s", backend.name, device.kind or device.platform)
    tiles = pallas_kernels.query_tiles(backend, *geometries)
    most = [pallas_kernels.most_pages(backend, *geometries)]
    for whole, head in zip(geometries, by_head, strict=False):
        limit = pallas_kernels.most_pages(backend, head)
        most.append(None if limit is None else limit // whole.kv_heads)
    return Attention(backend, kv_dtype, tiles, min((m for m in most if m is not None), default=None))


def choose_quantization(config: EngineConfig, model: ModelConfig) -> Quantization | None:
    """What the weights are rounded to, and what multiplies them here. Raises ConfigError with the reason when
    this device or this model's shapes do not allow what is asked for."""
    if config.quantization is None:
        return None
    device = pallas_kernels.Device.of(jax.local_devices()[0])
    failed: list[str] = []
    while True:
        try:
            backend = pallas_kernels.resolve_matmul(config.quantization, device, without=tuple(failed))
        except NotImplementedError as reason:
            raise ConfigError(f"quantization {config.quantization!r} cannot run here: {reason}") from None
        reason = ""
        if device.platform == "gpu":
            reason = self_test.matmul_failure(backend, config.quantization, config.dtype)
        if not reason:
            break
        logger.warning(
            "products of %s weights by %s fail their test on %s: it %s; the next one is taken",
            config.quantization, backend.name, device.kind, reason,
        )  # fmt: skip
        failed.append(backend.name)
    quantization = Quantization(config.quantization, backend)
    quantization.check(model)
    logger.info("weights: %s by %s", config.quantization, backend.name)
    return quantization
