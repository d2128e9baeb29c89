"""`jaxinfer simulate`: its table and JSON, the flags that go together, and a comparison with a log."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.bench import Arrival, Lengths, Load, Prompts, RequestRecord, closed, poisson
from jaxinfer.bench.against import check_same, errors, load_of
from jaxinfer.cli import main
from jaxinfer.core import ConfigError

ON_H200 = ["simulate", "llama3-70b", "--device", "h200", "--tp", "8"]
SMALL = ["--rate", "4", "--requests", "30", "--prompt", "uniform:50-200", "--output", "40"]


def simulate(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[list[str], dict[str, Any]]:
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    return lines, json.loads(lines[-1])


def refused(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) in (1, 2)
    return capsys.readouterr().err


def test_it_says_what_a_load_would_see(capsys: pytest.CaptureFixture[str]) -> None:
    lines, value = simulate(*ON_H200, *SMALL, capsys=capsys)
    page = "\n".join(lines[:-1])
    for word in ("TTFT", "TPOT", "end to end", "p95", "tokens/s", "MBU", "MFU", "preemptions", "as fast"):
        assert word in page
    assert value["simulated"]["ok"] == 30
    assert value["simulated"]["output_tokens"] == 1200
    assert value["load"]["requests"] == 30
    assert 0 < value["running_peak"] <= 30
    assert 0 < value["mfu"] < value["mbu"] < 1
    assert sum(value["walls"].values()) == pytest.approx(1)
    assert sum(value["parts"].values()) == pytest.approx(1, rel=0.01)
    # 8 cards of 140 GB hold 141 GB of weights and, in 90 % of the rest, pages of 40 KB a token and card.
    assert value["engine"]["num_pages"] == 256 * 512 + 1
    assert value["speed_up"] == pytest.approx(value["simulated_s"] / value["wall_s"])


def test_json_alone(capsys: pytest.CaptureFixture[str]) -> None:
    lines, _ = simulate(*ON_H200, *SMALL, "--json", capsys=capsys)
    assert len(lines) == 1


def test_the_flags_of_the_engine_do_something(capsys: pytest.CaptureFixture[str]) -> None:
    _, plain = simulate(*ON_H200, *SMALL, capsys=capsys)
    few = [*ON_H200, "--rate", "40", *SMALL[2:], "--max-num-seqs", "2", "--num-pages", "60"]
    _, tight = simulate(*few, "--max-model-len", "512", capsys=capsys)
    assert tight["running_peak"] <= 2 < plain["running_peak"]
    assert tight["waiting_peak"] > 2
    assert tight["pages_peak"] <= 59
    _, chunked = simulate(*ON_H200, *SMALL, "--max-num-batched-tokens", "64", capsys=capsys)
    assert chunked["steps"] > plain["steps"]
    _, narrow = simulate(*ON_H200, *SMALL, "--weight-dtype", "int8", capsys=capsys)
    assert narrow["simulated"]["tpot_s"]["p50"] < plain["simulated"]["tpot_s"]["p50"]
    _, waiting = simulate(*ON_H200, *SMALL, "--no-async-scheduling", capsys=capsys)
    assert waiting["simulated"]["tpot_s"]["p50"] > plain["simulated"]["tpot_s"]["p50"]
    shared = [*SMALL[:4], "--prompt", "16", "--output", "40", "--shared-prefix", "512"]
    _, cached = simulate(*ON_H200, *shared, capsys=capsys)
    _, computed = simulate(*ON_H200, *shared, "--no-enable-prefix-caching", capsys=capsys)
    assert cached["simulated"]["cached_tokens"] > computed["simulated"]["cached_tokens"] == 0
    assert cached["simulated"]["ttft_s"]["p50"] < computed["simulated"]["ttft_s"]["p50"]


def test_prefixes_are_shared_where_the_engine_shares_them(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a model whose answers alone choose pages the engine keeps no prefix cache (llm/caching.py)."""
    shared = [*SMALL[:4], "--prompt", "16", "--output", "40", "--shared-prefix", "512"]

    def cached(span: str) -> int:
        _, value = simulate(*ON_H200, *shared, "--attention-span", span, capsys=capsys)
        return value["simulated"]["cached_tokens"]

    assert cached("topk-pages:4,from:0") > 0
    assert cached("topk-pages:4") == 0
    assert cached("window:128") == 0


