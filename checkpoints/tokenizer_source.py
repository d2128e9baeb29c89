"""What a checkpoint knows about its tokenizer: plain data from which `jaxinfer.text` builds one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.errors import CheckpointError, quoted
from checkpoints.regular_file import is_present

UNREAD_TOKENIZERS = (
    "vocab.json", "merges.txt", "vocab.txt", "tekken.json", "tiktoken.model", "tokenizer.tiktoken",
    "qwen.tiktoken", "spiece.model", "sentencepiece.bpe.model",
)  # fmt: skip
"""Tokenizers of other kinds: how they cut text is in the code of their classes, and not read here."""


@dataclass(frozen=True)
class FolderTokenizerSource:
    """The tokenizer files of a Hugging Face folder; a path is None when that file is absent.

    `chat_template` is chat_template.jinja or, where that is absent, chat_template.json.
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

    Raises CheckpointError when bos_token_id or eos_token_id are not token ids, when one of the files is there
    and cannot be read (a link to nowhere, a folder, a pipe), and for a tokenizer of another kind alone.
    """

    def present(file_name: str) -> Path | None:
        return folder / file_name if is_present(folder / file_name) else None

    def configured(key: str) -> tuple[int, ...]:
        value, file = generation_config.get(key), "generation_config.json"
        if value is None:
            value, file = config.get(key), "config.json"
        return token_id_tuple(value, f"{folder / file}: key {key}")

    bos = configured("bos_token_id")
    tokenizer_json, sentencepiece_model = present("tokenizer.json"), present("tokenizer.model")
    if tokenizer_json is None and sentencepiece_model is None:
        other = next((name for name in UNREAD_TOKENIZERS if present(name)), None)
        if other is not None:
            raise CheckpointError(
                f"{folder / other}: this kind of tokenizer is not read; write a tokenizer.json "
                "with transformers (AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)), or "
                "remove the file to serve token ids alone"
            )
    return FolderTokenizerSource(
        tokenizer_json=tokenizer_json,
        sentencepiece_model=sentencepiece_model,
        tokenizer_config=present("tokenizer_config.json"),
        chat_template=present("chat_template.jinja") or present("chat_template.json"),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=configured("eos_token_id"),
    )
