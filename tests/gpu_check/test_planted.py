"""Faults planted in programs are found in their machine code. Needs the CUDA plugin (`make check-gpu`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_check.__main__ import has_plugin
from gpu_check.budgets import Budget, failures
from gpu_check.cases import CASES
from gpu_check.child import check
from gpu_check.report import Expected, Report

pytestmark = pytest.mark.skipif(
    not has_plugin(),
    reason="the CUDA plugin is not installed: pip install '.[gpu-check]'",
)

PLANTED = Path(__file__).parent / "planted.py"


def checked(
    name: str, folder: Path, target: str = "h200", budget: Budget | None = None, *expected: Expected
) -> Report:
    budget = budget or Budget(100, temp_mib=8)
    return check(name, target, budget, folder, (str(PLANTED),), timeout=120, expected=expected)


def test_a_healthy_program_passes(tmp_path: Path) -> None:
    report = checked("healthy", tmp_path)
    assert not report.failures
    assert report.aliased_bytes == report.pool_bytes == 4 * 16 << 20
    assert 4 <= report.launches <= 8
    assert report.kernels
    assert all(kernel.registers > 0 for kernel in report.kernels)


def kinds(report: Report) -> set[str]:
    return {failure.partition(":")[0] for failure in report.failures}


@pytest.mark.parametrize(
    ("name", "target", "expected"),
    [
        ("not_donated", "h200", {"alias", "copies"}),
        ("stacked_scan", "h200", {"copies"}),
        ("stacked_scan", "a100", {"copies"}),
        ("dequantised", "l4", {"copies"}),
        ("scales_not_donated", "h200", {"alias"}),
        ("scales_copied", "h200", {"copies"}),
        ("gathered", "h200", {"copies"}),
        ("converted_weight", "h200", {"copies"}),
        ("mosaic_spill", "a100", {"spills"}),
        ("mosaic_shared", "l4", {"shared memory"}),
        ("dies", "h200", {"died"}),
    ],
)
def test_a_planted_fault_is_found(name: str, target: str, expected: set[str], tmp_path: Path) -> None:
    report = checked(name, tmp_path, target)
    assert expected <= kinds(report), report


def test_shared_memory_is_judged_by_the_target(tmp_path: Path) -> None:
    assert not checked("mosaic_shared", tmp_path, "h200").failures


def test_int8_pages_are_written_in_place_with_their_scales(tmp_path: Path) -> None:
    report = checked("int8_pages", tmp_path)
    assert not report.failures
    assert report.aliased_bytes == report.pool_bytes == 8 * 512 * 8 * 16 * (128 + 4)


def test_a_widened_weight_is_over_the_budget_of_a_product(tmp_path: Path) -> None:
    report = checked("widened_weight", tmp_path, budget=CASES["quant_matmul/int8/64"].budget)
    assert {"copies", "temp"} <= kinds(report), report


@pytest.mark.parametrize(("name", "maker"), [("mosaic_spill", "mosaic"), ("triton_spill", "triton")])
def test_the_kernel_under_test_is_found_and_its_spills(name: str, maker: str, tmp_path: Path) -> None:
    report = checked(name, tmp_path, "h200", None, Expected(maker, "planted"))
    assert kinds(report) == {"spills"}, report
    missing, spills = failures(report, Budget(100), [Expected(maker, "another")])
    assert missing.startswith("missing: ")
    assert spills.startswith("spills: ")


def test_a_dump_that_is_missing_hides_no_spills(tmp_path: Path) -> None:
    report = checked("undumped", tmp_path, "h200", None, Expected("mosaic", "planted"))
    assert "spills" not in kinds(report)
    assert "missing" in kinds(report)


def test_a_budget_is_kept_to(tmp_path: Path) -> None:
    report = checked("healthy", tmp_path, budget=Budget(2, temp_mib=0, compile_s=0))
    assert {"launches", "slow"} <= kinds(report)


def test_a_child_that_hangs_is_ended(tmp_path: Path) -> None:
    report = check("hangs", "h200", Budget(1), tmp_path, (str(PLANTED),), timeout=15)
    assert kinds(report) == {"timeout"}
