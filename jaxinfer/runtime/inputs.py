"""The host's side of a step's data: a StepPlan becomes one padded int32 vector, and one transfer.

Everything a step reads is laid end to end in a single buffer (floats by their bits), because each
host-to-device copy costs tens of microseconds however small it is. `Layout` says where each part lies, for
numpy on the host and for the traced step alike.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.config import StepShape
from jaxinfer.core import MAX_HELD_BACK, Slice, StepPlan
from jaxinfer.model.kv import WriteSlots
from jaxinfer.runtime.sample import SamplingInputs
from pallas_kernels.batch import RaggedBatch, fill_tiles, tile_capacity

_FLOATS = {"temperature", "top_p", "min_p"}


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each named array lies in the buffer of one bucket: name -> (offset, shape)."""

    shape: StepShape
    parts: dict[str, tuple[int, tuple[int, ...]]]
    size: int

    def views(self, buffer: np.ndarray) -> dict[str, np.ndarray]:
        """Named windows into a host buffer; writing them writes it."""
        named = {}
        for name, (offset, shape) in self.parts.items():
            part = buffer[offset : offset + math.prod(shape)]
            named[name] = (part.view(np.float32) if name in _FLOATS else part).reshape(shape)
        return named

    def split(self, buffer: jax.Array) -> dict[str, jax.Array]:
        """The same, inside a traced step."""
        named = {}
        for name, (offset, shape) in self.parts.items():
            part = buffer[offset : offset + math.prod(shape)]
            if name in _FLOATS:
                part = jax.lax.bitcast_convert_type(part, jnp.float32)
            named[name] = part.reshape(shape)
        return named


@functools.cache
def layout(shape: StepShape, table_width: int) -> Layout:
    """The buffer of one bucket, with page tables of `table_width` (P) entries a row."""
    t, b = shape.tokens, shape.rows
    large, small = tile_capacity(shape.chunk_tokens, shape.chunk_rows)
    sizes = {
        "tokens": (t,), "positions": (t,), "token_row": (t,), "page_ids": (t,), "offsets": (t,),
        "page_table": (b, table_width), "kv_len": (b,), "emit": (b,), "num_prompt": (b,),
        "large_tiles": (large, 3), "small_tiles": (small, 3), "num_tiles": (2,),
        "temperature": (b,), "top_k": (b,), "top_p": (b,), "min_p": (b,), "top_logprobs": (b,),
        "seed": (b, 2), "sample_position": (b,), "held_back": (b, MAX_HELD_BACK),
    }  # fmt: skip
    parts, offset = {}, 0
    for name, size in sizes.items():
        parts[name] = (offset, size)
        offset += math.prod(size)
    return Layout(shape, parts, offset)


def choose_shape(plan: StepPlan, ladder: tuple[StepShape, ...]) -> StepShape:
    """The cheapest bucket that holds the plan."""
    ones = sum(s.count == 1 for s in plan.slices)
    chunks = len(plan.slices) - ones
    chunk_tokens = plan.num_tokens - ones
    for shape in ladder:
        if shape.holds(ones, chunks, chunk_tokens):
            return shape
    raise AssertionError(f"no bucket holds {ones} one-token slices, {chunks} chunks, {chunk_tokens} tokens")


def pack(
    plan: StepPlan,
    shape: StepShape,
    *,
    table_width: int,
    page_size: int,
    num_pages: int,
    vocab_size: int,
    window: int | None = None,
) -> tuple[np.ndarray, list[int]]:
    """The buffer of a plan, and the row of each slice.

    One-token slices take rows 0, 1, ... and the same packed places; chunks follow from place decode_rows
    and row decode_rows on. Worked example, decode_rows 2, Z 4, one decode at position 6 and a chunk of
    tokens 4..6 (see RaggedBatch):

        tokens    [a 0 b c d]     page_ids [3 0 9 9 9]     emit (place of a row's last token)  [0 0 4 ...]
        positions [6 0 4 5 6]     offsets  [2 0 0 1 2]     kv_len                              [7 0 7 ...]

    `window` is what every layer keeps to (`Limits.window`): pages that a slice's first query is past may be
    0. Each page that it sees or writes must be one of 1 .. num_pages - 1; raises AssertionError otherwise.
    """
    buffer = np.zeros(layout(shape, table_width).size, np.int32)
    view = layout(shape, table_width).views(buffer)
    view["token_row"][:] = -1
    view["held_back"][:] = vocab_size  # an id that no column has
    view["top_p"][:] = 1.0
    rows: list[int] = []
    chunks: list[tuple[int, int, int]] = []
    one, row, place = 0, shape.decode_rows, shape.decode_rows
    for piece in plan.slices:
        if piece.count == 1:
            at, this_row = one, one
            one += 1
        else:
            at, this_row = place, row
            chunks.append((row, place, piece.count))
            place += piece.count
            row += 1
        rows.append(this_row)
        _fill_row(view, piece, this_row, at, page_size, num_pages, vocab_size, window)
    capacity = tile_capacity(shape.chunk_tokens, shape.chunk_rows)
    (view["large_tiles"][:], view["small_tiles"][:]), view["num_tiles"][:] = fill_tiles(chunks, capacity)
    return buffer, rows


