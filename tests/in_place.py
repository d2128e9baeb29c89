"""What a compiled step does with its pages: it writes into them, and holds no second pool meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jaxinfer.runtime import steps
from jaxinfer.runtime.programs import Programs


def check_updated_in_place(programs: Programs, buckets: Iterable[Any], kv_bytes: int) -> None:
    """The programs of these buckets give back every array of the KV state in its place, and need little."""
    for bucket in buckets:
        source = programs.source(bucket)
        program = steps.compile_program(
            "test", source.function, source.arguments, "cpu", donate=source.donate
        )
        memory = program.memory_analysis()
        assert memory is not None
        assert memory.alias_size_in_bytes == kv_bytes
        assert memory.temp_size_in_bytes < kv_bytes / 20
