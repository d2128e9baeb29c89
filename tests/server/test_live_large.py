"""The live page over a large pool: it must not take the engine's time."""

from __future__ import annotations

import dataclasses
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from cpu_time import cpu_time
from fake_runner import FakeRunner
from test_live import LIMITS, application, request

from jaxinfer.engine import Engine
from jaxinfer.server.snapshot import CACHED, MOST_LOOKED, SHARED, Recorder, shape


def test_a_look_at_a_very_large_pool_takes_little_of_the_engines_time():
    """A million pages, half of them cached and a quarter held: only some are looked at, one by one."""
    limits = dataclasses.replace(LIMITS, num_pages=1_000_001, max_model_len=16_000_000)
    engine = Engine(FakeRunner(LIMITS), limits)  # its runner is not asked for anything
    pool = engine.scheduler.pool
    pool.free(keep_all(pool, 500_000))
    for name in ("a", "b", "c", "d"):
        engine.add(request(name, [1] * 9))
    held = [pool.allocate(62_500) for _ in range(3)]
    for sequence, pages in zip(engine.scheduler.waiting, [*held, held[0]], strict=True):
        sequence.pages = pages
        engine.scheduler.running.append(sequence)
    pool.share(held[0])
    recorder = Recorder(engine)
    times = []
    for _ in range(10):
        with cpu_time() as spent:
            seen = recorder.look()
            times.append(spent())
    assert len(seen.cached) <= MOST_LOOKED
    assert sum(len(p) for h in seen.holders for p in h.pages) <= MOST_LOOKED + 4
    assert min(times) < 0.02, times  # copying all of it took 50 ms and more
    value = shape(seen)
    cells = sum(n for _, _, n in value["pages"]["runs"])
    assert abs(cells * value["pages"]["per_cell"] - 1_000_000) < 100 * value["pages"]["per_cell"]
    told = Counter()
    for code, tenths, n in value["pages"]["runs"]:
        told[code] += tenths / 10 * n / cells
    assert told[CACHED] == pytest.approx(0.5, abs=0.02)
    assert told[SHARED] == pytest.approx(0.0625, abs=0.01)
    assert sum(told.values()) == pytest.approx(0.6875, abs=0.03)
    assert value["pages"]["shared"] == pytest.approx(62_500, rel=0.02)
    assert value["pages"]["most_holders"] == 2
    assert [r["pages"] for r in value["requests"]] == [pytest.approx(62_500, rel=0.02)] * 4


def keep_all(pool: Any, count: int) -> list[int]:
    """Pages of which the cache says, when they are freed, that it knows them."""
    pool._cache = SimpleNamespace(retain=lambda pages: pages, evict=lambda count: None)
    return pool.allocate(count)


def test_looks_are_further_apart_where_they_take_long():
    feed = application().state.live
    assert feed.wait_s == 0.25
    feed._took.extend([0.05, 0.01, 0.02])
    assert feed.wait_s == pytest.approx(1.0)
    feed._took.extend([0.001] * 4)
    assert feed.wait_s == 0.25
