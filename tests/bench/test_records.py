"""Percentiles that agree with the raw log, objectives, and failures that never pass for quick answers."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from served_answers import record

from jaxinfer.bench import Log, Objective, RequestRecord, Summary, read_log
from jaxinfer.bench.records import FOR_EVER_S, joined
from jaxinfer.core import ConfigError


@st.composite
def records(draw: st.DrawFn) -> list[RequestRecord]:
    """Requests of all kinds of ends."""
    made = []
    for index in range(draw(st.integers(1, 30))):
        arrived = draw(st.floats(0, 100))
        at, times = arrived + draw(st.floats(0, 5)), []
        for gap in draw(st.lists(st.floats(0, 2), max_size=8)):
            at += gap
            times.append(at)
        status = draw(st.sampled_from(["ok", "ok", "ok", "refused", "failed"]))
        made.append(
            record(
                index, arrived, tuple(times), ended_s=at + draw(st.floats(0, 1)), status=status,
                error=None if status == "ok" else "no", cached_tokens=draw(st.integers(0, 9)),
                finish_reason="length" if status == "ok" else None, sent_s=arrived + draw(st.floats(0, 1)),
            )
        )  # fmt: skip
    return made


@given(records())
def test_percentiles_are_numpys_of_the_raw_log(made: list[RequestRecord]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "log.jsonl"
        with Log(path) as log:
            log.add(made)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert read_log(path) == [made]
    answered = [line for line in lines if line["status"] == "ok"]
    raw = {
        "ttft": [line["token_s"][0] - line["arrived_s"] for line in answered if line["token_s"]],
        "tpot": [
            (line["token_s"][-1] - line["token_s"][0]) / (len(line["token_s"]) - 1)
            for line in answered
            if len(line["token_s"]) > 1
        ],
        "gap": [gap for line in answered for gap in np.diff(line["token_s"])],
        "e2e": [line["ended_s"] - line["arrived_s"] for line in answered],
    }
    summary = Summary.of(made)
    for name, values in raw.items():
        spread = getattr(summary, name)
        assert spread.count == len(values)
        if values:
            expected = np.percentile(values, [50, 95, 99])
            assert [spread.p50, spread.p95, spread.p99] == pytest.approx(
                expected.tolist(), rel=1e-12, abs=1e-12
            )
            assert spread.mean == pytest.approx(np.mean(values))
            assert spread.high == pytest.approx(np.max(values))
        else:
            assert spread.p50 is None
    assert summary.ok + summary.refused + summary.failed == len(made)
    assert summary.output_tokens == sum(len(line["token_s"]) for line in answered)
    duration = max(line["ended_s"] for line in lines) - min(line["arrived_s"] for line in lines)
    assert summary.duration_s == pytest.approx(duration)
    json.dumps(summary.as_dict(), allow_nan=False)


@given(records(), st.sampled_from(["ttft_p95=1s", "tpot_p50=500ms,e2e_p99=3s", "gap_max=1s", "ttft_mean=2s"]))
def test_failures_are_never_good_and_goodput_never_above_throughput(
    made: list[RequestRecord], text: str
) -> None:
    objective = Objective.parse(text)
    summary = Summary.of(made, objective)
    assert summary.goodput is not None
    assert summary.goodput <= summary.requests_per_s
    worse = [*made, record(99, 0.0, (), status="failed", error="no", ended_s=1e-9)]
    before, after = objective.seen(made), objective.seen(worse)
    assert all(after[name] >= before[name] - 1e-9 * abs(before[name]) for name in before)


def test_latency_counts_from_the_intended_arrival() -> None:
    """A driver that was 3 s late makes its request wait 3 s (coordinated omission)."""
    late = record(0, 1.0, (4.5, 5.0), sent_s=4.0)
    assert late.ttft_s == 3.5
    assert late.e2e_s == 4.0
    summary = Summary.of([late])
    assert (summary.ttft.p50, summary.late.p50) == (3.5, 3.0)


def test_refused_requests_break_an_objective_and_leave_the_percentiles_alone() -> None:
    answered = [record(i, float(i), (i + 0.1, i + 0.2)) for i in range(90)]
    refused = [record(90 + i, 0.0, (), status="refused", error="429", ended_s=0.001) for i in range(10)]
    objective = Objective.parse("ttft_p95=500ms")
    assert objective.broken(answered) == []
    summary = Summary.of([*answered, *refused], objective)
    assert summary.ttft.p99 == pytest.approx(0.1)
    assert (summary.ok, summary.refused, summary.errors) == (90, 10, {"429": 10})
    assert objective.broken([*answered, *refused])[0].startswith("ttft_p95 (not answered, or not measured)")
    assert objective.seen([*answered, *refused])["ttft_p95"] == FOR_EVER_S
    assert (
        objective.broken([*answered, *refused[:1]]) == []
    )  # 1 of 91: the P95 is of those that were answered
    assert Objective().broken([*answered, *refused]) == ["10 of 100 requests were not answered"]


def test_what_nobody_measured_is_no_promise_kept() -> None:
    """Answers of one token have no tpot and no gap, and both terms held."""
    singles = [record(i, float(i), (i + 0.1,)) for i in range(5)]
    objective = Objective.parse("ttft_p95=1s,tpot_p95=1us,gap_max=1us")
    assert [term.split()[0] for term in objective.broken(singles)] == ["tpot_p95", "gap_max"]
    assert objective.margin(singles) > 1


@pytest.mark.parametrize(
    "change",
    [
        {"arrived_s": float("nan")}, {"arrived_s": "0"}, {"arrived_s": -1.0}, {"ended_s": -3.0}, {"run": -1},
        {"run": 1}, {"run": 10**9}, {"run": True}, {"prompt_tokens": -5}, {"prompt_tokens": 10**12},
        {"token_s": [2.0, 1.0]}, {"token_s": "ab"}, {"status": "fine"}, {"index": None},
    ],
)  # fmt: skip
def test_a_log_that_no_run_can_have_written_is_refused_by_its_line(tmp_path: Path, change: dict) -> None:
    path = tmp_path / "log"
    with Log(path) as log:
        log.add([record(0, 0.0, (1.0, 1.5), ended_s=2.0)])
    line = json.loads(path.read_text())
    path.write_text(json.dumps(line | change) + "\n")
    with pytest.raises(ConfigError, match="log:1 is no line of a log"):
        read_log(path)
    path.write_bytes(b"\xff\xfe{}\n")
    with pytest.raises(ConfigError, match="log:1 is no line of a log"):
        read_log(path)


def test_a_request_meets_an_objective_by_itself() -> None:
    objective = Objective.parse("ttft_p50=100ms, ttft_p99=1s, tpot_p95=200ms, gap_max=300ms")
    assert objective.met_by(record(tokens=(0.9, 1.0, 1.1)))
    assert not objective.met_by(record(tokens=(1.1, 1.2)))
    assert not objective.met_by(record(tokens=(0.5, 1.0)))
    assert not objective.met_by(record(tokens=(0.5, 0.55, 0.9, 0.95)))
    assert objective.met_by(record(tokens=(0.5,)))
    assert not objective.met_by(record(tokens=(0.5,), status="failed"))


def test_an_objective_says_how_near_it_is() -> None:
    objective = Objective.parse("ttft_max=2s,tpot_max=1s")
    assert objective.margin([record(tokens=(1.0, 1.9))]) == pytest.approx(0.9)
    assert objective.margin([record(tokens=(4.0, 4.1))]) == pytest.approx(2.0)
    assert Objective().margin([record()]) == 0.0


def test_objectives_are_read_with_their_units() -> None:
    terms = Objective.parse("ttft_p95=500ms,tpot_p99.9=.5s,itl_p50=900us,e2e_mean=12s").terms
    assert [(t.name, t.limit_s) for t in terms] == [
        ("ttft_p95", 0.5), ("tpot_p99.9", 0.5), ("gap_p50", pytest.approx(9e-4)), ("e2e_mean", 12.0),
    ]  # fmt: skip
    assert str(Objective.parse("ttft_p95=0.5s, e2e_max=90s")) == "ttft_p95=500ms,e2e_max=90s"
    assert Objective.parse("").terms == ()


@pytest.mark.parametrize(
    "text",
    [
        "ttft=500ms", "ttft_p95", "ttft_p95=500", "ttft_p95=0ms", "ttft_p101=5ms", "ttft_p95=-5ms",
        "foo_p95=5ms", "ttft_p95=5m", "ttft_p95=1s,ttft_p95=2s", "gap_p9=1s,itl_p9=1s",
        "ttft_p95=5ms;tpot_p95=5ms",
    ],
)  # fmt: skip
def test_objectives_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"SLO|percentile"):
        Objective.parse(text)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ttft", "tpot", "gap", "e2e"]),
            st.sampled_from(["p50", "p95", "p99", "mean", "max"]),
            st.integers(1, 9999),
        ),
        unique_by=lambda term: term[:2],
    )
)  # fmt: skip
def test_objectives_are_written_as_they_are_read(terms: list[tuple[str, str, int]]) -> None:
    text = ",".join(f"{quantity}_{statistic}={limit}ms" for quantity, statistic, limit in terms)
    assert str(Objective.parse(text)) == text


def test_runs_are_joined_one_after_the_other() -> None:
    whole = joined([[record(0, 0.5, (1.0, 2.0))], [record(0, 0.25, (1.0,)), record(1, 0.5, (3.0,))]])
    assert [r.index for r in whole] == [0, 1, 2]
    assert [r.arrived_s for r in whole] == [0.5, 2.25, 2.5]
    assert [r.ttft_s for r in whole] == [0.5, 0.75, 2.5]
    assert Summary.of(whole).duration_s == 4.5


def test_a_log_holds_several_runs(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with Log(path) as log:
        log.add([record(0), record(1)])
        log.add([record(0, tokens=())])
    assert [len(run) for run in read_log(path)] == [2, 1]
    (tmp_path / "other").write_text('{"run": 0}\n')
    with pytest.raises(ConfigError, match="other:1"):
        read_log(tmp_path / "other")


def test_nothing_measured_is_no_number() -> None:
    summary = Summary.of([])
    assert (summary.requests, summary.requests_per_s, summary.ttft.p50) == (0, 0.0, None)
