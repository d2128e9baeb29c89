"""Where a device's memory goes: weights, the pool of KV pages, and what a step needs beside them.

The same rule as the engine's own (`jaxinfer.runtime.loading`): the pool takes `memory_utilization` of what is
free once the weights are there, and no more pages than `max_num_seqs` sequences of `max_model_len` can use.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxinfer.core import Limits
from jaxinfer.planner.costs import BYTES, ModelCosts

SAMPLER_COPIES = 7
"""Arrays [R, V] of float32 that the sampler holds at its peak (XLA's plan of it, on CPU; 6 on GPU)."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on one device. `largest_batch` is out of the `most_sequences` that may run together.
    `temporary_bytes` is an estimate of a step's peak beside the arrays that stay; `state_bytes` those of all
    sequences that may run together, in layers of linear attention."""

    device_bytes: int
    weight_bytes: int
    pool_bytes: int
    temporary_bytes: int
    page_bytes: int
    num_pages: int
    pages_per_sequence: int
    largest_batch: int
    most_sequences: int
    state_bytes: int = 0

    @property
    def fits(self) -> bool:
        """Whether one sequence of the stated length can be served at all."""
        return self.largest_batch >= 1 and self.used_bytes <= self.device_bytes

    @property
    def used_bytes(self) -> int:
        return self.weight_bytes + self.pool_bytes + self.state_bytes + self.temporary_bytes


def plan_memory(
    costs: ModelCosts,
    device_bytes: int,
    *,
    max_model_len: int,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 2048,
    memory_utilization: float = 0.9,
    pool_limit_bytes: int | None = None,
) -> MemoryPlan:
    """Pages, and the most sequences of `max_model_len` tokens that fit together.

    `pool_limit_bytes`: the most that a pool takes whatever is free (on CPU the engine has such a limit), but
    for the room of one sequence, which the engine always leaves.
    """
    weights, page, config = round(costs.weight_bytes), round(costs.page_bytes), costs.config
    limits = Limits(
        num_pages=2, page_size=costs.page_size, max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens, max_model_len=max_model_len,
        vocab_size=config.vocab_size, window=config.window, sinks=config.sinks,
    )  # fmt: skip
    each = limits.pages_per_sequence
    states = round(costs.state_bytes * (max_num_seqs + 1)) if costs.state_bytes else 0
    room = int(max(0, device_bytes - weights - states) * memory_utilization)
    if pool_limit_bytes is not None:
        room = min(room, max(pool_limit_bytes, (each + 1) * page))
    pages = max_num_seqs * each + 1  # the most that can be of use
    if page:
        pages = min(room // page, pages)
    return MemoryPlan(
        device_bytes=device_bytes, weight_bytes=weights, pool_bytes=pages * page,
        temporary_bytes=temporary_bytes(costs, max_num_batched_tokens + max_num_seqs, max_num_seqs),
        page_bytes=page, num_pages=pages, pages_per_sequence=each,
        largest_batch=max(0, pages - 1) // each, most_sequences=max_num_seqs, state_bytes=states,
    )  # fmt: skip


def logits_bytes(costs: ModelCosts, rows: int) -> int:
    """Of the logits of `rows` rows, float32, and what the sampler makes of them."""
    return SAMPLER_COPIES * rows * -(-costs.config.vocab_size // costs.tensor_parallel) * 4


def activation_bytes(costs: ModelCosts, places: int) -> int:
    """Of the forward pass of `places` tokens: residual, norm, q k v, attention's output, gate, up, down. An
    estimate: what XLA fuses or keeps differs by device (on CPU attention's slabs of keys come on top)."""
    config, n = costs.config, costs.tensor_parallel
    q = config.num_heads // n * config.head_dim
    kv = max(layer.num_kv_heads for layer in config.layers) * config.head_dim
    numbers = 4 * config.hidden_size + 2 * q + 2 * kv + 3 * config.intermediate_size // n
    return round(places * numbers * BYTES[costs.dtype])


def temporary_bytes(costs: ModelCosts, places: int, rows: int) -> int:
    """The forward pass and the sampler are two programs, one after the other: the larger counts."""
    return max(activation_bytes(costs, places), logits_bytes(costs, rows))
