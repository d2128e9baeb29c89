"""Strict reading of the JSON in and beside weights.

Python's parser takes more than JSON allows and forgives what is ambiguous: the last of two equal keys, NaN,
numbers of any size. Here each of these is an error, because a checkpoint that another program reads
differently is worse than one that is refused.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from checkpoints.errors import CheckpointError, shown
from checkpoints.regular_file import read_whole

# Real ones have some kilobytes; parsed, a hostile one of this size takes less than 100 MB.
MAX_CONFIG_BYTES = 4 * 1024 * 1024
# The index of the largest published models (140 000 tensors) has 14 MB.
MAX_INDEX_BYTES = 64 * 1024 * 1024
MAX_DEPTH = 32
# Beyond this a whole number is no size, and cannot become a float.
MAX_INTEGER = 2**128


def read_json_object(path: Path, most_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The JSON object in the file `path`.

    Raises CheckpointError when the file is absent, no regular file or too large, and as
    `parse_json_object` does.
    """
    return parse_json_object(read_whole(path, most_bytes), str(path))


def read_optional_json_object(path: Path) -> dict[str, Any]:
    """`read_json_object`, or an empty dict when there is nothing of that name."""
    return read_json_object(path) if path.exists() or path.is_symlink() else {}


def parse_json_object(raw: bytes, where: str) -> dict[str, Any]:
    """The JSON object in `raw`; `where` begins every message.

    Raises CheckpointError for what is not UTF-8, not JSON, not an object, or nested deeper than MAX_DEPTH,
    for a key that appears twice in one object, and for numbers that are not finite or absurdly large.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise CheckpointError(f"{where}: key {shown(twice)} appears twice")
        return result

    def whole(digits: str) -> int:
        value = int(digits) if len(digits) < 64 else MAX_INTEGER
        if abs(value) >= MAX_INTEGER:
            raise CheckpointError(f"{where}: the number {shown(digits)} is too large")
        return value

    def real(digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value):
            raise CheckpointError(f"{where}: the number {shown(digits)} is too large")
        return value

    def constant(word: str) -> float:
        raise CheckpointError(f"{where}: not valid JSON ({word} is no number)")

    try:
        value = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=unique,
            parse_int=whole,
            parse_float=real,
            parse_constant=constant,
        )
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}: not UTF-8 text (byte {error.start})") from error
    except RecursionError as error:
        raise CheckpointError(f"{where}: JSON is nested too deeply") from error
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{where}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: got a JSON {type(value).__name__}, expected an object")
    # What the parser survives can still be too deep for whoever prints or compares it.
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [child for item in level for child in _children(item)]
        if not level:
            return value
    raise CheckpointError(f"{where}: JSON is nested too deeply (more than {MAX_DEPTH} levels)")


def _children(item: dict[str, Any] | list[Any]) -> list[Any]:
    values = item.values() if isinstance(item, dict) else item
    return [value for value in values if isinstance(value, dict | list)]
