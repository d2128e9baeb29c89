"""Checkpoints on disk: open Hugging Face and Orbax folders and GGUF files, write folders, download models.

    checkpoint = open_checkpoint(resolve("smollm2-135m"))
    checkpoint.config["hidden_size"], checkpoint.read("model.norm.weight")

A leaf package: it knows numpy arrays and files, neither jax nor jaxinfer.
"""

from checkpoints.checkpoint import Checkpoint, open_checkpoint
from checkpoints.download import cache_folder, pull, resolve
from checkpoints.errors import CheckpointError, PullError
from checkpoints.tokenizer_source import FolderTokenizerSource, GGUFTokenizerSource, TokenizerSource

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "FolderTokenizerSource",
    "GGUFTokenizerSource",
    "PullError",
    "TokenizerSource",
    "cache_folder",
    "open_checkpoint",
    "pull",
    "resolve",
]
