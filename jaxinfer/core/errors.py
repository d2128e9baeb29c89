"""The errors that callers are meant to see."""

from __future__ import annotations


class JaxInferError(Exception):
    """The caller, or what the caller handed us, is wrong. The message says got / allowed / what to do."""


class ConfigError(JaxInferError, ValueError):
    """A configuration that cannot run: of the engine, or of the model."""


class RequestError(JaxInferError, ValueError):
    """One request cannot be served. `param` names the field at fault, as OpenAI's error object does."""

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


class EngineDeadError(JaxInferError, RuntimeError):
    """The engine thread has ended; nothing submitted to it will be answered."""
