"""What benchmarks.gpu runs on an engine: streams that decode, many requests at once, long prompts."""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax
import numpy as np

from benchmarks.device_idle import by_dispatch, by_trace
from jaxinfer import LLM, SamplingParams
from jaxinfer.model import kv


class EngineBench:
    """An engine, its model's sizes, and the two limits of the device: bytes and operations per second."""

    def __init__(self, llm: LLM, bandwidth: float, rate: float):
        assert llm.model_config is not None
        self.llm, self.bandwidth, self.rate = llm, bandwidth, rate
        model, self.model = llm.model_config, llm.model_config
        runner: Any = llm.engine.runner
        stats = llm.stats()
        page_bytes = kv.page_bytes(model, runner.page_size, jax.numpy.dtype(runner.kv_dtype))
        self.kv_bytes_per_token = page_bytes / runner.page_size
        embedding = model.vocab_size * model.hidden_size
        # A step reads all weights but the embedding, of which it reads a row for each token; tied, it is the
        # head.
        untied = 0 if model.tie_word_embeddings else embedding
        self.weight_bytes = stats["param_bytes"] - untied * runner.programs.leaves[0].dtype.itemsize
        self.head_params = embedding
        self.layer_params = model.num_params - embedding - untied
        self.seed = 0

    def facts(self) -> dict[str, Any]:
        runner: Any = self.llm.engine.runner
        stats = self.llm.stats()
        return {
            "attention": self.attention(), "weight_bytes_per_step": self.weight_bytes,
            "kv_bytes_per_token": self.kv_bytes_per_token, "param_bytes": stats["param_bytes"],
            "kv_pool_bytes": stats["kv_bytes"], "kv_dtype": str(runner.kv_dtype),
            "page_size": runner.page_size,
        }  # fmt: skip

    def attention(self) -> str:
        """The backend that serves: it is a static of the model's graph."""
        runner: Any = self.llm.engine.runner
        from flax import nnx

        model: Any = nnx.merge(runner._graph, runner._state)
        return model.layers[0].attention.backend.name

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """New ones at each call: none finds another's beginning in the prefix cache."""
        self.seed += 1
        drawn = np.random.default_rng(self.seed).integers(3, self.model.vocab_size, (count, length))
        return drawn.tolist()

    def operations(self, tokens: int, keys: int, emitted: int) -> float:
        """Of a step or more: tokens run, keys seen by all of them together, and rows of logits."""
        attention = 4 * self.model.num_heads * self.model.head_dim * self.model.num_layers * keys
        return 2.0 * (self.layer_params * tokens + self.head_params * emitted) + attention

    def against_floor(
        self, seconds: float, tokens: int, keys: int, emitted: int, steps: float = 1
    ) -> dict[str, float]:
        """MBU and MFU, and how many times the larger of the two least times `seconds` is. `keys`: those that
        are read, by rows of one query each."""
        moved = self.weight_bytes * steps + self.kv_bytes_per_token * keys
        operations = self.operations(tokens, keys, emitted)
        memory, arithmetic = moved / self.bandwidth, operations / self.rate
        return {
            "mbu": memory / seconds, "mfu": arithmetic / seconds,
            "over_floor": seconds / max(memory, arithmetic),
        }  # fmt: skip

    def programs(self) -> int:
        return self.llm.stats()["programs"]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)


def drain(llm: LLM) -> None:
    while llm.engine.has_work:
        llm.engine.step()


def settled(bench: EngineBench, function: Any, most: int = 4) -> Any:
    """The result of a run that compiled nothing: the first ones, up to `most` - 1, compile what they need."""
    result: Any = None
    for _ in range(most):
        before = bench.programs()
        result = function()
        if bench.programs() == before:
            break
    return result


