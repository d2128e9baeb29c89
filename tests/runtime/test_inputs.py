"""A plan becomes one buffer: literal numbers, every bucket, every plan."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.config import (
    EngineConfig,
    StepShape,
    choose_step_shape,
    invariant_ladder,
    most_emitting,
    sample_ladder,
    shape_ladder,
)
from jaxinfer.config.steps import QUERY_TILES
from jaxinfer.core import Slice, StepPlan
from jaxinfer.runtime import inputs
from pallas_kernels.batch import TILE_SIZES

SIZES: dict[str, Any] = {
    "table_width": 3, "page_size": 4, "num_pages": 10, "vocab_size": 300, "most_emitting": 4
}  # fmt: skip


def piece(start: int, tokens: tuple[int, ...], pages: tuple[int, ...], **changes: Any) -> Slice:
    return Slice(start=start, tokens=tokens, pages=pages, **{"uid": 0, "emit": True, **changes})


def packed(shape: StepShape, *pieces: Slice, **changes: Any) -> dict[str, np.ndarray]:
    sizes = {**SIZES, **changes}
    buffer, _ = inputs.pack(StepPlan(0, pieces), shape, **sizes)
    assert buffer.dtype == np.int32
    has_states = sizes.get("num_states", 0) > 0
    return inputs.layout(shape, sizes["table_width"], sizes["most_emitting"], has_states).views(buffer)


# ---------------------------------------------------------------------------------------------------- pack


def test_the_worked_example() -> None:
    """One decode at position 6 of pages 7, 3 and a chunk at 4..6 of pages 5, 9; two decode rows, Z 4."""
    plan = StepPlan(0, (piece(6, (11,), (7, 3)), piece(4, (21, 22, 23), (5, 9), emit=False)))
    shape = StepShape(tokens=5, decode_rows=2, chunk_rows=2)
    buffer, places = inputs.pack(plan, shape, **SIZES)
    view = inputs.layout(shape, 3, 4).views(buffer)
    assert places == [0, 2]
    assert view["tokens"].tolist() == [11, 0, 21, 22, 23]
    assert view["positions"].tolist() == [6, 0, 4, 5, 6]
    assert view["token_row"].tolist() == [0, -1, 2, 2, 2]
    assert view["page_ids"].tolist() == [3, 0, 9, 9, 9]
    assert view["offsets"].tolist() == [2, 0, 0, 1, 2]
    assert view["page_table"].tolist() == [[7, 3, 0], [0, 0, 0], [5, 9, 0], [0, 0, 0]]
    assert view["kv_len"].tolist() == [7, 0, 7, 0]
    assert view["emit"].tolist() == [0, 0, 0, 0]  # the decode's, then padding
    assert view["source"].tolist() == [-1] * 5
    assert view["num_tiles"].tolist() == [0, 1]
    assert view["tiles32"][0].tolist() == [2, 2, 3]


def test_emitting_slices_are_in_the_order_of_their_draws() -> None:
    """The places of their last tokens; a chunk in the middle of a prompt has none."""
    view = packed(
        StepShape(18, 2, 3), piece(4, (1,), (2, 3)), piece(0, (1, 2, 3), (4,), emit=False),
        piece(0, (5, 6), (5,)), piece(0, (7, 8), (6,)),
    )  # fmt: skip
    assert view["emit"].tolist() == [0, 6, 8, 0]
    with pytest.raises(AssertionError, match="3 slices emit, at most 2 can"):
        packed(
            StepShape(3, 3, 0), *(piece(0, (1,), (n,)) for n in (1, 2, 3)), most_emitting=2
        )  # fmt: skip


def test_chained_tokens_come_from_the_row_of_the_same_sequence() -> None:
    slices = [piece(4, (0,), (2, 3), uid=8, chained=True), piece(5, (7,), (4, 5), uid=9)]
    view = packed(StepShape(4, 4, 0), *slices, sampled_rows={3: 0, 8: 2})
    assert view["source"].tolist() == [2, -1, -1, -1]
    assert view["tokens"].tolist() == [0, 7, 0, 0]
    with pytest.raises(AssertionError, match="sequence 8 was not sampled in the step before"):
        packed(StepShape(4, 4, 0), *slices, sampled_rows={9: 0})
    with pytest.raises(AssertionError, match="sequence 8: no step before this one has sampled"):
        packed(StepShape(4, 4, 0), *slices)
    with pytest.raises(AssertionError, match="a chained slice of 2 tokens"):
        packed(StepShape(4, 0, 1), piece(4, (0, 0), (2, 3), chained=True), sampled_rows={0: 0})


def test_without_decode_rows_one_token_slices_are_chunks() -> None:
    """In invariant ladders: rows and places follow the order of the slices, and each is a tile."""
    (shape,) = invariant_ladder(4, 8)
    plan = StepPlan(0, (piece(6, (11,), (7, 3), uid=1, chained=True), piece(4, (21, 22, 23), (5, 9))))
    assert choose_step_shape(plan, (shape,)) == shape
    view = packed(shape, *plan.slices, sampled_rows={1: 3})
    assert view["tokens"].tolist() == [11, 21, 22, 23, 0, 0, 0, 0]
    assert view["source"].tolist() == [3, -1, -1, -1, -1, -1, -1, -1]
    assert view["token_row"].tolist() == [0, 1, 1, 1, -1, -1, -1, -1]
    assert view["kv_len"].tolist() == [7, 7, 0, 0]
    assert view["emit"].tolist() == [0, 3, 0, 0]
    assert view["num_tiles"].tolist() == [2]
    assert view["tiles32"][:2].tolist() == [[0, 0, 1], [1, 1, 3]]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (piece(4, (1,), (2,)), "1 pages of 4 do not cover 5 tokens"),
        (piece(0, (1,), (0,)), r"page ids \(0,\) leave 1\.\.9"),  # padding's page
        (piece(0, (1,), (10,)), r"page ids \(10,\) leave 1\.\.9"),  # a gather would clamp it (B147)
        (piece(0, (1,), (-1,)), r"page ids \(-1,\) leave 1\.\.9"),  # a scatter would wrap it (B146)
        (piece(0, (300,), (1,)), r"token ids leave 0\.\.299"),
        (piece(0, (-1,), (1,)), r"token ids leave 0\.\.299"),
    ],
)
def test_indexes_that_the_device_would_bend_are_refused(wrong: Slice, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        packed(StepShape(1, 1, 0), wrong)


WINDOWED = {**SIZES, "table_width": 4, "window": 5}


@pytest.mark.parametrize(
    ("start", "pages"),
    [
        (7, (7, 3)),  # the query at 7 sees 3 .. 7: page 0 of the table holds 3
        (8, (0, 7, 3)),  # 4 .. 8: the first page can go
        (8, (9, 7, 3)),  # and need not have gone: the plan of a step that was decided before it went
        (11, (0, 7, 3)),  # 7 .. 11
        (12, (0, 0, 7, 3)),  # 8 .. 12
    ],
)
def test_pages_behind_the_window_may_be_page_0(start: int, pages: tuple[int, ...]) -> None:
    shape = StepShape(1, 1, 0)
    buffer, _ = inputs.pack(StepPlan(0, (piece(start, (1,), pages),)), shape, **WINDOWED)
    view = inputs.layout(shape, WINDOWED["table_width"], 4).views(buffer)
    assert view["page_table"][0].tolist() == [*pages, *[0] * (4 - len(pages))]
    assert (view["page_ids"].tolist(), view["kv_len"].tolist()) == ([pages[-1]], [start + 1])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (piece(7, (1,), (0, 3)), r"page ids \(0, 3\) leave 1\.\.9"),  # seen
        (piece(12, (1,), (0, 0, 0, 3)), r"page ids \(0, 3\) leave 1\.\.9"),  # seen
        (piece(12, (1,), (0, 0, 7, 0)), r"page ids \(7, 0\) leave 1\.\.9"),  # written
        (piece(7, (1,) * 9, (0, 3, 4, 5)), r"page ids \(0, 3, 4, 5\) leave 1\.\.9"),  # seen by the first only
        (piece(8, (1,) * 8, (0, 3, 4, 0)), r"page ids \(3, 4, 0\) leave 1\.\.9"),  # written by the last
        (piece(8, (1,), (10, 7, 3)), r"page ids \(10, 7, 3\) leave 0\.\.9"),  # masked, and gathered still
        (piece(8, (1,), (-1, 7, 3)), r"page ids \(-1, 7, 3\) leave 0\.\.9"),
    ],
)
def test_pages_that_a_window_sees_or_a_slice_writes_are_none_of_page_0(wrong: Slice, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        inputs.pack(StepPlan(0, (wrong,)), StepShape(16, 1, 1), **WINDOWED)


@given(st.data())
def test_page_0_is_refused_exactly_where_a_query_sees_or_a_token_is_written(data: st.DataObject) -> None:
    """Against the definition: some query of the slice sees, or some token goes to, a position of the page."""
    size, window = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 40))
    start, count = data.draw(st.integers(0, 60)), data.draw(st.integers(1, 20))
    width = -(-(start + count) // size)
    gone = data.draw(st.integers(0, width - 1))
    pages = tuple(0 if i == gone else i + 1 for i in range(width))
    used = {p // size for q in range(start, start + count) for p in range(max(0, q - window + 1), q + 1)}
    shape = StepShape(21, 1, 1)
    sizes: dict[str, Any] = {
        "table_width": width,
        "page_size": size,
        "num_pages": width + 1,
        "vocab_size": 9,
        "most_emitting": 1,
    }
    plan = StepPlan(0, (piece(start, (1,) * count, pages),))
    if gone in used:
        with pytest.raises(AssertionError, match="page ids"):
            inputs.pack(plan, shape, window=window, **sizes)
    else:
        inputs.pack(plan, shape, window=window, **sizes)
        with pytest.raises(AssertionError, match="page ids"):
            inputs.pack(plan, shape, **sizes)


def test_the_length_of_the_prompt_goes_with_each_row() -> None:
    """Whether the slice samples or not: its rotations depend on it."""
    shape = StepShape(tokens=5, decode_rows=2, chunk_rows=2)
    decode = piece(6, (11,), (7, 3), num_prompt=4)
    chunk = piece(4, (21, 22, 23), (5, 9), emit=False, num_prompt=50)
    assert packed(shape, decode, chunk)["num_prompt"].tolist() == [4, 0, 50, 0]


# -------------------------------------------------------------------------------------------------- layout


@pytest.mark.parametrize(
    "shape",
    [StepShape(1, 1, 0), StepShape(5, 2, 1), StepShape(520, 8, 64), StepShape(64, 0, 4, True)],
    ids=str,
)
def test_host_and_device_read_the_same_parts(shape: StepShape) -> None:
    """Every part, floats by their bits; no two parts share a place and none is left over."""
    layout = inputs.layout(shape, 9, 4)
    buffer = np.arange(layout.size, dtype=np.int32)
    covered = np.concatenate([part.view(np.int32).ravel() for part in layout.views(buffer).values()])
    np.testing.assert_array_equal(np.sort(covered), buffer)
    generator = np.random.default_rng(0)
    for part in layout.views(buffer).values():
        drawn = generator.standard_normal(part.shape) if part.dtype == np.float32 else part
        part[...] = drawn
    views, split = layout.views(buffer), jax.jit(layout.split)(buffer)
    assert set(views) == set(split)
    for name, part in views.items():
        assert split[name].dtype == part.dtype, name
        np.testing.assert_array_equal(part, split[name], err_msg=name)


# -------------------------------------------------------------------------------------------------- ladder


@st.composite
def plans(draw: st.DrawFn) -> tuple[int, int, list[int]]:
    """(max_num_seqs, max_num_batched_tokens, counts of the slices of one step within the two)."""
    rows = draw(st.integers(1, 64))
    budget = draw(st.one_of(st.sampled_from([1, 2, 15, 16, 17, 317, 512, 2048]), st.integers(1, 700)))
    ones = draw(st.integers(0, min(rows, budget)))
    counts, left = [1] * ones, budget - ones
    chunk = st.sampled_from([2, 3, 16, 100, 10_000])
    while left >= 2 and len(counts) < rows and draw(st.booleans()):
        counts.append(min(left, draw(chunk)))
        left -= counts[-1]
    return rows, budget, counts or [1]


@given(plans(), st.sampled_from(["cpu", "gpu"]))
def test_every_plan_within_the_limits_fits_a_bucket(drawn: tuple[int, int, list[int]], platform: str) -> None:
    rows, budget, counts = drawn
    ladder = shape_ladder(rows, budget, platform=platform)
    assert len(set(ladder)) == len(ladder)
    assert list(ladder) == sorted(ladder)
    slices = tuple(piece(0, (1,) * n, (1,)) for n in counts)
    shape = choose_step_shape(StepPlan(0, slices), ladder)
    ones = sum(n == 1 for n in counts)
    assert shape.holds(ones, len(counts) - ones, sum(counts) - ones)
    assert shape.tokens <= rows + budget


@pytest.mark.parametrize("budget", [1, 2, 5, 16, 317])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 32])
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_the_fullest_plans_fit(rows: int, budget: int, platform: str) -> None:
    """All rows decoding; one chunk of the whole budget; as many chunks as possible; one chunk beside ones."""
    ladder = shape_ladder(rows, budget, platform=platform)
    ones = min(rows, budget)
    full = [[1] * ones, [budget], [2] * min(rows, budget // 2), [1] * (rows - 1) + [budget - rows + 1]]
    for counts in full:
        if counts and min(counts) >= 1 and len(counts) <= rows and sum(counts) <= budget:
            slices = tuple(piece(0, (1,) * n, (1,)) for n in counts)
            choose_step_shape(StepPlan(0, slices), ladder)


@pytest.mark.parametrize(("platform", "seqs", "tokens"), [("cpu", 32, 512), ("gpu", 256, 2048)])
def test_the_number_of_programs(platform: str, seqs: int, tokens: int) -> None:
    """At the defaults of a platform, with one program to score and one to copy."""
    defaults = EngineConfig().on(platform)
    assert (defaults.max_num_seqs, defaults.max_num_batched_tokens) == (seqs, tokens)
    ladder = shape_ladder(seqs, tokens, platform=platform)
    assert len(ladder) + len(sample_ladder(ladder, 49152, 13_000)) + 2 <= 40
    assert most_emitting(ladder) == seqs


def test_the_ladder_of_other_limits() -> None:
    assert len(shape_ladder(32, 512)) <= 24
    assert len(shape_ladder(256, 8192)) <= 60


def test_the_cheapest_bucket_is_taken() -> None:
    ladder = shape_ladder(8, 64)
    for counts, expected in [
        ([1], "T1/D1/C0"),
        ([1] * 3, "T4/D4/C0"),
        ([5], "T16/D0/C2"),
        ([1, 17], "T40/D8/C4"),
    ]:
        plan = StepPlan(0, tuple(piece(0, (1,) * n, (1,)) for n in counts))
        assert str(choose_step_shape(plan, ladder)) == expected


def test_places_of_states_are_in_the_buffers_of_models_that_have_states_alone() -> None:
    """A model without linear attention sends, and compiles, what it did before there were any."""
    shape = StepShape(tokens=5, decode_rows=2, chunk_rows=2)
    pieces = piece(6, (11,), (7, 3), state_place=2), piece(4, (21, 22, 23), (5, 9), state_place=5)
    view = packed(shape, *pieces, num_states=5)
    assert view["state_places"].tolist() == [2, 0, 5, 0]
    plain, stated = inputs.layout(shape, 3, 4), inputs.layout(shape, 3, 4, has_states=True)
    assert stated.parts.keys() - plain.parts.keys() == {"state_places"}
    assert stated.size == plain.size + shape.rows
    assert "state_places" not in packed(shape, *pieces)
    assert inputs.unpack(packed(shape, *pieces), shape).slots.state_places is None
    assert inputs.unpack(view, shape).slots.state_places is not None


def test_the_ladder_cuts_the_tiles_that_the_backend_wants() -> None:
    """What a ladder assumes when no backend is asked is what the xla backend wants."""
    assert QUERY_TILES == TILE_SIZES
    assert all(shape.tiles == (16,) for shape in shape_ladder(8, 256, (16,)))
    assert invariant_ladder(8, 256, (64, 16))[0].tiles == (16,)
    shape = StepShape(34, 2, 2, tiles=(16,))
    view = inputs.layout(shape, 3, 4).views(np.zeros(inputs.layout(shape, 3, 4).size, np.int32))
    assert view["tiles16"].shape == (4, 3)  # 32 tokens of 2 rows
    assert view["num_tiles"].shape == (1,)
