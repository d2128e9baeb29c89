"""Strict reading of the small JSON files that lie beside weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from checkpoints.errors import CheckpointError

# The index of a 1000-shard model is about 10 MB; anything much larger is not a header file.
MAX_JSON_BYTES = 256 * 1024 * 1024


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises CheckpointError when the file is absent, too large, not UTF-8, not JSON, nested so deeply that
    the parser gives up, or holds something other than an object.
    """
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: {size} bytes of JSON; expected at most {MAX_JSON_BYTES}")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 text (byte {error.start})") from error
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise CheckpointError(f"{path}: JSON is nested too deeply") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: got a JSON {type(value).__name__}, expected an object")
    return value


def read_optional_json_object(path: Path) -> dict[str, Any]:
    """`read_json_object`, or an empty dict when the file does not exist."""
    return read_json_object(path) if path.is_file() else {}