def streams_at(bench: EngineBench, streams: int, context: int, steps: int, *, idle: bool) -> dict[str, Any]:
    """`streams` running streams from `context` tokens on: time of a step, over `steps` of them."""
    llm = bench.llm
    chunk = llm.limits.max_num_batched_tokens
    spare = (
        2 * -(-streams * context // chunk) + steps + 64
    )  # those that are in early decode while others enter
    spare = min(spare, llm.limits.max_model_len - context)
    requests = [llm.prepare(prompt, greedy(spare)) for prompt in bench.prompts(streams, context)]
    began = time.perf_counter()
    for request in requests:
        llm.engine.add(request)
    reached: dict[str, int] = {}
    first = None
    while len(reached) < streams:
        for event in llm.engine.step():
            reached[event.request_id] = reached.get(event.request_id, context) + len(event.token_ids)
        if reached and first is None:
            first = time.perf_counter() - began
    for _ in range(4):
        llm.engine.step()
    before = llm.stats()["generated_tokens"]
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        llm.engine.step()
        times.append(time.perf_counter() - start)
    made = llm.stats()["generated_tokens"] - before
    assert made == streams * steps, f"{made} tokens in {steps} steps of {streams} streams: some ended early"
    seconds = sum(times) / steps
    keys = sum(reached.values()) + streams * (4 + steps // 2)
    result: dict[str, Any] = {
        "tokens_per_s": streams / seconds, "tpot_s": seconds, "tpot_median_s": statistics.median(times),
        "ttft_s": first, "keys": keys, **bench.against_floor(seconds, streams, keys, streams),
    }  # fmt: skip
    if idle:
        few = max(3, min(16, steps // 2))
        result["trace"] = by_trace(llm.engine.step, few)
        device = by_dispatch(llm, llm.engine.step, few)
        result |= {"device_s": device.seconds, "device_dispatch_s": device.dispatch}
        # "idle_s" is what the table shows, by dispatch: `device_idle` says how the two differ.
        result |= {"idle_s": device.idle(seconds), "idle_unknown": device.reason}
    for request in requests:
        llm.engine.cancel(request.request_id)
    drain(llm)
    return result


def decode(bench: EngineBench, scale: int) -> dict[str, Any]:
    """One stream, and 64 at three contexts, with the slope of a step's time over the bytes of K/V it
    reads."""
    steps, streams = max(8, 64 // scale), max(2, min(64, 64 * 8 // scale))
    found: dict[str, Any] = {}

    def at(count: int, context: int, *, idle: bool) -> dict[str, Any]:
        context = max(4, context // scale)
        return settled(bench, lambda: streams_at(bench, count, context, steps, idle=idle))

    found["1 x 128"] = at(1, 128, idle=True)
    for context in (512, 2048, 3328):
        found[f"{streams} x {max(4, context // scale)}"] = at(streams, context, idle=context == 2048)
    many = list(found.values())[1:]
    slope, least = np.polyfit(
        [one["keys"] * bench.kv_bytes_per_token for one in many], [one["tpot_s"] for one in many], 1
    )
    found["kv_slope"] = float(slope) * bench.bandwidth
    found["step_without_kv_s"] = float(least)
    return found


def run_all(bench: EngineBench, count: int, length: int, outputs: int) -> dict[str, Any]:
    """`count` requests of `length` + `outputs` tokens, added together, to the end of the last."""
    llm = bench.llm
    requests = [llm.prepare(prompt, greedy(outputs)) for prompt in bench.prompts(count, length)]
    before, began = llm.stats(), time.perf_counter()
    compiled = bench.programs()
    for request in requests:
        llm.engine.add(request)
    metrics = []
    while llm.engine.has_work:
        metrics += [event.metrics for event in llm.engine.step() if event.metrics is not None]
    seconds, after = time.perf_counter() - began, llm.stats()
    steps = after["steps"] - before["steps"]
    host = sum(after[name] - before[name] for name in ("engine_s", "dispatch_s"))
    # Keys read: each output token's once; what chunks read of earlier ones is arithmetic's, not memory's,
    # cost.
    keys = count * (outputs * length + outputs * (outputs - 1) // 2)
    tokens = count * (length + outputs - 1)
    run = after["tokens_run"] - before["tokens_run"]
    return {
        "tokens_per_s": count * outputs / seconds, "total_tokens_per_s": count * (length + outputs) / seconds,
        "seconds": seconds, "steps": steps, "tpot_s": statistics.median(m.tpot_s for m in metrics),
        "ttft_s": statistics.median(m.ttft_s for m in metrics), "host_s_per_step": host / steps,
        "padding_waste": 1 - run / (after["tokens_padded"] - before["tokens_padded"]),
        "preemptions": after["preemptions"] - before["preemptions"],
        "compiled_meanwhile": bench.programs() - compiled,
        **bench.against_floor(seconds, tokens, keys, count * outputs, steps),
    }  # fmt: skip


def saturated(bench: EngineBench, scale: int) -> dict[str, Any]:
    count, length = max(6, 512 // scale), max(8, 1000 // scale)
    # The warm-up compiles; its requests are short, and meet the same buckets.
    run_all(bench, count, length, max(2, length // 8))
    return {
        f"{count} x {length}+{length}": settled(bench, lambda: run_all(bench, count, length, length), most=2)
    }


def long(bench: EngineBench, scale: int) -> dict[str, Any]:
    length, outputs = 20000 // scale, max(4, 2000 // scale)
    run_all(bench, 8, length, 2)
    return {f"8 x {length}+{outputs}": settled(bench, lambda: run_all(bench, 8, length, outputs), most=2)}


def prefill(bench: EngineBench, scale: int) -> dict[str, Any]:
    """Time to the one token of a prompt, the median of three."""
    found: dict[str, Any] = {}
    for length in (2048 // scale, 8192 // scale, 32768 // scale):

        def once(length: int = length) -> list[float]:
            times = []
            for _ in range(3):
                prompt = bench.prompts(1, length)
                began = time.perf_counter()
                bench.llm.generate(prompt, greedy(1))
                times.append(time.perf_counter() - began)
            return times

        seconds = statistics.median(settled(bench, once))
        seen = length * (length + 1) // 2
        operations = bench.operations(length, seen, 1)
        found[f"1 x {length}"] = {
            "ttft_s": seconds, "prompt_tokens_per_s": length / seconds,
            "mfu": operations / bench.rate / seconds,
            "over_floor": seconds * bench.rate / operations,
        }  # fmt: skip
    return found
