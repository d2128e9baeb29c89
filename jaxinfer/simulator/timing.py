"""What a step takes: its bucket, its work and its time, for a plan of slices and for a group beside them."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxinfer.config import StepShape, cheapest_shape, sampled_rows
from jaxinfer.core import StepPlan
from jaxinfer.planner import DeviceSheet, StepTime, StepWork, Wall, binding_wall
from jaxinfer.planner.costs import Span
from jaxinfer.simulator.cruise import Window, seen
from jaxinfer.simulator.scheduler import Step


@dataclass(slots=True)
class Totals:
    """Sums over all steps. Bytes and operations are of one device, and of real tokens alone; `places` counts
    tokens with the padding of buckets, `decode_steps` the steps without a chunk. `busy_s` is all seconds,
    those after it are what went to which part (`StepParts`; `host_s` passes beside the others), and `walls_s`
    the time of the steps that each wall bound, as `planner.plan` names them ({} without a sheet)."""

    steps: int = 0
    decode_steps: int = 0
    tokens: int = 0
    places: int = 0
    moved_bytes: float = 0.0
    operations: float = 0.0
    busy_s: float = 0.0
    linear_s: float = 0.0
    decode_attention_s: float = 0.0
    chunk_attention_s: float = 0.0
    exchange_s: float = 0.0
    host_s: float = 0.0
    walls_s: dict[Wall, float] = field(default_factory=dict)


class StepTimer:
    """Seconds of steps by a `StepTime`, in the buckets that would run.

    asynchronous: the host prepares a step while the device runs the one before. Then a step takes the longer
    of the two, else both one after the other. sheet: the device, to say which wall binds.
    """

    def __init__(
        self,
        model: StepTime,
        ladder: tuple[StepShape, ...],
        *,
        asynchronous: bool = True,
        sheet: DeviceSheet | None = None,
    ):
        self.model, self.ladder, self.asynchronous = model, ladder, asynchronous
        self._ridge = None if sheet is None else sheet.ridge(model.costs.dtype)
        self.totals = Totals()
        rates = model.costs.key_rates
        self.windows: tuple[Window, ...] = tuple(most for most, _, _ in rates)
        self._rates = [(moved, operations) for _, moved, operations in rates]
        # By one-token slices, chunks, their tokens and rows that sample: places, and places of the head.
        self._buckets: dict[tuple[int, int, int, int], tuple[int, int]] = {}

    def seconds(self, step: Step) -> float:
        """Of a step of the simulation; it is added to the totals."""
        return self._count(self.work(step))

    def seconds_of(self, plan: StepPlan) -> float:
        """Of a step of an engine; it is added to the totals."""
        return self._count(self.work(Step(plan, 0, 0, (0,) * len(self.windows), None)))

    def work(self, step: Step) -> StepWork:
        """What a step asks of one device, with the padding of its bucket."""
        ones = emitting = step.rows
        chunk_tokens = 0
        keys = list(step.keys)
        chunks: list[Span] = []
        for piece in step.plan.slices:
            emitting += piece.emit + len(piece.targets)
            if piece.count > 1:
                chunks.append((piece.start, piece.count))
                chunk_tokens += piece.count
                continue
            ones += 1
            for view, window in enumerate(self.windows):
                keys[view] += seen(piece.start + 1, window)
        moved, operations = self.model.costs.linear_attention(ones, ones)
        for (key_bytes, key_operations), count in zip(self._rates, keys, strict=True):
            moved += key_bytes * count
            operations += key_operations * count
        chunk_bytes, chunk_operations = self.model.costs.attention(chunks) if chunks else (0.0, 0.0)
        key = ones, len(chunks), chunk_tokens, emitting
        bucket = self._buckets.get(key)
        if bucket is None:
            shape = cheapest_shape(self.ladder, ones, len(chunks), chunk_tokens)
            bucket = self._buckets[key] = shape.tokens, sampled_rows(self.ladder, emitting)
        return StepWork(
            tokens=ones + chunk_tokens,
            rows=emitting,
            places=bucket[0],
            head_places=bucket[1],
            decode_rows=ones,
            decode_kv_bytes=moved,
            decode_operations=operations,
            chunk_kv_bytes=chunk_bytes,
            chunk_operations=chunk_operations,
        )

    def _count(self, work: StepWork) -> float:
        parts, totals, costs = self.model.parts(work), self.totals, self.model.costs
        device, host = parts.device, parts.host
        seconds = max(device, host) if self.asynchronous else device + host
        moved, operations = costs.moved_bytes(work), costs.operations(work)
        totals.steps += 1
        totals.decode_steps += work.decode_rows == work.tokens
        totals.tokens += work.tokens
        totals.places += work.places
        totals.moved_bytes += moved
        totals.operations += operations
        totals.busy_s += seconds
        totals.linear_s += parts.linear
        totals.decode_attention_s += parts.decode_attention
        totals.chunk_attention_s += parts.chunk_attention
        totals.exchange_s += parts.exchange
        totals.host_s += host
        if self._ridge is not None:
            wall = binding_wall(parts, moved, operations, self._ridge)
            totals.walls_s[wall] = totals.walls_s.get(wall, 0.0) + seconds
        return seconds
