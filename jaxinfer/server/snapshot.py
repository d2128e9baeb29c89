"""What an engine is doing, as one JSON value: read on the engine's thread, put into shape on another.

    recorder = Recorder(engine)              while somebody watches it is the engine's trace, too
    seen = recorder.look()                   engine thread, between two steps: copies, nothing else
    value = shape(seen)                      anywhere: counts, percentiles, the page map

A look costs O(pages held or cached) of plain copying, and no more than MOST_LOOKED of them: of a larger pool
every so many-th is looked at. Nothing that a client sent is in it: no text, no token.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.core import FinishReason, Request, StepPlan
from jaxinfer.core import Sequence as EngineSequence
from jaxinfer.engine import Engine
from jaxinfer.engine.trace import Trace

MOST_CELLS = 2048
"""Cells of the page map; a larger pool has several pages to a cell."""
MOST_LOOKED = 16_384
"""Pages looked at one by one, of the cached ones and the held ones: a millisecond or two of the engine's."""
COLOURS = 12
"""Colours of requests; with more requests at a time some share one."""
FREE, CACHED, SHARED, FIRST_COLOUR = 0, 1, 2, 3
"""Codes of the page map: nobody's, known to the prefix cache alone, held by several, then the colours."""
MOST_REQUESTS = 24
"""Requests that are listed one by one."""
RECENT_STEPS = 96
WINDOW_S = 60.0
"""The percentiles are of the last minute, and of at most MOST_TIMES times."""
MOST_TIMES = 4096
RATE_S = 2.0
"""What is told per second is that of this long."""
RATES = ("generated_tokens", "computed_tokens", "moved_bytes", "operations")
"""What is told per second, of the statistics; 0 where they have it not."""


@dataclass(frozen=True, slots=True)
class Step:
    """One recorded step. `decode` rows of one token; `chunks` rows of a prompt, `chunk_tokens` together;
    `seconds` from its start, or the end of the step before, to its tokens."""

    number: int
    decode: int
    chunks: int
    chunk_tokens: int
    padding: int
    seconds: float
    bucket: str


class StepTrace(Trace):
    """Keeps the last steps and token times, and passes everything on to the trace that was there before."""

    def __init__(self, inner: Trace):
        self.inner = inner
        self.steps: deque[Step] = deque(maxlen=RECENT_STEPS)
        self.first_token: deque[tuple[float, float]] = deque(maxlen=MOST_TIMES)  # (when, seconds)
        self.inter_token: deque[tuple[float, float]] = deque(maxlen=MOST_TIMES)
        self._last_token: dict[int, float] = {}  # by uid, of sequences that go on
        self._last_step = float("-inf")

    def arrived(self, request: Request, now: float) -> None:
        self.inner.arrived(request, now)

    def step(
        self, plan: StepPlan, bucket: str, padding: int, gauges: dict[str, int],
        dispatched: float, waited: float, done: float, told: float,
    ) -> None:  # fmt: skip
        prompt = [piece.count for piece in plan.slices if piece.start < piece.num_prompt]
        seconds = done - max(dispatched, self._last_step)
        self._last_step = done
        decode = len(plan.slices) - len(prompt)
        self.steps.append(Step(plan.step, decode, len(prompt), sum(prompt), padding, seconds, bucket))
        self.inner.step(plan, bucket, padding, gauges, dispatched, waited, done, told)

    def token(self, sequence: EngineSequence, now: float) -> None:
        before = self._last_token.pop(sequence.uid, None)
        if before is not None:
            self.inter_token.append((now, now - before))
        elif sequence.num_output == 1:
            self.first_token.append((now, now - sequence.arrived_at))
        if sequence.finish_reason is None:
            self._last_token[sequence.uid] = now
        self.inner.token(sequence, now)

    def ended(self, sequence: EngineSequence, reason: FinishReason, now: float) -> None:
        if reason in ("abort", "error"):  # of the others, the last token is told after this
            self._last_token.pop(sequence.uid, None)
        self.inner.ended(sequence, reason, now)

    def close(self) -> None:
        self.inner.close()


@dataclass(frozen=True, slots=True)
class Holder:
    """A running request's part of the pool: the `pages` of each of its sequences (`Seen.every`)."""

    request_id: str
    colour: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    pages: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Seen:
    """What one look copied. `stats` is Engine.stats(); `now` the engine's clock. Of the cached pages, those
    that `every` divides are here, and of a sequence's every such page in its order."""

    now: float
    every: int
    num_pages: int
    page_size: int
    stats: dict[str, Any]
    cached: tuple[int, ...]
    holders: tuple[Holder, ...]
    steps: tuple[Step, ...]
    first_token: tuple[tuple[float, float], ...]
    inter_token: tuple[tuple[float, float], ...]
    per_second: dict[str, float]


