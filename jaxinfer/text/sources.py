"""What the tokenizer and the chat template are built from, as shapes of data.

`checkpoints.FolderTokenizerSource` and `checkpoints.GGUFTokenizerSource` have these attributes; this room
does not import them, so that text can be tested, and used, without any checkpoint.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxinfer.text.errors import TokenizerError


class FolderSource(Protocol):
    """Paths of the tokenizer files of a Hugging Face folder (None when absent) and its end ids."""

    @property
    def tokenizer_json(self) -> Path | None: ...
    @property
    def sentencepiece_model(self) -> Path | None: ...
    @property
    def tokenizer_config(self) -> Path | None: ...
    @property
    def chat_template(self) -> Path | None: ...
    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...


class GGUFSource(Protocol):
    """The `tokenizer.*` keys of a GGUF file."""

    @property
    def model(self) -> str: ...
    @property
    def pre(self) -> str | None: ...
    @property
    def tokens(self) -> tuple[str, ...]: ...
    @property
    def merges(self) -> tuple[str, ...]: ...
    @property
    def scores(self) -> np.ndarray | None: ...
    @property
    def token_types(self) -> np.ndarray | None: ...
    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def unknown_token_id(self) -> int | None: ...
    @property
    def add_bos(self) -> bool | None: ...
    @property
    def add_eos(self) -> bool | None: ...
    @property
    def add_space_prefix(self) -> bool | None: ...
    @property
    def chat_template(self) -> str | None: ...


@dataclass(frozen=True)
class FolderFiles:
    """A `FolderSource` made by looking into a folder."""

    tokenizer_json: Path | None
    sentencepiece_model: Path | None
    tokenizer_config: Path | None
    chat_template: Path | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @classmethod
    def of(cls, folder: str | Path) -> FolderFiles:
        """The tokenizer files in `folder`; begin and end ids of generation_config.json, else config.json."""
        folder, ids = Path(folder), dict[str, Any]()
        for name in ("config.json", "generation_config.json"):
            for key in ("bos_token_id", "eos_token_id"):
                value = read_json(present(folder / name)).get(key)
                if value is not None:
                    ids[key] = value
        bos, eos = ids.get("bos_token_id"), ids.get("eos_token_id", ())
        return cls(
            tokenizer_json=present(folder / "tokenizer.json"),
            sentencepiece_model=present(folder / "tokenizer.model"),
            tokenizer_config=present(folder / "tokenizer_config.json"),
            chat_template=present(folder / "chat_template.jinja") or present(folder / "chat_template.json"),
            bos_token_id=bos if isinstance(bos, int) else None,
            eos_token_ids=(eos,) if isinstance(eos, int) else tuple(eos),
        )


def present(path: Path) -> Path | None:
    """`path` where there is a file; None where nothing is. Raises TokenizerError for anything else: a link
    to nowhere is a file that was lost, not one that was never there."""
    if not os.path.lexists(path):
        return None
    if not path.is_file():
        raise TokenizerError(f"{path}: cannot be read (a broken link, folder or pipe; expected a file)")
    return path


def flag(config: dict[str, Any], key: str, path: Path | None) -> bool | None:
    """A switch of tokenizer_config.json, whose path is `path`; None when it is absent or null.

    Raises TokenizerError for any other value: "false" would be taken for true.
    """
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise TokenizerError(f"{path}: {key} must be true or false, got {value!r:.80}")
    return value


def read_json(path: Path | None) -> dict[str, Any]:
    """The JSON object in a file; empty without a file. Raises TokenizerError naming the file."""
    if path is None:
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: got a JSON {type(value).__name__}, expected an object")
    return value
