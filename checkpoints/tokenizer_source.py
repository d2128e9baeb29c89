"""What a checkpoint knows about its tokenizer: plain data from which `jaxinfer.text` builds one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class FolderTokenizerSource:
    """The tokenizer files of a Hugging Face folder; a path is None when that file is absent.

    `bos_token_id` and `eos_token_ids` come from generation_config.json, else from config.json.
    """

    tokenizer_json: Path | None
    tokenizer_config: Path | None
    chat_template: Path | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class GGUFTokenizerSource:
    """The `tokenizer.*` keys of a GGUF file (names as in the GGUF specification).

    `model` is the kind ("gpt2" byte-level BPE, "llama" SentencePiece), `pre` the pre-tokenizer kind.
    `token_types` uses the llama.cpp numbers: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused,
    6 byte. A bool is None when the file does not say.
    """

    path: Path
    model: str
    pre: str | None
    tokens: tuple[str, ...]
    merges: tuple[str, ...]
    scores: np.ndarray | None
    token_types: np.ndarray | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    unknown_token_id: int | None
    padding_token_id: int | None
    add_bos: bool | None
    add_eos: bool | None
    add_space_prefix: bool | None
    chat_template: str | None


TokenizerSource = FolderTokenizerSource | GGUFTokenizerSource


def token_id_tuple(value: Any) -> tuple[int, ...]:
    """Token ids from a configuration value: None, one id, or a list of ids."""
    if value is None:
        return ()
    values = value if isinstance(value, list | tuple) else [value]
    return tuple(int(item) for item in values if isinstance(item, int) and not isinstance(item, bool))
