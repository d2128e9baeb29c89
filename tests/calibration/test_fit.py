"""Step times fitted to steps whose times are known, and to steps that are run."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import TINY, tiny_runner

from jaxinfer.calibration import MeasuredStep, StepKind, fit, measure_steps, step_kinds
from jaxinfer.calibration.detect import step_time
from jaxinfer.calibration.fit import errors
from jaxinfer.calibration.measure import plan_of
from jaxinfer.config import choose_step_shape, shape_ladder
from jaxinfer.core import ConfigError
from jaxinfer.planner import ModelCosts, RooflineTime, measured_sheet
from jaxinfer.planner.calibration import CalibratedTime, Calibration, Curve

COSTS = ModelCosts(TINY, "float32", "float32")
LADDER = shape_ladder(8, 64)
TRUE = Calibration(
    device="made up", platform="cpu", model="tiny", dtype="float32", kv_dtype="float32", quantization=None,
    date="2026-11-30", versions={}, bandwidth=1e10, matmul_rate=1e11, step_s=0.0,
    linear=Curve((1, 8, 64), (1e-9, 2e-9, 1.5e-8)), head=Curve((1, 8), (1e-9, 3e-9)),
    decode_row_s=1e-5, decode_byte_s=2e-10, chunk_byte_s=5e-11, chunk_operation_s=2e-11,
    residual=0.0, steps=0,
)  # fmt: skip


def kinds_of_tiny() -> list[StepKind]:
    return step_kinds(LADDER, 4000, 500)


def as_measured(kinds: list[StepKind], noise: float = 0.0, seed: int = 1) -> list[MeasuredStep]:
    """What a device of TRUE would have taken."""
    drawn = random.Random(seed)
    time = CalibratedTime(COSTS, TRUE)
    steps = []
    for kind in kinds:
        shape = choose_step_shape(plan_of(kind, 0, _Pool()), LADDER)  # type: ignore[arg-type]
        rows = len(kind.spans) if kind.emit else 0
        head = 0 if not rows else 1 << (rows - 1).bit_length()
        work = COSTS.work(kind.spans, rows, places=shape.tokens, head_places=head)
        steps.append(MeasuredStep(work, time.seconds(work) * (1 + noise * drawn.uniform(-1, 1))))
    return steps


class _Pool:
    page_size, num_pages, num_states = 16, 300, 0


ABOUT = {
    name: getattr(TRUE, name)
    for name in ("device", "platform", "model", "date", "versions", "bandwidth", "matmul_rate")
}


def test_a_fit_gives_back_the_times_that_it_was_shown() -> None:
    steps = as_measured(kinds_of_tiny())
    found = fit(COSTS, steps, **ABOUT)
    assert found.residual < 1e-4
    assert max(map(abs, errors(CalibratedTime(COSTS, found), steps))) < 0.02
    # steps that it was not shown: another batch, another context, another chunk
    for spans, rows in (([(200, 1)] * 3, 3), ([(77, 40)], 0), ([(5, 1), (300, 1), (0, 20)], 3)):
        work = COSTS.work(spans, rows, places=8 if rows == 3 and len(spans) == 3 else 64)
        expected = CalibratedTime(COSTS, TRUE).seconds(work)
        assert CalibratedTime(COSTS, found).seconds(work) == pytest.approx(expected, rel=0.15)


def test_noise_moves_a_fit_no_further_than_itself() -> None:
    steps = as_measured(kinds_of_tiny(), noise=0.1)
    found = fit(COSTS, steps, **ABOUT)
    assert 0.0 < found.residual < 0.1
    exact = as_measured(kinds_of_tiny())
    assert sorted(map(abs, errors(CalibratedTime(COSTS, found), exact)))[len(exact) // 2] < 0.1


def test_a_fault_in_one_term_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: steps whose K/V take four times as long as those that were fitted."""
    found = fit(COSTS, as_measured(kinds_of_tiny()), **ABOUT)
    slow = dataclasses.replace(TRUE, decode_byte_s=4 * TRUE.decode_byte_s)
    work = COSTS.work([(2000, 1)] * 8, 8, places=8, head_places=8)
    wrong = CalibratedTime(COSTS, found).seconds(work) / CalibratedTime(COSTS, slow).seconds(work)
    assert abs(wrong - 1) > 0.15


