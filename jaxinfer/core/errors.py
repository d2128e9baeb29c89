"""The errors that callers are meant to see."""

from __future__ import annotations

from typing import Any


class JaxInferError(Exception):
    """The caller, or what the caller handed us, is wrong. The message says got / allowed / what to do."""


class ConfigError(JaxInferError, ValueError):
    """A configuration that cannot run: of the engine, or of the model."""


class RequestError(JaxInferError, ValueError):
    """One request cannot be served. `param` names the field at fault, as OpenAI's error object does, and
    `code` the kind of fault."""

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value"):
        super().__init__(message)
        self.param, self.code = param, code


class EngineDeadError(JaxInferError, RuntimeError):
    """The engine thread has ended; nothing submitted to it will be answered."""


def shown(value: Any) -> str:
    """A value as an error message repeats it, cut: a client may send megabytes."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits has no repr
        return "an integer of thousands of digits"
    return text if len(text) <= 80 else text[:77] + "..."
