"""Files of examples: JSON objects, one a line, checked; what is wrong is told with file and line."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxinfer.core import RequestError


def lines_of(file: str) -> Iterator[tuple[str, str]]:
    """(FILE:LINE, text) of every line that is not blank. Raises OSError, or RequestError for a file that is
    no UTF-8 or has no such line."""
    content = Path(file).read_bytes()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise RequestError(f"{file}:{line}: byte {error.start} is not valid UTF-8", "file") from None
    found = False
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        if line.strip():
            found = True
            yield f"{file}:{number}", line
    if not found:
        raise RequestError(f"{file}: no example in it", "file")


def objects_of(file: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(FILE:LINE, object) of every line. Raises as `lines_of` does, and for a line that is no JSON object."""
    for where, line in lines_of(file):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{where}: not JSON ({error})", "file") from None
        if not isinstance(value, dict):
            raise RequestError(f"{where}: a JSON object was expected, got {_shown(value)}", "file")
        yield where, value


def text_at(value: dict[str, Any], key: str, where: str, *, empty: bool = False) -> str:
    """The text of a key. Raises RequestError where it is no text, or (unless `empty`) white space alone."""
    text = value.get(key)
    if not isinstance(text, str) or not (empty or text.strip()):
        raise RequestError(f"{where}: {key!r} must be a text, got {_shown(text)}", "file")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError(f"{where}: {key!r} has half of a surrogate pair in it", "file") from None
    return text


def texts_at(value: dict[str, Any], key: str, where: str) -> tuple[str, ...]:
    """The texts of a key, two or more. Raises RequestError for anything else."""
    texts = value.get(key)
    if not isinstance(texts, list) or len(texts) < 2:
        raise RequestError(
            f"{where}: {key!r} must be a list of two texts or more, got {_shown(texts)}", "file"
        )
    return tuple(text_at({f"{key}[{i}]": text}, f"{key}[{i}]", where) for i, text in enumerate(texts))


def index_of(value: Any, count: int, where: str, named: str) -> int:
    """Which of `count` choices a value (an integer, or its digits as text) names, from 0 on. Raises
    RequestError."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = int(value.strip())
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < count:
        raise RequestError(f"{where}: {named} must be 0 to {count - 1}, got {_shown(value)}", "file")
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
