"""Draws become one buffer and a mask: literal numbers, and the choice of the sampler's bucket."""

from __future__ import annotations

import math
from array import array
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer.config import SampleShape, invariant_ladder, sample_ladder, shape_ladder
from jaxinfer.core import Draw, LogitChanges, SamplingParams
from jaxinfer.runtime import draws

VOCAB = 70


def draw(seed: int = 0, position: int = 0, **fields: Any) -> Draw:
    changes, mask = fields.pop("changes", None), fields.pop("mask", None)
    return Draw(SamplingParams(**fields), seed, position, changes, mask)


def some(count: int, first: int = 0) -> LogitChanges:
    ids = array("i", range(first, first + count))
    return LogitChanges(ids, array("f", [1.5] * count), array("f", [-math.inf] * count))


def packed(shape: SampleShape, *given: Draw | None) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
    buffer, mask = draws.pack(given, shape, VOCAB)
    assert buffer.dtype == np.int32
    return draws.layout(shape).views(buffer), mask


def test_a_row_and_one_that_nobody_wants() -> None:
    wanted = draw((7 << 32) | 0xFFFFFFFE, 5, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, logprobs=4)
    view, mask = packed(SampleShape(4, 0), None, wanted)
    assert mask is None
    assert view["temperature"].tolist() == [0.0, np.float32(0.7), 0.0, 0.0]
    assert view["top_k"].tolist() == [0, 5, 0, 0]
    assert view["top_p"].tolist() == [1.0, np.float32(0.9), 1.0, 1.0]
    assert view["min_p"].tolist() == [0.0, np.float32(0.1), 0.0, 0.0]
    assert view["top_logprobs"].tolist() == [0, 4, 0, 0]
    assert view["seed"].tolist() == [[0, 0], [7, -2], [0, 0], [0, 0]]
    assert view["position"].tolist() == [0, 5, 0, 0]
    assert view["masked"].tolist() == [0]


@pytest.mark.parametrize(
    "greedy", [{"temperature": 0.0}, {"temperature": 1e-12}, {"top_k": 1}, {"top_p": 0.0}], ids=str
)
def test_what_is_greedy_reaches_the_device_as_temperature_zero(greedy: dict[str, Any]) -> None:
    """B080, B081: nothing is divided by a tiny temperature, and top_p 0 cuts nothing."""
    assert packed(SampleShape(1, 0), draw(**greedy))[0]["temperature"].tolist() == [0.0]


@pytest.mark.parametrize("top_k", [0, -1])
def test_top_k_off(top_k: int) -> None:
    assert packed(SampleShape(1, 0), draw(top_k=top_k))[0]["top_k"].tolist() == [0]


def test_a_temperature_beyond_float32_stays_finite() -> None:
    assert np.isfinite(packed(SampleShape(1, 0), draw(temperature=1e300))[0]["temperature"]).all()


def test_changes_follow_each_other_and_the_rest_is_of_no_row() -> None:
    given = (draw(changes=some(2, 10)), None, draw(changes=some(1, 69)), draw(changes=some(0)))
    view, _ = packed(SampleShape(4, 5), *given)
    assert view["row"].tolist() == [0, 0, 2, 4, 4]
    assert view["id"].tolist() == [10, 11, 69, 0, 0]
    assert view["factor"].tolist() == [1.5, 1.5, 1.5, 1.0, 1.0]
    assert view["addend"].tolist() == [-math.inf, -math.inf, -math.inf, 0.0, 0.0]


def test_masks_are_rows_of_words_and_the_others_are_free() -> None:
    words = np.asarray([1, -2, 3], np.int32)
    view, mask = packed(SampleShape(4, 0), None, draw(mask=words.tobytes()))
    assert mask is not None
    assert mask.tolist() == [[-1] * 3, words.tolist(), [-1] * 3, [-1] * 3]
    assert view["masked"].tolist() == [1]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (draw(mask=b"1234"), "a mask of 4 bytes, 12 are needed for 70 ids"),
        (draw(changes=some(1, 70)), r"changed ids leave 0\.\.69"),
        (draw(changes=some(1, -1)), r"changed ids leave 0\.\.69"),
    ],
)
def test_what_the_device_would_bend_is_refused(wrong: Draw, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        packed(SampleShape(1, 4), wrong)


def test_host_and_device_read_the_same_parts() -> None:
    layout = draws.layout(SampleShape(3, 7))
    buffer = np.arange(layout.size, dtype=np.int32)
    views, split = layout.views(buffer), jax.jit(layout.split)(buffer)
    assert sum(part.size for part in views.values()) == layout.size
    for name, part in views.items():
        assert split[name].dtype == part.dtype, name
        np.testing.assert_array_equal(part, split[name], err_msg=name)


# -------------------------------------------------------------------------------------------------- buckets

LADDER = sample_ladder(shape_ladder(32, 512), 49152, 8192)


@pytest.mark.parametrize(
    ("rows", "changes", "expected"),
    [
        (1, 0, "B1/N0"), (3, 0, "B4/N0"), (32, 0, "B32/N0"),
        (1, 1, "B1/N512"), (1, 513, "B1/N8192"), (1, 8193, "B8/N65536"), (2, 9, "B8/N4096"),
        (9, 9, "B32/N16384"), (9, 20_000, "B32/N262144"), (1, 65_537, "B32/N262144"),
    ],
)  # fmt: skip
def test_the_cheapest_bucket_is_taken(rows: int, changes: int, expected: str) -> None:
    given = [draw(changes=some(changes) if changes else None), *[None] * (rows - 1)]
    assert str(draws.choose_shape(given, LADDER)) == expected


def test_the_buckets() -> None:
    assert len(LADDER) == 12
    assert list(map(str, sample_ladder(invariant_ladder(32, 512), 300, 9000))) == ["B32/N0", "B32/N9600"]
    for seqs in (1, 2, 3, 8, 20, 256):
        ladder = sample_ladder(shape_ladder(seqs, 2048), 128_000, 40_000)
        assert list(ladder) == sorted(set(ladder))
        assert ladder[-1].rows == seqs
