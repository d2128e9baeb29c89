"""From flags to a running server: bind, load, serve until a signal, drain."""

from __future__ import annotations

import asyncio
import gc
import logging
import logging.config
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxinfer.core import ConfigError, EngineDeadError
from jaxinfer.server.logs import LogFormat, logging_config

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

    from jaxinfer.llm import LLM


logger = logging.getLogger(__name__)

DEAD_S = 2.0
"""How long a server whose engine has died goes on, to say so, before it ends."""

SEND_BUFFER = 128 << 10
"""Bytes that the system holds for a client that does not read: Linux doubles it, and takes megabytes else."""

OTHER_FILES = 128
"""Files that the process has open besides connections, at most."""

_ROOT_PATH = re.compile(r"(/[A-Za-z0-9_.~-]+)+")
_HOST = re.compile(r"\*|[^/\s?#@:]+|\[?[0-9a-fA-F:.]+\]?")
_ORIGIN = re.compile(r"\*|https?://[^/\s?#@]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How the endpoint is offered. Field names are the command-line flags of `jaxinfer serve`."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 or :: is every interface of this machine."""
    port: int = 8000
    """Port to listen on; 0 takes a free one and prints it."""
    api_key: str | None = None
    """Key that clients must send as `Authorization: Bearer KEY`; None takes $JAXINFER_API_KEY, if set."""
    served_model_name: tuple[str, ...] = ()
    """Names of the model in the API, after MODEL on the command line: any of them asks for it, and answers
    carry the first. Without one, the name it was loaded by."""
    max_queue: int = 256
    """Sequences that may wait besides those that run; more are refused with 429."""
    max_body_bytes: int = 8 << 20
    """Longest request body."""
    drain_seconds: int = 30
    """After SIGTERM, how long answers in progress may take to finish."""
    receive_seconds: int = 30
    """How long a client may take to send a request, its head and its body each."""
    stall_seconds: int = 30
    """How long a client may leave its answer unread, once the buffers of its connection are full."""
    keep_alive_seconds: int = 30
    """How long a connection stays open between two requests."""
    max_connections: int = 1024
    """Connections that are kept at a time; what comes over more is refused with 503, but for /health and
    /metrics. Fewer where the system allows fewer open files."""
    step_timeout: int = 600
    """Seconds of one step after which /health says 503 ("stuck") until it ends; 0 never does. A program that
    is compiled at its first use is part of its step (minutes, for some models on some GPUs), unless all are
    at start (--warmup full)."""
    cors_origin: tuple[str, ...] = ()
    """A web origin whose pages may use the API (* for all); may be given several times."""
    allowed_host: tuple[str, ...] = ()
    """A name by which clients may call the server, besides localhost and the host (* for all); may be given
    several times. On an address that other machines reach, any name will do until one is given."""
    root_path: str = ""
    """Path under which a proxy offers this server, such as /llm; requests may come with or without it."""
    return_tokens_as_token_ids: bool = False
    """Name the tokens of log-probabilities by their ids (token_id:7), where a request does not say."""
    enable_force_include_usage: bool = False
    """Tell the usage in every chunk of every stream, as if each request had asked for it."""
    measure_machine: bool = True
    """Measure memory bandwidth and matmul rate at the start (a second), for MBU and MFU in /metrics."""
    log_format: LogFormat = "plain"
    """Lines on stderr for people, or one JSON object a line."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("port", 0, 65535),
            ("max_queue", 0, None),
            ("max_body_bytes", 1, None),
            ("drain_seconds", 0, None),
            ("receive_seconds", 1, None),
            ("stall_seconds", 1, None),
            ("keep_alive_seconds", 1, None),
            ("max_connections", 1, None),
            ("step_timeout", 0, None),
        ):
            value = getattr(self, name)
            if value < low or (high is not None and value > high):
                allowed = f"at least {low}" if high is None else f"from {low} to {high}"
                raise ConfigError(f"{name} must be {allowed}, got {value}")
        names = self.served_model_name
        if "" in names or len(set(names)) < len(names):
            raise ConfigError(f"served_model_name must be different names, none of them empty; got {names!r}")
        if self.root_path and not _ROOT_PATH.fullmatch(self.root_path):
            raise ConfigError(f"root_path must be a path such as /llm, got {self.root_path!r}")
        if self.api_key == "":
            raise ConfigError("api_key is empty; leave it out to serve without a key")
        for origin in self.cors_origin:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(f"cors_origin {origin!r} is no origin such as https://example.org, or *")
        for name in self.allowed_host:
            if not _HOST.fullmatch(name):
                raise ConfigError(f"allowed_host {name!r} is no name such as example.org, without port, or *")


