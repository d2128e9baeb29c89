"""JSON, server-sent events and errors as clients see them. Nothing here knows of sockets or threads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jaxinfer.core import EngineDeadError, JaxInferError, RequestError
from jaxinfer.server.worker import OverloadedError


def encode(value: Any) -> bytes:
    """Strict JSON. Escaped to ASCII: clients that split a stream into lines take U+2028 for a line end."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")


def frame(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"


# -------------------------------------------------------------------------------------------- errors


class ApiError(Exception):
    """An error as the client sees it: a status and OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """`{"error": {...}}`."""
        kind = _ERROR_TYPES.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


_ERROR_TYPES = {
    401: "authentication_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


def api_error(error: Exception) -> ApiError:
    """The one mapping from our errors to the wire; what is not ours says nothing of its inside."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, OverloadedError):
        retry = {"Retry-After": str(error.retry_after_s)}
        return ApiError(429, str(error), code="overloaded", headers=retry)
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error), code="engine_stopped", headers={"Retry-After": "10"})
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.param, code="invalid_value")
    if isinstance(error, JaxInferError):
        return ApiError(400, str(error))
    return ApiError(500, "internal error; the server's log says more", code="internal_error")
