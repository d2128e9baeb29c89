"""A step that hangs: nothing on the host can end it, but people and supervisors can be told."""

from __future__ import annotations

import asyncio
import logging

from jaxinfer.server.worker import EngineWorker

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between two looks at the step in progress."""


async def watch_steps(worker: EngineWorker, look_s: float = LOOK_S) -> None:
    """Write a line when a step has taken longer than the worker's `step_timeout_s`, and one when it ends."""
    stuck = False
    while True:
        await asyncio.sleep(look_s)
        health = worker.health()
        if (health["status"] == "stuck") == stuck:
            continue
        stuck = not stuck
        if stuck:
            logger.error(
                "a step has taken %.0f s, and more than %g s is not usual (--step-timeout): /health says 503 "
                "until it ends; %d sequences wait",
                health["step_s"],
                worker.step_timeout_s,
                health["sequences"],
            )
        else:
            logger.error("the step that was stuck has ended; the engine is %s", health["status"])
