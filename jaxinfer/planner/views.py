"""Which keys the queries of a layer see, counted: what attention reads and computes follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxinfer.config import LayerConfig, PageSpan, TopPages


@dataclass(frozen=True, slots=True)
class KeyView:
    """The last `window` tokens (None: all) and the first `sinks`; or what `span` or `top` says, in pages of
    `page_size` tokens (`jaxinfer.config.spans`)."""

    window: int | None = None
    sinks: int = 0
    span: PageSpan | None = None
    top: TopPages | None = None
    page_size: int = 16

    @classmethod
    def of(cls, layer: LayerConfig, span: PageSpan | None, page_size: int) -> KeyView:
        """Of a layer with pages; `span`: that of its model."""
        if span is not None or layer.top_pages is not None:
            return cls(span=span, top=layer.top_pages, page_size=page_size)
        return cls(layer.window, layer.sinks)

    @property
    def most(self) -> int | None:
        """The most keys that one query sees which was not part of a prompt; None: all that are before it."""
        if self.span is not None:
            return self.span.most_pages * self.span.page_size
        if self.top is not None:
            return (self.top.count + 1) * self.page_size  # the query's own page beside the chosen
        return None if self.window is None else self.window + self.sinks

    def keys_of(self, start: int, count: int) -> tuple[int, int]:
        """Of a slice: keys that it reads, each once; and keys seen, by all its queries together.

        Where queries choose pages, a slice of one token is taken for one after the prompt. Each query that
        chooses reads its own keys, whatever the others do.
        """
        if self.span is not None:
            return self.span.keys_of(start, count)
        if self.top is None:
            return keys_of(start, count, self.window, self.sinks)
        all_see = self._seeing_all(start, count)
        read, seen = keys_of(start, all_see, None) if all_see else (0, 0)
        chosen = sum(self._chosen(position) for position in range(start + all_see, start + count))
        return read + chosen, seen + chosen

    def keys_of_ones(self, positions: Sequence[int]) -> int:
        """Keys that slices of one token read, all together; as many as they see."""
        if self.span is not None or self.top is not None:
            return sum(self.keys_of(position, 1)[0] for position in positions)
        if (most := self.most) is None:
            return sum(positions) + len(positions)
        return sum(min(position + 1, most) for position in positions)

    def bounds_of(self, start: int, count: int) -> int:
        """Pages whose bounds the queries of a slice look at to choose, all together."""
        if self.top is None:
            return 0
        first = start + self._seeing_all(start, count)
        return _sum_of_pages(start + count, self.page_size) - _sum_of_pages(first, self.page_size)

    def _seeing_all(self, start: int, count: int) -> int:
        """How many of a slice's queries choose no pages; they come first."""
        assert self.top is not None
        if count == 1:
            return 0
        return count if self.top.start is None else min(count, max(0, self.top.start - start))

    def _chosen(self, position: int) -> int:
        assert self.top is not None
        full, own = divmod(position, self.page_size)
        return min(full, self.top.count) * self.page_size + own + 1


def _sum_of_pages(end: int, size: int) -> int:
    """Full pages before each of the positions below `end`, added up."""
    full, rest = divmod(end, size)
    return size * (full * (full - 1) // 2) + rest * full


def keys_of(start: int, count: int, window: int | None, sinks: int = 0) -> tuple[int, int]:
    """Of a slice: keys that it reads, each once; and keys seen, by all its queries together."""
    if sinks and window is not None:
        read, seen = keys_of(start, count, window)
        more = _sinks_seen(start + count, window, sinks) - _sinks_seen(start, window, sinks)
        return read + min(sinks, max(0, start - window + 1)), seen + more
    if count == 1:
        keys = start + 1 if window is None else min(start + 1, window)
        return keys, keys
    if window is None:
        return start + count, count * start + count * (count + 1) // 2
    read = start + count - max(0, start - window + 1)
    growing = min(count, max(0, window - start))  # queries that see less than a window before them
    return read, growing * start + growing * (growing + 1) // 2 + (count - growing) * window


def _sinks_seen(length: int, window: int, sinks: int) -> int:
    """Sinks that the first `length` queries of a text see outside of their windows, all together: the query
    at p sees min(sinks, p + 1 - window) there."""
    past = max(0, length - window)
    growing = min(past, sinks)
    return growing * (growing + 1) // 2 + (past - growing) * sinks
