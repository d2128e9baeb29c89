"""Who may use the server: who calls it by a name of its own, from an origin that may, with the key."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable, Collection, Sequence

from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxinfer.server.transport import on_error
from jaxinfer.server.wire import ApiError


class HostCheck:
    """Refuses requests to a host that this server is not: its names are those of the loopback interface and
    `allowed` ("*": all).

    A page whose name its owner lets lead to 127.0.0.1 ("DNS rebinding") is of the same origin as a server
    that listens there, for a browser; but it calls the server by the page's name.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str]):
        self.app = app
        self.allowed = {_plain(name) for name in allowed}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host") if scope["type"] == "http" else None
        # Without one (HTTP/1.0) it is no browser's.
        if (
            host is None
            or "*" in self.allowed
            or (name := host_name(host)) in self.allowed
            or is_loopback(name)
        ):
            await self.app(scope, receive, send)
            return
        error = ApiError(
            403,
            f"this server is not {name[:200]!r}; it is called by a name of this machine's loopback interface "
            "or one that --allowed-host gives",
            code="host_not_allowed",
        )
        await (await on_error(HttpRequest(scope), error))(scope, receive, send)


def host_name(host: str) -> str:
    """The name in a Host header, in lower case: without its port, brackets or a dot at its end."""
    name = host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]
    return _plain(name)


def _plain(name: str) -> str:
    return name.strip().lower().removeprefix("[").removesuffix("]").removesuffix(".")


def is_loopback(name: str) -> bool:
    """Whether a host's name or address can only be this machine."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


def origin_check(allowed: Sequence[str]) -> Callable[[HttpRequest], Awaitable[None]]:
    """A dependency that refuses requests which a page of another site makes from somebody's browser: its
    Origin is neither in `allowed` ("*": all) nor this server's. A browser asks no leave for a body that it
    calls text/plain, and such a page would drive a server that listens on this machine alone."""

    async def check(http: HttpRequest) -> None:
        origin = http.headers.get("origin")
        if origin is None or "*" in allowed or origin in allowed:
            return
        if origin.partition("://")[2] != http.headers.get("host"):
            raise ApiError(
                403,
                f"pages of {origin!r} may not use this server; --cors-origin allows them",
                code="origin_not_allowed",
            )

    return check


def key_check(api_key: str) -> Callable[[HttpRequest], Awaitable[None]]:
    """A dependency that lets only `Authorization: Bearer <api_key>` pass, compared in constant time."""
    expected = api_key.encode("utf-8", "surrogateescape")

    async def check(http: HttpRequest) -> None:
        # The raw header: decoding it would guess an encoding, and the key may hold any bytes.
        raw = next((value for name, value in http.scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = raw.partition(b" ")
        if not (scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), expected)):
            raise ApiError(
                401,
                "no valid API key; send it as `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    return check
