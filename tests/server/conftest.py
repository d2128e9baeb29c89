"""Fixtures of the server's tests: coroutine tests, and real servers on free ports."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator

import pytest
from fastapi import FastAPI
from serving import serving


@pytest.fixture
def anyio_backend() -> str:
    """Coroutine tests (`pytest.mark.anyio`) run on asyncio, as the server does."""
    return "asyncio"


@pytest.fixture
def serve() -> Generator[Callable[[FastAPI], str]]:
    """Serves applications on free ports of 127.0.0.1 until the test ends; gives their addresses."""
    with contextlib.ExitStack() as running:
        yield lambda app: running.enter_context(serving(app))
