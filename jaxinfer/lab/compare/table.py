"""A table of a recipe, read strictly: every key is taken by its type, and what is left over is a fault."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, overload

from jaxinfer.core import ConfigError


@dataclass(frozen=True, slots=True)
class TextPart:
    """A file, and which part of its characters: shares from 0 to 1."""

    file: str
    start: float = 0.0
    end: float = 1.0


class Table:
    """A table of the recipe whose keys are taken one by one; what is left over at the end is a fault."""

    def __init__(self, value: dict[str, Any], name: str):
        self.value, self.name, self._taken = value, name, set[str]()

    def key(self, name: str) -> str:
        return f"{self.name}.{name}" if self.name else name

    def take(self, name: str, *default: Any) -> Any:
        self._taken.add(name)
        if name in self.value:
            return self.value[name]
        if not default:
            raise ConfigError(f"{self.key(name)} is missing")
        return default[0]

    @overload
    def text(self, name: str, default: None, /) -> str | None: ...
    @overload
    def text(self, name: str, *default: str) -> str: ...
    def text(self, name: str, *default: str | None) -> str | None:
        value = self.take(name, *default)
        if name not in self.value and value is None:
            return None
        if not _is_line(value):
            raise ConfigError(f"{self.key(name)} must be a text of one line, got {value!r}")
        return value

    def number(self, name: str, default: float | None) -> float | None:
        value = self.take(name, default)
        if name in self.value and (type(value) not in (int, float) or not math.isfinite(value)):
            raise ConfigError(f"{self.key(name)} must be a number, got {value!r}")
        return value

    @overload
    def integer(self, name: str, default: None, /, *, least: int) -> int | None: ...
    @overload
    def integer(self, name: str, *default: int, least: int) -> int: ...
    def integer(self, name: str, *default: int | None, least: int) -> int | None:
        value = self.take(name, *default)
        if name in self.value and (type(value) is not int or value < least):
            raise ConfigError(f"{self.key(name)} must be an integer of {least} or more, got {value!r}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.key(name)} must be true or false, got {value!r}")
        return value

    def items(self, name: str, *default: Any) -> list[Any]:
        value = self.take(name, *default)
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{self.key(name)} must be a list, got {value!r}")
        return list(value)

    def texts(self, name: str, *default: Any) -> list[str]:
        values = self.items(name, *default)
        for value in values:
            if not _is_line(value):
                raise ConfigError(f"{self.key(name)} must be texts of one line, got {value!r}")
        return values

    def ints(self, name: str, *, least: int, default: Any = None) -> tuple[int, ...]:
        values = self.take(name, *(() if default is None else (list(default),)))
        if not isinstance(values, list) or any(type(each) is not int or each < least for each in values):
            allowed = f"a list of integers of {least} or more"
            raise ConfigError(f"{self.key(name)} must be {allowed}, got {values!r}")
        return tuple(values)

    def parts(self, name: str, single: bool = False) -> tuple[TextPart, ...]:
        """Texts: file names, or tables {file, start, end} of a part of one."""
        value = self.take(name)
        found = []
        for place, each in enumerate([value] if single else value if isinstance(value, list) else [value]):
            if _is_line(each):
                found.append(TextPart(each))
                continue
            if not isinstance(each, dict):
                raise ConfigError(f"{self.key(name)}: a text is a file name or a table, got {each!r}")
            table = Table(each, f"{self.key(name)}[{place}]")
            ends = table.take("start", 0.0), table.take("end", 1.0)
            if not all(type(x) in (int, float) and math.isfinite(x) for x in ends) or not (
                0 <= ends[0] < ends[1] <= 1
            ):
                raise ConfigError(f"{table.name}: start and end go from 0 to 1, the first first; got {ends}")
            found.append(TextPart(table.text("file"), float(ends[0]), float(ends[1])))
            table.close()
        if not found:
            raise ConfigError(f"{self.key(name)} names no text")
        return tuple(found)

    def table(self, name: str, *, optional: bool = False) -> Table:
        value = self.take(name, *([{}] if optional else []))
        if not isinstance(value, dict):
            raise ConfigError(f"{self.key(name)} must be a table, got {value!r}")
        return Table(value, self.key(name))

    def tables(self, name: str) -> list[Table]:
        values = self.items(name)
        if wrong := [value for value in values if not isinstance(value, dict)]:
            raise ConfigError(f"{self.key(name)} must be tables, [[{name}]]; got {wrong[0]!r}")
        return [Table(value, f"{self.key(name)}[{place}]") for place, value in enumerate(values)]

    def rest(self) -> dict[str, Any]:
        """All keys that were not taken, which are then."""
        left = {key: value for key, value in self.value.items() if key not in self._taken}
        self._taken |= left.keys()
        return left

    def close(self) -> None:
        """Raises ConfigError for a key that nobody asked for."""
        for key in self.value:
            if key not in self._taken:
                raise ConfigError(f"{self.key(key)} is not known; there are {', '.join(sorted(self._taken))}")


def _is_line(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[^\x00-\x1f]+", value) is not None
