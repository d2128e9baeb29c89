"""What a checkpoint knows about its tokenizer: plain data from which `jaxinfer.text` builds one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.errors import CheckpointError, quoted


@dataclass(frozen=True)
class FolderTokenizerSource:
    """The tokenizer files of a Hugging Face folder; a path is None when that file is absent.

    `bos_token_id` and `eos_token_ids` come from generation_config.json, else from config.json.
    """

    tokenizer_json: Path | None
    sentencepiece_model: Path | None
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


def token_id_tuple(value: Any, where: str = "config.json") -> tuple[int, ...]:
    """Token ids from a configuration value: None, one id, or a list of ids.

    Raises CheckpointError, beginning with `where`, for anything else: an end token that is silently dropped
    is an answer that never ends.
    """
    if value is None:
        return ()
    values = value if isinstance(value, list | tuple) else [value]
    if any(type(item) is not int or item < 0 for item in values):
        raise CheckpointError(f"{where}: got {quoted(value)}, expected token ids")
    return tuple(values)


def folder_tokenizer_source(
    folder: Path, config: dict[str, Any], generation_config: dict[str, Any]
) -> FolderTokenizerSource:
    """The tokenizer files in a folder, and the special ids that its two configurations state.

    Raises CheckpointError when bos_token_id or eos_token_id are not token ids.
    """

    def present(file_name: str) -> Path | None:
        return folder / file_name if (folder / file_name).is_file() else None

    def configured(key: str) -> tuple[int, ...]:
        value, file = generation_config.get(key), "generation_config.json"
        if value is None:
            value, file = config.get(key), "config.json"
        return token_id_tuple(value, f"{folder / file}: key {key}")

    bos = configured("bos_token_id")
    return FolderTokenizerSource(
        tokenizer_json=present("tokenizer.json"),
        sentencepiece_model=present("tokenizer.model"),
        tokenizer_config=present("tokenizer_config.json"),
        chat_template=present("chat_template.jinja"),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=configured("eos_token_id"),
    )
