"""The table of measured sizes: who gets what, and that nothing is in it that was not measured."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import Backend, Device, Geometry, Rule, pallas_mosaic, pallas_triton, tuning
from pallas_kernels.pallas_triton.blocking import decode_blocking, tuned

KEY = tuning.geometry_key(Geometry(32, 8, 128, 16), 64)
SIZES = {"keys": 128, "warps": 4, "stages": 3}
ENTRY = {"parameters": SIZES, "seconds": 1e-3, "beside": 2e-3, "date": "2026-12-01", "jax": "0.11.2"}


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
    assert tuning.lookup("NVIDIA H200", "pallas_triton.decode", KEY) == SIZES
    assert tuning.lookup("NVIDIA A100", "pallas_triton.decode", KEY) == {}
    assert tuning.lookup("NVIDIA H200", "pallas_triton.prefill", KEY) == {}
    assert tuning.lookup("NVIDIA H200", "pallas_triton.decode", KEY + "-other") == {}
    tuning.lookup("NVIDIA H200", "pallas_triton.decode", KEY)["keys"] = 3  # a copy
    assert tuning.lookup("NVIDIA H200", "pallas_triton.decode", KEY) == SIZES


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
    with tuning.trial("pallas_triton.decode", KEY, {"keys": 32}):
        assert tuning.lookup("NVIDIA H200", "pallas_triton.decode", KEY) == {"keys": 32}
        assert tuning.lookup("NVIDIA H200", "pallas_triton.decode", "other") == {}
    assert tuning.lookup("NVIDIA H200", "pallas_triton.decode", KEY) == SIZES


def test_records_add_up_and_replace(table: Path) -> None:
    other: dict[str, Any] = {**ENTRY, "parameters": {**SIZES, "stages": 5}}
    tuning.record(table, "NVIDIA H200", "pallas_triton.decode", KEY, other)
    tuning.record(table, "NVIDIA L4", "pallas_triton.decode", KEY, ENTRY)
    assert tuning.lookup("NVIDIA H200", "pallas_triton.decode", KEY) == {**SIZES, "stages": 5}
    assert tuning.lookup("NVIDIA L4", "pallas_triton.decode", KEY) == SIZES


H200 = Device("gpu", (9, 0), "NVIDIA H200", 132)
GEOMETRY = Geometry(32, 8, 128, 16)


def test_an_entry_changes_what_the_triton_kernels_are_built_with() -> None:
    own = decode_blocking(H200, GEOMETRY)
    assert tuned("decode", own, H200, GEOMETRY, 64) == own
    with tuning.trial("pallas_triton.decode", KEY, {"keys": 128, "stages": 3}):
        assert tuned("decode", own, H200, GEOMETRY, 64) == dataclasses.replace(own, keys=128, stages=3)
        assert tuned("decode", own, H200, GEOMETRY, 128) == own
        assert tuned("prefill", own, H200, GEOMETRY) == own


def test_an_entry_changes_what_the_mosaic_kernel_is_built_with() -> None:
    """The shares of the keys are an output's shape: it shows without running."""

    def shares() -> int:
        q = jax.ShapeDtypeStruct((64, 32, 128), jnp.bfloat16)
        pages = jax.ShapeDtypeStruct((4096, 8, 16, 128), jnp.bfloat16)
        table, kv_len = jax.ShapeDtypeStruct((64, 512), jnp.int32), jax.ShapeDtypeStruct((64,), jnp.int32)
        run = functools.partial(pallas_mosaic.decode, rule=Rule(1.0), backend=Backend("pallas_mosaic", H200))
        jaxpr = jax.make_jaxpr(lambda *given: run(*given))(q, pages, pages, table, kv_len)
        shapes = [v.aval.shape for e in jaxpr.eqns for v in e.outvars]
        return max(shape[2] for shape in shapes if len(shape) == 5 and shape[:2] == (64, 8))

    before = shares()
    with tuning.trial("pallas_mosaic.decode", KEY, {"blocks_per_core": 32}):
        assert shares() > before


@pytest.mark.parametrize("module", [pallas_mosaic, pallas_triton])
def test_what_the_backends_would_try_is_what_they_can_be_told(module: Any) -> None:
    """Every candidate is another choice than the kernel's own, and of parameters that it reads."""
    found = module.candidates(H200, GEOMETRY, "decode")
    assert len({tuple(sorted(one.items())) for one in found}) == len(found) > 3
    known = {"keys", "warps", "stages"} if module is pallas_triton else {"blocks_per_core", "block"}
    assert all(set(one) == known for one in found)


def test_what_was_not_measured_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    path.write_text(json.dumps({"NVIDIA H200": {"pallas_triton.decode": {KEY: {"parameters": SIZES}}}}))
    with pytest.raises(ValueError, match="lacks seconds, beside, date, jax"):
        tuning.read(path)
    with pytest.raises(AssertionError, match="an entry has"):
        tuning.record(tmp_path / "new.json", "NVIDIA H200", "x", KEY, {"parameters": SIZES})
