"""Applications served over real sockets, within the process of a test."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator

import uvicorn
from fastapi import FastAPI


@contextlib.contextmanager
def serving(app: FastAPI) -> Generator[str]:
    """The application on a free port of 127.0.0.1; gives its address."""
    # Without a log_config of uvicorn's: to configure logging anew shuts all handlers down, and absl's closes
    # the file that pytest captures stderr with.
    config = uvicorn.Config(
        app,
        host="127.0.0.1",
        port=0,
        log_config=None,
        log_level="warning",
        timeout_graceful_shutdown=1,
        loop="asyncio",  # uvloop, which is there if some package needs it, has no callbacks to be timed
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        thread.join(0.005)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
