"""Progress on stderr: silent for what is quick, sparse for what is long, one display on a terminal."""

from __future__ import annotations

import re
import sys

import pytest

from jaxinfer import progress


def test_short_phases_are_silent_and_long_ones_sparse(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.delenv("JAXINFER_PROGRESS", raising=False)
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])

    def work(seconds: float, **options) -> list[str]:
        with progress.phase("loading", total=1000, **options) as advance:
            for _ in range(1000):
                clock[0] += seconds / 1000
                advance(1)
        out, err = capsys.readouterr()
        assert out == ""
        return err.splitlines()

    assert work(0.9) == []
    lines = work(60)
    assert 3 <= len(lines) <= 8
    assert lines[-1] == "jaxinfer: loading: done in 60.0 s"
    assert re.fullmatch(r"jaxinfer: loading: \d+/1000", lines[0])
    assert work(60, wanted=False) == []
    with progress.silenced():
        assert work(60) == []
    monkeypatch.setenv("JAXINFER_PROGRESS", "0")
    assert work(60) == []


def test_a_failed_phase_says_so(monkeypatch: pytest.MonkeyPatch, capsys):
    clock = iter([0.0, 5.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with pytest.raises(ValueError, match="torn"), progress.phase("loading"):
        raise ValueError("torn")
    assert capsys.readouterr().err == "jaxinfer: loading: failed after 5.0 s\n"


def test_on_a_terminal_phases_share_one_display(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.delenv("JAXINFER_PROGRESS", raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with (
        progress.phase("loading", total=2_000_000, unit="B") as load,
        progress.phase("compiling", total=3) as compile_,
    ):
        load(1_000_000)
        compile_()
        assert progress._open_phases == 2
    assert progress._board is None
    assert capsys.readouterr().out == ""


def test_a_note_says_how_it_goes(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.delenv("JAXINFER_PROGRESS", raising=False)
    clock = iter([0.0, 5.0, 500.0, 559.0, 561.0, 562.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with progress.phase("training", total=9) as advance:
        for step in range(4):
            advance(1, f"loss {4 - step}.0")
    assert capsys.readouterr().err.splitlines() == [
        "jaxinfer: training: 1/9, loss 4.0",
        "jaxinfer: training: 2/9, loss 3.0",  # and a minute later again, however long it has taken
        "jaxinfer: training: 4/9, loss 1.0",
        "jaxinfer: training: done in 562.0 s",
    ]
