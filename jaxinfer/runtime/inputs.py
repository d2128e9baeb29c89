"""The host's side of a forward pass: a StepPlan becomes one padded int32 vector, and one transfer.

Everything a step reads is laid end to end in a single buffer (floats by their bits), because each
host-to-device copy costs tens of microseconds however small it is. `Layout` says where each part lies, for
numpy on the host and for the traced step alike.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.config import PageSpan, StepShape
from jaxinfer.core import Slice, StepPlan
from jaxinfer.model.kv import WriteSlots
from jaxinfer.runtime.compact import compacted
from pallas_kernels.batch import RaggedBatch, fill_tiles, tile_capacity

_FLOATS = {"temperature", "top_p", "min_p", "factor", "addend"}


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each named array lies in a buffer: name -> (offset, shape)."""

    parts: dict[str, tuple[int, tuple[int, ...]]]
    size: int

    @classmethod
    def of(cls, sizes: Mapping[str, tuple[int, ...]]) -> Layout:
        """The parts one after the other."""
        parts, offset = {}, 0
        for name, size in sizes.items():
            parts[name] = (offset, size)
            offset += math.prod(size)
        return cls(parts, offset)

    def views(self, buffer: np.ndarray) -> dict[str, np.ndarray]:
        """Named windows into a host buffer; writing them writes it."""
        named = {}
        for name, (offset, shape) in self.parts.items():
            part = buffer[offset : offset + math.prod(shape)]
            named[name] = (part.view(np.float32) if name in _FLOATS else part).reshape(shape)
        return named

    def split(self, buffer: jax.Array) -> dict[str, jax.Array]:
        """The same, inside a traced program."""
        named = {}
        for name, (offset, shape) in self.parts.items():
            part = buffer[offset : offset + math.prod(shape)]
            if name in _FLOATS:
                part = jax.lax.bitcast_convert_type(part, jnp.float32)
            named[name] = part.reshape(shape)
        return named


@functools.cache
def layout(shape: StepShape, table_width: int, most_emitting: int, has_states: bool = False) -> Layout:
    """The buffer of one bucket, with page tables of `table_width` (P) entries a row and R = `most_emitting`
    places of emitted tokens. `has_states`: rows have places of states, in models of linear attention."""
    t, b = shape.tokens, shape.rows
    sizes = shape.tiles
    capacity = tile_capacity(shape.chunk_tokens, shape.table_rows, sizes)
    parts = {
        "tokens": (t,), "source": (t,), "positions": (t,), "token_row": (t,), "page_ids": (t,),
        "offsets": (t,), "page_table": (b, table_width), "kv_len": (b,), "num_prompt": (b,),
        "emit": (most_emitting,), "num_tiles": (len(sizes),),
    }  # fmt: skip
    if has_states:
        parts["state_places"] = (b,)
    parts |= {f"tiles{size}": (room, 3) for size, room in zip(sizes, capacity, strict=True)}
    if shape.cut is not None:
        parts["text_positions"] = (t,)
    return Layout.of(parts)


