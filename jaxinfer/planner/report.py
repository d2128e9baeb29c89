"""A plan for people (tables of text) and for programs (plain data for JSON)."""

from __future__ import annotations

from typing import Any

from jaxinfer.config import ModelConfig
from jaxinfer.planner.plan import Phase, Plan, Remedy

GIB = 2**30
WALLS = {
    "capacity": "capacity: the K/V of the batch do not fit beside the weights",
    "bandwidth": "bandwidth: the device waits for bytes of weights and K/V",
    "compute": "compute: the device multiplies as fast as it can",
    "exchange": "exchange: devices wait for each other's sums",
    "scheduling": "scheduling: the device waits for the host, to launch kernels and to plan",
}


def as_data(plan: Plan, remedies: list[Remedy]) -> dict[str, Any]:
    """Everything, ready for JSON. Bytes, operations and seconds, of one device."""
    costs, memory, sheet = plan.costs, plan.memory, plan.sheet
    layers = costs.config.layers
    return {
        "model": plan.model,
        "device": {
            "name": sheet.name, "memory_bytes": sheet.memory_bytes, "bandwidth": sheet.bandwidth,
            "rates": sheet.rates, "source": sheet.source, "ridge": sheet.ridge(costs.dtype),
        },
        "workload": {name: getattr(plan.workload, name) for name in plan.workload.__slots__},
        "dtype": costs.dtype, "kv_dtype": costs.kv_dtype, "quantization": costs.quantization,
        "tensor_parallel": costs.tensor_parallel, "page_size": costs.page_size,
        "parameters": costs.config.num_params,
        "kv": {
            "bytes_per_token": costs.kv_bytes_per_token,
            "bytes_per_token_per_layer": [costs.kv_bytes_of(layer) for layer in layers],
            "kv_heads": [layer.num_kv_heads for layer in layers],
            "kv_from": [layer.kv_from for layer in layers],
            "query_heads": costs.config.num_heads,
            "bytes_of_batch": plan.memory.page_bytes * plan.memory.pages_per_sequence * plan.workload.batch,
        },
        "memory": {
            **{name: getattr(memory, name) for name in memory.__slots__}, "fits": memory.fits,
        },
        "prefill": _phase_data(plan.prefill), "decode": _phase_data(plan.decode),
        "walls": list(plan.walls),
        "ttft_floor_s": plan.prefill.floor_s, "ttft_s": plan.prefill.expected_s,
        "batch_ttft_s": plan.batch_ttft_s,
        "tpot_floor_s": plan.decode.floor_s, "tpot_s": plan.decode.expected_s,
        "stall_s": plan.stall_s, "tokens_per_s": plan.tokens_per_s,
        "mbu": plan.mbu, "mfu": plan.mfu, "prefill_mfu": plan.prefill_mfu,
        "critical_batch": plan.critical_batch,
        "critical_batch_at_context": plan.critical_batch_at_context,
        "even_length": plan.even_length,
        "expectation": plan.expectation,
        "remedies": [_remedy_data(remedy) for remedy in remedies],
    }  # fmt: skip


def _phase_data(phase: Phase) -> dict[str, Any]:
    return {
        **{name: getattr(phase, name) for name in phase.__slots__},
        "operations": phase.operations,
        "intensity": phase.intensity,
        "attention_share": phase.attention_operations / phase.operations,
    }


def _remedy_data(remedy: Remedy) -> dict[str, Any]:
    plan = remedy.plan
    return {
        "name": remedy.name, "note": remedy.note,
        "kv_bytes_per_token": plan.costs.kv_bytes_per_token, "weight_bytes": plan.memory.weight_bytes,
        "largest_batch": plan.memory.largest_batch, "fits": "capacity" not in plan.walls,
        "ttft_s": plan.prefill.expected_s, "batch_ttft_s": plan.batch_ttft_s,
        "tpot_s": plan.decode.expected_s, "stall_s": plan.stall_s, "tokens_per_s": plan.tokens_per_s,
    }  # fmt: skip


