"""Files of texts: JSONL with a text a line, or one text as a whole."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from jaxinfer.core import RequestError


def read_texts(files: Sequence[str | Path]) -> list[str]:
    """The texts of files, as `texts_in` has them.

    Raises OSError for a file that cannot be read, RequestError naming file and line for one that is not what
    it should be, and for files without any text.
    """
    paths = [Path(name).expanduser() for name in files]
    texts = [text for path in paths for text in texts_in(read_content(path), path)]
    if not any(texts):
        raise RequestError(f"no text in {', '.join(map(str, files)) or 'no file'}", "data")
    return [text for text in texts if text]


def read_content(path: Path) -> str:
    """All characters of a file in UTF-8, line ends as they are, without a byte order mark. Raises OSError,
    and RequestError for other bytes."""
    content = path.read_bytes()
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise RequestError(f"{path}: byte {error.start} is not valid UTF-8", "data") from None


def has_lines(path: Path) -> bool:
    """Whether each line of a file has a text of its own."""
    return path.suffix == ".jsonl"


def lines_in(content: str) -> list[str]:
    """The lines that are not blank, with their ends."""
    return [line for line in io.StringIO(content, newline="") if line.strip()]


def texts_in(content: str, path: Path) -> list[str]:
    """The texts in the content of a file: every line {"text": ...} of a .jsonl file, any other as a whole.
    Raises RequestError naming the line."""
    if not has_lines(path):
        return [content]
    lines = enumerate(io.StringIO(content, newline=""), 1)
    return [_line(path, number, line) for number, line in lines if line.strip()]


def one_text(texts: Iterable[str]) -> str:
    """Texts as one, to be measured in windows: a blank line between them."""
    return "\n\n".join(text for text in texts if text)


def _line(path: Path, number: int, line: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    text = value.get("text") if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise RequestError(f'{path}:{number}: expected an object with a string, {{"text": ...}}', "data")
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise RequestError(f"{path}:{number}: 'text' has half of a surrogate pair in it", "data")
    return text
