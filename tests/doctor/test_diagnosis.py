"""Readings of /metrics in which one wall stands, and what is said of each."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.core import ConfigError
from jaxinfer.doctor.diagnosis import _quantile, diagnose, read
from jaxinfer.engine.metrics import FIRST_TOKEN_BOUNDS, Histogram, Histograms
from jaxinfer.reading import Reading
from jaxinfer.server.metrics import Metrics

# A second of a server with nothing wrong: its limits are 10 GB/s and 100 GFLOP/s.
CALM = {
    "steps": 20, "failed_steps": 0, "programs": 5, "compile_s": 1.0, "tokens_run": 160, "tokens_padded": 200,
    "moved_bytes": 1e9, "operations": 1e9, "generated_tokens": 160, "prompt_tokens": 0, "preemptions": 0,
    "engine_s": 0.01, "dispatch_s": 0.01, "wait_s": 0.9,
}  # fmt: skip
STEADY = {
    "bandwidth": 10e9, "matmul_rate": 100e9, "running": 8, "waiting": 0, "pages_total": 100, "pages_free": 60,
    "pages_cached": 10, "pages_live": 30, "prefix_cache": {}, "finished": {}, "compiles_after_warmup": 0,
}  # fmt: skip


def reading(times: int, health: str = "ok", **changes: float) -> Reading:
    """What a server says after `times` seconds like CALM with changes."""
    rates = {name: changes.pop(name, value) for name, value in CALM.items()}
    stats = {**STEADY, **changes, **{name: times * rate for name, rate in rates.items()}}
    engine = SimpleNamespace(stats=lambda: stats, histograms=Histograms(512))
    worker = SimpleNamespace(
        health=lambda: {"status": health, "sequences": 8, "capacity": 100, "step_s": 0.0}
    )
    return Reading.parse(bytes(Metrics(engine, worker, "tiny").handle().body).decode())


def wall(**changes: float) -> str:
    health = str(changes.pop("health", "ok"))
    return diagnose(reading(10, **changes), reading(15, health, **changes), 5.0).wall


@pytest.mark.parametrize(("expected", "changes"), [
    ("latency", {}),
    ("bandwidth", {"moved_bytes": 8e9}),
    ("compute", {"operations": 70e9}),
    ("compute", {"operations": 90e9, "moved_bytes": 6e9}),
    ("bandwidth", {"operations": 60e9, "moved_bytes": 9e9}),
    ("host", {"engine_s": 0.5, "dispatch_s": 0.3, "wait_s": 0.2}),
    ("capacity", {"preemptions": 1}),
    ("capacity", {"waiting": 3, "pages_free": 2, "pages_cached": 0, "pages_live": 98}),
    ("seats", {"waiting": 3}),
    ("seats", {"waiting": 3, "max_num_seqs": 8, "max_num_batched_tokens": 64}),
    ("budget", {"waiting": 3, "max_num_seqs": 32, "max_num_batched_tokens": 64}),
    ("padding", {"tokens_padded": 500}),
    ("broken", {"failed_steps": 1}),
    ("broken", {"health": "unhealthy"}),
    ("compiling", {"programs": 6}),
    ("idle", {"steps": 0, "moved_bytes": 0, "operations": 0, "tokens_run": 0, "tokens_padded": 0}),
])  # fmt: skip
def test_one_thing_wrong_is_what_is_named(expected: str, changes: dict[str, float]) -> None:
    base = {"programs": 0, **changes}
    assert wall(**base) == expected


def test_figures_are_of_the_time_between_the_readings() -> None:
    found = diagnose(reading(10), reading(14), 4.0)
    assert found.figures["steps_per_s"] == 20
    assert found.figures["mbu"] == pytest.approx(0.1)
    assert found.figures["mfu"] == pytest.approx(0.01)
    assert found.figures["padding"] == pytest.approx(0.2)
    assert found.figures["ttft_p95_s"] is None, "nobody had a first token"
    assert "mbu: 0.1" in found.as_text()


def test_several_things_wrong_are_all_told() -> None:
    changes = {"programs": 0, "waiting": 3, "moved_bytes": 9e9, "tokens_padded": 900}
    found = diagnose(reading(1, **changes), reading(2, **changes), 1.0)
    assert found.wall == "seats"
    assert [words in " ".join(found.advice) for words in ("--max-num-seqs", "bandwidth", "padding")] == [
        True
    ] * 3


def test_a_server_that_began_anew_is_not_counted_backwards() -> None:
    """It was said to be idle: what it had done since counted as nothing."""
    found = diagnose(reading(10), reading(1), 5.0)
    assert all(value is None or value >= 0 for value in found.figures.values())
    assert found.figures["steps_per_s"] == 20 / 5
    assert found.wall == "broken"
    assert "started anew" in found.advice[0]


def test_a_moment_of_waiting_is_no_wall() -> None:
    changes = {"programs": 0}
    assert diagnose(reading(1, waiting=5, **changes), reading(2, **changes), 1.0).wall == "latency"


@given(st.lists(st.floats(0.0005, 100.0), min_size=1, max_size=200), st.sampled_from([0.5, 0.95]))
def test_a_quantile_lies_in_the_bucket_of_the_true_one(values: list[float], share: float) -> None:
    histogram = Histogram(FIRST_TOKEN_BOUNDS)
    for value in values:
        histogram.add(value)
    counts, _ = histogram.snapshot()
    buckets = list(zip([*FIRST_TOKEN_BOUNDS, float("inf")], map(float, counts), strict=True))
    found = _quantile([], buckets, share)
    true = float(np.quantile(values, share, method="inverted_cdf"))
    edges = [0.0, *FIRST_TOKEN_BOUNDS]
    low = max(edge for edge in edges if edge < true)
    high = min((edge for edge in edges if edge >= true), default=edges[-1])
    assert found is not None
    assert low - 1e-9 <= found <= high + 1e-9


def test_what_is_no_server_of_ours_is_said_in_one_line() -> None:
    with pytest.raises(ValueError, match="not the metrics of a jaxinfer server"):
        Reading.parse("up 1\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        read("http://127.0.0.1:9", timeout_s=1)
    with pytest.raises(ConfigError, match="begins with http"):
        read("file:///etc/passwd")
