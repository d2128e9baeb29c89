"""Converts checkpoints: any MODEL that can be opened, to an Orbax folder or to Hugging Face safetensors.

    convert("smollm2-135m", "models/smollm2")                     an Orbax folder, loaded shard by shard
    convert("models/smollm2", "models/smollm2-hf", to="safetensors", dtype="bfloat16")
    convert("smollm2-135m", "models/smollm2-mqa", heads=HeadPlan(kv_heads=1, method="align"))
    convert("smollm2-135m", "models/smollm2-linear", linear_layers=[3, 7], favor=Favor(features=256))
    convert("smollm2-135m", "models/smollm2-cla", sharing=SharePlan(share=2))

The result has everything to run from: weights under Hugging Face names, config.json, generation_config.json,
tokenizer and chat template. Tensors go one by one, so host memory stays near the largest of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

import checkpoints
from checkpoints import writing
from checkpoints.regular_file import is_present
from checkpoints.writing import DEFAULT_SHARD_BYTES, PendingTensor
from jaxinfer.config import Favor, ModelConfig, with_linear_attention
from jaxinfer.core import ConfigError
from jaxinfer.heads import HeadChange, HeadPlan, Regrouped, Shared, SharePlan, decide
from jaxinfer.model import weights
from jaxinfer.progress import phase
from jaxinfer.text.chat import find_template
from jaxinfer.text.errors import ChatTemplateError, TokenizerError
from jaxinfer.text.export import hugging_face_files
from jaxinfer.text.tokenizer import load_tokenizer

Format = Literal["orbax", "safetensors"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json",
    "special_tokens_map.json", "added_tokens.json", "tokenizer.model", "vocab.json", "merges.txt",
)  # fmt: skip
_SPARE_BYTES = 32_000_000
"""Room for the small files: the largest tokenizers have some 20 MB."""


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    to: Format = "orbax",
    dtype: Dtype = "auto",
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    heads: HeadPlan | None = None,
    on_heads: Callable[[HeadChange], None] | None = None,
    linear_layers: Sequence[int] | Literal["all"] | None = None,
    favor: Favor | None = None,
    sharing: SharePlan | None = None,
    on_sharing: Callable[[Shared], None] | None = None,
    progress: bool | None = None,
) -> Path:
    """Write the model `source` (a path, or a name that was pulled) to the new folder `destination`.

    `dtype` "auto" keeps the type of every tensor; block-quantised weights come as float32, plain FP8 ones as
    bfloat16, which holds each of their values. Tensors that the
    model derives (a tied head, rotary tables) are left out. `max_shard_bytes` bounds a file of safetensors.
    `heads` asks for other KV heads (None: those of the source); `on_heads` is given what it came to, before
    anything is written. `linear_layers` get linear attention (of the source's that have it, only those stay
    that are named), by the features of `favor`, None: `Favor()`. Their weights stay as they are.
    `sharing` lets layers share K/V, after other heads were made; `on_sharing` is given the model that will be
    written, before it is. `progress` False keeps the bar off stderr. Returns `destination`, which is complete
    or not there.

    Raises CheckpointError or ConfigError, in one line, when the source is unknown or damaged, its tensors
    are not those of its config, its heads cannot become those of `heads`, its layers linear ones or share as
    `sharing` says, its tokenizer is damaged, a value does not fit `dtype`, or the destination exists, lies in
    the source, or cannot be written (a full disk included).
    """
    _check_choice("to", to, get_args(Format))
    _check_choice("dtype", dtype, get_args(Dtype))
    if not isinstance(max_shard_bytes, int) or max_shard_bytes < 1:
        raise ConfigError(f"max_shard_bytes must be 1 or more, got {max_shard_bytes!r}")
    if not str(destination):
        raise ConfigError("the destination must be a folder's name, got ''")
    path, destination = checkpoints.resolve(source), Path(destination).expanduser()
    check_places(path, destination)
    writing.check_free(destination)

    checkpoint = checkpoints.open_checkpoint(path)
    config = ModelConfig.from_hf(checkpoint.config)
    weights.check_names(config, checkpoint)
    weights.warn_of_another_head(config, checkpoint)
    keys, favors = checkpoint.config, None
    if linear_layers is not None:
        layers = range(config.num_layers) if linear_layers == "all" else linear_layers
        keys = with_linear_attention(keys, layers, favor or Favor())
        config = ModelConfig.from_hf(keys)
        favors = [layer.favor for layer in config.layers]
    elif favor is not None:
        raise ConfigError(f"{favor} without linear_layers, which say where it is wanted")
    if sharing is not None:
        sharing.check(config, heads)
    if heads is not None:
        change = decide(checkpoint, heads, favors=favors, progress=progress is not False)
        if on_heads is not None:
            on_heads(change)
        checkpoint, config = Regrouped(checkpoint, change), change.after
        keys = checkpoint.config
    if sharing is not None:
        checkpoint = Shared(checkpoint, sharing, keys)
        if on_sharing is not None:
            on_sharing(checkpoint)
        keys, config = checkpoint.config, checkpoint.after
    tensors = _tensors(config, checkpoint, dtype)
    write_model(
        destination, checkpoint, tensors, to=to, config=keys, max_shard_bytes=max_shard_bytes,
        title=f"converting {path.name}", progress=progress,
    )  # fmt: skip
    return destination


def write_model(
    destination: Path,
    checkpoint: checkpoints.Checkpoint,
    tensors: list[PendingTensor],
    *,
    to: Format = "orbax",
    config: dict[str, Any] | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    title: str = "writing",
    progress: bool | None = None,
) -> None:
    """Write `tensors` with everything else that `checkpoint` has: generation_config.json, tokenizer, chat
    template, and config.json, which is `config` where the tensors are not those of its own.

    Raises CheckpointError when the destination is no free place or cannot be written, ConfigError when the
    tokenizer is damaged.
    """
    total = sum(tensor.nbytes for tensor in tensors)
    texts, copies = _tokenizer_files(checkpoint)
    writing.check_room(destination, total + _SPARE_BYTES)
    with (
        phase(title, total=total, unit="B", wanted=progress is not False) as advance,
        writing.new_folder(destination) as folder,
    ):
        if to == "orbax":
            writing.write_orbax(folder, tensors, advance)
        else:
            writing.write_safetensors(folder, tensors, max_shard_bytes, advance)
        keys = checkpoint.config if config is None else config
        writing.write_json(folder / "config.json", _config(keys, tensors))
        generation = {key: value for key, value in checkpoint.generation_config.items() if value is not None}
        if generation:
            writing.write_json(folder / "generation_config.json", generation)
        for name, text in texts.items():
            writing.write_text(folder / name, text)
        for file in copies:
            writing.copy_file(file, folder / file.name)


def _check_choice(name: str, got: Any, allowed: tuple[str, ...]) -> None:
    if got not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {got!r}")


def check_places(source: Path, destination: Path) -> None:
    """A destination within the source would change what is being read; around it, replace it: ConfigError."""
    old, new = source.resolve(), destination.resolve()
    if old == new:
        raise ConfigError(f"{destination}: destination and source are the same; name a new folder")
    if old in new.parents:
        raise ConfigError(f"{destination}: the destination lies inside the source {source}")


def _tensors(config: ModelConfig, checkpoint: checkpoints.Checkpoint, dtype: str) -> list[PendingTensor]:
    """What the model needs, in the order of a forward pass."""
    return [
        _pending(checkpoint, name, dtype)
        for parameter in weights.parameters(config)
        for name in parameter.tensors
    ]


def _pending(checkpoint: checkpoints.Checkpoint, name: str, dtype: str) -> PendingTensor:
    held = checkpoint.dtype(name)
    eight = held.name.startswith("float8")
    target = np.dtype("bfloat16" if eight else held) if dtype == "auto" else np.dtype(dtype)
    if (not eight and held.name not in (*writing.DTYPES, "float64")) or target.name not in writing.DTYPES:
        raise ConfigError(
            f"{checkpoint.path}: tensor {name} has type {held}, which cannot be written as {target}; "
            f"allowed: {', '.join(writing.DTYPES)}"
        )

    def read() -> np.ndarray:
        values = checkpoint.read(name)
        if values.dtype == target:
            return values
        with np.errstate(over="ignore", invalid="ignore"):
            cast = values.astype(target)
        if np.isinf(cast).any() and not np.array_equal(np.isinf(cast), np.isinf(values)):
            largest = np.abs(values[np.isfinite(values)]).max()
            raise ConfigError(f"tensor {name}: {largest:g} does not fit {target}; choose a wider dtype")
        return cast

    return PendingTensor(name, tuple(checkpoint.shape(name)), target, read)


def _config(config: dict[str, Any], tensors: list[PendingTensor]) -> dict[str, Any]:
    """config.json with the type that most of the weights have now, under the key that was there."""
    held: Counter[str] = Counter()
    for tensor in tensors:
        held[tensor.dtype.name] += tensor.nbytes
    result = dict(config)
    # Every version of transformers reads torch_dtype; new ones call it dtype.
    for key in [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]:
        result[key] = held.most_common(1)[0][0]
    return result


def _tokenizer_files(checkpoint: checkpoints.Checkpoint) -> tuple[dict[str, str], list[Path]]:
    """Texts to write by file name, and files to copy; one of the two is empty."""
    source = checkpoint.tokenizer_source()
    try:
        if isinstance(source, checkpoints.GGUFTokenizerSource):
            return hugging_face_files(source, max_length=checkpoint.config.get("max_position_embeddings")), []
        load_tokenizer(source)  # None, without one: such a model is served token ids
        find_template(source)
    except (TokenizerError, ChatTemplateError) as error:
        raise ConfigError(f"{checkpoint.path}: the tokenizer cannot be converted: {error}") from error
    files = [checkpoint.path / name for name in TOKENIZER_FILES]
    return {}, [file for file in files if is_present(file)]
