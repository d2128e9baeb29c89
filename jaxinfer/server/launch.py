"""From flags to a running server: bind, load, serve until a signal, drain."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxinfer.core import ConfigError

if TYPE_CHECKING:
    from jaxinfer.llm import LLM


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How the endpoint is offered. Field names are the command-line flags of `jaxinfer serve`."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 or :: is every interface of this machine."""
    port: int = 8000
    """Port to listen on; 0 takes a free one and prints it."""
    api_key: str | None = None
    """Key that clients must send as `Authorization: Bearer KEY`; None takes $JAXINFER_API_KEY, if set."""
    served_model_name: str | None = None
    """Name of the model in the API; None is the name it was loaded by."""
    max_queue: int = 256
    """Sequences that may wait besides those that run; more are refused with 429."""
    max_body_bytes: int = 8 << 20
    """Longest request body."""
    drain_seconds: int = 30
    """After SIGTERM, how long answers in progress may take to finish."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("port", 0, 65535),
            ("max_queue", 0, None),
            ("max_body_bytes", 1, None),
            ("drain_seconds", 0, None),
        ):
            value = getattr(self, name)
            if value < low or (high is not None and value > high):
                allowed = f"at least {low}" if high is None else f"from {low} to {high}"
                raise ConfigError(f"{name} must be {allowed}, got {value}")
        if self.api_key == "":
            raise ConfigError("api_key is empty; leave it out to serve without a key")


def serve(load: Callable[[], LLM], config: ServerConfig) -> None:
    """Serve until SIGTERM or SIGINT, then let answers in progress finish. Returns when all is closed.

    The address is taken before `load` runs, so that a port in use shows before minutes of loading. Raises
    ConfigError when it cannot be taken, and SystemExit(0) for SIGTERM before the server runs.
    """
    listener = _bind(config.host, config.port)
    with listener, _exit_on_sigterm(), load() as llm:
        _run(llm, config, listener)


def _run(llm: LLM, config: ServerConfig, listener: socket.socket) -> None:
    import uvicorn

    from jaxinfer.server.app import create_app

    name = config.served_model_name or llm.model_name
    ready = f"jaxinfer: serving {name} at {_address(listener)}/v1"

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            """Says so when clients are heard."""
            await super().startup(sockets)
            if self.started:
                print(ready, file=sys.stderr, flush=True)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            """Answers that are not finished in time end with an error that says why, not with a cut."""
            end = asyncio.get_running_loop().call_later(config.drain_seconds, app.state.worker.end)
            await super().shutdown(sockets)
            end.cancel()

    app = create_app(
        llm,
        api_key=config.api_key or os.environ.get("JAXINFER_API_KEY") or None,
        served_model_name=config.served_model_name,
        max_queue=config.max_queue,
        max_body_bytes=config.max_body_bytes,
    )
    settings = uvicorn.Config(
        app, log_config=_logging(), timeout_graceful_shutdown=config.drain_seconds + 10, server_header=False
    )
    Server(settings).run(sockets=[listener])


def _bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: clients are refused, not left waiting, while a model loads."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return listener


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextmanager
def _exit_on_sigterm() -> Generator[None]:
    """SIGTERM is a way to end with status 0, before the server runs and after it has drained.

    uvicorn drains on SIGTERM and then raises the signal again for the handler that was there before: this.
    """

    def leave(*_: Any) -> None:
        raise SystemExit(0)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _logging() -> dict[str, Any]:
    """What uvicorn sets up, with as much of ours as was wanted before (JAXINFER_DEBUG)."""
    level = min(logging.INFO, logging.getLogger("jaxinfer").level or logging.INFO)
    return {**_LOGGING, "loggers": {**_LOGGING["loggers"], "jaxinfer": {**_OURS, "level": level}}}


# uvicorn's own configuration writes access lines to stdout, which belongs to results.
_LOGGING: dict[str, Any] = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"plain": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}},
    "handlers": {
        "stderr": {"class": "logging.StreamHandler", "stream": "ext://sys.stderr", "formatter": "plain"}
    },
    "loggers": {
        "uvicorn": {"handlers": ["stderr"], "level": "WARNING", "propagate": False},
        "uvicorn.access": {"handlers": ["stderr"], "level": "INFO", "propagate": False},
    },
}
_OURS = {"handlers": ["stderr"], "propagate": False}
