"""Worker processes one after the other: whichever dies takes one row with it, and the next begins behind
it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from typing import Any

from pallas_kernels.bench.rows import Options, Row


def work(
    jobs: list[dict[str, Any]], options: Options, *, tiny: bool, timeout: float, deadline: float
) -> Generator[Row]:
    """The row of every job, in order. One that kills its worker, or takes over `timeout` seconds, has the
    status "failed"; those that would start after `deadline` (of time.monotonic) "skipped"."""
    left = list(jobs)
    while left:
        if time.monotonic() > deadline:
            yield from ({**job, "status": "skipped", "reason": "out of time"} for job in left)
            return
        done = 0
        for row in _one_worker(left, options, tiny, timeout, deadline):
            done += 1
            yield row
        left = left[done:]


def _one_worker(
    jobs: list[dict[str, Any]], options: Options, tiny: bool, timeout: float, deadline: float
) -> Generator[Row]:
    """Rows of one worker until it ends; at least one, and none after the deadline."""
    command = [sys.executable, "-m", "pallas_kernels.bench.worker"]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()

    def read(stream: Any) -> None:
        for line in stream:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, args=(child.stdout,), daemon=True).start()
    try:
        child.stdin.write(json.dumps({"jobs": jobs, "options": dataclasses.asdict(options), "tiny": tiny}))
        child.stdin.close()
    except BrokenPipeError:  # it died at once: told below
        pass
    made = 0
    try:
        while made < len(jobs):
            try:
                line = lines.get(timeout=timeout)
            except queue.Empty:
                yield {**jobs[made], "status": "failed", "reason": f"nothing came for {timeout:.0f} s"}
                return
            if line is None:
                status = child.wait()
                if not made or status < 0:  # else it has told of the failure that it ended with
                    yield {
                        **jobs[made],
                        "status": "failed",
                        "reason": f"the process ended with {_named(status)}",
                    }
                return
            if line.startswith("ROW "):
                made += 1
                yield json.loads(line[4:])
                if time.monotonic() > deadline:
                    return
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=30 if made == len(jobs) else 0)
        if child.poll() is None:  # it hangs, or nobody wants the rest of its rows
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _named(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"status {status}"
