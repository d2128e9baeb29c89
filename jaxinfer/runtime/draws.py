"""The host's side of sampling: the Draws of a step become one padded int32 vector, and masks one more."""

from __future__ import annotations

import functools
from collections.abc import Sequence as Seq
from typing import Any

import jax
import numpy as np

from jaxinfer.config import SampleShape
from jaxinfer.core import MAX_LOGPROBS, Draw
from jaxinfer.runtime.inputs import Layout
from jaxinfer.runtime.sample import Changes, SamplingInputs


@functools.cache
def layout(shape: SampleShape) -> Layout:
    """The buffer of one bucket: parameters of B rows, then N changes."""
    b, n = shape.rows, shape.changes
    return Layout.of({
        "temperature": (b,), "top_k": (b,), "top_p": (b,), "min_p": (b,), "top_logprobs": (b,),
        "seed": (b, 2), "position": (b,), "told": (b, MAX_LOGPROBS), "masked": (1,),
        "row": (n,), "id": (n,), "factor": (n,), "addend": (n,),
    })  # fmt: skip


@functools.cache
def _neutral(shape: SampleShape) -> np.ndarray:
    """The buffer of a step in which nobody draws: greedy rows, and changes of no row."""
    buffer = np.zeros(layout(shape).size, np.int32)
    view = layout(shape).views(buffer)
    view["top_p"][:] = 1.0
    view["told"][:] = -1
    view["row"][:] = shape.rows
    view["factor"][:] = 1.0
    return buffer


def choose_shape(draws: Seq[Draw | None], ladder: tuple[SampleShape, ...]) -> SampleShape:
    """The cheapest bucket for the rows 0 .. len(draws) - 1 and their changes. The ladder holds any."""
    rows = len(draws)
    changes = sum(len(draw.changes) for draw in draws if draw is not None and draw.changes is not None)
    for shape in ladder:
        if shape.rows >= rows and (shape.changes >= changes if changes else not shape.changes):
            return shape
    raise AssertionError(f"{rows} Draws with {changes} changes do not fit {ladder[-1]}")


def mask_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def pack(
    draws: Seq[Draw | None], shape: SampleShape, vocab_size: int
) -> tuple[np.ndarray, np.ndarray | None]:
    """(buffer int32, mask int32 [B, ceil(V / 32)]); the mask is None where no Draw has one.

    Raises AssertionError for a mask of another length and for changes of ids outside 0 .. V - 1.
    """
    buffer = _neutral(shape).copy()
    view = layout(shape).views(buffer)
    live = [(row, draw) for row, draw in enumerate(draws) if draw is not None]
    rows = [row for row, _ in live]
    sampling = [draw.sampling for _, draw in live]
    view["temperature"][rows] = [0.0 if s.greedy else min(s.temperature, _HOTTEST) for s in sampling]
    view["top_k"][rows] = [min(max(s.top_k, 0), vocab_size) for s in sampling]
    view["top_p"][rows] = [s.top_p for s in sampling]
    view["min_p"][rows] = [s.min_p for s in sampling]
    view["top_logprobs"][rows] = [s.logprobs or 0 for s in sampling]
    seeds = [word for _, draw in live for word in (draw.seed >> 32, draw.seed & 0xFFFFFFFF)]
    view["seed"][rows] = np.asarray(seeds, np.uint32).view(np.int32).reshape(-1, 2)
    view["position"][rows] = [draw.position for _, draw in live]
    for row, draw in live:
        if draw.sampling.logprob_token_ids is not None:
            view["told"][row, : len(draw.sampling.logprob_token_ids)] = draw.sampling.logprob_token_ids
    mask: np.ndarray | None = None
    place = 0
    for row, draw in live:
        if draw.changes is not None and len(draw.changes):
            end = place + len(draw.changes)
            ids = view["id"][place:end]
            ids[:] = draw.changes.ids
            assert 0 <= ids.min() <= ids.max() < vocab_size, f"changed ids leave 0..{vocab_size - 1}"
            view["row"][place:end] = row
            view["factor"][place:end] = draw.changes.factors
            view["addend"][place:end] = draw.changes.addends
            place = end
        if draw.mask is not None:
            if mask is None:
                mask = np.full((shape.rows, mask_words(vocab_size)), -1, np.int32)
                view["masked"][0] = 1
            assert len(draw.mask) == mask[0].nbytes, (
                f"a mask of {len(draw.mask)} bytes, {mask[0].nbytes} are needed for {vocab_size} ids"
            )
            mask[row] = np.frombuffer(draw.mask, "<i4")
    return buffer, mask


_HOTTEST = float(np.finfo(np.float32).max)
"""A temperature beyond float32 would become infinite there."""


def unpack(named: dict[str, Any]) -> tuple[SamplingInputs, Changes | None, jax.Array]:
    """What `Layout.split` gives as the sampler takes it: (parameters, changes, whether a mask is in use)."""
    inputs = SamplingInputs(
        named["temperature"], named["top_k"], named["top_p"], named["min_p"], named["top_logprobs"],
        named["seed"], named["position"], named["told"],
    )  # fmt: skip
    changes = Changes(named["row"], named["id"], named["factor"], named["addend"])
    return inputs, changes if changes.row.shape[0] else None, named["masked"][0]
