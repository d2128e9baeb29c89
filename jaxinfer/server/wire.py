"""JSON, server-sent events and errors as clients see them. Nothing here knows of sockets or threads."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jaxinfer.core import EngineDeadError, JaxInferError, RequestError
from jaxinfer.server.worker import OverloadedError


def encode(value: Any) -> bytes:
    """Strict JSON. Escaped to ASCII: clients that split a stream into lines take U+2028 for a line end."""
    return _ENCODER.encode(value).encode("ascii")


def frame(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(value) + b"\n\n"


# ------------------------------------------------------------------------------------- large values

AT_ONCE = 2048
"""About how many values are encoded in one go: a few milliseconds, for which the encoder keeps the GIL."""


class Parts:
    """A long list that is made while it is written, `make(start, end)` after `make`: it never lies about as a
    whole, at half a kilobyte for each log-probability."""

    def __init__(self, length: int, make: Callable[[int, int], list[Any]]):
        self._length, self._make = length, make

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, places: slice) -> list[Any]:
        start, end, _ = places.indices(self._length)
        return self._make(start, end)


def joined(first: list[Any] | Parts, then: list[Any] | Parts) -> list[Any] | Parts:
    """One list after the other."""
    if isinstance(first, list) and isinstance(then, list):
        return first + then
    size = len(first)
    return Parts(size + len(then), lambda i, j: first[i:j] + then[max(0, i - size) : max(0, j - size)])


class _Encoder(json.JSONEncoder):
    def default(self, o: Any) -> Any:
        return o[:] if isinstance(o, Parts) else super().default(o)


_ENCODER = _Encoder(allow_nan=False, separators=(",", ":"))


def encoded_parts(value: Any) -> Iterator[bytes]:
    """`encode(value)` piece by piece, for values too large to be encoded in one go; it knows `Parts`."""
    if isinstance(value, (list, Parts)) and _weight(value) > AT_ONCE:
        each = max(1, AT_ONCE * len(value) // _weight(value))
        opening = b"["
        for start in range(0, len(value), each):
            yield opening
            some = value[start : start + each]
            if len(some) == 1:
                yield from encoded_parts(some[0])
            else:
                yield encode(some)[1:-1]
            opening = b","
        yield b"]"
    elif isinstance(value, dict) and _weight(value) > AT_ONCE:
        opening = b"{"
        for name, item in value.items():
            yield opening + encode(name) + b":"
            yield from encoded_parts(item)
            opening = b","
        yield b"}"
    else:
        yield encode(value)


def _weight(value: Any) -> int:
    """About how many values a value holds: a list is as many of its heavier end."""
    if isinstance(value, dict):
        return 1 + sum(map(_weight, value.values()))
    if isinstance(value, (list, Parts)):
        size = len(value)
        return 1 + size * max(_weight(value[:1][0]), _weight(value[-1:][0])) if size else 1
    return 1


def frame_parts(value: Any) -> Iterator[bytes]:
    """`frame(value)` piece by piece."""
    return itertools.chain([b"data: "], encoded_parts(value), [b"\n\n"])


def grouped(pieces: Iterable[bytes], size: int = 1 << 16) -> list[bytes]:
    """The same bytes in pieces of at least `size`, but for the last."""
    groups, held = [], bytearray()
    for piece in pieces:
        held += piece
        if len(held) >= size:
            groups.append(bytes(held))
            held.clear()
    return [*groups, bytes(held)] if held else groups


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
        return ApiError(400, str(error), param=error.param, code=error.code)
    if isinstance(error, JaxInferError):
        return ApiError(400, str(error))
    return ApiError(500, "internal error; the server's log says more", code="internal_error")
