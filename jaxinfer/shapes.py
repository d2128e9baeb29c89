"""The numbers of a MODEL without its weights: a built-in shape, a config.json, or those of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxinfer.config import ModelConfig
from jaxinfer.core import ConfigError
from jaxinfer.presets import PRESETS

RANDOM = "random:"


def config_keys(which: str) -> dict[str, Any]:
    """The keys of config.json of a built-in shape, or in the file or folder of that path.

    Raises ConfigError when it is neither.
    """
    if which in PRESETS:
        return PRESETS[which]
    path = Path(which)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as reason:
        known = ", ".join(PRESETS)
        raise ConfigError(
            f"{which}: neither a built-in shape ({known}) nor a readable config.json: {reason}"
        ) from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: a config.json must hold an object, got {type(config).__name__}")
    return config


def model_shape(model: str) -> ModelConfig:
    """The config of any MODEL of the command line, of a built-in shape, or of a bare config.json.

    Of a checkpoint the header alone is read. Raises ConfigError, or CheckpointError, naming what is wrong.
    """
    which = model.removeprefix(RANDOM)
    if which in PRESETS or which.endswith(".json") or model.startswith(RANDOM):
        return ModelConfig.from_hf(config_keys(which))
    path = Path(which).expanduser()
    if path.is_dir() and (path / "config.json").is_file():  # with weights or without
        return ModelConfig.from_hf(config_keys(str(path)))
    import checkpoints

    return ModelConfig.from_hf(checkpoints.open_checkpoint(checkpoints.resolve(model)).config)
