"""The pages of each sequence: taken, shared, found in the prefix cache, copied and given back; and the place
of its state, in a model that keeps one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from jaxinfer.core import Limits, Sequence
from jaxinfer.engine.pages import PagePool, pages_for
from jaxinfer.engine.prefix import Match, Node, PrefixCache


class PageTables:
    """Every change of `Sequence.pages` and `state_place` happens here.

    Steps run on the device in the order of their dispatch, each on the KV state that the one before left.
    So a page that is given back while a step in flight still writes it may be handed out at once: whoever
    gets it writes it in a later step. Only full pages below `computed` enter the prefix cache, and no step
    in flight writes those. A place for a state is handed on in the same way: its next owner starts at 0, and
    a state begins there from nothing.
    """

    def __init__(self, limits: Limits, *, prefix_caching: bool):
        self.limits = limits
        self.pool = PagePool(limits.num_pages)
        self.cache = PrefixCache(self.pool, limits.page_size) if prefix_caching else None
        # A stack; none where sequences have no state: their place is 0.
        self._places = list(range(limits.max_num_seqs, 0, -1)) if limits.stateful else []

    # ----------------------------------------------------------------------------------- starting

    def find(self, sequence: Sequence, siblings: Iterable[Sequence]) -> Found:
        """What of a sequence is in pages already; nothing is taken yet.

        From the prefix cache: full pages, and the page that begins as what follows them. From a sibling (a
        continuation of the same request): its prompt up to the last token, which is run again for its logits.
        """
        best = Found()
        if sequence.request.sampling.prompt_logprobs is not None and not sequence.index:
            return best  # the logits of every prompt token are wanted
        if self.cache is not None:
            match = self.cache.match(sequence.tokens, sequence.request.cache_salt, len(sequence.tokens) - 1)
            best = Found(match.pages, match.num_tokens, match.partial, match)
        siblings = list(siblings)
        if not siblings:
            return best
        last, size = sequence.num_prompt - 1, self.limits.page_size
        unseen, whole = self._unseen(last), last // size
        for sibling in siblings:
            if sibling.computed >= last > best.total and sibling.released <= len(unseen):
                partial = (sibling.pages[whole], last % size) if last % size else None
                pages = tuple(0 if i in unseen else page for i, page in enumerate(sibling.pages[:whole]))
                best = Found(pages, whole * size, partial, None)
        return best

    def start(self, sequence: Sequence, found: Found) -> tuple[int, int] | None:
        """Give a sequence that holds nothing what was found; returns the pages (from, to) to copy, if any."""
        assert not sequence.pages, f"{sequence} holds pages"
        if self.limits.stateful:
            assert not found.total, f"{found.total} tokens of {sequence} are in pages, and in no state"
            sequence.state_place = self._places.pop()
        if found.match is not None and self.cache is not None:
            sequence.cursor = self.cache.take(found.match)
        else:
            self.pool.share(page for page in found.pages if page)
        sequence.pages = list(found.pages)
        sequence.computed = found.num_tokens
        copy = None
        if found.partial is not None:
            source, count = found.partial
            # The source may be evicted for this, and even become its own copy: it is read before any write.
            own = self.pool.allocate(1)
            if own is not None:
                copy = (source, own[0])
                sequence.pages += own
                sequence.computed += count
        unseen = self._unseen(sequence.computed)
        sequence.released = len(unseen)
        for index in unseen:
            if sequence.pages[index]:
                self.pool.free([sequence.pages[index]])
                sequence.pages[index] = 0
        if not sequence.epoch:  # later it would find what it has computed itself
            sequence.cached_tokens = min(sequence.computed, sequence.num_prompt)
        return copy

    # ------------------------------------------------------------------------------------ running

    def reach(self, sequence: Sequence) -> int:
        """Positions that it has pages for, with all that can be had."""
        return (len(sequence.pages) + self.pool.num_available) * self.limits.page_size

    def extend(self, sequence: Sequence, positions: int) -> None:
        """Take pages up to `positions`, which must be within `reach`."""
        more = self.pool.allocate(pages_for(positions, self.limits.page_size) - len(sequence.pages))
        assert more is not None, f"{positions} positions of {sequence} do not fit {self.pool}"
        sequence.pages += more

    def advance(self, sequence: Sequence) -> None:
        """`computed` has moved on, by a step that succeeded: full pages become matchable, and those behind
        the window are given back."""
        if self.cache is not None:
            full = sequence.computed // self.limits.page_size
            if full > (sequence.cursor.depth if isinstance(sequence.cursor, Node) else 0):
                salt, pages = sequence.request.cache_salt, sequence.pages[:full]
                sequence.cursor = self.cache.register(sequence.cursor, sequence.tokens, pages, salt)
        unseen = self.limits.unseen_pages(sequence.computed)
        if unseen != sequence.released:
            first, end = (self.limits.sink_pages + count for count in (sequence.released, unseen))
            self.pool.free(sequence.pages[first:end])
            sequence.pages[first:end] = [0] * (end - first)
            sequence.released = unseen

    def release(self, sequence: Sequence) -> None:
        """Give all pages back, the last first: the prefix cache evicts those that were let go first."""
        pages = self._held(sequence)
        sequence.pages, sequence.released, sequence.cursor = [], 0, None
        self.pool.free(reversed(pages))
        if sequence.state_place:
            self._places.append(sequence.state_place)
            sequence.state_place = 0

    def forget(self, sequence: Sequence) -> None:
        """What a sequence computed is not to be trusted: take its pages out of the prefix cache."""
        if self.cache is not None:
            self.cache.forget(sequence.pages)

    def lost(self) -> None:
        """The content of every page is gone."""
        if self.cache is not None:
            self.cache.clear()

    def _unseen(self, position: int) -> range:
        """Indexes of the pages that no query from `position` on sees."""
        first = self.limits.sink_pages
        return range(first, first + self.limits.unseen_pages(position))

    def _held(self, sequence: Sequence) -> list[int]:
        """Its pages without the places of those given back."""
        first = self.limits.sink_pages
        return sequence.pages[:first] + sequence.pages[first + sequence.released :]

    # ------------------------------------------------------------------------------------- checks

    def check(self, running: Iterable[Sequence]) -> list[str]:
        """What is wrong with the books, one sentence each."""
        running = list(running)
        problems = self.pool.check()
        if self.cache is not None:
            problems += self.cache.check()
        holders = Counter(page for s in running for page in self._held(s))
        if holders.pop(0, 0):
            problems.append("page 0 is in a table where a page should be")
        wrong = {p: n for p, n in holders.items() if self.pool.count(p) != n}
        if wrong or len(holders) != self.pool.num_live:
            problems.append(
                f"{self.pool} but tables hold {len(holders)}; counts differ at {sorted(wrong)[:8]}"
            )
        places = self._places + [s.state_place for s in running if s.state_place]
        all_places = range(1, self.limits.max_num_seqs + 1) if self.limits.stateful else ()
        if sorted(places) != list(all_places) or (places and any(not s.state_place for s in running)):
            problems.append(f"places of states are lost, or held twice: {sorted(places)[:32]}")
        for s in running:
            unseen = self._unseen(s.computed)
            if s.released != len(unseen) or any(s.pages[index] for index in unseen):
                problems.append(f"{s} keeps pages behind its window, or gave back what it sees")
            if s.live_pages > self.limits.pages_per_sequence:
                problems.append(f"{s} holds more than {self.limits.pages_per_sequence} pages")
        return problems


class Found:
    """The part of a sequence that is in pages: full `pages` of `num_tokens`, and a page to copy from, whose
    first `partial[1]` tokens are its next ones."""

    __slots__ = ("match", "num_tokens", "pages", "partial")

    def __init__(
        self,
        pages: tuple[int, ...] = (),
        num_tokens: int = 0,
        partial: tuple[int, int] | None = None,
        match: Match | None = None,
    ):
        self.pages, self.num_tokens, self.partial, self.match = pages, num_tokens, partial, match

    @property
    def total(self) -> int:
        """Tokens that need not be computed."""
        return self.num_tokens + (self.partial[1] if self.partial else 0)
