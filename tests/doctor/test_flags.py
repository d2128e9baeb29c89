"""Flags of `jaxinfer doctor`: those of what it was not asked for are refused by name."""

from __future__ import annotations

import pytest

from jaxinfer import cli


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--max-num-seqs", "3"), "--max-num-seqs is of the model that --calibrate names"),
        (("--server", "http://127.0.0.1:9", "--quantization", "int8"), "--quantization is of the model"),
        (("--api-key", "x"), "--api-key is of a server"),
        (("--seconds", "3"), "--seconds is of a server"),
        (("--calibrate", "m", "--seconds", "3"), "--seconds is of a server"),
        (("--server", "http://127.0.0.1:9", "--seconds", "nan"), "--seconds must be more than 0"),
    ],
)
def test_flags_of_something_else_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], told: str
) -> None:
    assert cli.main(("doctor", *arguments)) == 2
    assert told in capsys.readouterr().err