def test_it_says_that_prefix_caching_is_off(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """As the engine does, and only where it was asked for."""
    off = [*ON_H200, *SMALL, "--attention-span", "window:128"]
    simulate(*off, "--no-enable-prefix-caching", capsys=capsys)
    simulate(*ON_H200, *SMALL, capsys=capsys)
    assert not caplog.records
    simulate(*off, capsys=capsys)
    told = [record.getMessage() for record in caplog.records]
    reason = "every layer has a sliding window, and pages behind it are given back"
    assert told == [f"llama3-70b: prefix caching is off: {reason}"]


def test_a_refused_prompt_is_as_long_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """And is never made (longer ones: tests/bench/test_loads.py)."""
    load = ["--rate", "4", "--requests", "2", "--prompt", "10000000", "--output", "40"]
    assert main([*ON_H200, *load]) == 1
    value = json.loads(capsys.readouterr().out.splitlines()[-1])
    (error,) = value["simulated"]["errors"]
    assert "the prompt has 10000000 tokens" in error


def test_an_objective_is_judged(capsys: pytest.CaptureFixture[str]) -> None:
    _, value = simulate(*ON_H200, *SMALL, "--slo", "ttft_p95=1us", capsys=capsys)
    assert not value["slo"]["holds"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--rate, --concurrency and --trace"),
        (["--rate", "4", "--concurrency", "2"], "one of"),
        (["--rate", "4", "--against-run", "1"], "--against"),
        (["--rate", "4", "--device", "h2000"], "no sheet"),
        (["--rate", "4", "--device", "h100", "--tp", "1"], "--tp"),
        (["--rate", "4", "--tp", "7"], "7 devices"),
        (["--rate", "4", "--page-size", "3"], "page_size"),
        (["--rate", "4", "--calibration", "nowhere.json"], "nowhere.json"),
        (["--against", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_what_does_not_go_is_said(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = refused(*ON_H200, *arguments, capsys=capsys)
    assert said in text
    assert "unexpected" not in text


# -------------------------------------------------------------------------------------- against a log


def test_a_simulation_against_its_own_log_is_not_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "run.jsonl"
    simulate(*ON_H200, *SMALL, "--log", str(log), capsys=capsys)
    for stated in ([], SMALL):
        lines, value = simulate(*ON_H200, *stated, "--against", str(log), capsys=capsys)
        against = value["against"]
        assert against["log"] == "run.jsonl"
        for name in ("ttft_s", "tpot_s", "gap_s", "e2e_s"):
            for statistic in ("p50", "p95", "p99"):
                assert against[name][statistic]["error"] == pytest.approx(0, abs=1e-9)
        assert "against run.jsonl" in "\n".join(lines)
    _, value = simulate(
        "simulate", "llama3-70b", "--device", "h200", "--tp", "4", "--against", str(log), capsys=capsys
    )
    assert value["against"]["tpot_s"]["p50"]["error"] > 0.2
    text = refused(*ON_H200, *SMALL, "--seed", "1", "--against", str(log), capsys=capsys)
    assert "same load" in text
    text = refused(*ON_H200, "--requests", "5", "--against", str(log), capsys=capsys)
    assert "--requests" in text
    text = refused(*ON_H200, "--against", str(log), "--against-run", "1", capsys=capsys)
    assert "1 runs" in text


def record(index: int, **changes: Any) -> RequestRecord:
    at_s = 0.5 * index
    values = {
        "index": index, "arrived_s": at_s, "sent_s": at_s, "token_s": (at_s + 0.1, at_s + 0.2),
        "ended_s": at_s + 0.2, "prompt_tokens": 5 + index, "asked_tokens": 3,
    }  # fmt: skip
    return RequestRecord(**values | changes)


def test_the_load_of_a_log_is_what_was_answered() -> None:
    records = [record(0), record(1, status="refused", token_s=()), record(2)]
    load = load_of(records)
    assert [(a.at_s, a.prompt_tokens, a.output_tokens) for a in load.arrivals] == [(0.0, 5, 2), (1.0, 7, 2)]
    with pytest.raises(ConfigError, match="answered"):
        load_of(records[1:2])


def test_errors_are_of_what_was_measured() -> None:
    measured = [record(index) for index in range(4)]
    slower = [dataclasses.replace(r, token_s=tuple(at + 0.1 for at in r.token_s)) for r in measured]
    found = errors(measured, slower)
    assert found["ttft_s"]["p50"]["error"] == pytest.approx(1.0)
    assert found["tpot_s"]["p99"]["error"] == pytest.approx(0.0)
    assert not errors([], slower)["ttft_s"]


def test_another_load_is_found() -> None:
    load = closed(2, 3, Prompts(Lengths.parse("9")), Lengths.parse("3"))
    check_same(load, [record(i, prompt_tokens=9) for i in range(3)])
    with pytest.raises(ConfigError, match="2 requests"):
        check_same(load, [record(i, prompt_tokens=9) for i in range(2)])
    with pytest.raises(ConfigError, match="request 1"):
        check_same(load, [record(i, prompt_tokens=9 + i) for i in range(3)])


def test_the_bench_drives_an_engine_to_the_same_times() -> None:
    """`bench.drive`, a real Engine and a SimulatedRunner say what `Predictor` says."""
    from worlds import World

    from jaxinfer.bench import drive
    from jaxinfer.bench.predicted import Predictor
    from jaxinfer.core import Limits
    from jaxinfer.engine import Engine
    from jaxinfer.simulator import SimulatedRunner, VirtualClock

    limits = Limits(
        num_pages=300, page_size=4, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=200,
        vocab_size=1000,
    )  # fmt: skip
    timer = World(limits, ()).timer()
    lengths = Prompts(Lengths.parse("uniform:5-90"), shared=9), Lengths.parse("uniform:1-60")
    loads: list[Load] = [poisson(20.0, 60, *lengths), closed(6, 60, *lengths)]
    for load in loads:
        clock = VirtualClock()
        runner = SimulatedRunner(World(limits, ()).timer(), limits, clock)
        engine = Engine(runner, limits, seed=0, clock=clock, prefix_caching=True, asynchronous=True)
        predictor = Predictor(limits, timer.model, timer.ladder, prefix_caching=True)
        assert predictor(load) == drive(engine, load, clock)
        long = dataclasses.replace(load, arrivals=(Arrival(0.0, 500_000_000, 3), *load.arrivals[1:]))
        records = predictor(long)
        assert "500000000 tokens" in str(records[0].error)
        clock.wait_until(clock() + 1.0)
        measured = drive(engine, long, clock)
        assert measured[0].error == records[0].error
        assert [record.status for record in measured] == [record.status for record in records]
