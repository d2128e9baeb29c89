"""What is made for a machine with a GPU, in small on the CPU: its tests, and the benchmark of the whole
engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu, gpu_parts
from benchmarks.device_idle import Queued, covered
from benchmarks.gpu import PARTS, parse

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu"}


def run(*words: str, timeout: float, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, env={**ENVIRONMENT, **environment}, capture_output=True,
        text=True, timeout=timeout,
    )  # fmt: skip


def test_without_a_gpu_its_tests_are_skipped() -> None:
    done = run("pytest", "-q", "-m", "gpu", "tests/gpu/test_pages_in_place.py", timeout=120)
    assert done.returncode == 0, done.stdout
    assert "there is no GPU here (jax runs on cpu)" in done.stdout
    assert "passed" not in done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_on_the_cpu_they_pass() -> None:
    """A part of them, with the interpreter where it serves; the whole takes a quarter of an hour."""
    some = (
        "pages_in_place or planted or (decode_lengths and 193) or (chunk_lengths and 318) or (groups and 16)"
        " or (windows_and_sinks and 17) or (narrow_pages and int8 and 64 and conformance) or random_model"
        " or its_chunk or long_decodes"
    )
    done = run("pytest", "-q", "tests/gpu", "-k", some, timeout=590, JAXINFER_GPU_TESTS="cpu")
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_the_engine_benchmark_in_small() -> None:
    done = run("benchmarks.gpu", "random:tiny", "--tiny", "--backend", "xla", timeout=590)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert set(PARTS) <= set(told)
    assert {"cold", "warm"} <= set(told["start"])
    assert told["start"]["warm"]["compile_s"] < told["start"]["cold"]["compile_s"]
    for name, figures in told["decode"].items():
        if isinstance(figures, dict):
            assert figures["tokens_per_s"] > 0, name
            assert 0 < figures["mbu"] < 2
    one = told["decode"]["1 x 128"]
    assert one["device_dispatch_s"] > 0
    if one["idle_unknown"]:  # a step of this model takes no longer than its dispatch
        assert (one["idle_unknown"], one["device_s"], one["idle_s"]) == ("launch-bound", None, None)
    else:
        assert one["device_s"] > 0
        assert one["idle_s"] >= 0
    assert one["trace"]["busy_s"] > 0
    assert isinstance(told["decode"]["kv_slope"], float)
    assert all(figures["tpot_s"] > 0 for part in ("saturated", "long") for figures in told[part].values())
    assert len(told["prefill"]) == 3
    assert told["limits"]["copy"] > 0
    assert "revision" in told


def test_its_options() -> None:
    given = parse(["random:llama3-8b", "--quick", "--parts", "decode,long"])
    assert (given.scale, given.budget, given.parts) == (8, 2048, ["decode", "long"])
    with pytest.raises(SystemExit):
        parse(["random:llama3-8b", "--parts", "nonsense"])


def test_idle_time_is_unknown_where_dispatch_is_slower_than_the_device() -> None:
    """Programs that are queued no faster than they run: the device may have waited in between."""
    known, unknown = Queued.of(2e-3, 1e-3), Queued.of(2e-3, 1.9e-3)
    assert (known.seconds, known.reason, known.idle(3e-3)) == (2e-3, "", pytest.approx(1e-3))
    assert (unknown.seconds, unknown.reason, unknown.idle(3e-3)) == (None, "launch-bound", None)


class _Engine:
    """What a part is given, as far as `run` itself asks it."""

    def __init__(self, *_: Any, **options: Any):
        del options

    def facts(self) -> dict[str, Any]:
        return {}


def _raises(*_: Any, **options: Any) -> Any:
    raise RuntimeError("out of memory")


def test_a_part_that_fails_fails_the_command(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    import jaxinfer

    limits = {name: 1.0 for name in ("copy", "copy_memcpy", "copy_kernel", "matmul")} | {"device": {}}
    monkeypatch.setattr(gpu, "limits", lambda given: limits)
    monkeypatch.setattr(jaxinfer, "LLM", _Engine)
    monkeypatch.setattr(gpu_parts, "EngineBench", _Engine)
    for part in ("decode", "saturated", "long", "prefill"):
        monkeypatch.setattr(gpu_parts, part, lambda *_: {})
    monkeypatch.setattr(gpu, "start", lambda given: {})
    assert gpu.main(["random:tiny", "--tiny"]) == 0
    with monkeypatch.context() as patch:
        patch.setattr(gpu_parts, "saturated", _raises)
        assert gpu.main(["random:tiny", "--tiny"]) == 1
        told = capsys.readouterr()
        report = json.loads(told.out.splitlines()[-1])
        assert report["saturated"] == {"failed": "RuntimeError: out of memory"}
        assert "prefill" in report
        assert told.err.splitlines()[-1] == "failed: saturated"
    with monkeypatch.context() as patch:
        patch.setattr(jaxinfer, "LLM", _raises)
        assert gpu.main(["random:tiny", "--tiny", "--parts", "long"]) == 1
        assert capsys.readouterr().err.splitlines()[-1] == "failed: engine long+prefill; not run: long"
    monkeypatch.setattr(gpu, "start", lambda given: {"failed": "the cold process ended with 1"})
    assert gpu.main(["random:tiny", "--tiny", "--parts", "start"]) == 1


def test_busy_time_is_that_of_the_union() -> None:
    assert covered([(0, 2), (1, 3), (5, 6), (5, 5.5)]) == 4
    assert covered([]) == 0
