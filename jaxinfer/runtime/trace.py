"""What was compiled, when and why; and proof that nothing else is."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import sys
import threading
from dataclasses import dataclass
from typing import Any

import jax

_BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts every XLA compile of the process, the engine's own programs included.

    JAX offers listeners but no way to remove one, so there is one counter per process: `compiles`.
    """

    def __init__(self) -> None:
        self._count = 0
        self._lock = threading.Lock()
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == _BACKEND_COMPILE:
            with self._lock:
                self._count += 1

    @property
    def count(self) -> int:
        return self._count


compiles = CompileCounter()


def release_freed_memory() -> None:
    """Give what the compiler has freed back to the system; glibc would keep some 100 MB a program."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's own
        if trim is not None:
            trim(0)


@dataclass(slots=True)
class ProgramRecord:
    """One line of the compile manifest. Bytes are XLA's own plan for the program (memory_analysis).

    kind: forward, sample, score or copy. `aliased_bytes` is what it updates in place; for forward and copy
    the whole KV pool, or something is copied. `tokens` counts what a forward program ran but its padding.
    """

    kind: str
    bucket: str
    reason: str
    compile_s: float
    temp_bytes: int
    aliased_bytes: int
    calls: int = 0
    tokens: int = 0

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
