"""Budgets, children that end badly, and the command line; nothing is compiled."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import pytest

from gpu_check.__main__ import line, main, parse
from gpu_check.budgets import MIB, Budget, failures
from gpu_check.child import ended, run_child
from gpu_check.report import Expected, Kernel, Report

GOOD = Report(
    "step", "l4", compile_s=7, pool_bytes=64 * MIB, aliased_bytes=64 * MIB, temp_bytes=MIB,
    kinds={"kCustomKernel": 40, "kCopy": 4}, kernels=[Kernel("k", "xla", 40, 0, 1000)],
)  # fmt: skip
BUDGET = Budget(launches=44, temp_mib=1)


def test_a_good_report_has_no_failures() -> None:
    assert failures(GOOD, BUDGET) == []


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"kernels": [Kernel("k", "mosaic", 255, 8)]}, "spills: 1 kernels spill registers: k 8 B at 255"),
        ({"kernels": [Kernel("k", "mosaic", 9, 0, 101377)]}, "shared memory: more than the 101376 B"),
        ({"aliased_bytes": 60 * MIB}, "alias: of the pool's 64.0 MiB only 60.0 MiB"),
        ({"copies": ["copy c bf16[9]"]}, "copies: 1 of pool or weights: copy c"),
        ({"kinds": {"kCustomKernel": 45}}, "launches: 45 of at most 44"),
        ({"temp_bytes": 2 * MIB}, "temp: 2.0 MiB of at most 1"),
        (
            {"argument_bytes": 22592 * MIB},
            "memory: 22593 MiB of arguments and temporaries, NVIDIA L4 has 22592",
        ),
        ({"compile_s": 61}, "slow: compiled in 61.0 s of at most 60"),
        ({"kernels": []}, "empty: "),
        ({"error": "Cannot select", "error_kind": "died"}, "died: Cannot select"),
    ],
)
def test_each_limit_is_a_failure_of_its_own(changed: dict, expected: str) -> None:
    (failure,) = failures(replace(GOOD, **changed), BUDGET)
    assert failure.startswith(expected)


def test_another_budget_may_hold_on_a_target() -> None:
    assert failures(GOOD, Budget(43, temp_mib=1, on={"l4": BUDGET})) == []
    assert failures(GOOD, Budget(99, on={"l4": Budget(43)})) == ["launches: 44 of at most 43"]


MOSAIC, TRITON = Expected("mosaic", "paged_decode"), Expected("triton", "paged_decode")


@pytest.mark.parametrize(
    ("expected", "kernel", "found"),
    [
        (MOSAIC, ("paged_decode_0:paged_decode_mosaic_gpu_kernel", "mosaic"), True),
        (MOSAIC, ("paged_decode_long_0:paged_decode_long", "mosaic"), False),
        (MOSAIC, ("paged_decode", "xla"), False),
        (TRITON, ("paged_decode", "xla"), True),
        (TRITON, ("paged_decode_2", "xla"), True),
        (TRITON, ("paged_decode_0:paged_decode", "mosaic"), False),
        (TRITON, ("loop_paged_decode", "xla"), False),
    ],
)
def test_a_kernel_is_known_by_its_maker_and_name(
    expected: Expected, kernel: tuple[str, str], found: bool
) -> None:
    made = Kernel(*kernel, registers=40, spill_bytes=0)
    said = failures(replace(GOOD, kernels=[*GOOD.kernels, made]), BUDGET, (expected,))
    assert said == ([] if found else [f"missing: {expected}; the kernels found: k, {made.name}"])


def test_every_kernel_that_is_expected_must_be_there() -> None:
    wanted = Expected("triton", "k"), Expected("triton", "paged_prefill")
    assert failures(GOOD, BUDGET, wanted) == ["missing: triton paged_prefill; the kernels found: k"]


def child(code: str, timeout: float = 30) -> tuple[str, str]:
    status, output = run_child((sys.executable, "-c", code), dict(os.environ), timeout)
    return ended(status, output, timeout)


def test_how_a_child_ended_is_told_with_the_end_of_its_output() -> None:
    assert child("print('LLVM ERROR: Cannot select', flush=True); import os; os.abort()") == (
        "died",
        "SIGABRT; LLVM ERROR: Cannot select",
    )
    assert child("raise SystemExit('no')") == ("error", "exit status 1; no")
    kind, text = child("import time; print('begun', flush=True); time.sleep(60)", timeout=3)
    assert (kind, text) == ("timeout", "not done after 3 s; begun")


def test_command_line() -> None:
    assert parse([]).targets == ("h200", "a100", "l4", "b200")
    options = parse(["--target", "l4", "--case", "step/*", "--jobs", "2"])
    assert (options.targets, options.cases, options.jobs) == (("l4",), ("step/*",), 2)
    with pytest.raises(SystemExit):
        parse(["--target", "v100"])


def test_a_row_says_whether_it_passed() -> None:
    assert line(GOOD).endswith("  ok")
    assert "  77.0  " in line(replace(GOOD, argument_bytes=77 * MIB))
    assert line(replace(GOOD, failures=["temp: too much"])).endswith("  FAILED")


def test_without_the_plugin_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gpu_check.__main__.has_plugin", lambda: False)
    assert main([]) == 2
    assert "[gpu-check]" in capsys.readouterr().err
