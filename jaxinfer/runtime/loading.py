"""From a MODEL argument to everything that runs it: parameters, pages, programs, tokenizer."""

from __future__ import annotations

import logging
import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache

import checkpoints
from jaxinfer.config import EngineConfig, ModelConfig, invariant_ladder, shape_ladder, shown_layers
from jaxinfer.core import ConfigError, Limits, SamplingParams
from jaxinfer.model import kv, weights
from jaxinfer.model.llama import Build
from jaxinfer.progress import phase
from jaxinfer.runtime import backends
from jaxinfer.runtime.backends import Attention
from jaxinfer.runtime.generation_config import check_ids, default_sampling
from jaxinfer.runtime.runner import JaxRunner
from jaxinfer.runtime.trace import release_freed_memory
from jaxinfer.shapes import RANDOM, model_shape
from jaxinfer.text.chat import ChatTemplate
from jaxinfer.text.errors import ChatTemplateError, TokenizerError
from jaxinfer.text.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

CLIENT_SHARE = "0.94"
"""Of a GPU's memory: CUDA's own context and its libraries need some hundred MB beside."""
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
    default_sampling: SamplingParams


def load(model: str, config: EngineConfig, *, progress: bool | None = None) -> Loaded:
    """Open MODEL (a pulled name, a checkpoint's path, or random:CONFIG) and make it ready to run.

    Raises ConfigError or CheckpointError when the model, its tokenizer or chat template, or the configuration
    cannot run here.
    `progress` False keeps the bars (load, compile) off stderr.
    """
    use_compile_cache(config.compile_cache_dir)
    claim_memory()
    platform = jax.default_backend()
    config = config.on(platform)
    assert config.max_num_seqs is not None
    assert config.max_num_batched_tokens is not None
    wanted = progress is not False

    name, model_config, source, tokenizer, template = _open(model)
    span = config.span()
    if span is not None:
        model_config = model_config.spanned(span)
    if config.batch_invariant and model_config.linear_layers:
        raise ConfigError(
            f"batch_invariant: layers {shown_layers(model_config.linear_layers)} have linear attention, and "
            "its sums depend on the chunks of a text in their last bits; leave batch_invariant out"
        )
    attention = backends.choose_attention(config, model_config)
    quantization = backends.choose_quantization(config, model_config)
    build = Build(jnp.dtype(config.dtype), platform, attention.backend, quantization)
    if source is None:
        _check_room(model, model_config, build)
    eos = _eos_ids(model_config, source, tokenizer)
    sampled_vocab = _sampled_vocab(model_config, source, tokenizer)
    sampling = SamplingParams()
    if source is not None and config.generation_config == "auto":
        sampling = default_sampling(source.generation_config, _generation_file(source))
        if sampling.stop and tokenizer is None:
            logger.warning("%s: stop_strings need a tokenizer, and there is none", _generation_file(source))
            sampling = replace(sampling, stop=())
    max_model_len = config.max_model_len or model_config.max_position
    if max_model_len > model_config.longest_position:
        raise ConfigError(
            f"max_model_len {max_model_len} is more than the model's own limit of "
            f"{model_config.longest_position}"
        )
    total = sum(1 for _ in weights.parameters(model_config))
    with phase(f"loading {name}", total=total, wanted=wanted) as advance:
        if source is None:
            graph, state = weights.random_params(model_config, build, on_tensor=advance)
        else:
            graph, state = weights.load_params(model_config, build, source, on_tensor=advance)
    release_freed_memory()  # what reading left behind, before the pool takes its share
    limits = Limits(
        num_pages=2, page_size=config.page_size, max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens, max_model_len=max_model_len,
        vocab_size=model_config.vocab_size, eos_token_ids=eos, window=model_config.window,
        sampled_vocab=sampled_vocab, sinks=model_config.sinks,
        stateful=bool(model_config.linear_layers),
    )  # fmt: skip
    num_pages = _num_pages(config, model_config, limits, attention, platform)
    limits = replace(limits, num_pages=num_pages)
    sizes = config.max_num_seqs, config.max_num_batched_tokens, attention.tiles
    cut = None if model_config.page_span is None else config.page_size
    ladder = shape_ladder(*sizes, platform, cut=cut)
    if config.batch_invariant:
        ladder = invariant_ladder(*sizes, cut=cut)
    runner = JaxRunner(
        model_config, graph, state, ladder,
        num_pages=num_pages, page_size=config.page_size, max_model_len=max_model_len,
        kv_dtype=attention.kv_dtype, platform=platform, progress=wanted, sampled_vocab=sampled_vocab,
        strict=config.strict_compiles, num_states=config.max_num_seqs,
    )  # fmt: skip
    if config.warmup == "full":
        runner.warm_up()
    return Loaded(runner, limits, tokenizer, template, name, model_config, config, sampling)


