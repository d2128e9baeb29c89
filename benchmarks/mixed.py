"""A mixed load on the whole engine: what is wasted, who waits, what the prefix cache saves.

    python -m benchmarks.mixed smollm2-135m [--requests 64 --parts load,stall --quick --sync --invariant]

load          64 requests at once, prompts of 32-1024 and outputs of 16-256 tokens, greedy: tokens per second,
              share of packed tokens that was padding, share of step time that was Python, preemptions
shared        the same with a common prefix of 512 tokens in front of every prompt
stall         8 running streams while a prompt of 8000 tokens enters: inter-token time, p99 over p50
prefix        time to the first token of a 1024-token prompt, cold over with its prefix in the cache

The last line of stdout is one JSON object with versions and revision. Compare within one run: a shared
machine's speed changes by the minute.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import numpy as np

from benchmarks.cpu import prompts, versions
from jaxinfer import LLM, SamplingParams


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)


def difference(before: dict[str, Any], after: dict[str, Any], names: tuple[str, ...]) -> dict[str, float]:
    return {name: after[name] - before[name] for name in names}


def load(llm: LLM, count: int, shared: int, seed: int) -> dict[str, float]:
    """`count` mixed requests at once, behind a common prefix of `shared` tokens."""
    generator = np.random.default_rng(seed)
    prefix = generator.integers(1000, 40000, shared).tolist()
    lengths = np.exp(generator.uniform(np.log(32), np.log(1024), count)).astype(int)
    outputs = generator.integers(16, 257, count)
    asked = [
        llm.prepare(prefix + generator.integers(1000, 40000, length).tolist(), greedy(int(output)))
        for length, output in zip(lengths, outputs, strict=True)
    ]
    before, start = llm.stats(), time.perf_counter()
    for request in asked:
        llm.engine.add(request)
    made = 0
    while llm.engine.has_work:
        made += sum(len(event.token_ids) for event in llm.engine.step())
    seconds, after = time.perf_counter() - start, llm.stats()
    names = (
        "tokens_run",
        "tokens_padded",
        "engine_s",
        "dispatch_s",
        "wait_s",
        "preemptions",
        "cached_tokens",
        "steps",
    )
    spent = difference(before, after, names)
    return {
        "output_tokens_per_s": made / seconds,
        "prompt_tokens": float(lengths.sum() + shared * count),
        "cached_tokens": spent["cached_tokens"],
        "padding_waste": 1 - spent["tokens_run"] / spent["tokens_padded"],
        "host_share": 1 - spent["wait_s"] / seconds,
        "host_ms_per_step": 1e3 * (spent["engine_s"] + spent["dispatch_s"]) / spent["steps"],
        "preemptions": spent["preemptions"],
        "seconds": seconds,
    }


def stall(llm: LLM, streams: int, length: int, seed: int) -> dict[str, float]:
    """Inter-token times of running streams from the moment a long prompt is added to its first token."""
    for prompt in prompts(streams, 32, seed):
        llm.engine.add(llm.prepare(prompt, greedy(400)))
    while len(llm.engine.scheduler.running) < streams or llm.engine.scheduler.waiting:
        llm.engine.step()
    for _ in range(4):
        llm.engine.step()
    entering = llm.prepare(prompts(1, length, seed + 1)[0], greedy(1))
    llm.engine.add(entering)
    last: dict[str, float] = {}
    gaps: list[float] = []
    entered = False
    while not entered:
        events, now = llm.engine.step(), time.perf_counter()
        for event in events:
            if event.request_id == entering.request_id:
                entered = True
            elif event.token_ids:
                if event.request_id in last:
                    gaps.append(now - last[event.request_id])
                last[event.request_id] = now
    for request_id in last:
        llm.engine.cancel(request_id)
    while llm.engine.has_work:
        llm.engine.step()
    p50, p99 = np.percentile(gaps, [50, 99])
    return {"p50_s": float(p50), "p99_s": float(p99), "ratio": float(p99 / p50), "gaps": float(len(gaps))}


def prefix(llm: LLM, length: int, repeat: int, seed: int) -> dict[str, float]:
    """First-token times of a prompt that is new, and of one that is in the cache; best of some."""
    cold, warm = [], []
    for number in range(repeat):
        prompt = prompts(1, length, seed + number)[0]
        for times in (cold, warm):
            start = time.perf_counter()
            llm.generate(prompt, greedy(1))
            times.append(time.perf_counter() - start)
    return {"cold_s": min(cold), "warm_s": min(warm), "speed_up": min(cold) / min(warm)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--quick", action="store_true", help="a sixteenth of the load, for a smoke test")
    parser.add_argument("--sync", action="store_true", help="without steps ahead")
    parser.add_argument("--invariant", action="store_true", help="batch_invariant=True")
    parser.add_argument("--parts", default="load,shared,stall,prefix", help="which of them to run")
    args = parser.parse_args()
    count = max(4, args.requests // 16) if args.quick else args.requests
    length = 600 if args.quick else 8000

    llm = LLM(
        args.model, max_num_seqs=32, max_model_len=8192, dtype="float32", warmup="full",
        async_scheduling=not args.sync, batch_invariant=args.invariant,
    )  # fmt: skip
    llm.generate(prompts(1, 40, 0)[0], greedy(4))
    report: dict[str, Any] = {"model": args.model, "requests": count}
    parts = {
        "load": lambda: load(llm, count, 0, 1),
        "shared": lambda: load(llm, count, 512 if not args.quick else 64, 2),
        "stall": lambda: stall(llm, 8, length, 3),
        "prefix": lambda: prefix(llm, 1024 if not args.quick else 200, 3, 40),
    }
    parts = {name: parts[name] for name in args.parts.split(",")}
    for name, part in parts.items():
        report[name] = {key: round(value, 4) for key, value in part().items()}
        print(
            f"{name:8}" + "  ".join(f"{key} {value:g}" for key, value in report[name].items()),
            file=sys.stderr,
        )
    stats = llm.stats()
    for name in ("programs", "compiles_after_warmup", "compile_s", "invariant_failures"):
        report[name] = stats[name]
    print(json.dumps({**report, **versions()}))


if __name__ == "__main__":
    main()