def serve(load: Callable[[], LLM], config: ServerConfig) -> None:
    """Serve until SIGTERM or SIGINT, then let answers in progress finish. Returns when all is closed.

    The address is taken before `load` runs, so that a port in use shows before minutes of loading. Raises
    ConfigError when it cannot be taken, SystemExit(0) for SIGTERM, and EngineDeadError when the engine's
    thread broke: then the server said 503 for DEAD_S and has ended, for a supervisor to start another.
    """
    if (
        config.log_format == "json"
    ):  # from the first line on; plain lines are as they were until uvicorn starts
        logging.config.dictConfig(_logging(config.log_format))
    listener = _bind(config.host, config.port)
    with listener, _exit_on_sigterm(), load() as llm:
        _run(llm, config, listener)


def _run(llm: LLM, config: ServerConfig, listener: socket.socket) -> None:
    import uvicorn

    from jaxinfer.server.app import create_app
    from jaxinfer.server.connection import Connection

    name = ", ".join(config.served_model_name) or llm.model_name
    ready = f"jaxinfer: serving {name} at {_address(listener)}/v1"

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            """Says so when clients are heard."""
            await super().startup(sockets)
            if self.started and config.log_format == "json":
                logger.info(ready)
            elif self.started:
                print(ready, file=sys.stderr, flush=True)

        async def on_tick(self, counter: int) -> bool:
            """Ends DEAD_S after the engine: until then /health and new requests get their 503."""
            nonlocal dead_since
            if dead_since is None and worker.death is not None:
                dead_since = time.monotonic()
            if dead_since is not None and time.monotonic() - dead_since > DEAD_S:
                self.should_exit = True
            return await super().on_tick(counter)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            """Answers that are not finished in time end with an error that says why, not with a cut."""
            end = asyncio.get_running_loop().call_later(config.drain_seconds, self.end)
            app.state.live.close()  # those who watch would be waited for
            await super().shutdown(sockets)
            end.cancel()

        def end(self) -> None:
            """The drain has taken its time."""
            worker.end()
            for connection in list(self.server_state.connections):
                if isinstance(connection, Connection):
                    connection.cut_unless_heard()

    if config.measure_machine:
        llm.measure_machine()
    app = create_app(
        llm,
        api_key=config.api_key or os.environ.get("JAXINFER_API_KEY") or None,
        served_model_name=config.served_model_name,
        max_queue=config.max_queue,
        max_body_bytes=config.max_body_bytes,
        receive_seconds=config.receive_seconds,
        cors_origins=config.cors_origin,
        allowed_hosts=_allowed_hosts(config, listener),
        step_timeout=config.step_timeout or None,
        root_path=config.root_path,
        names_as_ids=config.return_tokens_as_token_ids,
        force_usage=config.enable_force_include_usage,
    )
    worker, dead_since = app.state.worker, None
    # What is here by now stays. A full collection of garbage would look through it again and again, and stop
    # every thread meanwhile: 0.15 s for the 260 000 objects of a process that serves SmolLM2.
    gc.collect()
    gc.freeze()
    Server(uvicorn_config(app, config)).run(sockets=[listener])
    if worker.death is not None:
        raise EngineDeadError(f"the engine has stopped: {worker.death}; the log has the reason")


def uvicorn_config(app: FastAPI, config: ServerConfig) -> uvicorn.Config:
    """How uvicorn runs the application."""
    import uvicorn

    from jaxinfer.server.connection import connection_class

    return uvicorn.Config(
        app,
        http=connection_class(config.receive_seconds, config.stall_seconds, _connections(config)),
        ws="none",  # a handshake would go around every check, and be answered without an id
        access_log=False,  # `AccessLog` says more
        log_config=_logging(config.log_format),
        timeout_graceful_shutdown=config.drain_seconds + 10,
        timeout_keep_alive=config.keep_alive_seconds,
        server_header=False,
    )


def _connections(config: ServerConfig) -> int:
    """The connections that can be kept. Beside as many again that are being refused, there must be room for
    other files."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * config.max_connections + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        if allowed < wanted:
            most = max(1, (allowed - OTHER_FILES) // 2)
            logger.warning("%d connections are kept at most: the system allows %d open files", most, allowed)
            return most
    return config.max_connections


def _bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: clients are refused, not left waiting, while a model loads."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return listener


def _allowed_hosts(config: ServerConfig, listener: socket.socket) -> tuple[str, ...] | None:
    """The names by which clients may call the server, besides those of the loopback interface; None for any.

    An address that other machines reach has names that nobody here knows. What keeps a page in somebody's
    browser out there is an API key, or names that are given.
    """
    from jaxinfer.server.guards import is_loopback

    bound = listener.getsockname()[0]
    if not config.allowed_host and not is_loopback(bound):
        return None
    return (config.host, bound, *config.allowed_host)


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


def _logging(log_format: LogFormat = "plain") -> dict[str, Any]:
    """What the server and uvicorn say, with as much of ours as was wanted before (JAXINFER_DEBUG)."""
    level = min(logging.INFO, logging.getLogger("jaxinfer").level or logging.INFO)
    return logging_config(log_format, level)