def _eos_ids(config: ModelConfig, source: Any, tokenizer: Tokenizer | None) -> frozenset[int]:
    """The ids that end an answer: the tokenizer's with those of its source (generation_config.json's, else
    config.json's), which are all without a tokenizer. Random weights end nowhere but at the config's. Raises
    ConfigError for an id outside the vocabulary: such an answer would never end."""
    if source is None:
        ids, where = config.eos_token_ids, "config.json"
    elif tokenizer is None:
        ids, where = source.tokenizer_source().eos_token_ids, str(source.path)
    else:
        ids, where = tokenizer.eos_ids, str(source.path)
    check_ids("eos_token_id", ids, config.vocab_size, where)
    return frozenset(ids)


def _sampled_vocab(config: ModelConfig, source: Any, tokenizer: Tokenizer | None) -> int:
    """How many ids, from 0 on, may be sampled: those up to the tokenizer's last one. The rows past it only
    pad the output matrix. Without a tokenizer, and for random weights, every row counts.

    The other way round, a tokenizer with more ids than the model has rows: where only added tokens lie
    outside (many fine-tunes add a "[PAD]" and leave the matrix as it was), a prompt that holds one is
    refused, one by one. A whole vocabulary that does not fit belongs to another model: ConfigError.
    """
    rows = config.vocab_size
    if source is None or tokenizer is None:
        return rows
    if tokenizer.base_vocab_size > rows:
        raise ConfigError(
            f"{source.path}: the tokenizer's vocabulary has {tokenizer.base_vocab_size} ids and the model's "
            f"{rows} (vocab_size); they do not belong together"
        )
    if tokenizer.adds_bos:
        check_ids("bos_token_id", [tokenizer.bos_id or 0], rows, str(source.path))
    outside = [token for token_id, token in tokenizer.added_tokens.items() if token_id >= rows]
    if outside:
        shown = ", ".join(repr(token.content[:40]) for token in outside[:3])
        logger.warning(
            "%s: %d added tokens (%s) lie outside the model's vocabulary of %d; a prompt with one is refused",
            source.path, len(outside), shown, rows,
        )  # fmt: skip
    return min(tokenizer.vocab_size, rows)


def _generation_file(source: Any) -> str:
    """What a message calls the place of generation_config; a GGUF file holds it itself."""
    return str(source.path / "generation_config.json" if source.path.is_dir() else source.path)


def _open(model: str) -> tuple[str, ModelConfig, Any, Tokenizer | None, ChatTemplate | None]:
    if model.startswith(RANDOM):
        model_config = model_shape(model)
        tokenizer = ByteTokenizer()
        usable = tokenizer.vocab_size <= model_config.vocab_size
        return model, model_config, None, tokenizer if usable else None, None
    path = checkpoints.resolve(model)
    if not path.is_dir() and not path.is_file():  # reading a FIFO would wait for ever
        raise ConfigError(
            f"{path} is neither a file nor a folder but a {_kind(path)}; give a folder with config.json and "
            "safetensors, or a .gguf file"
        )
    checkpoint = checkpoints.open_checkpoint(path)
    model_config = ModelConfig.from_hf(checkpoint.config)
    origin = checkpoint.tokenizer_source()
    try:
        tokenizer = load_tokenizer(origin)
        template = ChatTemplate.from_source(origin, tokenizer) if tokenizer else None
    except (TokenizerError, ChatTemplateError) as error:
        raise ConfigError(f"{path}: the tokenizer cannot be used: {error}") from error
    return _model_name(model), model_config, checkpoint, tokenizer, template


def _model_name(model: str) -> str:
    """What the model is served as: a pulled name, or the last part of its path as it was written. Of a
    snapshot in the hub's cache, .../models--ORG--NAME/snapshots/HASH, ORG/NAME."""
    if not os.path.exists(os.path.expanduser(model)):
        return model
    path = Path(os.path.abspath(os.path.expanduser(model)))
    above = path.parents[1].name if len(path.parts) > 2 else ""
    if path.parent.name == "snapshots" and above.startswith("models--"):
        return above.removeprefix("models--").replace("--", "/", 1)
    return path.name


