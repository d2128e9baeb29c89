"""Costs in CPU time: what a test may bound. A wait by the clock is also a matter of what else the machine
does, and a collection of garbage is a matter of what other tests have left."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Generator

import pytest


@contextlib.contextmanager
def no_collection() -> Generator[None]:
    """No collection of garbage begins meanwhile, on whatever thread."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@contextlib.contextmanager
def cpu_time() -> Generator[Callable[[], float]]:
    """Gives the CPU seconds that the calling thread has spent since, for itself and in the system's name."""
    with no_collection():
        began = time.thread_time()
        yield lambda: time.thread_time() - began


@contextlib.contextmanager
def longest_callback(monkeypatch: pytest.MonkeyPatch) -> Generator[Callable[[], float]]:
    """Gives the most CPU seconds that one callback has spent since on an event loop of asyncio: so long did
    everybody wait whom the loop serves, had the machine been theirs alone."""
    longest, run = 0.0, asyncio.Handle._run  # pyright: ignore[reportAttributeAccessIssue]

    def timed(handle: asyncio.Handle) -> None:
        nonlocal longest
        began = time.thread_time()
        run(handle)
        longest = max(longest, time.thread_time() - began)

    with monkeypatch.context() as patched, no_collection():
        patched.setattr(asyncio.Handle, "_run", timed)
        yield lambda: longest
