"""The kernels' bench in small: what it counts, that it judges before it times, and that no row can take it
down."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import CPU, tuning, xla
from pallas_kernels.bench import __main__ as command
from pallas_kernels.bench import children, report, timing, tune, worker
from pallas_kernels.bench.matmuls import TINY_MATMULS, matmul_row
from pallas_kernels.bench.rows import DENSE, Bench, Options, worst_error
from pallas_kernels.bench.workload import TINY_WORKLOADS, WORKLOADS, Workload, draw

ROOT = Path(__file__).parents[2]
QUICK = Options(budget=0.01, check_bytes=1 << 20)
SMALL = {"heads": 4, "kv_heads": 2, "width": 8}
DECODE = Workload("decode", (20, 16), **SMALL)
BY_NAME = {workload.name: workload for workload in TINY_WORKLOADS}


def test_bytes_and_operations_are_counted() -> None:
    decode = Workload("d", (20, 16), heads=4, kv_heads=2, width=8)
    assert decode.bytes_moved == 2 * 36 * 2 * 8 * 2 + 2 * (2 * 4 * 8 * 2)
    assert decode.operations == 4 * 4 * 8 * 36
    int8 = Workload("d", (20, 16), heads=4, kv_heads=2, width=8, kv_dtype="int8")
    assert int8.bytes_moved == 2 * 36 * 2 * (8 + 4) + 2 * (2 * 4 * 8 * 2)
    prefill = Workload("p", chunks=((2, 3),), heads=4, kv_heads=2, width=8)
    assert prefill.operations == 4 * 4 * 8 * (3 + 4 + 5)
    full = {workload.name: workload for workload in WORKLOADS}["decode 64x8k Z16 bfloat16"]
    assert full.bytes_moved == 64 * 8192 * 8 * 128 * 2 * 2 + 2 * 64 * 32 * 128 * 2


def test_inputs_are_dealt_out_with_poison_between() -> None:
    inputs = draw(DECODE)
    used = inputs.page_table[inputs.page_table > 0]
    assert sorted(used.tolist()) == [1, 2, 3]
    pages = np.asarray(inputs.k_pages, np.float32)
    assert np.isnan(pages[0]).all()
    last = inputs.page_table[0, 1]
    assert np.isfinite(pages[last, :, :4]).all()
    assert np.isnan(pages[last, :, 4:]).all()


def test_time_of_a_call_is_that_of_the_device() -> None:
    """Queued calls take together what the clock says, however many of them are in a launch."""
    x = jnp.ones((256, 256))
    product = jax.jit(lambda x: x @ x)
    single = timing.measure(lambda _: product(x), budget=0.05)
    assert 0 < single.least <= single.seconds <= single.most
    assert single.dispatch <= single.seconds * 1.01

    def slow(_: int) -> jax.Array:
        time.sleep(0.01)
        return x

    slept = timing.measure(slow, calls_each=5, budget=0.1)
    assert 0.002 <= slept.seconds <= 0.2
    assert slept.launch_bound


@pytest.mark.parametrize("name", ["decode 3x64 Z16 int8", "prefill 64 Z16 bfloat16"])
def test_a_right_backend_has_a_time(name: str) -> None:
    row = Bench(CPU, QUICK).attention(BY_NAME[name], "xla")
    assert row["status"] == "ok", row
    assert row["error"] < 8e-3
    assert row["seconds"] > 0


def test_dense_attention_stands_beside() -> None:
    bench = Bench(CPU, QUICK)
    row = bench.attention(BY_NAME["decode 3x64 Z16 bfloat16"], DENSE)
    assert (row["status"], row["implementation"]) == ("ok", "xla")
    assert bench.attention(BY_NAME["decode 3x64 Z16 int8"], DENSE)["status"] == "refused"
    assert bench.attention(BY_NAME["mixed 2x32+40 Z16 bfloat16"], DENSE)["status"] == "refused"


def test_a_refusal_is_a_row_with_its_reason() -> None:
    row = Bench(CPU, QUICK).attention(DECODE, "cudnn")
    assert row["status"] == "refused"
    assert "dense keys" in row["reason"]


@pytest.mark.parametrize("fault", ["last key", "not a number", "not twice"])
def test_a_wrong_backend_has_no_time(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    whole = xla.paged_attention
    calls = iter(range(100))

    def faulty(q: Any, k: Any, v: Any, batch: Any, **options: Any) -> Any:
        if fault == "last key":
            return whole(q, k, v, dataclasses.replace(batch, kv_len=batch.kv_len - 1), **options)
        out = whole(q, k, v, batch, **options)
        if fault == "not a number":
            return out.at[1, 2, 3].set(jnp.nan)
        noise = jax.pure_callback(
            lambda: np.float32(2e-2 * next(calls)), jax.ShapeDtypeStruct((), jnp.float32)
        )
        return (out * (1 + noise)).astype(out.dtype)

    monkeypatch.setattr(xla, "paged_attention", faulty)
    row = Bench(CPU, QUICK).attention(DECODE, "xla")
    assert row["status"] == "wrong", row
    assert "seconds" not in row
    assert [bad["case"] for bad in report.print_table([row], {"copy": 1.0, "matmul": 1.0})] == [row["case"]]


def test_errors_are_of_the_worst_vector() -> None:
    expected = np.ones((3, 2, 4), np.float32)
    out = expected.copy()
    out[1, 1] *= 1.5
    assert worst_error(out, expected) == pytest.approx(0.5)
    out[0, 0, 0] = np.nan
    assert not worst_error(out, expected) <= 1e9


@pytest.mark.parametrize("case", TINY_MATMULS[::2], ids=lambda case: case.name)
def test_products_have_rows(case: Any) -> None:
    row = matmul_row(case, "xla", CPU, QUICK)
    assert row["status"] == "ok", row


# ----------------------------------------------------------------------------------------- many rows at once


def test_a_worker_that_dies_takes_one_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One job kills its process, one hangs, one raises: each is a row, and the others are run."""
    script = tmp_path / "worker.py"
    script.write_text(
        textwrap.dedent(
            """
            import json, os, sys, time
            for job in json.load(sys.stdin)["jobs"]:
                print("START", job["number"], flush=True)
                if job["does"] == "dies":
                    os.abort()
                if job["does"] == "hangs":
                    time.sleep(60)
                print("noise of a library")
                print("ROW " + json.dumps({"number": job["number"], "status": job["does"]}), flush=True)
                if job["does"] == "failed":
                    sys.exit(1)
            """
        )
    )
    real = subprocess.Popen
    monkeypatch.setattr(
        children.subprocess, "Popen", lambda command, **options: real([sys.executable, script], **options)
    )
    jobs = [{"number": i, "does": does} for i, does in enumerate(["ok", "dies", "failed", "hangs", "ok"])]
    rows = list(children.work(jobs, QUICK, tiny=True, timeout=3.0, deadline=time.monotonic() + 60))
    assert [row["number"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["status"] for row in rows] == ["ok", "failed", "failed", "failed", "ok"]
    assert "SIGABRT" in rows[1]["reason"]
    assert "nothing came for 3 s" in rows[3]["reason"]
    late = children.work(jobs[:2], QUICK, tiny=True, timeout=3.0, deadline=0.0)
    assert [row["status"] for row in late] == ["skipped", "skipped"]


def test_the_plan_has_what_was_asked_for() -> None:
    def planned(*words: str) -> list[tuple[str, str, str]]:
        jobs = command.plan(command.parse(["--tiny", *words]))
        assert [job["number"] for job in jobs] == list(range(len(jobs)))
        assert jobs[0]["kind"] == "limits"
        return [(job["kind"], job["case"], job["backend"]) for job in jobs[1:]]

    everything = planned()
    assert ("attention", "decode 3x64 Z16 int8", "pallas_triton") in everything
    assert ("matmul", "matmul tiny x1 int4", "xla") in everything
    assert len(everything) == len(set(everything))
    assert "reference" not in {backend for _, _, backend in everything}
    some = planned("--cases", "1x256", "--backends", "xla,reference")
    assert some == [("attention", "decode 1x256 Z64 bfloat16", name) for name in ("xla", "reference")]
    tuned = planned("--cases", "1x256", "--backends", "pallas_triton", "--tune")
    assert [kind for kind, _, _ in tuned] == ["attention", "tune"]
    for wrong in (("--backends", "nonsense"), ("--cases", "nonsense")):
        with pytest.raises(SystemExit, match="nonsense"):
            planned(*wrong)


def test_the_command_prints_a_table_and_one_line_of_json(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pallas_kernels.bench", "--tiny", "--cases", "1x256,tiny x1 int8",
         "--backends", "xla,cudnn dense,cudnn", "--budget", "0.01", "--output", str(tmp_path / "rows"),
         "--no-torch"],
        env={**os.environ, "JAX_PLATFORMS": "cpu"}, cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    told = json.loads(line)
    assert told["limits"]["copy"] > 0
    assert told["limits"]["matmul"] > 0
    assert told["device"]["platform"] == "cpu"
    assert {"jax", "revision", "date"} <= set(told)
    rows = {(row["case"], row["backend"]): row for row in told["cases"]}
    ours = rows["decode 1x256 Z64 bfloat16", "xla"]
    assert ours["floor_share"] > 0
    assert ours["speedup_cudnn"] > 0
    assert rows["decode 1x256 Z64 bfloat16", "cudnn"]["status"] == "refused"
    assert rows["matmul tiny x1 int8", "xla"]["speedup_bfloat16"] > 0
    assert "% floor" in done.stderr
    assert len((tmp_path / "rows").read_text().splitlines()) == len(told["cases"]) + 1


def test_a_failed_row_fails_the_command(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    limits = {"copy": 1e9, "matmul": 1e9, "copy_memcpy": 1e9, "copy_kernel": 1e9, "device": {}, "number": 0}
    rows = [limits, {"case": "c", "shape": "c", "backend": "xla", "status": "failed", "reason": "died"}]
    monkeypatch.setattr(command, "run", lambda jobs, given: [dict(row) for row in rows])
    assert command.main(["--tiny", "--no-torch"]) == 1
    assert json.loads(capsys.readouterr().out)["wrong"] == 1
    rows[1]["backend"] = DENSE  # no backend of ours
    assert command.main(["--tiny", "--no-torch"]) == 0


def test_skipped_rows_are_counted(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    limits = {"copy": 1e9, "matmul": 1e9, "copy_memcpy": 1e9, "copy_kernel": 1e9, "device": {}, "number": 0}
    late = {"case": "c", "backend": "xla", "status": "skipped", "reason": "out of time"}
    monkeypatch.setattr(command, "run", lambda jobs, given: [dict(limits), dict(late), dict(late)])
    assert command.main(["--tiny", "--no-torch"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["skipped"] == 2
    assert told.err.splitlines()[-1] == "2 rows: 0 wrong or failed, 2 skipped"


def test_torch_is_asked_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A stand-in for torch: the script measures whatever `scaled_dot_product_attention` is."""
    package = tmp_path / "torch"
    (package / "nn").mkdir(parents=True)
    (package / "__init__.py").write_text(
        "bfloat16 = 'bfloat16'\n"
        "def randn(size, device, dtype): return size\n"
        "class cuda:\n    is_available = staticmethod(lambda: False)\n"
    )
    (package / "nn" / "__init__.py").write_text("")
    (package / "nn" / "attention.py").write_text(
        "import contextlib\n"
        "sdpa_kernel = contextlib.nullcontext\n"
        "class SDPBackend: FLASH_ATTENTION, CUDNN_ATTENTION, MATH = 1, 2, 3\n"
    )
    (package / "nn" / "functional.py").write_text(
        "def scaled_dot_product_attention(q, k, v, is_causal, enable_gqa):\n"
        "    assert k == v and q[0] == k[0] and is_causal == (q[2] > 1) and enable_gqa\n"
        "    if q[2] > 1: raise RuntimeError('no kernel')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    rows = command.torch_rows(command.parse(["--tiny"]), {"decode 1x256", "prefill 64", "mixed 2x32+40"})
    assert {row["shape"]: row["status"] for row in rows} == {"decode 1x256": "ok", "prefill 64": "refused"}
    assert rows[1]["reason"] == "RuntimeError: no kernel"


# ------------------------------------------------------------------------------------------------- tuning


def test_tuning_records_the_fastest_that_is_right(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of three candidates one is slower, one is wrong and one is faster: that one is in the table."""
    operation, key = "xla.decode", tuning.geometry_key(DECODE.geometry, 2)
    whole = xla.paged_attention

    def tunable(q: Any, k: Any, v: Any, batch: Any, **options: Any) -> Any:
        splits = tuning.lookup("cpu", operation, key).get("splits", 1)
        asked.append(splits)
        return whole(q, k, v, batch, **options) * (2 if splits == 3 else 1)

    asked: list[int] = []
    monkeypatch.setattr(xla, "paged_attention", tunable)
    monkeypatch.setattr(
        xla,
        "candidates",
        lambda device, geometry, operation: [{"splits": n} for n in (2, 3, 4)],
        raising=False,
    )
    seconds = {1: 1.0, 2: 2.0, 3: 0.1, 4: 0.5}
    monkeypatch.setattr(Bench, "_time", lambda *_: timing.Timing(seconds[asked[-1]], 0.0, 0.0, 0.0, 1))
    path = tmp_path / "tuning.json"
    row = tune.tune_row(Bench(CPU, QUICK), DECODE, "xla", str(path))
    assert set(asked) == {1, 2, 3, 4}
    assert row["recorded"]["parameters"] == {"splits": 4}
    entry = tuning.read(path)[CPU.kind][operation][key]
    assert entry == row["recorded"]
    assert (entry["seconds"], entry["beside"]) == (0.5, 1.0)
    assert [one["status"] for one in row["tried"]] == ["ok", "wrong", "ok"]
    assert tuning.lookup("cpu", operation, key) == {}  # the package's own table is another file


def test_what_names_no_candidates_is_not_tuned(tmp_path: Path) -> None:
    row = tune.tune_row(Bench(CPU, QUICK), DECODE, "xla", str(tmp_path / "t.json"))
    assert row["status"] == "refused"
    assert not (tmp_path / "t.json").exists()


def test_the_worker_ends_after_what_raises(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    import io

    jobs = [{"number": 5, "kind": "attention", "case": "nonsense", "backend": "xla"}, {"number": 6}]
    given = {"options": {"budget": 0.01}, "tiny": True, "jobs": jobs}
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(given)))
    assert worker.main() == 1
    start, row = capsys.readouterr().out.splitlines()
    assert start == "START 5"
    assert json.loads(row.removeprefix("ROW "))["status"] == "failed"
