"""The pool of KV pages: who may write where, as numbers only.

A page id indexes the device's page arrays; the pool never sees them. Page 0 belongs to nobody (padding
writes go there), so a pool of M pages hands out ids 1 .. M - 1.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Protocol


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold the K/V of `num_tokens` tokens from position 0 on: ceil(num_tokens / page_size)."""
    return -(-num_tokens // page_size)


class PageCache(Protocol):
    """Who knows what is in pages that nobody holds: the prefix cache, as the pool sees it."""

    def retain(self, pages: list[int]) -> list[int]:
        """The last holder of each of these pages let go, in this order. Returns those whose content is known,
        which are to be cached; in the same order."""
        ...

    def evict(self, count: int) -> None:
        """Forget cached pages, the least recently used first, until `count` more are free (`uncache`)."""
        ...


class PagePool:
    """Hands out page ids and takes them back; every operation costs O(pages it touches).

    A page is in one of three states, and free + cached + live = num_pages - 1:

        free     count 0; its content means nothing
        live     count = number of page tables that hold it
        cached   count 0, but the prefix cache knows its content; it can be had, at the cost of that

        allocate: free → live      share: one more holder      touch: cached or live → one more holder
        free: one holder less, the last → cached if the prefix cache knows the page, else free
        allocate, when the free pages do not suffice: cached → free, by `PageCache.evict`

    A page with a count above one must not be written. Running out is no error: `allocate` answers None.
    Freeing what is not live is a fault of ours and raises AssertionError with the values.
    """

    __slots__ = ("_cache", "_cached", "_counts", "_free", "num_pages")

    def __init__(self, num_pages: int):
        assert num_pages >= 2, f"a pool needs page 0 and at least one page to hand out, got {num_pages}"
        self.num_pages = num_pages
        # A stack: the page freed last is handed out first. Built in reverse so that ids start at 1.
        self._free = list(range(num_pages - 1, 0, -1))
        self._counts = [0] * num_pages
        # In the order of their last use. Ordered, not a dict: its first entry is found in O(1) whatever was
        # taken out before.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._cache: PageCache | None = None

    @property
    def num_free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Pages that nobody holds and the prefix cache knows."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can give: free and cached."""
        return len(self._free) + len(self._cached)

    @property
    def num_live(self) -> int:
        return self.num_pages - 1 - self.num_available

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` pages, each with one holder; None, taking none, when too few are available."""
        assert count >= 0, f"cannot allocate {count} pages"
        if count > self.num_available:
            return None
        if count == 0:
            return []
        if (short := count - len(self._free)) > 0:
            assert self._cache is not None, f"{self} caches pages for nobody"
            self._cache.evict(short)
            assert count <= len(self._free), f"{short} pages were to be evicted for {count} in {self}"
        free, counts = self._free, self._counts
        pages = free[-count:]
        del free[-count:]
        for page in pages:
            counts[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Count one more holder of each of these live pages."""
        for page in pages:
            assert self.count(page) > 0, f"page {page} is not live and cannot be shared"
            self._counts[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """Count one holder less of each page; a page nobody holds is free again, or cached.

        The pages that come first are evicted first: give those of a sequence from the last one on.
        """
        counts, end = self._counts, self.num_pages
        idle = []
        try:
            for page in pages:
                assert 0 < page < end and counts[page] > 0, f"page {page} is freed twice"  # noqa: PT018
                counts[page] -= 1
                if not counts[page]:
                    idle.append(page)
        finally:  # of those before a page that nobody holds, too
            self._let_go(idle)

    def _let_go(self, idle: list[int]) -> None:
        """Pages that nobody holds any more are cached, or free."""
        if self._cache is None:
            self._free += idle
            return
        cached, known = self._cached, self._cache.retain(idle)
        for page in known:
            cached[page] = None
        if len(known) < len(idle):
            self._free += [page for page in idle if page not in cached]

    def are_live(self, pages: Iterable[int]) -> bool:
        """Whether somebody holds each of these pages, ids of this pool."""
        return all(map(self._counts.__getitem__, pages))

    def count(self, page: int) -> int:
        """Number of holders of a page."""
        assert 0 < page < self.num_pages, f"page {page} is not one of 1 .. {self.num_pages - 1}"
        return self._counts[page]

    # ------------------------------------------------------------------------ for the prefix cache

    def attach(self, cache: PageCache) -> None:
        """From now on ask `cache` whether to keep a page that nobody holds. A pool has one cache for life."""
        assert self._cache is None, f"{self} has a cache already"
        self._cache = cache

    def touch(self, pages: Iterable[int]) -> None:
        """Count one more holder of each of these pages, live or cached; the cached ones are live again."""
        for page in pages:
            if self.count(page) == 0:
                assert page in self._cached, f"page {page} is free and cannot be touched"
                del self._cached[page]
            self._counts[page] += 1

    def refresh(self, page: int) -> None:
        """If it is cached: the page was of use just now."""
        if page in self._cached:
            self._cached.move_to_end(page)

    def uncache(self, page: int) -> bool:
        """The cache knows a page no longer: free it, if it was cached. True when it was."""
        if page not in self._cached:
            return False
        del self._cached[page]
        self._free.append(page)
        return True

    def least_recent(self) -> int:
        """The cached page that has been of no use for the longest time; there must be one. O(1)."""
        return next(iter(self._cached))

    # -------------------------------------------------------------------------------------- checks

    def free_pages(self) -> tuple[int, ...]:
        """The ids that hold nothing (a copy; for checks and tests)."""
        return tuple(self._free)

    def cached_pages(self) -> tuple[int, ...]:
        """The ids that are cached, the least recently used first (a copy; for checks and tests)."""
        return tuple(self._cached)

    def cached_among(self, pages: Iterable[int]) -> tuple[int, ...]:
        """Those of the pages that are cached."""
        return tuple(filter(self._cached.__contains__, pages))

    def check(self) -> list[str]:
        """What is wrong with the books, one sentence each; an empty list when all is well. O(M)."""
        problems = []
        free, cached = len(self._free), len(self._cached)
        live = sum(count > 0 for count in self._counts)
        if free + cached + live != self.num_pages - 1:
            problems.append(f"free {free} + cached {cached} + live {live} pages != {self.num_pages - 1}")
        if len(set(self._free)) != free:
            problems.append(f"the free list of {free} pages holds a page twice")
        if both := [page for page in self._free if page in self._cached]:
            problems.append(f"pages {both[:8]} are free and cached")
        if any(self._counts[page] for page in self._free):
            problems.append("a page on the free list has holders")
        if any(self._counts[page] for page in self._cached):
            problems.append("a cached page has holders")
        if cached and self._cache is None:
            problems.append(f"{cached} pages are cached for nobody")
        if self._counts[0] or 0 in self._free or 0 in self._cached:
            problems.append("page 0 was handed out")
        if any(count < 0 for count in self._counts):
            problems.append("a page has fewer than no holders")
        return problems

    def __repr__(self) -> str:
        cached = f"{self.num_cached} cached, " if self._cache is not None else ""
        return f"PagePool({self.num_free} free, {cached}{self.num_live} live of {self.num_pages - 1})"