class Recorder:
    """Looks at one engine. All of it belongs to the engine's thread."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._trace: StepTrace | None = None
        self._colours: dict[str, int] = {}  # by request id
        self._counts: deque[tuple[float, list[float]]] = deque()  # (when, of each of RATES)

    def detach(self) -> None:
        """Keep nothing, and cost nothing, until the next look."""
        if self._trace is not None and self._engine.trace is self._trace:
            self._engine.trace = self._trace.inner
        self._trace = None
        self._counts.clear()

    def look(self) -> Seen:
        """Copy what is to be shown, between two steps. From the first look on, steps and times are kept."""
        engine, trace = self._engine, self._trace
        if trace is None:
            trace = self._trace = engine.trace = StepTrace(engine.trace)
        now, stats = engine.clock(), engine.stats()
        pool = engine.scheduler.pool
        every = -(-engine.limits.num_pages // MOST_LOOKED)
        return Seen(
            now=now,
            every=every,
            num_pages=engine.limits.num_pages,
            page_size=engine.limits.page_size,
            stats=stats,
            cached=pool.cached_among(range(every, pool.num_pages, every)),
            holders=self._holders(engine.scheduler.running, every),
            steps=tuple(trace.steps),
            first_token=tuple(trace.first_token),
            inter_token=tuple(trace.inter_token),
            per_second=self._rates(now, stats),
        )

    def _rates(self, now: float, stats: dict[str, Any]) -> dict[str, float]:
        counts = self._counts
        counts.append((now, [stats.get(name, 0) for name in RATES]))
        while len(counts) > 2 and counts[1][0] <= now - RATE_S:
            counts.popleft()
        (then, before), (_, after) = counts[0], counts[-1]
        seconds = now - then
        return {
            name: (new - old) / seconds if seconds > 0 else 0.0
            for name, old, new in zip(RATES, before, after, strict=True)
        }

    def _holders(self, running: Iterable[EngineSequence], every: int) -> tuple[Holder, ...]:
        groups: dict[str, list[EngineSequence]] = {}
        for sequence in running:
            groups.setdefault(sequence.request.request_id, []).append(sequence)
        self._colours = {key: colour for key, colour in self._colours.items() if key in groups}
        taken = set(self._colours.values())
        unused = itertools.chain(
            (c for c in range(COLOURS) if c not in taken), itertools.cycle(range(COLOURS))
        )
        for key in groups:
            if key not in self._colours:
                self._colours[key] = next(unused)
        return tuple(
            Holder(
                request_id=key,
                colour=self._colours[key],
                prompt_tokens=group[0].num_prompt,
                output_tokens=sum(s.num_output for s in group),
                cached_tokens=group[0].cached_tokens,
                pages=tuple(tuple(p for p in s.pages[::every] if p) for s in group),
            )
            for key, group in groups.items()
        )


# --------------------------------------------------------------------------------------------- shape


def shape(seen: Seen) -> dict[str, Any]:
    """The JSON value of one look; times in seconds, memory in bytes.

    `pages.runs` is the page map from page 1 on, as [code, tenths, cells]: a run of `cells` cells of
    `pages.per_cell` pages each, of which so many tenths are not free (at least 1 where any is), and whose
    most frequent use is `code`. In a pool of which not every page was looked at, what is not of `stats` is
    told of those that were, times `every`. Percentiles are None where nothing was measured.
    """
    stats = seen.stats
    prefix = stats["prefix_cache"]
    codes, every = page_codes(seen), seen.every
    _, counts = _held(seen)
    per_cell = -(-len(codes) // MOST_CELLS)
    return {
        "pages": {
            "total": stats["pages_total"],
            "free": stats["pages_free"],
            "cached": stats["pages_cached"],
            "live": stats["pages_live"],
            "shared": every * int((counts > 1).sum()),
            "most_holders": int(counts.max(initial=0)),
            "page_size": seen.page_size,
            "per_cell": per_cell * every,
            "runs": runs(codes, per_cell),
        },
        "requests": [_request(holder, every) for holder in seen.holders[:MOST_REQUESTS]],
        "more_requests": max(0, len(seen.holders) - MOST_REQUESTS),
        "running": stats["running"],
        "waiting": stats["waiting"],
        "finished": stats["finished"],
        "steps": [
            [s.number, s.decode, s.chunks, s.chunk_tokens, s.padding, round(s.seconds, 6), s.bucket]
            for s in seen.steps
        ],
        "steps_total": stats["steps"],
        "failed_steps": stats["failed_steps"],
        "latency": {
            "window_s": WINDOW_S,
            "first_token": percentiles(seen.first_token, seen.now),
            "inter_token": percentiles(seen.inter_token, seen.now),
        },
        "generated_per_s": round(seen.per_second["generated_tokens"], 3),
        "computed_per_s": round(seen.per_second["computed_tokens"], 3),
        "prompt_tokens": stats["prompt_tokens"],
        "generated_tokens": stats["generated_tokens"],
        "prefix": {"queries": prefix["queries"], "hits": prefix["hits"]} if prefix else None,
        "preemptions": stats["preemptions"],
        "memory": {
            "kv_bytes": stats.get("kv_bytes"),
            "param_bytes": stats.get("param_bytes"),
            "rss_bytes": resident_bytes(),
        },
        "roofline": {
            "mbu": _share(seen.per_second["moved_bytes"], stats.get("bandwidth")),
            "mfu": _share(seen.per_second["operations"], stats.get("matmul_rate")),
        },
    }


def page_codes(seen: Seen) -> np.ndarray:
    """uint8, (num_pages - 1,): the code of each page from page 1 on; or, of a pool of which not every page
    was looked at, the code of each `every` pages from page `every` on, of which one was."""
    every = seen.every
    codes = np.zeros(-(-seen.num_pages // every), np.uint8)
    codes[np.asarray(seen.cached, np.int64) // every] = CACHED
    for holder in seen.holders:
        for pages in holder.pages:
            codes[np.asarray(pages, np.int64) // every] = FIRST_COLOUR + holder.colour
    held, counts = _held(seen)
    codes[held[counts > 1] // every] = SHARED
    return codes[1:]


def _held(seen: Seen) -> tuple[np.ndarray, np.ndarray]:
    """The pages that sequences hold, and how many of them each."""
    held = [page for holder in seen.holders for pages in holder.pages for page in pages]
    ids, counts = np.unique(np.asarray(held, np.int64), return_counts=True)
    return ids, counts


def runs(codes: np.ndarray, per_cell: int) -> list[list[int]]:
    """[code, tenths, cells] as `shape` tells of them."""
    cells = -(-len(codes) // per_cell)
    kinds = FIRST_COLOUR + COLOURS
    place = np.arange(len(codes)) // per_cell
    counts = np.bincount(place * kinds + codes, minlength=cells * kinds).reshape(cells, kinds)
    used = counts[:, 1:].sum(axis=1)
    tenths = -(-10 * used // counts.sum(axis=1))
    code = np.where(used > 0, counts[:, 1:].argmax(axis=1) + 1, FREE)
    ends = np.flatnonzero((np.diff(code) != 0) | (np.diff(tenths) != 0)) + 1
    starts = np.concatenate([[0], ends])
    lengths = np.diff(np.concatenate([starts, [cells]]))
    return [[int(code[start]), int(tenths[start]), int(n)] for start, n in zip(starts, lengths, strict=True)]


def percentiles(times: Sequence[tuple[float, float]], now: float) -> dict[str, Any]:
    """count, and p50, p95, p99: of so many times in the window, each the least that is not exceeded by
    that many percent of them."""
    ordered = sorted(seconds for when, seconds in times if when >= now - WINDOW_S)
    count = len(ordered)
    ranks = {"p50": 50, "p95": 95, "p99": 99}
    return {
        "count": count,
        **{
            name: round(ordered[-(-percent * count // 100) - 1], 6) if count else None
            for name, percent in ranks.items()
        },
    }


def resident_bytes() -> int | None:
    """Memory of this process; None where the system does not tell it as Linux does."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return None


def _request(holder: Holder, every: int) -> dict[str, Any]:
    return {
        "id": holder.request_id[:8],
        "code": FIRST_COLOUR + holder.colour,
        "sequences": len(holder.pages),
        "prompt_tokens": holder.prompt_tokens,
        "output_tokens": holder.output_tokens,
        "cached_tokens": holder.cached_tokens,
        "pages": every * len({page for pages in holder.pages for page in pages}),
    }


def _share(per_second: float, most: Any) -> float | None:
    """The part of what the machine could; None where the engine's statistics do not say that."""
    return round(per_second / most, 4) if most else None
