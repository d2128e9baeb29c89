"""Fixtures of the server's tests: coroutine tests, and real servers on free ports."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
import uvicorn
from fastapi import FastAPI

sys.path.insert(0, str(Path(__file__).parent.parent))  # fake_runner lies one folder up


@pytest.fixture
def anyio_backend() -> str:
    """Coroutine tests (`pytest.mark.anyio`) run on asyncio, as the server does."""
    return "asyncio"


@pytest.fixture
def serve() -> Generator[Callable[[FastAPI], str]]:
    """Serves applications on free ports of 127.0.0.1 until the test ends; gives their addresses."""
    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(app: FastAPI) -> str:
        config = uvicorn.Config(
            app, host="127.0.0.1", port=0, log_level="warning", timeout_graceful_shutdown=1
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            thread.join(0.005)
        running.append((server, thread))
        return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"

    yield start
    for server, _ in running:
        server.should_exit = True
    for _, thread in running:
        thread.join(10)
