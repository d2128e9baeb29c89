"""Groups of KV heads as they are written at the command line, or in a file that it names.

0,1|2,3              two groups, in every layer
0-1|2-3;0-3;0|1-3    the first layer's, the second's, the third's
groups.json          [[0, 1], [2, 3]] for every layer, or a list of such lists, one for each
groups.toml          the same as the value of `groups`
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

from jaxinfer.cli.terminal import UsageError
from jaxinfer.core import ConfigError

Layers = tuple[tuple[tuple[int, ...], ...], ...]
FORMS = (
    "groups of heads such as 0,1|2-3 (with ; between layers), or a .json or .toml file of lists such as "
    "[[0, 1], [2, 3]]"
)


def read_groups(argument: str) -> Layers:
    """What `--groups` says: of each layer, or of one entry for all, the old heads of each new one.

    Raises UsageError for what is none of the forms above; which heads a model has is not known here.
    """
    if Path(argument).suffix in (".json", ".toml"):
        return _of_file(Path(argument))
    layers = tuple(
        tuple(tuple(_heads(argument, heads)) for heads in layer.split("|")) for layer in argument.split(";")
    )
    return layers


def _heads(argument: str, text: str) -> list[int]:
    heads: list[int] = []
    for part in text.split(","):
        found = numbers_of(part)
        if found is None:
            raise UsageError(f"--groups: {part.strip()!r} of {argument!r} names no heads; give {FORMS}")
        heads += found
    return heads


def numbers_of(text: str) -> list[int] | None:
    """Numbers and ranges with commas, such as 3,7,12-15; None for what is none."""
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,4})(?:-([0-9]{1,4}))?", part.strip())
        first, last = (0, -1) if match is None else (int(match[1]), int(match[2] or match[1]))
        if first > last:
            return None
        numbers += range(first, last + 1)
    return numbers


def _of_file(path: Path) -> Layers:
    try:
        text = path.expanduser().read_text(encoding="utf-8")
        value = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"--groups {path}: cannot be read ({error})") from None
    if isinstance(value, dict) and set(value) == {"groups"}:
        value = value["groups"]
    from jaxinfer.heads import stated_groups

    try:
        return stated_groups(value)
    except ConfigError as error:
        raise UsageError(f"--groups {path}: {error}") from None
