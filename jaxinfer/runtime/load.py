"""From a MODEL argument to everything that runs it: parameters, pages, programs, tokenizer."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache

import checkpoints
import pallas_kernels
from jaxinfer.config import EngineConfig, ModelConfig, shape_ladder
from jaxinfer.core import ConfigError, Limits
from jaxinfer.model import weights
from jaxinfer.model.llama import Build
from jaxinfer.presets import PRESETS
from jaxinfer.progress import phase
from jaxinfer.runtime.runner import JaxRunner
from jaxinfer.runtime.trace import release_freed_memory
from jaxinfer.text.chat import ChatTemplate
from jaxinfer.text.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

RANDOM = "random:"
CPU_POOL_BYTES = 1 << 30
"""Most that a pool of unstated size takes on CPU, where the memory belongs to everything else too."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to run. `tokenizer` None serves token ids only."""

    runner: JaxRunner
    limits: Limits
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    model_name: str
    model_config: ModelConfig
    engine_config: EngineConfig


def load(model: str, config: EngineConfig, *, progress: bool | None = None) -> Loaded:
    """Open MODEL (a pulled name, a checkpoint's path, or random:CONFIG) and make it ready to run.

    Raises ConfigError or CheckpointError when the model or the configuration cannot run here.
    `progress` False keeps the bars (load, compile) off stderr.
    """
    use_compile_cache(config.compile_cache_dir)
    platform = jax.default_backend()
    dtype = jnp.dtype(_auto(config.dtype, "float32" if platform == "cpu" else "bfloat16"))
    kv_dtype = jnp.dtype(_auto(config.kv_cache_dtype, dtype.name))
    try:
        backend = pallas_kernels.resolve_backend(config.attention_backend, platform)
    except NotImplementedError as reason:
        raise ConfigError(str(reason)) from None
    build = Build(dtype, platform, backend)
    wanted = progress is not False

    name, model_config, source, tokenizer, template = _open(model)
    max_model_len = config.max_model_len or model_config.max_position
    if max_model_len > model_config.max_position:
        raise ConfigError(
            f"max_model_len {max_model_len} is more than the model's own limit of {model_config.max_position}"
        )
    total = sum(1 for _ in weights.parameters(model_config))
    with phase(f"loading {name}", total=total, wanted=wanted) as advance:
        if source is None:
            graph, state = weights.random_params(model_config, build, on_tensor=advance)
        else:
            graph, state = weights.load_params(model_config, build, source, on_tensor=advance)
    release_freed_memory()  # what reading left behind, before the pool takes its share
    num_pages = _num_pages(config, model_config, max_model_len, kv_dtype, platform)
    runner = JaxRunner(
        model_config, graph, state, shape_ladder(config.max_num_seqs, config.max_num_batched_tokens),
        num_pages=num_pages, page_size=config.page_size, max_model_len=max_model_len,
        kv_dtype=kv_dtype, platform=platform, progress=wanted,
    )  # fmt: skip
    if config.warmup == "full":
        runner.warm_up()
    eos = _eos_ids(model_config, source, tokenizer)
    limits = Limits(
        num_pages=num_pages, page_size=config.page_size, max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens, max_model_len=max_model_len,
        vocab_size=model_config.vocab_size, eos_token_ids=frozenset(eos),
    )  # fmt: skip
    return Loaded(runner, limits, tokenizer, template, name, model_config, config)


def _eos_ids(config: ModelConfig, source: Any, tokenizer: Tokenizer | None) -> frozenset[int]:
    """The ids that end an answer: generation_config.json's where it names any, else the tokenizer's or the
    model's own. Random weights end nowhere but at the config's."""
    if source is None:
        return frozenset(config.eos_token_ids)
    if tokenizer is not None:
        return frozenset(tokenizer.eos_ids)  # it has read generation_config too
    stated = source.generation_config.get("eos_token_id")
    if stated is None:
        return frozenset(config.eos_token_ids)
    return frozenset([stated] if isinstance(stated, int) else stated)


def _auto(value: str, default: str) -> str:
    return default if value == "auto" else value


def _open(model: str) -> tuple[str, ModelConfig, Any, Tokenizer | None, ChatTemplate | None]:
    if model.startswith(RANDOM):
        model_config = ModelConfig.from_hf(_random_config(model.removeprefix(RANDOM)))
        tokenizer = ByteTokenizer()
        usable = tokenizer.vocab_size <= model_config.vocab_size
        return model, model_config, None, tokenizer if usable else None, None
    checkpoint = checkpoints.open_checkpoint(checkpoints.resolve(model))
    model_config = ModelConfig.from_hf(checkpoint.config)
    origin = checkpoint.tokenizer_source()
    tokenizer = load_tokenizer(origin)
    template = ChatTemplate.from_source(origin, tokenizer) if tokenizer else None
    name = Path(model).resolve().name if os.path.exists(model) else model
    return name, model_config, checkpoint, tokenizer, template


def _random_config(which: str) -> dict[str, Any]:
    """The config of random:WHICH: a built-in shape, or the path of a config.json or its folder."""
    if which in PRESETS:
        return PRESETS[which]
    path = Path(which)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as reason:
        known = ", ".join(PRESETS)
        raise ConfigError(
            f"random:{which}: neither a built-in shape ({known}) nor a readable config.json: {reason}"
        ) from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: a config.json must hold an object, got {type(config).__name__}")
    return config


def _num_pages(
    config: EngineConfig, model: ModelConfig, max_model_len: int, kv_dtype: jnp.dtype, platform: str
) -> int:
    """M: as stated, else what the limits can use, within the memory that may be taken."""
    page_bytes = model.kv_bytes_per_token(kv_dtype.itemsize) * config.page_size
    available = _free_bytes(platform)
    if config.num_pages is not None:
        wanted = config.num_pages * page_bytes
        if wanted > available:
            raise ConfigError(
                f"num_pages {config.num_pages} of {page_bytes / 1e6:.2f} MB take {wanted / 1e9:.1f} GB; "
                f"{available / 1e9:.1f} GB are free"
            )
        return config.num_pages
    per_sequence = -(-max_model_len // config.page_size)
    free = int(available * config.memory_utilization)
    if platform == "cpu":
        free = min(free, max(CPU_POOL_BYTES, (per_sequence + 1) * page_bytes))
    pages = min(free // page_bytes, config.max_num_seqs * per_sequence + 1)
    if pages < 2:
        raise ConfigError(
            f"the device has {free / 1e6:.0f} MB for KV pages and one page takes {page_bytes / 1e6:.1f} MB"
        )
    return pages


def _free_bytes(platform: str) -> int:
    if platform == "cpu":
        try:  # what could be had, the page cache included; MemFree alone can be next to nothing
            with open("/proc/meminfo") as meminfo:
                fields = dict(line.split(":", 1) for line in meminfo)
            return int(fields["MemAvailable"].split()[0]) * 1024
        except (OSError, KeyError):  # no Linux: assume that half of the memory is free
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        raise ConfigError(f"{platform} does not tell its free memory: state num_pages")
    return stats["bytes_limit"] - stats["bytes_in_use"]


def use_compile_cache(folder: str | None) -> None:
    """Let JAX keep compiled programs in `folder` (None: the default one, "": nowhere)."""
    if folder is None:
        if jax.config.jax_compilation_cache_dir:
            return  # the user's own choice stands
        folder = str(checkpoints.cache_folder() / "compile")
    if (folder or None) == jax.config.jax_compilation_cache_dir:
        return
    compilation_cache.reset_cache()  # JAX opens its cache once a process; a new folder needs a new opening
    jax.config.update("jax_compilation_cache_dir", folder or None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
