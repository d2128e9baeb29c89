"""The prefix cache: which pages hold the K/V of which tokens, after those who computed them have ended.

A radix tree over full pages. A node is one page; its key is the tuple of that page's Z tokens, and the path
from the root is the whole prefix that its K/V depends on. Keys are compared token by token and no hash
decides anything, so a prompt cannot be made to match another one's pages. Each `cache_salt` has a tree of
its own; None is one of them.

Pages of 2 tokens, 5 of them usable (a test runs this):

>>> pool = PagePool(6)
>>> cache = PrefixCache(pool, page_size=2)
>>> a = [7, 7, 8, 8, 9]                            # prompt A: two full pages and a token
>>> pages = pool.allocate(3); pages
[3, 2, 1]
>>> cursor = cache.register(None, a, pages[:2])    # A's step has succeeded: its full pages can be matched
>>> pool.free(reversed(pages)); pool               # A ends; page 1 is not full and not known
PagePool(3 free, 2 cached, 0 live of 5)

>>> b = [7, 7, 8, 5, 6]                            # prompt B: A's first page, and half of its second
>>> match = cache.match(b, limit=len(b) - 1); match.pages, match.num_tokens, match.partial
((3,), 2, (2, 1))
>>> cursor = cache.take(match); pool               # page 3 is live again
PagePool(3 free, 1 cached, 1 live of 5)
>>> own = pool.allocate(2); own                    # page 2 is copied into page 4, and B goes on there
[4, 1]
>>> cursor = cache.register(cursor, b, [3, 4])
>>> cache.match([7, 7, 8, 5, 0], limit=4).pages    # both branches can be found now
(3, 4)
>>> more = pool.allocate(2); more, pool            # the free page, then the cached one
([5, 2], PagePool(0 free, 0 cached, 5 live of 5))
>>> pool.allocate(1) is None                       # what is live stays
True
>>> cache.match(a, limit=4).pages, cache.evictions
((3,), 1)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from heapq import heappop, heappush, heapreplace
from itertools import batched
from operator import attrgetter
from typing import NamedTuple

from jaxinfer.engine.pages import PagePool

Tokens = tuple[int, ...]
_KEY = attrgetter("key")


class Node:
    """One page of one tree. To everybody but PrefixCache it is a cursor: the place of a sequence's last page.

    The children are in order of their keys: of all keys, the two beside the place of any tokens have the
    longest prefix in common with them, however many there are. `parent` None: out of the tree, or a root.
    """

    __slots__ = ("children", "depth", "key", "page", "parent", "tick")

    def __init__(self, key: Tokens, page: int, parent: Node | None):
        self.key, self.page, self.parent = key, page, parent
        self.depth: int = 0 if parent is None else parent.depth + 1  # pages from the root on
        self.children: list[Node] = []
        self.tick = 0  # when it was last of use

    def place(self, key: Tokens) -> int:
        """Where among the children `key` is, or would be."""
        return bisect_left(self.children, key, key=_KEY)

    def child(self, key: Tokens) -> Node | None:
        place = bisect_left(self.children, key, key=_KEY)
        if place < len(self.children) and self.children[place].key == key:
            return self.children[place]
        return None

    def __repr__(self) -> str:
        return f"Node(page {self.page} at depth {self.depth}, {len(self.children)} children)"


class Root(Node):
    """Where the tree of one salt begins. It has no page, and is gone when it has no children."""

    __slots__ = ("salt",)

    def __init__(self, salt: str | None):
        super().__init__((), 0, None)
        self.salt = salt


class Match(NamedTuple):
    """What the cache holds of some tokens; good until the next change of pool or cache.

    `pages` hold the K/V of the first `num_tokens` tokens, all full. `partial` (page, count): a page whose
    first `count` >= 1 tokens, fewer than the page size, are those that follow; it must be copied to go on.
    `queried` tokens were asked for.
    """

    pages: tuple[int, ...] = ()
    num_tokens: int = 0
    partial: tuple[int, int] | None = None
    queried: int = 0
    node: Node | None = None  # of the last page


class PrefixCache:
    """Knows the content of full pages, and which of those that nobody holds go first.

        match = cache.match(tokens, salt, limit=len(tokens) - 1)    look; changes nothing
        cursor = cache.take(match)                                  become a holder of match.pages
        cursor = cache.register(cursor, tokens, full_pages, salt)   after each step that succeeded
        pool.free(reversed(pages))                                  the end; known pages stay, as cached

    **Which page.** The first page registered for a path stays. Whoever computed the same tokens beside it
    keeps its own page, which the tree does not know and which is free in the end; its further pages are
    registered below the node all the same. So the pages of one match may come from several computations. That
    is sound, because the K/V of a page is a function of its path; in float32 two computations of it (other
    chunks, other batch) may differ in the last bits, as they do without a cache.

    **Who goes.** Least recently used first, leaves first: a page is of use until its last holder lets go, and
    when `take` names it. A parent follows when its last child is gone. Where the holder of a child has a page
    of its own in the parent's place, a page that nobody holds can be above live ones. When only such pages
    are left, the topmost goes, and all that is below it leaves the tree; what is live there becomes private,
    and its holder's next `register` puts it back, along with the holder's own pages above. So all
    `num_available` pages of the pool can really be had.

    **Copies within a plan.** The source of `partial` is not held. It may be evicted, and even be handed out,
    by the very plan that copies it: a step reads the sources of all its copies before anything is written
    (StepPlan.copies), and what a page held at the end of the step before is what was matched. It may even be
    handed out as its own copy.

    Costs: match, take and register O(log children) a page; register O(1) when no page was filled. Evicting is
    O(log M) a page, amortised over what was let go before; besides, a page's place among its siblings is a
    list's (8 bytes moved for each).
    """

    def __init__(self, pool: PagePool, page_size: int):
        assert page_size >= 1, f"a page holds at least one token, got {page_size}"
        self.page_size = page_size
        self.queries = 0  # tokens that might have come from the cache, of all that was taken
        self.hits = 0  # tokens that did
        self.evictions = 0  # pages
        self._pool = pool
        self._roots: dict[str | None, Root] = {}
        self._nodes: list[Node | None] = [None] * pool.num_pages  # by page
        self._barred: set[int] = set()  # live pages that may not be registered
        self._clock = 0
        # (tick, page) of every node that could go, at most one entry a page. An entry may be out of date:
        # then its tick is too early, never too late, so the first one that is up to date is the right one.
        self._heap: list[tuple[int, int]] = []
        self._queued = bytearray(pool.num_pages)  # 1 for pages on the heap
        pool.attach(self)

    # ------------------------------------------------------------------------------------- looking

    def match(self, tokens: Seq[int], salt: str | None = None, limit: int | None = None) -> Match:
        """The longest run of known pages that holds `tokens[:limit]` from the first on; changes nothing.

        limit: how many tokens may come from the cache; None: all. The engine leaves one token to compute,
        for its logits.
        """
        size = self.page_size
        limit = len(tokens) if limit is None else max(0, min(limit, len(tokens)))
        node: Node | None = self._roots.get(salt)
        if node is None:
            return Match(queried=limit)
        pages = []
        start = 0
        while start + size <= limit:
            child = node.child(tuple(tokens[start : start + size]))
            if child is None:
                break
            node = child
            pages.append(node.page)
            start += size
        partial = _longest(node, tuple(tokens[start : min(start + size, limit)]))
        return Match(tuple(pages), start, partial, limit, node if pages else None)

    def take(self, match: Match) -> Node | None:
        """Become a holder of each of the match's pages; returns the cursor to `register` from.

        The match must be fresh. Counts it in the statistics, also when nothing was found.
        """
        if match.node is not None:
            assert match.node.parent is not None, f"{match} is out of date"
            self._pool.touch(match.pages)
        if match.partial is not None:
            page, count = match.partial
            node = self._nodes[page]
            assert node is not None, f"{match} is out of date"
            self._pool.refresh(page)
            node.tick = self._next_tick()
            self.hits += count
        self.hits += match.num_tokens
        self.queries += match.queried
        return match.node

    # ------------------------------------------------------------------------------------ learning

    def register(
        self, cursor: object, tokens: Seq[int], pages: Seq[int], salt: str | None = None
    ) -> Node | None:
        """Make a sequence's full pages matchable; returns the cursor for the sequence's next call.

        `pages`, held by the caller, hold the K/V of `tokens[: len(pages) * Z]`, computed by steps that have
        succeeded. cursor: what `take` or the last `register` for this sequence returned; None: from the root
        on. A cursor whose node is gone, evicted or cleared, counts as None: all pages are registered anew.
        """
        assert cursor is None or isinstance(cursor, Node), f"{cursor!r} is no cursor"
        node = cursor if cursor is not None and cursor.parent is not None else None
        depth = 0 if node is None else node.depth
        assert depth <= len(pages), f"{node} is past the {len(pages)} pages of its sequence"
        size, end = self.page_size, len(pages)
        if self._barred:  # nor what was computed from such a page
            end = next((index for index, page in enumerate(pages) if page in self._barred), end)
        if end <= depth:
            return node
        assert len(tokens) >= end * size, f"{len(tokens)} tokens do not fill {len(pages)} pages of {size}"
        parent = node or self._roots.get(salt)
        if parent is None:
            parent = self._roots[salt] = Root(salt)
        nodes, more = self._nodes, pages[depth:end]
        assert self._pool.are_live(more), f"one of the pages {more} has no holder and cannot be registered"
        for page, key in zip(more, batched(tokens[depth * size : end * size], size), strict=True):
            children, place = parent.children, 0
            if children:
                place = bisect_left(children, key, key=_KEY)
                if place < len(children) and children[place].key == key:
                    parent = children[place]
                    continue
            assert nodes[page] is None, f"page {page} is known as {nodes[page]}, not below {parent}"
            nodes[page] = new = Node(key, page, parent)
            children.insert(place, new)
            parent = new
        return parent

    # ---------------------------------------------------------------------------------- forgetting

    def forget(self, pages: Iterable[int]) -> None:
        """The content of these pages is not to be trusted, nor what was computed from it.

        They leave the tree with all that is below them, and while anybody holds one it cannot be registered
        again, nor can the pages after it in a sequence.
        """
        for page in pages:
            if self._pool.count(page) > 0:
                self._barred.add(page)
            if (node := self._nodes[page]) is not None:
                self._detach(node)

    def clear(self) -> None:
        """The content of every page is gone, on the device: forget all nodes.

        Cached pages become free. Live ones become private to their holders, who have to compute them anew
        before they register them; old cursors may be handed in again. Statistics stay. O(M).
        """
        for root in tuple(self._roots.values()):
            for node in tuple(root.children):
                self._detach(node)
        # Whatever is registered from here on has been computed since, in whatever page.
        self._barred.clear()
        self._heap.clear()
        self._queued = bytearray(len(self._queued))

    def retain(self, pages: list[int]) -> list[int]:
        """For the pool: the last holder of each of these pages let go, in this order; those to be cached."""
        nodes, tick, known = self._nodes, self._clock, []
        for page in pages:
            node = nodes[page]
            if node is None:
                self._barred.discard(page)
                continue
            node.tick = tick = tick + 1
            known.append(page)
            if not node.children:
                self._queue(node)
        self._clock = tick
        return known

    def evict(self, count: int) -> None:
        """For the pool: make `count` cached pages free, or a few more."""
        while count > 0:
            node = self._least_recent_leaf()
            freed = self._detach(self._topmost()) if node is None else self._detach_up(node, count)
            self.evictions += freed
            count -= freed

    def _least_recent_leaf(self) -> Node | None:
        """Of the cached pages without children, the one to evict, off the heap; None when there is none."""
        heap, nodes, holders = self._heap, self._nodes, self._pool.count
        while heap:
            tick, page = heap[0]
            node = nodes[page]
            if node is not None and node.tick != tick and not node.children and not holders(page):
                heapreplace(heap, (node.tick, page))  # of use since it was put here
                continue
            heappop(heap)
            self._queued[page] = 0
            if node is not None and not node.children and not holders(page):
                return node
        return None

    def _topmost(self) -> Node:
        """A cached page whose parent is live, above the least recently used one."""
        node = self._nodes[self._pool.least_recent()]
        assert node is not None, "a cached page is not in the tree"
        while (parent := node.parent) is not None and parent.page and not self._pool.count(parent.page):
            node = parent
        return node

    def _detach(self, node: Node) -> int:
        """Take a node and all below it out of the tree; returns how many of their pages were cached."""
        parent = node.parent
        assert parent is not None, f"{node} is not in the tree"
        siblings = parent.children
        del siblings[parent.place(node.key) if len(siblings) > 1 else 0]
        if not siblings:
            if isinstance(parent, Root):
                del self._roots[parent.salt]
            elif not self._pool.count(parent.page):
                self._queue(parent)
        cached, below = 0, [node]
        while below:
            node = below.pop()
            below += node.children
            node.children, node.parent = [], None
            self._nodes[node.page] = None
            cached += self._pool.uncache(node.page)
        return cached

    def _detach_up(self, node: Node, most: int) -> int:
        """Take a cached leaf out of the tree, and its ancestors as long as each is the next to go; `most` at
        most. Returns how many. They were let go together: none needs a place on the heap for that."""
        heap, nodes, holders, uncache = self._heap, self._nodes, self._pool.count, self._pool.uncache
        gone = 0
        while True:
            parent = node.parent
            assert parent is not None, f"{node} is not in the tree"
            siblings = parent.children
            del siblings[parent.place(node.key) if len(siblings) > 1 else 0]
            node.parent = nodes[node.page] = None
            uncache(node.page)
            gone += 1
            if siblings:
                return gone
            if isinstance(parent, Root):
                del self._roots[parent.salt]
                return gone
            if holders(parent.page):
                return gone
            if gone == most or (heap and heap[0][0] <= parent.tick):
                self._queue(parent)
                return gone
            node = parent

    def _queue(self, node: Node) -> None:
        if not self._queued[node.page]:
            self._queued[node.page] = 1
            heappush(self._heap, (node.tick, node.page))

    def _next_tick(self) -> int:
        self._clock += 1
        return self._clock

    # -------------------------------------------------------------------------------------- checks

    def __iter__(self) -> Iterator[tuple[str | None, Tokens, int]]:
        """(salt, all tokens from the first on, page) of every node; for checks and tests."""
        below: list[tuple[str | None, Tokens, Node]] = [(r.salt, (), r) for r in self._roots.values()]
        while below:
            salt, path, node = below.pop()
            for child in node.children:
                yield salt, path + child.key, child.page
                below.append((salt, path + child.key, child))

    def check(self) -> list[str]:
        """What is wrong with the trees, one sentence each; an empty list when all is well. O(M)."""
        problems = []
        queued = {page: tick for tick, page in self._heap}
        found = 0
        below: list[Node] = list(self._roots.values())
        while below:
            node = below.pop()
            below += node.children
            keys = [child.key for child in node.children]
            if keys != sorted(set(keys)):
                problems.append(f"the children of {node} are not in order")
            if any(c.parent is not node or c.depth != node.depth + 1 for c in node.children):
                problems.append(f"a child of {node} does not know its place")
            if isinstance(node, Root):
                if not node.children:
                    problems.append(f"the tree of salt {node.salt!r} is empty")
                continue
            found += 1
            if self._nodes[node.page] is not node or len(node.key) != self.page_size:
                problems.append(f"{node} is not the page's node, or has {len(node.key)} tokens")
            goes = not node.children and not self._pool.count(node.page)
            if goes and not 0 < queued.get(node.page, 0) <= node.tick:
                problems.append(f"{node} could go, but would not in its turn")
        known = [node.page for node in self._nodes if node is not None]
        if found != len(known):
            problems.append(f"{found} nodes in the trees, {len(known)} known by page")
        idle = {page for page in known if not self._pool.count(page)}
        if idle != set(self._pool.cached_pages()):
            problems.append(f"{len(idle)} pages in the trees have no holder, others are cached: {self._pool}")
        marked = {page for page, mark in enumerate(self._queued) if mark}
        if len(queued) != len(self._heap) or queued.keys() != marked:
            problems.append(f"the heap of {len(self._heap)} pages holds a page twice, or one not marked")
        if any(self._pool.count(page) == 0 or self._nodes[page] is not None for page in self._barred):
            problems.append("a page that is not to be trusted is known, or has no holder")
        return problems

    def stats(self) -> dict[str, int]:
        """Since the start: tokens asked for and found, by what was taken, and pages evicted."""
        return {"queries": self.queries, "hits": self.hits, "evictions": self.evictions}

    def __repr__(self) -> str:
        return f"PrefixCache({len(self._roots)} trees, {self._pool})"


def _longest(node: Node, tokens: Tokens) -> tuple[int, int] | None:
    """(page, count) of the child that begins with the most of `tokens`; None when none has the first."""
    best, most = None, 0
    place = node.place(tokens)
    for child in node.children[max(0, place - 1) : place + 1]:
        same = 0
        for a, b in zip(child.key, tokens, strict=False):
            if a != b:
                break
            same += 1
        if same > most:
            best, most = (child.page, same), same
    return best
