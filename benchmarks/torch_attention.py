"""What torch's attention takes for the shapes of `pallas_kernels.bench`: the one file here that imports
torch.

    python benchmarks/torch_attention.py < shapes.json

Reads [{"shape", "rows", "queries", "keys", "heads", "kv_heads", "width"}] and prints, last, rows of JSON as
the bench's own: torch's scaled_dot_product_attention over dense keys, by flash attention and by cuDNN. A
program of its own, which the bench starts where it is there: nothing of the project needs torch, and two
frameworks in one process would fight for the device's memory. It times by CUDA events; on a machine without a
GPU by the clock, to be tested.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

CACHE_BYTES = 192 << 20  # as pallas_kernels.bench.rows: smaller inputs take turns


def measure(torch: Any, launch: Callable[[int], Any], rounds: int = 7, budget: float = 1.0) -> float:
    """Median seconds of launch(i), queued many at a time."""
    on_gpu = torch.cuda.is_available()

    def timed(count: int) -> float:
        if not on_gpu:
            began = time.perf_counter()
            for index in range(count):
                launch(index)
            return (time.perf_counter() - began) / count
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for index in range(count):
            launch(index)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3 / count

    timed(3)
    count = max(1, min(int(budget / rounds / max(timed(1), 1e-6)), 2000))
    return statistics.median(timed(count) for _ in range(rounds))


def row(torch: Any, asked: dict[str, Any], name: str, kernel: Any) -> dict[str, Any]:
    from torch.nn.attention import sdpa_kernel  # type: ignore[import-not-found]
    from torch.nn.functional import scaled_dot_product_attention  # type: ignore[import-not-found]

    device = "cuda" if torch.cuda.is_available() else "cpu"
    made: dict[str, Any] = {"shape": asked["shape"], "case": asked["shape"], "backend": name}

    def draw(heads: int, tokens: int) -> Any:
        size = (asked["rows"], heads, tokens, asked["width"])
        return torch.randn(size, device=device, dtype=torch.bfloat16)

    elements = asked["rows"] * asked["width"]
    size = 2 * elements * (2 * asked["kv_heads"] * asked["keys"] + 2 * asked["heads"] * asked["queries"])
    count = max(1, min(-(-CACHE_BYTES // size), 16)) if device == "cuda" else 1
    sets = [
        (
            draw(asked["heads"], asked["queries"]),
            *(draw(asked["kv_heads"], asked["keys"]) for _ in range(2)),
        )
        for _ in range(count)
    ]
    grouped = asked["heads"] != asked["kv_heads"]

    def launch(index: int) -> Any:
        q, k, v = sets[index % count]
        return scaled_dot_product_attention(q, k, v, is_causal=asked["queries"] > 1, enable_gqa=grouped)

    try:
        with sdpa_kernel(kernel):
            return made | {"status": "ok", "seconds": measure(torch, launch)}
    except Exception as error:
        return made | {
            "status": "refused",
            "reason": f"{type(error).__name__}: {error}".splitlines()[0][:200],
        }


def main() -> None:
    asked = json.load(sys.stdin)
    try:
        import torch  # type: ignore[import-not-found]
        from torch.nn.attention import SDPBackend  # type: ignore[import-not-found]
    except ImportError as error:
        print(json.dumps([{"backend": "torch", "status": "refused", "reason": f"{error}"}]))
        return
    kernels = {"torch flash": SDPBackend.FLASH_ATTENTION, "torch cudnn": SDPBackend.CUDNN_ATTENTION}
    if not torch.cuda.is_available():
        kernels = {"torch math": SDPBackend.MATH}
    rows = [row(torch, one, name, kernel) for one in asked for name, kernel in kernels.items()]
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