def as_text(plan: Plan, remedies: list[Remedy]) -> str:
    """Tables for a terminal."""
    costs, memory, sheet, work = plan.costs, plan.memory, plan.sheet, plan.workload
    heads = sorted({layer.num_kv_heads for layer in costs.config.layers}, reverse=True)
    kind = "MQA" if heads == [1] else "MHA" if heads == [costs.config.num_heads] else "GQA"
    each = "" if costs.tensor_parallel == 1 else f" (each of {costs.tensor_parallel})"
    lines = [
        f"{plan.model} on {sheet.name}{each}: {work.batch} x ({work.context} + {work.output} tokens)",
        "",
        "model",
        _row("parameters", f"{costs.config.num_params / 1e9:.3f} G"),
        _row("weights", f"{costs.quantization or costs.dtype}, {_bytes(memory.weight_bytes)}"),
        _row(
            "heads", f"{costs.config.num_heads} query, {'/'.join(map(str, heads))} KV ({kind}) "
            f"in {costs.config.num_layers} layers{_sharing(costs.config)}",
        ),
        _row(
            "K/V of one token", f"{costs.kv_dtype}, {costs.kv_bytes_per_token / 1024:.6g} KiB "
            f"({max(map(costs.kv_bytes_of, costs.config.layers)) / 1024:.6g} KiB a layer)",
        ),
        _row("attention = layers", "never" if plan.even_length is None else f"at {plan.even_length} tokens"),
        "",
        "memory",
        _row("device", _bytes(memory.device_bytes)),
        _row("K/V of the batch", _bytes(memory.page_bytes * memory.pages_per_sequence * work.batch)),
        _row(
            "pool", f"{memory.num_pages} pages of {costs.page_size} tokens, {_bytes(memory.pool_bytes)} "
            f"({work.memory_utilization:g} of what is free, at most {memory.most_sequences} sequences)",
        ),
        *([_row("states", _bytes(memory.state_bytes))] if memory.state_bytes else []),
        _row("a step's peak beside", f"about {_bytes(memory.temporary_bytes)}"),
        _row("largest batch", f"{memory.largest_batch} sequences of {work.length} tokens"),
        "",
        f"{'speed':22}{'prefill of one':>18}{f'decode of {work.batch}':>18}",
        _phases(plan, "read at least", lambda p: _bytes(p.moved_bytes)),
        _phases(plan, "compute at least", lambda p: _operations(p.operations)),
        _phases(plan, "  of it attention", lambda p: f"{100 * p.attention_operations / p.operations:.1f} %"),
        _phases(plan, "operations a byte", lambda p: f"{p.intensity:.1f}"),
        _phases(plan, "wall", lambda p: p.wall),
        _phases(plan, "floor", lambda p: _seconds(p.floor_s)),
        _phases(plan, "expected", lambda p: _seconds(p.expected_s)),
        "",
        _row("ridge of the device", f"{sheet.ridge(costs.dtype):.0f} operations a byte"),
        _row("first tokens of all", f"{_seconds(plan.batch_ttft_s)} after they arrive together"),
        _row("longest stall", f"{_seconds(plan.stall_s)} between two tokens, beside the prompts of others"),
        _row("throughput", f"{plan.tokens_per_s:.4g} new tokens/s"),
        _row("decode uses", f"{100 * plan.mbu:.1f} % of the bandwidth, {100 * plan.mfu:.2f} % of the rate"),
        _row("critical batch", _critical(plan)),
        _row("expectation", plan.expectation),
        "",
        "what binds",
        *(f"  {number}. {WALLS[wall]}" for number, wall in enumerate(dict.fromkeys(plan.walls), 1)),
    ]  # fmt: skip
    if remedies:
        lines += ["", *_table(plan, remedies)]
    return "\n".join(lines)


def _critical(plan: Plan) -> str:
    at = plan.critical_batch_at_context
    with_context = "no batch at this context" if at is None else f"{at:.0f} at this context"
    return f"{plan.critical_batch:.0f} for the weights alone, {with_context}"


def _row(name: str, value: str) -> str:
    return f"  {name:22}{value}"


def _sharing(config: ModelConfig) -> str:
    """How many layers read the K/V of an earlier one, where any does."""
    count = len(config.sharing_layers)
    return f", {count} of which read the K/V of an earlier one" if count else ""


def _phases(plan: Plan, name: str, show: Any) -> str:
    return f"  {name:20}{show(plan.prefill):>18}{show(plan.decode):>18}"


def _table(plan: Plan, remedies: list[Remedy]) -> list[str]:
    head = ("remedy", "KV KiB/token", "batch", "TTFT", "TPOT", "stall", "tokens/s", "")
    rows = [head, _remedy_row("as it is", plan, "")]
    rows += [_remedy_row(remedy.name, remedy.plan, remedy.note) for remedy in remedies]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head) - 1)]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:-1], widths[1:], strict=True))]
        lines.append(("  ".join(cells) + f"  {row[-1]}").rstrip())
    return [*lines, "(batch: the largest that fits; * does not fit; TTFT of one prompt alone)"]


def _remedy_row(name: str, plan: Plan, note: str) -> tuple[str, ...]:
    star = "*" if "capacity" in plan.walls else ""
    return (
        name + star, f"{plan.costs.kv_bytes_per_token / 1024:.4g}", str(plan.memory.largest_batch),
        _seconds(plan.prefill.expected_s), _seconds(plan.decode.expected_s), _seconds(plan.stall_s),
        f"{plan.tokens_per_s:.4g}", note,
    )  # fmt: skip


def _bytes(count: float) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB / 10 else f"{count / 2**20:.2f} MiB"


def _operations(count: float) -> str:
    return f"{count / 1e12:.3g} TFLOP" if count >= 1e11 else f"{count / 1e9:.3g} GFLOP"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