def test_every_term_is_in_the_steps_that_are_measured() -> None:
    steps = as_measured(kinds_of_tiny())
    works = [step.work for step in steps]
    assert {w.places for w in works} >= {shape.tokens for shape in LADDER if not shape.decode_rows}
    assert {w.head_places for w in works} >= {0, 1, 2, 4, 8}
    assert any(w.decode_kv_bytes > 8 * 400 * COSTS.kv_bytes_per_token for w in works)
    assert any(w.chunk_operations and w.chunk_kv_bytes for w in works)
    assert len(set(kinds_of_tiny())) == len(kinds_of_tiny()), "no step is measured twice"


@given(st.integers(1, 5000))
def test_a_curve_rises_between_its_points(count: int) -> None:
    curve = Curve((1, 8, 64), (1.0, 2.0, 10.0))
    value = curve(count)
    assert value >= 1.0
    assert curve(count + 1) >= value
    if count >= 64:
        assert value == pytest.approx(10.0 * count / 64)


def test_a_calibration_comes_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "one.json"
    TRUE.save(path)
    assert Calibration.load(path) == TRUE
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(ConfigError, match="calibrate again"):
        Calibration.load(path)
    for text in ("[]", "{", '{"format": 1}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="calibrate again"):
            Calibration.load(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        Calibration.load(tmp_path / "none.json")


def test_other_numbers_than_those_measured_are_refused_and_fall_back_to_the_roofline() -> None:
    for other in (
        dataclasses.replace(COSTS, dtype="bfloat16"), dataclasses.replace(COSTS, kv_dtype="int8"),
        dataclasses.replace(COSTS, tensor_parallel=2),
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            CalibratedTime(other, TRUE)
        sheet = measured_sheet("cpu", 1e10, 1e11)
        assert isinstance(step_time(other, TRUE, sheet), RooflineTime)
    assert isinstance(step_time(COSTS, TRUE, measured_sheet("cpu", 1e10, 1e11)), CalibratedTime)


@pytest.mark.usefixtures("compile_cache")
def test_real_programs_are_measured_and_the_pool_serves_on() -> None:
    runner = tiny_runner(ladder=shape_ladder(2, 32))
    kinds = [StepKind(((40, 1),) * 2, emit=True), StepKind(((16, 20),), emit=False)]
    steps = measure_steps(runner, runner.costs, kinds)
    assert [step.work.decode_rows for step in steps] == [2, 0]
    assert [step.work.tokens for step in steps] == [2, 20]
    assert [step.work.head_places for step in steps] == [2, 0]
    assert steps[1].work.places == 32, "the bucket's padding counts"
    assert all(0 < step.seconds < 5 for step in steps)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"linear": {"at": [8, 1], "seconds": [1e-9, 1e-9]}}, "rising"),
        ({"linear": {"at": [], "seconds": []}}, "rising"),
        ({"linear": {"at": [1, 8], "seconds": [1e-9]}}, "rising"),
        ({"linear": {"at": [1, 8], "seconds": [1e-9, float("nan")]}}, "seconds of a curve"),
        ({"linear": "fast"}, "attribute"),
        ({"decode_byte_s": -1e-9}, "decode_byte_s"),
        ({"bandwidth": float("inf")}, "bandwidth"),
        ({"step_s": "1"}, "step_s"),
        ({"chunk_operation_s": None}, "chunk_operation_s"),
    ],
)
def test_a_calibration_that_nothing_measured_is_refused(tmp_path: Path, change: dict, named: str) -> None:
    path = tmp_path / "calibration.json"
    TRUE.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=f"{named}.*calibrate again"):
        Calibration.load(path)


def test_the_order_of_keys_in_a_calibration_means_nothing(tmp_path: Path) -> None:
    """Values were taken in their order: numbers of tokens for seconds, and a TTFT of 1e26 s."""
    path = tmp_path / "calibration.json"
    TRUE.save(path)
    fields = json.loads(path.read_text())
    fields["linear"] = dict(reversed(fields["linear"].items()))
    path.write_text(json.dumps(fields))
    assert Calibration.load(path) == TRUE
    assert [file.name for file in tmp_path.iterdir()] == ["calibration.json"]
