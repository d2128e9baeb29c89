"""FAVOR+ over packed steps: each row gives what its text gives whole, however steps cut and mix them."""

from __future__ import annotations

import functools

import favor_by_hand
import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.config import Favor
from jaxinfer.model.favor import FavorState, attend_rows, random_features
from pallas_kernels.batch import RaggedBatch, fill_tiles, tile_capacity

WIDTH, SCALE, FAVOR = 8, 8**-0.5, Favor(24)
DECODE_ROWS, CHUNK_ROWS, CHUNK_TOKENS, TILES, PLACES = 2, 3, 26, (8, 4), 6


@functools.partial(jax.jit, donate_argnums=3)
def step(q, k, v, states, batch, places):
    return attend_rows(q, k, v, states, batch, places, decode_rows=DECODE_ROWS, favor=FAVOR, scale=SCALE)


def spoiled() -> FavorState:
    """States that hold what nobody may ever see."""
    shape = (PLACES, 2, FAVOR.features)
    return FavorState(*(np.full(s, np.nan, np.float32) for s in ((*shape, WIDTH), shape, shape)))


class Text:
    """q, k, v of one text, where its state is, and what came out so far."""

    def __init__(self, length: int, place: int, seed: int):
        generator = np.random.default_rng(seed)
        self.qkv = [
            generator.standard_normal((length, heads, WIDTH)).astype(np.float32) for heads in (4, 2, 2)
        ]
        self.length, self.place, self.start = length, place, 0
        self.attended = np.zeros((length, 4, WIDTH))

    def run(self, out: np.ndarray, count: int) -> None:
        self.attended[self.start : self.start + count] = out
        self.start += count


def run(states: FavorState, ones: list[Text], chunks: list[tuple[Text, int]]) -> FavorState:
    """A step with a token of each of `ones` and so many of each of `chunks`; the rest is padding of NaN."""
    tokens, rows = DECODE_ROWS + CHUNK_TOKENS, DECODE_ROWS + CHUNK_ROWS
    qkv = [np.full((tokens, heads, WIDTH), np.nan, np.float32) for heads in (4, 2, 2)]
    token_row, positions = np.full(tokens, -1, np.int32), np.zeros(tokens, np.int32)
    places = np.zeros(rows, np.int32)
    cut, taken, at = [], [], DECODE_ROWS
    for row, text in enumerate(ones):
        taken.append((text, row, row, 1))
    for row, (text, count) in enumerate(chunks, DECODE_ROWS):
        taken.append((text, row, at, count))
        cut.append((row, at, count))
        at += count
    for text, row, first, count in taken:
        for to, x in zip(qkv, text.qkv, strict=True):
            to[first : first + count] = x[text.start : text.start + count]
        token_row[first : first + count] = row
        positions[first : first + count] = range(text.start, text.start + count)
        places[row] = text.place
    tiles, num_tiles = fill_tiles(cut, tile_capacity(CHUNK_TOKENS, CHUNK_ROWS, TILES), TILES)
    table = np.zeros((rows, 1), np.int32)
    batch = RaggedBatch(token_row, positions, table, np.zeros(rows, np.int32), tiles, num_tiles, TILES)
    out, states = step(*qkv, states, batch, places)
    for text, _, first, count in taken:
        text.run(np.asarray(out[first : first + count]), count)
    return states


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_mix_of_rows_gives_what_each_text_gives_alone(data: st.DataObject) -> None:
    """Decodes and chunks of several texts together; places of NaN at first, and later of other texts."""
    waiting = [Text(data.draw(st.integers(1, 40)), 0, seed) for seed in range(data.draw(st.integers(1, 7)))]
    texts, running, free, states = list(waiting), [], list(range(1, PLACES)), spoiled()
    while waiting or running:
        while waiting and free:
            running.append(waiting.pop())
            running[-1].place = free.pop()
        chosen = data.draw(st.permutations(running))[: DECODE_ROWS + CHUNK_ROWS]
        ones, chunks = chosen[:DECODE_ROWS], []
        room = CHUNK_TOKENS
        for text in chosen[DECODE_ROWS:]:
            most = min(text.length - text.start, room)
            if most:
                chunks.append((text, data.draw(st.integers(1, most))))
                room -= chunks[-1][1]
        states = run(states, ones, chunks)
        for text in chosen:
            if text.start == text.length:
                running.remove(text)
                free.append(text.place)
    for text in texts:
        expected = favor_by_hand.attended(*text.qkv, random_features(FAVOR, WIDTH), SCALE)
        np.testing.assert_allclose(text.attended, expected, atol=1e-3)
