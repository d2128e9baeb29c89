"""PrefixCache beside a naive one: a dict from (salt, tokens) to pages, searched afresh each time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxinfer.engine.pages import PagePool, pages_for
from jaxinfer.engine.prefix import PrefixCache

Path = tuple[str | None, tuple[int, ...]]

# hash(-1) == hash(-2), and few tokens, so that prefixes meet.
TOKENS = st.lists(st.sampled_from([-1, -2, 5]), max_size=8)
SALTS = st.sampled_from([None, None, None, "", "a"])
PICK = st.integers(0, 15)


@dataclass
class Holder:
    """A sequence: all its tokens, and pages for the first of them."""

    tokens: list[int]
    salt: str | None
    pages: list[int]
    registered: int = 0
    cursor: Any = None


@dataclass
class Naive:
    """What the cache should know. `used`: when a page was last of use, by page."""

    size: int
    nodes: dict[Path, int] = field(default_factory=dict)
    used: dict[int, int] = field(default_factory=dict)
    barred: set[int] = field(default_factory=set)
    clock: int = 0

    def use(self, page: int) -> None:
        self.clock += 1
        self.used[page] = self.clock

    def match(self, tokens: list[int], salt: str | None, limit: int) -> tuple[tuple[int, ...], int]:
        """Pages, and the most tokens that a page after them has in common with what follows."""
        pages: list[int] = []
        while (end := (len(pages) + 1) * self.size) <= limit:
            page = self.nodes.get((salt, tuple(tokens[:end])))
            if page is None:
                break
            pages.append(page)
        start = len(pages) * self.size
        rest = tokens[start : min(limit, start + self.size)]
        common = 0
        for (other, path), _ in self.nodes.items():
            if other == salt and len(path) == start + self.size and list(path[:start]) == tokens[:start]:
                while path[start : start + common + 1] == tuple(rest[: common + 1]) and common < len(rest):
                    common += 1
        return tuple(pages), common

    def below(self, top: Path) -> list[Path]:
        return [path for path in self.nodes if path[0] == top[0] and path[1][: len(top[1])] == top[1]]

    def forget(self, page: int) -> None:
        for path in [path for path, known in self.nodes.items() if known == page]:
            for gone in self.below(path):
                del self.nodes[gone]

    def evict_one(self, idle: set[int]) -> set[int]:
        """Forget the page that goes next, and what goes with it; the pages that are free then."""
        paths = sorted((path for path, page in self.nodes.items() if page in idle), key=self._used)
        leaves = [path for path in paths if len(self.below(path)) == 1]
        top = leaves[0] if leaves else paths[0]
        if not leaves:
            while len(top[1]) > self.size and self.nodes[parent := self.parent(top)] in idle:
                top = parent
        return {self.nodes.pop(path) for path in self.below(top)} & idle

    def parent(self, path: Path) -> Path:
        return path[0], path[1][: -self.size]

    def _used(self, path: Path) -> int:
        return self.used[self.nodes[path]]


class Machine(RuleBasedStateMachine):
    """Sequences come, take what they match, compute, register, share, let go of any page, in any order."""

    @initialize(num_pages=st.integers(1, 16), size=st.integers(1, 4))
    def start(self, num_pages: int, size: int) -> None:
        self.size = size
        self.pool = PagePool(num_pages + 1)
        self.cache = PrefixCache(self.pool, size)
        self.naive = Naive(size)
        self.holders: list[Holder] = []
        # What the device has in each page: the salt and the tokens up to its last one.
        self.content: dict[int, Path] = {}
        self.prompts: list[list[int]] = [[]]

    # ------------------------------------------------------------------------ what the rules share

    def live(self) -> set[int]:
        return {page for holder in self.holders for page in holder.pages}

    def idle(self) -> set[int]:
        return set(self.naive.nodes.values()) - self.live()

    def allocate(self, count: int) -> list[int] | None:
        live, idle = self.live(), self.idle()
        free = self.pool.num_pages - 1 - len(live | idle)
        evictions = self.cache.evictions
        pages = self.pool.allocate(count)
        assert (pages is None) == (count > free + len(idle)), (count, free, idle)
        if pages is None:
            return None
        assert not live & set(pages), "a live page was handed out"
        before = free
        while free < count:
            gone = self.naive.evict_one(idle)
            idle -= gone
            free += len(gone)
        assert self.cache.evictions - evictions == free - before
        for page in pages:
            self.content.pop(page, None)
        return pages

    def write(self, holder: Holder, pages: list[int], first: int) -> None:
        for index, page in enumerate(pages, first):
            self.content[page] = holder.salt, tuple(holder.tokens[: (index + 1) * self.size])

    def drop(self, pages: list[int]) -> None:
        """One holder less of each page, after the holder has lost it."""
        self.pool.free(pages)
        for page in pages:
            if page not in self.live():
                self.naive.barred.discard(page)
                if page in self.naive.nodes.values():
                    self.naive.use(page)

    # ------------------------------------------------------------------------------------ rules

    @rule(
        like=PICK,
        keep=st.integers(0, 12),
        rest=TOKENS,
        salt=SALTS,
        short=st.integers(0, 2),
        way=st.sampled_from(["match", "match", "match, no cursor", "alone", "only match"]),
        learn=st.booleans(),
    )
    def come(
        self, like: int, keep: int, rest: list[int], salt: str | None, short: int, way: str, learn: bool
    ) -> None:
        """A sequence that begins as an earlier one; `alone` as if it had been computed beside that one."""
        tokens = self.prompts[like % len(self.prompts)][:keep] + rest
        self.prompts = [*self.prompts[-8:], tokens]
        limit = max(0, len(tokens) - short)
        holder = Holder(tokens, salt, [])
        if way != "alone":
            self.take(holder, limit)
        if way == "match, no cursor":
            holder.cursor = None
        self.holders.append(holder)
        if way != "only match":
            held = len(holder.pages)
            more = self.allocate(pages_for(len(tokens), self.size) - held)
            if more is not None:
                holder.pages += more
                self.write(holder, more, held)
        if learn:
            self.register(-1, 4)

    def take(self, holder: Holder, limit: int) -> None:
        """Give a new sequence what the cache has of it."""
        tokens, salt = holder.tokens, holder.salt
        match = self.cache.match(tokens, salt, limit)
        pages, common = self.naive.match(tokens, salt, limit)
        assert (match.pages, match.num_tokens) == (pages, len(pages) * self.size)
        assert (match.partial[1] if match.partial else 0) == common
        assert match.num_tokens + common <= limit
        for index, page in enumerate(pages):
            assert self.content[page] == (salt, tuple(tokens[: (index + 1) * self.size]))
        if match.partial is not None:
            theirs, path = self.content[match.partial[0]]
            end = match.num_tokens + common
            assert (theirs, path[:end]) == (salt, tuple(tokens[:end]))
            self.naive.use(match.partial[0])
        hits, queries = self.cache.hits, self.cache.queries
        cursor = self.cache.take(match)
        found = match.num_tokens + common
        assert (self.cache.hits - hits, self.cache.queries - queries) == (found, limit)
        holder.pages, holder.registered, holder.cursor = list(pages), len(pages), cursor

    @precondition(lambda self: self.holders)
    @rule(pick=PICK, count=st.integers(0, 4))
    def register(self, pick: int, count: int) -> None:
        holder = self.holders[pick % len(self.holders)]
        full = min(len(holder.pages), len(holder.tokens) // self.size)
        if holder.registered > full:
            return  # it has let go of pages
        holder.registered = min(full, holder.registered + count)
        holder.cursor = self.cache.register(
            holder.cursor, holder.tokens, holder.pages[: holder.registered], holder.salt
        )
        known = self.naive.nodes
        # The naive one begins at the root each time.
        for index, page in enumerate(holder.pages[: holder.registered]):
            if page in self.naive.barred:
                break
            known.setdefault((holder.salt, tuple(holder.tokens[: (index + 1) * self.size])), page)

    @precondition(lambda self: self.holders)
    @rule(pick=PICK, tokens=TOKENS)
    def generate(self, pick: int, tokens: list[int]) -> None:
        holder = self.holders[pick % len(self.holders)]
        if pages_for(len(holder.tokens), self.size) != len(holder.pages) or len(holder.tokens) > 20:
            return
        held, tokens = len(holder.pages), holder.tokens + tokens
        more = self.allocate(pages_for(len(tokens), self.size) - held)
        if more is not None:
            holder.tokens = tokens
            holder.pages += more
            # The last page that it had is written on, if it was not full; `share` shares only what is.
            self.write(holder, holder.pages[max(0, held - 1) :], max(0, held - 1))

    @precondition(lambda self: self.holders)
    @rule(pick=PICK)
    def share(self, pick: int) -> None:
        """Another sequence of the same prefix, as the continuations of one request are."""
        holder = self.holders[pick % len(self.holders)]
        full = min(len(holder.pages), len(holder.tokens) // self.size)
        self.pool.share(holder.pages[:full])
        tokens = holder.tokens[: full * self.size]
        registered = min(full, holder.registered)
        cursor = holder.cursor if registered == holder.registered else None
        self.holders.append(Holder(tokens, holder.salt, holder.pages[:full], registered, cursor))

    @precondition(lambda self: self.holders)
    @rule(pick=PICK)
    def end(self, pick: int) -> None:
        holder = self.holders.pop(pick % len(self.holders))
        self.drop(holder.pages[::-1])

    @precondition(lambda self: self.holders)
    @rule(pick=PICK, first=st.integers(0, 6))
    def lose(self, pick: int, first: int) -> None:
        """End by giving the pages back in an odd order, with others' allocations between."""
        holder = self.holders.pop(pick % len(self.holders))
        while holder.pages:
            page = holder.pages.pop(first % len(holder.pages))
            rest = Holder([], None, holder.pages)
            self.holders.append(rest)  # so that what is left counts as live
            self.drop([page])
            got = self.allocate(1)
            self.holders.remove(rest)
            if got is not None:
                self.holders.append(Holder([], holder.salt, got))

    @precondition(lambda self: self.holders)
    @rule(pick=PICK, sure=st.integers(0, 2))
    def forget(self, pick: int, sure: int) -> None:
        if sure < 2:
            return
        holder = self.holders[pick % len(self.holders)]
        self.cache.forget(holder.pages)
        for page in holder.pages:
            self.naive.barred.add(page)
            self.naive.forget(page)

    @rule(sure=st.integers(0, 4))
    def clear(self, sure: int) -> None:
        if sure < 4:
            return  # it would leave little to look at
        self.cache.clear()
        self.naive.nodes.clear()
        self.naive.barred.clear()

    # -------------------------------------------------------------------------- what always holds

    @invariant()
    def the_books_are_exact(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool, held = self.pool, [page for holder in self.holders for page in holder.pages]
        assert (pool.check(), self.cache.check()) == ([], [])
        assert all(pool.count(page) == held.count(page) for page in range(1, pool.num_pages))
        assert pool.num_free + pool.num_cached + pool.num_live == pool.num_pages - 1
        assert pool.cached_pages() == tuple(sorted(self.idle(), key=self.naive.used.__getitem__))
        assert set(pool.free_pages()).isdisjoint({*held, *pool.cached_pages()})

    @invariant()
    def the_tree_is_what_was_registered(self) -> None:
        if not hasattr(self, "pool"):
            return
        known = [((salt, path), page) for salt, path, page in self.cache]
        assert len({page for _, page in known}) == len(known), "a page in two nodes"
        assert dict(known) == self.naive.nodes
        assert all(self.content[page] == path for path, page in known), "a node's path is not its content"

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        while self.holders:
            self.end(0)
        self.allocate(self.pool.num_available)
        assert list(self.cache) == []


TestPrefixCache = Machine.TestCase
TestPrefixCache.settings = settings(max_examples=300, stateful_step_count=50, deadline=None)
