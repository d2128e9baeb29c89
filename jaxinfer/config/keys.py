"""Typed reading of a JSON object's keys; every complaint is a ConfigError that names the key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxinfer.core import ConfigError


class Keys:
    """`config` is the object, `where` what messages call it. null is absent unless a method differs."""

    def __init__(self, config: Mapping[str, Any], where: str):
        self.config, self.where = config, where

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        return self._checked(key, self._value(key, default), 1, "a positive integer")

    def whole(self, key: str, default: int | None = None) -> int:
        """An integer of 0 or more."""
        return self._checked(key, self._value(key, default), 0, "an integer of at least 0")

    def optional_integer(self, key: str, absent: int | None = None) -> int | None:
        """A positive integer; null is None, and a key that is not there is `absent`."""
        value = self.config.get(key, absent)
        return None if value is None else self._checked(key, value, 1, "a positive integer or null")

    def optional_whole(self, key: str) -> int | None:
        value = self.config.get(key)
        return None if value is None else self._checked(key, value, 0, "an integer of at least 0, or null")

    def number(self, key: str, default: float | None = None) -> float:
        """A positive, finite number."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e308:
            raise ConfigError(f"{self.where}: {key} must be a positive number, got {value!r}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.config.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.where}: {key} must be true or false, got {value!r}")
        return value

    def _value(self, key: str, default: Any) -> Any:
        value = self.config.get(key)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"{self.where} has no {key!r}, which is needed")
        return value

    def _checked(self, key: str, value: Any, low: int, what: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value < math.inf:
            raise ConfigError(f"{self.where}: {key} must be {what}, got {value!r}")
        return value