def _check_room(model: str, config: ModelConfig, build: Build) -> None:
    """Raise ConfigError where random weights would not fit: numpy's own error would name neither number."""
    needed, free = weights.param_bytes(config, build), free_bytes(build.platform)
    if needed > free:
        kind = build.quantization.format if build.quantization else build.dtype.name
        raise ConfigError(
            f"{model}: {config.num_params} parameters in {kind} take {needed / 1e9:.1f} GB; "
            f"{free / 1e9:.1f} GB are free"
        )


def _kind(path: Path) -> str:
    kinds = (
        (path.is_fifo, "named pipe"), (path.is_socket, "socket"),
        (path.is_char_device, "character device"), (path.is_block_device, "block device"),
    )  # fmt: skip
    return next((name for test, name in kinds if test()), "special file")


def _num_pages(
    config: EngineConfig, model: ModelConfig, limits: Limits, attention: Attention, platform: str
) -> int:
    """M: as stated, else what the limits (whose own num_pages is not looked at) can use, within the memory
    that may be taken and what the attention backend can index."""
    page_bytes = kv.page_bytes(model, config.page_size, attention.kv_dtype)
    states = model.state_bytes * (limits.max_num_seqs + 1)
    available = free_bytes(platform) - states
    if available < 0:
        raise ConfigError(
            f"max_num_seqs {limits.max_num_seqs}: so many states of layers of linear attention take "
            f"{states / 1e9:.1f} GB; {(available + states) / 1e9:.1f} GB are free"
        )
    if config.num_pages is not None:
        wanted = config.num_pages * page_bytes
        if wanted > available:
            raise ConfigError(
                f"num_pages {config.num_pages} of {page_bytes / 1e6:.2f} MB take {wanted / 1e9:.1f} GB; "
                f"{available / 1e9:.1f} GB are free"
            )
        if attention.most_pages is not None and config.num_pages > attention.most_pages:
            raise ConfigError(
                f"num_pages {config.num_pages} is more than attention backend {attention.backend.name!r} can "
                f"index with pages of {attention.kv_dtype.name}: {attention.most_pages}"
            )
        return config.num_pages
    per_sequence = limits.pages_per_sequence
    free = int(available * config.memory_utilization)
    if platform == "cpu":
        free = min(free, max(CPU_POOL_BYTES, (per_sequence + 1) * page_bytes))
    pages = limits.max_num_seqs * per_sequence + 1  # the most that can be of use
    if page_bytes:
        pages = min(free // page_bytes, pages)
    if attention.most_pages is not None and pages > attention.most_pages:
        logger.warning(
            "the pool is held at %d pages, the most that %s can index; %d would be of use",
            attention.most_pages, attention.backend.name, pages,
        )  # fmt: skip
        pages = attention.most_pages
    if pages < 2:
        raise ConfigError(
            f"the device has {free / 1e6:.0f} MB for KV pages and one page takes {page_bytes / 1e6:.1f} MB"
        )
    return pages


def free_bytes(platform: str) -> int:
    """What could be had now of the device's memory. Raises ConfigError where the device does not tell."""
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


def claim_memory() -> None:
    """Let JAX take CLIENT_SHARE of a GPU's memory in place of its 75 %, unless the user has said otherwise.

    The pool's `memory_utilization` is a share of what JAX may take, less the weights: a quarter of the device
    would never be used. Without effect once JAX has opened the device.
    """
    if not any(
        os.environ.get(name) for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    ):
        os.environ["XLA_CLIENT_MEM_FRACTION"] = CLIENT_SHARE


def use_compile_cache(folder: str | None) -> None:
    """Let JAX keep compiled programs in `folder` (None: the default one, "": nowhere).

    A folder that cannot be written is told in one line and not used: JAX would warn at every program.
    """
    if folder is None:
        if jax.config.jax_compilation_cache_dir:
            return  # the user's own choice stands
        folder = str(checkpoints.cache_folder() / "compile")
    if folder and (reason := _not_writable(folder)):
        logger.warning("compiled programs are not kept: the folder %s cannot be written (%s)", folder, reason)
        folder = ""
    if (folder or None) == jax.config.jax_compilation_cache_dir:
        return
    compilation_cache.reset_cache()  # JAX opens its cache once a process; a new folder needs a new opening
    jax.config.update("jax_compilation_cache_dir", folder or None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _not_writable(folder: str) -> str | None:
    """Why no file can be made in `folder` (made too, if need be); None when one can."""
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
