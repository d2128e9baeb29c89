"""`bench throughput`: tokens per second of a batch that is there from the start, as an offline job has it."""

from __future__ import annotations

from typing import Any

from jaxinfer.bench.lengths import Lengths
from jaxinfer.bench.load import Prompts, at_once
from jaxinfer.bench.serve import serve
from jaxinfer.bench.workbench import Measured, Workbench


def throughput(
    bench: Workbench, requests: int, prompts: Prompts, outputs: Lengths, *, seed: int, warm_up: int
) -> tuple[Measured, dict[str, Any]]:
    """Run `requests` requests handed over together: the run, and the report of it as JSON.

    Their first tokens come one after the other, so that TTFT is a matter of how many there are. Raises
    ConfigError when no request of the warm-up is answered.
    """
    return serve(bench, at_once(requests, prompts, outputs, seed=seed), warm_up, "throughput")
