"""Speed of the whole engine through `LLM.generate`, float32 on CPU, best of several runs.

    python -m benchmarks.cpu smollm2-135m [--repeat 3]

decode N    N greedy streams from 16-token prompts: tokens per second once all are past their first token
prefill N   one prompt of N tokens: N over the time to the first token
e2e N       N requests of 128 + 128 tokens submitted together: new tokens over the whole time

Also: the Python share of a decode step at batch 8, peak memory, and the machine's own two limits measured
in the same run, because a shared machine's speed changes by the minute and only ratios travel. The last
line of stdout is one JSON object with versions and revision.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from importlib import metadata
from typing import Any

import numpy as np

from jaxinfer import LLM, SamplingParams


def machine_limits() -> dict[str, float]:
    """Read bandwidth (GB/s) over 512 MB and rate (GFLOP/s) of a 1536^3 float32 product, best of 5."""
    import jax
    import jax.numpy as jnp

    def best(function: Any, *args: Any) -> float:
        jax.block_until_ready(function(*args))
        times = []
        for _ in range(5):
            start = time.perf_counter()
            jax.block_until_ready(function(*args))
            times.append(time.perf_counter() - start)
        return min(times)

    matrix = jnp.ones((8192, 16384), jnp.float32)
    vector = jnp.ones((16384,), jnp.float32)
    square = jnp.ones((1536, 1536), jnp.float32)
    return {
        "read_gb_s": matrix.nbytes / best(jax.jit(jnp.dot), matrix, vector) / 1e9,
        "matmul_gflop_s": 2 * 1536**3 / best(jax.jit(jnp.dot), square, square) / 1e9,
    }


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    return np.random.default_rng(seed).integers(1000, 40000, (count, length)).tolist()


def decode(llm: LLM, streams: int, tokens: int, seed: int) -> tuple[float, float]:
    """(tokens per second, Python share of step time) of `streams` running together."""
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    for prompt in prompts(streams, 16, seed):
        llm.engine.add(llm.prepare(prompt, params))
    started = 0
    while started < streams:
        started += sum(bool(event.token_ids) for event in llm.engine.step())
    before, made, start = llm.stats(), 0, time.perf_counter()
    # The last token of each stream is left out: rows that end early would make the batch smaller.
    while made < streams * (tokens - 4):
        made += sum(len(event.token_ids) for event in llm.engine.step())
    seconds = time.perf_counter() - start
    after = llm.stats()
    while llm.engine.has_work:
        llm.engine.step()
    return made / seconds, 1.0 - (after["wait_s"] - before["wait_s"]) / seconds


def prefill(llm: LLM, length: int, seed: int) -> float:
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts(1, length, seed), params)
    return length / (time.perf_counter() - start)


def end_to_end(llm: LLM, streams: int, seed: int) -> float:
    params = SamplingParams(max_tokens=128, temperature=0, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts(streams, 128, seed), params)
    return streams * 128 / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--budget", type=int, default=512, help="max_num_batched_tokens")
    args = parser.parse_args()

    llm = LLM(
        args.model, max_num_seqs=32, max_model_len=2304, max_num_batched_tokens=args.budget, dtype="float32"
    )
    figures: dict[str, float] = {}
    shares: list[float] = []

    def keep(name: str, value: float) -> None:
        figures[name] = max(figures.get(name, 0.0), value)

    for repeat in range(args.repeat + 1):  # the first round compiles
        if repeat == 1:
            figures.clear()
            shares.clear()
        for streams in (1, 8, 32):
            rate, share = decode(llm, streams, 48, seed=repeat)
            keep(f"decode {streams}", rate)
            if streams == 8:
                shares.append(share)
        for length in (512, 2048):
            keep(f"prefill {length}", prefill(llm, length, seed=repeat))
        for streams in (8, 32):
            keep(f"e2e {streams}", end_to_end(llm, streams, seed=repeat))
        print(f"round {repeat}: " + ", ".join(f"{k} {v:.0f}" for k, v in figures.items()), file=sys.stderr)

    stats = llm.stats()
    # Before the machine's limits are measured: those arrays are not the engine's.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    report = {
        "model": args.model,
        "tokens_per_s": {name: round(value, 1) for name, value in figures.items()},
        "python_share_decode_8": round(min(shares), 4),
        "peak_bytes_above_weights_and_pool": peak - stats["param_bytes"] - stats["kv_bytes"],
        "compiles_after_warmup": stats["compiles_after_warmup"],
        "padding_waste": round(stats["padding_waste"], 3),
        "machine": {name: round(value, 1) for name, value in machine_limits().items()},
        **versions(),
    }
    print(f"{'':12}{'tok/s':>8}")
    for name, value in figures.items():
        print(f"{name:12}{value:8.1f}")
    print(json.dumps(report))


def versions() -> dict[str, str]:
    import flax
    import jax

    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return {
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
        "flax": flax.__version__,
        "python": platform.python_version(),
        "revision": revision.stdout.strip() or "unknown",
    }


if __name__ == "__main__":
    main()