def _fill_row(
    view: dict[str, np.ndarray],
    piece: Slice,
    row: int,
    at: int,
    page_size: int,
    num_pages: int,
    vocab_size: int,
    window: int | None,
) -> None:
    end = piece.start + piece.count
    pages = np.asarray(piece.pages, np.int32)
    # The device clamps a wrong index silently and reads another request's page: refuse it here.
    assert len(pages) * page_size >= end, f"{len(pages)} pages of {page_size} do not cover {end} tokens"
    behind = 0 if window is None else max(0, piece.start - window + 1) // page_size
    used = pages[behind:]
    assert 0 < used.min() <= used.max() < num_pages, (
        f"page ids {piece.pages[behind:]} leave 1..{num_pages - 1}"
    )
    # What lies behind every window may still be gathered and masked: given back (0) or not, within the pool.
    assert 0 <= pages.min() <= pages.max() < num_pages, f"page ids {piece.pages} leave 0..{num_pages - 1}"
    tokens = view["tokens"][at : at + piece.count]
    tokens[:] = piece.tokens
    assert 0 <= tokens.min() <= tokens.max() < vocab_size, f"token ids leave 0..{vocab_size - 1}"
    positions = np.arange(piece.start, end, dtype=np.int32)
    view["positions"][at : at + piece.count] = positions
    view["token_row"][at : at + piece.count] = row
    view["page_ids"][at : at + piece.count] = pages[positions // page_size]
    view["offsets"][at : at + piece.count] = positions % page_size
    view["page_table"][row, : len(pages)] = pages
    view["kv_len"][row] = end
    view["emit"][row] = at + piece.count - 1
    view["num_prompt"][row] = piece.num_prompt
    if not piece.emit:
        return
    sampling = piece.sampling
    view["temperature"][row] = 0.0 if sampling.greedy else sampling.temperature
    view["top_k"][row] = min(max(sampling.top_k, 0), vocab_size)
    view["top_p"][row] = sampling.top_p
    view["min_p"][row] = sampling.min_p
    view["top_logprobs"][row] = sampling.logprobs or 0
    view["seed"][row] = np.asarray([piece.seed >> 32, piece.seed & 0xFFFFFFFF], np.uint32).view(np.int32)
    view["sample_position"][row] = end
    held = piece.held_back
    view["held_back"][row, : len(held)] = held


class StepInputs(NamedTuple):
    """A split buffer as the step's own types. tokens [T]; num_prompt, emit [B]; all int32."""

    tokens: jax.Array
    batch: RaggedBatch
    slots: WriteSlots
    num_prompt: jax.Array
    emit: jax.Array
    sampling: SamplingInputs


def unpack(named: dict[str, Any]) -> StepInputs:
    """Group the parts that `Layout.split` gives."""
    batch = RaggedBatch(
        named["token_row"], named["positions"], named["page_table"], named["kv_len"],
        (named["large_tiles"], named["small_tiles"]), named["num_tiles"],
    )  # fmt: skip
    sampling = SamplingInputs(
        named["temperature"], named["top_k"], named["top_p"], named["min_p"], named["top_logprobs"],
        named["seed"], named["sample_position"], named["held_back"],
    )  # fmt: skip
    slots = WriteSlots(named["page_ids"], named["offsets"])
    return StepInputs(named["tokens"], batch, slots, named["num_prompt"], named["emit"], sampling)
