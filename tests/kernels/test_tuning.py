"""The table of measured sizes: who gets what, and that nothing is in it that was not measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pallas_kernels import Geometry, tuning

KEY = tuning.geometry_key(Geometry(32, 8, 128, 16), 64)
ENTRY = {"parameters": {"splits": 8}, "seconds": 1e-3, "beside": 2e-3, "date": "2026-12-01", "jax": "0.11.2"}


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A table of one entry in place of the package's."""
    path = tmp_path / "tuning.json"
    tuning.record(path, "NVIDIA H200", "pallas_triton.decode", KEY, ENTRY)
    monkeypatch.setattr(tuning, "PATH", path)
    tuning._table.cache_clear()
    yield path
    monkeypatch.undo()
    tuning._table.cache_clear()


def test_the_table_of_the_package_is_whole() -> None:
    """Every entry says what was measured, when and with what; `read` refuses others."""
    for operations in tuning.read(tuning.PATH).values():
        for entries in operations.values():
            for entry in entries.values():
                assert set(entry) == set(tuning.FIELDS)
                assert 0 < entry["seconds"] < entry["beside"]


def test_lookup_is_exact(table: Path) -> None:
    del table
    assert tuning.lookup("NVIDIA H200", "pallas_triton.decode", KEY) == {"splits": 8}
    assert tuning.lookup("NVIDIA A100", "pallas_triton.decode", KEY) == {}
    assert tuning.lookup("NVIDIA H200", "pallas_triton.prefill", KEY) == {}
    assert tuning.lookup("NVIDIA H200", "pallas_triton.decode", KEY + "-other") == {}
    tuning.lookup("NVIDIA H200", "pallas_triton.decode", KEY)["splits"] = 3  # a copy
    assert tuning.lookup("NVIDIA H200", "pallas_triton.decode", KEY) == {"splits": 8}


def test_keys_tell_shapes_and_rows_apart() -> None:
    keys = {
        tuning.geometry_key(Geometry(*sizes), rows)
        for sizes in (
            (32, 8, 128, 16),
            (32, 8, 128, 64),
            (32, 8, 64, 16),
            (32, 8, 128, 16, "bfloat16", "int8"),
        )
        for rows in (0, 1, 64)
    }
    assert len(keys) == 12
    geometry = Geometry(32, 8, 128, 16)
    assert tuning.geometry_key(geometry, 48) == tuning.geometry_key(geometry, 64)


def test_a_trial_is_for_one_operation_and_ends(table: Path) -> None:
    del table
    with tuning.trial("pallas_triton.decode", KEY, {"splits": 2}):
        assert tuning.lookup("NVIDIA H200", "pallas_triton.decode", KEY) == {"splits": 2}
        assert tuning.lookup("NVIDIA H200", "pallas_triton.decode", "other") == {}
    assert tuning.lookup("NVIDIA H200", "pallas_triton.decode", KEY) == {"splits": 8}


def test_records_add_up_and_replace(table: Path) -> None:
    other: dict[str, Any] = {**ENTRY, "parameters": {"splits": 4}}
    tuning.record(table, "NVIDIA H200", "pallas_triton.decode", KEY, other)
    tuning.record(table, "NVIDIA L4", "pallas_triton.decode", KEY, ENTRY)
    assert tuning.lookup("NVIDIA H200", "pallas_triton.decode", KEY) == {"splits": 4}
    assert tuning.lookup("NVIDIA L4", "pallas_triton.decode", KEY) == {"splits": 8}


def test_what_was_not_measured_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    path.write_text(
        json.dumps({"NVIDIA H200": {"pallas_triton.decode": {KEY: {"parameters": {"splits": 8}}}}})
    )
    with pytest.raises(ValueError, match="lacks seconds, beside, date, jax"):
        tuning.read(path)
    with pytest.raises(AssertionError, match="an entry has"):
        tuning.record(tmp_path / "new.json", "NVIDIA H200", "x", KEY, {"parameters": {"splits": 8}})
