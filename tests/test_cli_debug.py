"""JAXINFER_DEBUG, --trace and `jaxinfer score`: what a command tells beside and about answers."""

from __future__ import annotations

import json
import logging
import math
import re
from pathlib import Path

import pytest
from test_cli import HELLO, LIMITS, fake_llm, one_line
from test_cli import run as run

from jaxinfer import cli
from jaxinfer.cli import debug
from jaxinfer.cli.flags import EngineFlags
from jaxinfer.config import EngineConfig
from jaxinfer.llm import LLM
from jaxinfer.server import launch


@pytest.fixture(autouse=True)
def as_before():
    """Commands set up the package's logger; other tests must not see it."""
    package = logging.getLogger("jaxinfer")
    before = package.level, package.handlers, package.propagate
    yield
    package.level, package.handlers, package.propagate = before


def lines_at(level: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What stderr gets while `hi there` and one request that fails are answered at a level."""
    monkeypatch.setenv("JAXINFER_DEBUG", str(level))
    debug.set_up()
    llm = fake_llm(nan_tokens={ord("~")})
    debug.watch(llm.engine)
    llm.generate(["hi", "~"])
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()


def test_each_level_tells_more(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    assert lines_at(0, monkeypatch, capsys) == lines_at(1, monkeypatch, capsys) == []
    steps = lines_at(2, monkeypatch, capsys)
    told = re.compile(
        r"\d\d:\d\d:\d\d\.\d{3} jaxinfer\.debug: StepPlan\(\d+: .* tokens\) bucket \S+: "
        r"[\d.]+ ms \(waited [\d.]+, told [\d.]+\); pages_free \d+, .*waiting \d+"
    )
    assert len(steps) >= len(HELLO.encode())
    assert all(told.fullmatch(line) for line in steps)
    requests = [line for line in lines_at(3, monkeypatch, capsys) if "StepPlan" not in line]
    assert [" arrived: " in line for line in requests] == [True, True, False, False, False]
    (first,) = [i for i, line in enumerate(requests) if "first token after" in line]
    ends = {re.search(r"ended: (\w+)", line)[1]: i for i, line in enumerate(requests) if " ended: " in line}  # pyright: ignore
    assert set(ends) == {"stop", "error"}
    assert first < ends["stop"]
    assert "not finite" in requests[ends["error"]]
    slices = [line for line in lines_at(4, monkeypatch, capsys) if " runs " in line]
    assert any(re.search(r"step 0: uid 0 runs 0\+2, emits, pages \[\d+\]$", line) for line in slices[:2])
    assert any("chained" in line for line in slices)


def test_a_first_token_that_ends_an_answer_is_told_before_its_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("JAXINFER_DEBUG", "3")
    debug.set_up()
    llm = fake_llm()
    debug.watch(llm.engine)
    llm.generate("hi", {"max_tokens": 1})
    told = [line for line in capsys.readouterr().err.splitlines() if "StepPlan" not in line]
    assert ["arrived" in told[0], "first token" in told[1], "ended: length" in told[2], len(told)] == [
        True
    ] * 3 + [3]


def test_broken_books_are_told_at_level_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("JAXINFER_DEBUG", "3")
    debug.set_up()
    llm = fake_llm()
    debug.watch(llm.engine)
    monkeypatch.setattr(llm.engine, "check", lambda: ["a page is lost"])
    llm.generate("hi", {"max_tokens": 1})
    assert "the books are wrong after a step: a page is lost" in capsys.readouterr().err


@pytest.mark.parametrize("asked", ["yes", "5", "-1", "1.5"])
def test_a_level_that_does_not_exist_is_told(run, monkeypatch: pytest.MonkeyPatch, asked: str):
    monkeypatch.setenv("JAXINFER_DEBUG", asked)
    status, out, err = run("generate", "m", "hi")
    assert (status, out) == (2, "")
    assert asked in one_line(err)


def test_a_server_logs_as_much_as_was_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("JAXINFER_DEBUG", raising=False)
    debug.set_up()
    assert launch._logging()["loggers"]["jaxinfer"]["level"] == logging.INFO
    monkeypatch.setenv("JAXINFER_DEBUG", "2")
    debug.set_up()
    assert launch._logging()["loggers"]["jaxinfer"]["level"] == logging.DEBUG


def test_a_command_completes_its_trace(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    def load(flags: EngineFlags, model: str) -> LLM:
        fake = fake_llm()
        config = EngineConfig(**flags.checked())
        return LLM.from_parts(fake.engine.runner, LIMITS, tokenizer=fake.tokenizer, engine_config=config)

    monkeypatch.setattr(EngineFlags, "load", load)
    trace = tmp_path / "trace.json"
    assert cli.main(["generate", "m", "hi", "--trace", str(trace)]) == 0
    assert capsys.readouterr().out == HELLO + "\n"
    events = json.loads(trace.read_text())
    assert any(event.get("name") == "step 0" for event in events)
    assert cli.main(["generate", "m", "hi", "--trace", str(tmp_path / "no" / "where")]) == 1
    assert "cannot be written" in one_line(capsys.readouterr().err)


# --------------------------------------------------------------------------------------------- score


def test_score_is_a_table_or_json_lines(run, tmp_path: Path):
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text("hi there")
    second.write_text("abc\n\n def \r\n")
    status, out, err = run("score", "m", str(first), str(second), "--json")
    assert (status, err) == (0, "")
    one, two = map(json.loads, out.splitlines())
    assert set(one) == {"file", "line", "token_ids", "logprobs", "nll", "perplexity"}
    assert (one["file"], one["line"], bytes(one["token_ids"])) == (str(first), None, b"hi there")
    assert bytes(two["token_ids"]) == second.read_bytes(), "line ends are part of a text"
    assert one["logprobs"][0] is None
    assert one["nll"] == pytest.approx(-sum(one["logprobs"][1:]))
    assert one["perplexity"] == pytest.approx(math.exp(one["nll"] / 7))

    status, out, _ = run("score", "m", str(first), str(second))
    head, *rows, everything = out.splitlines()
    assert head.split() == ["text", "tokens", "nll", "perplexity"]
    assert [row.split()[:2] for row in rows] == [
        [str(first), "8"],
        [str(second), str(len(second.read_bytes()))],
    ]
    assert rows[0].split()[2:] == [f"{one['nll']:.3f}", f"{one['perplexity']:.4f}"]
    assert everything.split()[2] == f"{one['nll'] + two['nll']:.3f}"
    assert len({len(line) for line in out.splitlines()}) == 1

    lines = [json.loads(line) for line in run("score", "m", str(second), "--lines", "--json")[1].splitlines()]
    assert [(line["line"], bytes(line["token_ids"])) for line in lines] == [(1, b"abc"), (3, b" def ")]
    assert run("score", "m", str(second), "--lines")[1].splitlines()[1].startswith(f"{second}:1")


@pytest.mark.parametrize(
    ("content", "flags", "told"),
    [
        (b"x", [], "1 tokens"),
        (b"x" * 80, [], "80 tokens"),
        (b"ok\ny", ["--lines"], ":2 has 1 tokens"),
        (b"\n \n", ["--lines"], "no line"),
        (b"ab\xff", [], "byte 2"),
        (None, [], "No such file"),
    ],
)
def test_what_cannot_be_scored_is_one_line(
    run, tmp_path: Path, content: bytes | None, flags: list, told: str
):
    file = tmp_path / "text"
    if content is not None:
        file.write_bytes(content)
    status, out, err = run("score", "m", str(file), *flags)
    assert (status, out) == (1, "")
    assert told in one_line(err)
    assert str(file) in err


def test_a_span_that_a_scored_text_does_not_see_is_refused(run, tmp_path: Path):
    (tmp_path / "text").write_text("some text")
    span = ("--attention-span", "topk-pages:2")
    status, out, err = run("score", "m", str(tmp_path / "text"), *span)
    assert (status, out) == (2, "")
    assert "say from:P" in one_line(err)
    assert run("score", "m", str(tmp_path / "text"), "--attention-span", "topk-pages:2,from:0")[0] == 0


def test_a_text_that_fails_is_told_and_the_others_are_scored(run, tmp_path: Path):
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_text("fine")
    bad.write_text("a~b")
    status, out, err = run("score", "m", str(bad), str(good), "--json", nan_tokens={ord("~")})
    assert status == 1
    assert json.loads(out)["file"] == str(good)
    assert str(bad) in one_line(err)
