"""Compact page tables: how queries that see some of their sequence's pages run on kernels that know of none.

All queries of one page see the same pages (`config.PageSpan`). So a slice is cut at the borders of its pages
into rows, and the table of a row holds the pages that it sees, and its own page last; it attends causally in
that table as if nothing else had ever been. Keys have their rotation from when they were written, so
attention needs no other positions; only the rotation of what is new does. Pages of 4, near 1 and global 1:

    slice      start 6, count 5, pages [7 3 9]      tokens 6 7 | 8 9 10
    rows       pages [7 3], start 6, 2 tokens       pages [7 9], start 4, 3 tokens, text position 8
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from jaxinfer.config import PageSpan
from jaxinfer.core import Slice


class Compacted(NamedTuple):
    """`pieces`: the rows, as slices whose start and pages are those of their compact tables. `inner`: indexes
    of those that are parts of longer slices. `text_starts`: the position in the text of each piece's first
    token. `firsts`: the index of the first piece of each slice."""

    pieces: tuple[Slice, ...]
    inner: Collection[int]
    text_starts: list[int]
    firsts: list[int]


def compacted(slices: Iterable[Slice], span: PageSpan) -> Compacted:
    """Cut slices into rows of one page each, in order."""
    pieces: list[Slice] = []
    inner: set[int] = set()
    text_starts: list[int] = []
    firsts: list[int] = []
    size = span.page_size
    for piece in slices:
        start, end = piece.start, piece.start + piece.count
        firsts.append(len(pieces))
        while start < end:
            page = start // size
            seen, stop = span.pages(page), min(end, (page + 1) * size)
            if piece.count > 1:
                inner.add(len(pieces))
            pieces.append(
                piece._replace(
                    start=(len(seen) - 1) * size + start % size,
                    tokens=piece.tokens[start - piece.start : stop - piece.start],
                    pages=tuple(piece.pages[index] for index in seen), emit=piece.emit and stop == end,
                )
            )  # fmt: skip
            text_starts.append(start)
            start = stop
    return Compacted(tuple(pieces), inner, text_starts, firsts)
