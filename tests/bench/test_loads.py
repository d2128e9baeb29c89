"""Loads: what a seed makes of a rate and of lengths, and what a trace file may say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.bench import Arrival, Lengths, Load, Prompts, at_once, closed, constant, poisson, read_trace
from jaxinfer.bench.load import _generator
from jaxinfer.core import ConfigError, Limits, RequestError, SamplingParams

LENGTHS = (
    "128",
    "uniform:64-256",
    "uniform:7-7",
    "lognormal:128,0.6",
    "lognormal:50,1.5,300",
    "lognormal:1,0",
)


@pytest.mark.parametrize("text", LENGTHS)
def test_lengths_are_written_as_they_are_read(text: str) -> None:
    assert str(Lengths.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "", "0", "-3", "1.5", "uniform:9-3", "uniform:0-3", "uniform:3", "lognormal:5", "lognormal:0,1",
        "normal:3,4", "lognormal:9,1,2,3", "lognormal:9,99", "lognormal:nan,1", "lognormal:9,nan",
        "lognormal:90,1,50", "12 tokens", "99999999999",
    ],
)  # fmt: skip
def test_lengths_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"length|median"):
        Lengths.parse(text)


@given(st.sampled_from(LENGTHS), st.integers(0, 2**63), st.integers(1, 200))
def test_drawn_lengths_stay_within_their_bounds(text: str, seed: int, count: int) -> None:
    lengths = Lengths.parse(text)
    drawn = lengths.draw(np.random.default_rng(seed), count)
    assert len(drawn) == count
    assert all(type(length) is int and lengths.low <= length <= lengths.high for length in drawn)


def test_a_lognormal_has_its_median() -> None:
    drawn = Lengths.parse("lognormal:200,0.7").draw(np.random.default_rng(0), 20_001)
    assert np.median(drawn) == pytest.approx(200, rel=0.03)
    assert np.std(np.log(drawn)) == pytest.approx(0.7, rel=0.03)


PROMPTS, OUTPUTS = Prompts(Lengths.parse("uniform:5-40")), Lengths.parse("uniform:1-9")


@given(st.floats(0.01, 1000), st.integers(1, 300), st.integers(-(2**63), 2**63), st.floats(0.2, 5))
def test_a_seed_makes_the_same_load_and_arrivals_go_forward(
    rate: float, count: int, seed: int, burstiness: float
) -> None:
    one, other = (poisson(rate, count, PROMPTS, OUTPUTS, seed=seed, burstiness=burstiness) for _ in range(2))
    assert one == other
    times = [arrival.at_s for arrival in one.arrivals]
    assert len(times) == count
    assert times == sorted(times)
    assert times[0] >= 0
    assert one.prompt_ids(count - 1, 500) == other.prompt_ids(count - 1, 500)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_burstiness(burstiness: float) -> None:
    load = poisson(8.0, 20_000, PROMPTS, OUTPUTS, seed=3, burstiness=burstiness)
    gaps = np.diff([arrival.at_s for arrival in load.arrivals])
    assert np.mean(gaps) == pytest.approx(1 / 8, rel=0.05)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.05)
    assert load.offered_rate == pytest.approx(8, rel=0.05)


def test_another_seed_changes_arrivals_lengths_and_prompts() -> None:
    one, other = (poisson(8.0, 50, PROMPTS, OUTPUTS, seed=seed) for seed in (1, 2))
    for attribute in ("at_s", "prompt_tokens", "output_tokens"):
        assert [getattr(a, attribute) for a in one.arrivals] != [
            getattr(a, attribute) for a in other.arrivals
        ]
    assert one.prompt_ids(0, 500) != other.prompt_ids(0, 500)


def test_constant_closed_and_at_once() -> None:
    assert [a.at_s for a in constant(4.0, 5, PROMPTS, OUTPUTS).arrivals] == [0, 0.25, 0.5, 0.75, 1.0]
    load = closed(3, 7, PROMPTS, OUTPUTS)
    assert (load.concurrency, len(load.arrivals), load.offered_rate) == (3, 7, None)
    assert {a.at_s for a in at_once(6, PROMPTS, OUTPUTS).arrivals} == {0.0}
    for wrong in (
        lambda: poisson(0.0, 5, PROMPTS, OUTPUTS), lambda: poisson(float("nan"), 5, PROMPTS, OUTPUTS),
        lambda: poisson(1.0, 0, PROMPTS, OUTPUTS), lambda: poisson(1.0, 5, PROMPTS, OUTPUTS, burstiness=0.0),
        lambda: closed(0, 5, PROMPTS, OUTPUTS), lambda: Prompts(OUTPUTS, -1), lambda: Prompts(OUTPUTS, 5, 0),
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            wrong()


@given(st.integers(0, 1000), st.integers(1, 60), st.integers(300, 50_000))
def test_no_two_prompts_begin_alike(seed: int, count: int, vocab_size: int) -> None:
    load = at_once(count, PROMPTS, OUTPUTS, seed=seed)
    ids = [load.prompt_ids(index, vocab_size) for index in range(count)]
    assert len({prompt[0] for prompt in ids}) == count
    assert [len(prompt) for prompt in ids] == [arrival.num_prompt for arrival in load.arrivals]
    assert all(0 <= token < vocab_size for prompt in ids for token in prompt)


def test_prefixes_are_shared_within_their_group_and_nowhere_else() -> None:
    load = at_once(12, Prompts(Lengths.parse("uniform:5-40"), shared=16, groups=3), OUTPUTS, seed=5)
    ids = [load.prompt_ids(index, 1000) for index in range(12)]
    assert len({prompt[:16] for prompt in ids}) == 3
    assert len({prompt[:17] for prompt in ids}) == 12
    assert all(ids[i][:16] == ids[i % 3][:16] for i in range(12))
    assert all(arrival.num_prompt >= 16 + 5 for arrival in load.arrivals)


def test_a_trace_is_read_in_the_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"at_s": 2, "prompt_tokens": 7, "output_tokens": 3},
        {"at_s": 0.5, "prompt_tokens": [4, 5, 6], "output_tokens": 1},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    load = read_trace(path, seed=1, speed=2.0)
    assert [a.at_s for a in load.arrivals] == [0.25, 1.0]
    assert load.prompt_ids(0, 10) == (4, 5, 6)
    assert len(load.prompt_ids(1, 10)) == 7
    assert load.described()["file"] == "trace.jsonl"
    assert (load.prompt_total, load.output_total) == (10, 4)


@pytest.mark.parametrize(
    "line",
    [
        "{", "[]", '{"at_s": 1}', '{"at_s": 1, "prompt_tokens": 5, "output_tokens": 5, "x": 1}',
        *(
            f'{{"at_s": {at}, "prompt_tokens": {prompt}, "output_tokens": {output}}}'
            for at, prompt, output in (
                (-1, 5, 5), ("NaN", 5, 5), ("true", 5, 5), (1, 0, 5), (1, "[]", 5), (1, "[true]", 5),
                (1, 5, 0), (1, 5, 2.5), (1, '"a"', 5),
            )
        ),
    ],
)  # fmt: skip
def test_a_wrong_line_of_a_trace_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"at_s": 0, "prompt_tokens": 5, "output_tokens": 5}\n' + line + "\n")
    with pytest.raises(ConfigError, match=r"trace\.jsonl:2"):
        read_trace(path)


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="no request"):
        read_trace(tmp_path / "empty")
    with pytest.raises(ConfigError, match="speed"):
        read_trace(tmp_path / "empty", speed=0)


def test_a_load_says_how_it_was_made() -> None:
    load = poisson(2.0, 10, Prompts(Lengths.parse("8"), shared=4), Lengths.parse("uniform:1-9"), seed=11)
    said = load.described()
    assert (said["kind"], said["rate"], said["seed"], said["requests"]) == ("poisson", 2.0, 11, 10)
    assert (said["prompt"], said["output"], said["shared_prefix"]) == ("8", "uniform:1-9", 4)
    assert isinstance(load, Load)
    assert json.loads(json.dumps(said)) == said


def test_a_trace_of_other_bytes_is_refused_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(b'{"at_s": 0, "prompt_tokens": 1, "output_tokens": 1}\n\xff\xfe\n')
    with pytest.raises(ConfigError, match="trace:2 is no JSON"):
        read_trace(path)


@pytest.mark.parametrize("extreme", [1e-310, 0.0, -1.0, float("nan"), float("inf"), 1e300])
def test_extreme_speeds_and_rates_are_refused(tmp_path: Path, extreme: float) -> None:
    one = Lengths.fixed(1)
    path = tmp_path / "trace"
    path.write_text('{"at_s": 1.5, "prompt_tokens": 1, "output_tokens": 1}')
    with pytest.raises(ConfigError, match="speed of a trace"):
        read_trace(path, speed=extreme)
    with pytest.raises(ConfigError, match="rate must be"):
        poisson(extreme, 1, Prompts(one), one)


def test_a_prompt_that_no_engine_takes_is_not_drawn() -> None:
    limits = Limits(num_pages=9, page_size=4, max_num_seqs=1, max_num_batched_tokens=4, max_model_len=32,
                    vocab_size=100)  # fmt: skip
    load = Load((Arrival(0.0, 10_000_000, 1), Arrival(0.0, 33, 1), Arrival(0.0, 3, 1)))
    for index, length in ((0, 10_000_000), (1, 33)):
        with pytest.raises(RequestError, match=f"the prompt has {length} tokens"):
            load.request(index, f"r{index}", SamplingParams(), limits)
    assert load.request(2, "r2", SamplingParams(), limits).prompt_token_ids == load.prompt_ids(2, 100)


@pytest.mark.parametrize("seed", [0, 7, -1, 2**32, 2**32 + 5, 2**63 + 9])
def test_the_streams_of_a_seed_are_those_of_numpy(seed: int) -> None:
    """Prompts stay what they were: runs of other days are compared with."""
    for stream in ((0,), (3, 0), (3, 77), (4, 2**33 + 1)):
        ours, theirs = _generator(seed, *stream), np.random.default_rng([seed % 2**64, *stream])
        assert ours.integers(0, 128_256, 50).tolist() == theirs.integers(0, 128_256, 50).tolist()
    with pytest.raises(ValueError, match="from 0, got -3"):
        _generator(seed, 4, -3)
