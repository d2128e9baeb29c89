"""A look at the engine from another thread: asked on an event loop, answered on the engine's own thread."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


class Question:
    """Something to look at on the engine's thread, and the future of what was seen there."""

    def __init__(self, look: Callable[[], Any], loop: asyncio.AbstractEventLoop):
        self.answer: asyncio.Future[Any] = loop.create_future()
        self._look, self._loop = look, loop

    def put(self) -> None:
        """Look, on this thread. What that raises is the asker's, and ends nothing else."""
        if self.answer.cancelled():
            return
        try:
            seen = self._look()
        except Exception as error:
            self.fail(error)
        else:
            self._settle(self.answer.set_result, seen)

    def fail(self, error: Exception) -> None:
        self._settle(self.answer.set_exception, error)

    def _settle(self, settle: Callable[[Any], None], value: Any) -> None:
        def tell() -> None:
            if not self.answer.done():
                settle(value)

        try:
            self._loop.call_soon_threadsafe(tell)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            logger.debug("an event loop closed before its question was answered")