def pack(
    plan: StepPlan,
    shape: StepShape,
    *,
    table_width: int,
    page_size: int,
    num_pages: int,
    vocab_size: int,
    most_emitting: int,
    num_states: int = 0,
    window: int | None = None,
    sinks: int = 0,
    span: PageSpan | None = None,
    sampled_rows: Mapping[int, int] | None = None,
) -> tuple[np.ndarray, list[int]]:
    """The buffer of a plan, and the packed place of the first token of each slice.

    One-token slices take rows 0, 1, ... and the same packed places; chunks follow from place decode_rows
    and row decode_rows on. A bucket without decode rows runs one-token slices as chunks. Worked example,
    decode_rows 2, Z 4, one decode at position 6 and a chunk of tokens 4..6 (see RaggedBatch):

        tokens    [a 0 b c d]     page_ids [3 0 9 9 9]     emit (places of last tokens, by Draw)  [0 4]
        positions [6 0 4 5 6]     offsets  [2 0 0 1 2]     kv_len                                 [7 0 7 ...]

    `sampled_rows` tells, by uid, which row of the step before sampled a sequence's token: a chained token
    is `source` of that row instead of -1. `window` and `sinks` are what every layer keeps to (`Limits`):
    pages that a slice's first query is past may be 0. Each page that it sees or writes must be one of
    1 .. num_pages - 1, and of `num_states` places for states, where there are any, each slice has its own;
    raises AssertionError otherwise.

    With a `span`, for a bucket that is `cut`, slices become rows with compact tables (`runtime.compact`):
    `positions` and `kv_len` count in those, `text_positions` in the text.
    """
    assert (span is None) == (shape.cut is None), f"{span} in bucket {shape}"
    pieces, inner, text_starts, firsts = plan.slices, (), (), None
    if span is not None:
        pieces, inner, text_starts, firsts = compacted(plan.slices, span)
        plan = StepPlan(plan.step, pieces)
    parts = layout(shape, table_width, most_emitting, num_states > 0)
    buffer = np.zeros(parts.size, np.int32)
    view = parts.views(buffer)
    tokens, positions, source, table = view["tokens"], view["positions"], view["source"], view["page_table"]
    token_row, kv_len, num_prompt, page_ids = (
        view["token_row"], view["kv_len"], view["num_prompt"], view["page_ids"]
    )  # fmt: skip
    token_row.fill(-1)
    source.fill(-1)
    # The plain loop over Python numbers below runs for every decoding row of every step: arrays of one
    # element would cost a microsecond for each line of it.
    places: list[int] = []
    emit: list[int] = []
    behind: list[int] = [0] * shape.rows
    held: list[int] = [0] * shape.rows
    state_places: list[int] = [0] * shape.rows
    ones: list[Slice] = []
    chunks: list[tuple[int, int, int]] = []
    row, place = shape.decode_rows, shape.decode_rows
    for index, piece in enumerate(pieces):
        count, start = len(piece.tokens), piece.start
        end = start + count
        if count == 1 and shape.decode_rows and index not in inner:
            at = this_row = len(ones)
            ones.append(piece)
        else:
            at, this_row = place, row
            chunks.append((row, place, count))
            tokens[at : at + count] = piece.tokens
            positions[at : at + count] = range(start, end)
            token_row[at : at + count] = row
            place += count
            row += 1
        assert len(piece.pages) * page_size >= end, (
            f"{len(piece.pages)} pages of {page_size} do not cover {end} tokens"
        )
        table[this_row, : len(piece.pages)] = piece.pages
        held[this_row] = len(piece.pages)
        if window is not None:
            behind[this_row] = max(0, start - window + 1) // page_size
        kv_len[this_row] = end
        num_prompt[this_row] = piece.num_prompt
        state_places[this_row] = piece.state_place
        if piece.chained:
            assert count == 1, f"a chained slice of {count} tokens: {piece}"
            assert sampled_rows is not None, f"sequence {piece.uid}: no step before this one has sampled"
            assert piece.uid in sampled_rows, f"sequence {piece.uid} was not sampled in the step before"
            source[at] = sampled_rows[piece.uid]
        if piece.emit:
            emit.append(at + count - 1)
        places.append(at)
    if ones:
        count = len(ones)
        tokens[:count] = [piece.tokens[0] for piece in ones]
        positions[:count] = [piece.start for piece in ones]
        token_row[:count] = range(count)
    assert len(emit) <= most_emitting, f"{len(emit)} slices emit, at most {most_emitting} can"
    view["emit"][: len(emit)] = emit
    if num_states:
        own = sorted(piece.state_place for piece in pieces)
        assert 0 < own[0] <= own[-1] <= num_states, f"places of states {own} leave 1..{num_states}"
        assert len(set(own)) == len(own), f"two slices share a place of a state: {own}"
        view["state_places"][:] = state_places
    _check(plan, tokens, table, behind, held, num_pages, vocab_size, page_size, window, sinks)
    if firsts is not None:
        for at, piece, start in zip(places, pieces, text_starts, strict=True):
            view["text_positions"][at : at + len(piece.tokens)] = range(start, start + len(piece.tokens))
        places = [places[index] for index in firsts]
    # Padding tokens are of row -1: they are written into page 0, at offset 0.
    real = token_row >= 0
    page_ids[:] = np.where(real, table[token_row, positions // page_size], 0)
    view["offsets"][:] = positions % page_size
    sizes = shape.tiles
    if chunks:
        capacity = tile_capacity(shape.chunk_tokens, shape.table_rows, sizes)
        tiles, view["num_tiles"][:] = fill_tiles(chunks, capacity, sizes)
        for size, filled in zip(sizes, tiles, strict=True):
            view[f"tiles{size}"][:] = filled
    return buffer, places


def _check(
    plan: StepPlan,
    tokens: np.ndarray,
    table: np.ndarray,
    behind: list[int],
    held: list[int],
    num_pages: int,
    vocab_size: int,
    page_size: int,
    window: int | None,
    sinks: int,
) -> None:
    """Raise AssertionError for an index that the device would bend: it clamps a wrong one silently, and reads
    another request's page."""
    assert 0 <= tokens.min() <= tokens.max() < vocab_size, f"token ids leave 0..{vocab_size - 1}"
    column = np.arange(table.shape[1], dtype=np.int32)
    used = (column >= np.asarray(behind)[:, None]) & (column < np.asarray(held)[:, None])
    front = -(-sinks // page_size)
    if front:
        used[:, :front] = column[:front] < np.asarray(held)[:, None]
    # What lies behind every window may still be gathered and masked: given back (0) or not, within the pool.
    wrong = (table < used) | (table >= num_pages)
    if not wrong.any():
        return
    for piece in plan.slices:
        first = 0 if window is None else max(0, piece.start - window + 1) // page_size
        seen = piece.pages[:front] + piece.pages[max(first, front) :]
        assert 0 < min(seen) <= max(seen) < num_pages, f"page ids {seen} leave 1..{num_pages - 1}"
        assert 0 <= min(piece.pages) <= max(piece.pages) < num_pages, (
            f"page ids {piece.pages} leave 0..{num_pages - 1}"
        )
    raise AssertionError(f"page ids of {plan} leave 0..{num_pages - 1}")


class StepInputs(NamedTuple):
    """A split buffer as the step's own types. tokens, source [T]; num_prompt [B]; emit [R]; text_positions
    [T] where they are not the batch's own, None else; all int32."""

    tokens: jax.Array
    source: jax.Array
    batch: RaggedBatch
    slots: WriteSlots
    num_prompt: jax.Array
    emit: jax.Array
    text_positions: jax.Array | None = None


def unpack(named: dict[str, Any], shape: StepShape) -> StepInputs:
    """Group the parts that `Layout.split` gives."""
    batch = RaggedBatch(
        named["token_row"], named["positions"], named["page_table"], named["kv_len"],
        tuple(named[f"tiles{size}"] for size in shape.tiles), named["num_tiles"], shape.tiles,
    )  # fmt: skip
    slots = WriteSlots(named["page_ids"], named["offsets"], named.get("state_places"))
    return StepInputs(
        named["tokens"], named["source"], batch, slots, named["num_prompt"], named["emit"],
        named.get("text_positions"),
    )  # fmt: skip
