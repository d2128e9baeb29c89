"""The pool of KV pages: who may write where, as numbers only.

A page id indexes the device's page arrays; the pool never sees them. Page 0 belongs to nobody (padding
writes go there), so a pool of M pages hands out ids 1 .. M - 1.
"""

from __future__ import annotations

from collections.abc import Iterable


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold the K/V of `num_tokens` tokens from position 0 on: ceil(num_tokens / page_size)."""
    return -(-num_tokens // page_size)


class PagePool:
    """Hands out page ids and takes them back; every operation costs O(pages it touches).

    A page is free (count 0) or live (count = number of page tables that hold it). Sharing is `share`: a
    page with a count above one must not be written, and returns to the free list when its last holder
    frees it.

    Running out is no error: `allocate` answers None. Freeing what is not live is a fault of ours and
    raises AssertionError with the values.
    """

    __slots__ = ("_counts", "_free", "num_pages")

    def __init__(self, num_pages: int):
        assert num_pages >= 2, f"a pool needs page 0 and at least one page to hand out, got {num_pages}"
        self.num_pages = num_pages
        # A stack: the page freed last is handed out first. Built in reverse so that ids start at 1.
        self._free = list(range(num_pages - 1, 0, -1))
        self._counts = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_live(self) -> int:
        return self.num_pages - 1 - len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` pages, each with one holder; None, taking none, when too few are free."""
        assert count >= 0, f"cannot allocate {count} pages"
        if count > len(self._free):
            return None
        if count == 0:
            return []
        pages = self._free[-count:]
        del self._free[-count:]
        for page in pages:
            self._counts[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Count one more holder of each of these live pages."""
        for page in pages:
            assert self.count(page) > 0, f"page {page} is free and cannot be shared"
            self._counts[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """Count one holder less of each page; a page nobody holds is free again."""
        for page in pages:
            assert self.count(page) > 0, f"page {page} is freed twice"
            self._counts[page] -= 1
            if self._counts[page] == 0:
                self._free.append(page)

    def count(self, page: int) -> int:
        """Number of holders of a page."""
        assert 0 < page < self.num_pages, f"page {page} is not one of 1 .. {self.num_pages - 1}"
        return self._counts[page]

    def free_pages(self) -> tuple[int, ...]:
        """The ids that nobody holds (a copy; for checks and tests)."""
        return tuple(self._free)

    def check(self) -> list[str]:
        """What is wrong with the books, one sentence each; an empty list when all is well. O(M)."""
        problems = []
        live = sum(count > 0 for count in self._counts)
        if len(self._free) + live != self.num_pages - 1:
            problems.append(f"free {len(self._free)} + live {live} pages != {self.num_pages - 1}")
        if len(set(self._free)) != len(self._free):
            problems.append(f"the free list of {len(self._free)} pages holds a page twice")
        if any(self._counts[page] for page in self._free):
            problems.append("a page on the free list has holders")
        if self._counts[0] or 0 in self._free:
            problems.append("page 0 was handed out")
        if any(count < 0 for count in self._counts):
            problems.append("a page has fewer than no holders")
        return problems

    def __repr__(self) -> str:
        return f"PagePool({self.num_free} free, {self.num_live} live of {self.num_pages - 1})"
