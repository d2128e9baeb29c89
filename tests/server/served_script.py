"""A server process of its own around the scripted engine: `python served_script.py JSON`.

It does what `jaxinfer serve` does from `launch.serve` on. In the JSON, "server" has fields of ServerConfig
and "engine" those of ScriptedEngine; with "break" the engine's thread meets a fault of its own, outside of
a step.
"""

from __future__ import annotations

import contextlib
import json
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


class Served:
    """A running server process, as a test sees it."""

    def __init__(self, process: subprocess.Popen[str], url: str):
        self.process, self.url = process, url
        self.port = int(url.rpartition(":")[2])

    def end(self, how: int | None = signal.SIGTERM, timeout_s: float = 30.0) -> tuple[int, str]:
        """Send a signal, if any, and wait: exit status and what stderr said after the server was ready."""
        if how is not None:
            self.process.send_signal(how)
        _, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, err


@contextlib.contextmanager
def served(command: list[str], ready_s: float = 60.0) -> Generator[Served]:
    """Start a server and wait until it says where; it is killed at the end if the test did not end it."""
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=HERE.parent.parent,
    )
    try:
        assert process.stderr is not None
        said, end = "", time.monotonic() + ready_s
        while not (ready := re.search(r"serving .* at (http://127\.0\.0\.1:\d+)/v1", said)):
            assert select.select([process.stderr], [], [], end - time.monotonic())[0], said
            line = process.stderr.readline()
            assert line, f"the server ended with {process.wait(10)}: {said}"
            said += line
        yield Served(process, ready[1])
    finally:
        process.kill()
        process.wait(10)


def scripted(*, engine: dict[str, Any] | None = None, broken: bool = False, **server: Any) -> list[str]:
    """The command of a server with these fields of ScriptedEngine and ServerConfig."""
    given = {"engine": engine or {}, "break": broken, "server": server}
    return [__file__, json.dumps(given)]


def main(given: dict[str, Any]) -> None:
    """Serve until the end."""
    sys.path.insert(0, str(HERE))
    from scripted import ScriptedEngine, ScriptedLLM

    from jaxinfer.server.launch import ServerConfig, serve

    class Breaking(ScriptedEngine):
        """Its thread ends by a fault that is no step's when it is asked for work the 51st time."""

        asked = 0

        @property
        def has_work(self) -> bool:
            self.asked += 1
            if self.asked > 50:
                raise MemoryError("planted")
            return bool(self.running)

    llm = ScriptedLLM((Breaking if given["break"] else ScriptedEngine)(**given["engine"]))
    server = {name: tuple(v) if isinstance(v, list) else v for name, v in given["server"].items()}
    serve(
        lambda: contextlib.nullcontext(llm), ServerConfig(**{"port": 0, "measure_machine": False, **server})
    )  # type: ignore[arg-type]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
