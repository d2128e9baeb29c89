"""PrefixCache: what a match holds is what it says, and what is evicted is what was longest of no use."""

from __future__ import annotations

import doctest

import pytest
from cpu_time import cpu_time

from jaxinfer.engine import prefix
from jaxinfer.engine.pages import PagePool
from jaxinfer.engine.prefix import Node, PrefixCache


def caching(num_pages: int, page_size: int) -> tuple[PagePool, PrefixCache]:
    """`num_pages` that can be taken."""
    pool = PagePool(num_pages + 1)
    return pool, PrefixCache(pool, page_size)


def take(pool: PagePool, count: int) -> list[int]:
    pages = pool.allocate(count)
    assert pages is not None
    return pages


def learn(pool: PagePool, cache: PrefixCache, tokens: list[int], salt: str | None = None) -> list[int]:
    """A sequence that computes all of its tokens with nothing from the cache, and ends; its full pages."""
    pages = take(pool, -(-len(tokens) // cache.page_size))
    full = pages[: len(tokens) // cache.page_size]
    cache.register(None, tokens, full, salt)
    pool.free(reversed(pages))
    return full


def test_the_worked_example() -> None:
    failed, attempted = doctest.testmod(prefix)
    assert (failed, attempted > 10) == (0, True)


# ------------------------------------------------------------------------------------------ matching


def test_a_match_is_the_longest_run_of_full_pages() -> None:
    pool, cache = caching(8, 2)
    pages = learn(pool, cache, [1, 2, 3, 4, 5, 6, 7])
    assert (len(pages), pool.num_cached, pool.num_free) == (3, 3, 5)
    for tokens, found in (
        ([1, 2, 3, 4, 5, 6, 7], 3),
        ([1, 2, 3, 4, 5, 6], 3),
        ([1, 2, 3, 4, 9, 9], 2),
        ([1, 2], 1),
        ([1], 0),
        ([], 0),
        ([3, 4], 0),  # the same page content, but another prefix before it
    ):
        match = cache.match(tokens)
        assert (match.pages, match.num_tokens) == (tuple(pages[:found]), 2 * found)
    assert pool.num_live == 0, "a match takes nothing"


@pytest.mark.parametrize(
    ("limit", "full", "partial"),
    [(None, 2, None), (6, 2, None), (5, 1, 2), (4, 1, 1), (3, 1, None), (2, 0, 2), (1, 0, 1), (0, 0, None)],
)
def test_no_more_than_the_limit_comes_from_the_cache(
    limit: int | None, full: int, partial: int | None
) -> None:
    pool, cache = caching(8, 3)
    pages = learn(pool, cache, [1, 2, 3, 4, 5, 6])
    match = cache.match([1, 2, 3, 4, 5, 6], limit=limit)
    assert match.pages == tuple(pages[:full])
    assert match.partial == (None if partial is None else (pages[full], partial))


def test_the_partial_page_is_the_one_with_the_most_in_common() -> None:
    pool, cache = caching(16, 4)
    tails = ([5, 5, 5, 5], [5, 6, 1, 1], [5, 6, 7, 1], [5, 6, 9, 9], [8, 8, 8, 8])
    found = {tuple(tail): learn(pool, cache, [1, 2, 3, 4, *tail])[1:] for tail in tails}
    # Those that came later hold the first page twice: theirs was free in the end.
    assert (pool.num_cached, pool.num_free) == (6, 10)
    for rest, tail, count in (
        ([5, 6, 7, 8], (5, 6, 7, 1), 3),
        ([5, 6, 7], (5, 6, 7, 1), 3),
        ([5, 5, 9, 9], (5, 5, 5, 5), 2),
        ([8, 0, 0, 0], (8, 8, 8, 8), 1),
    ):
        assert cache.match([1, 2, 3, 4, *rest]).partial == (found[tail][0], count)
    assert cache.match([1, 2, 3, 4, 6]).partial is None


def test_salts_keep_to_themselves() -> None:
    pool, cache = caching(8, 2)
    tokens = [1, 2, 3, 4]
    own = {salt: tuple(learn(pool, cache, tokens, salt)) for salt in (None, "", "a")}
    assert len({page for pages in own.values() for page in pages}) == 6
    for salt, pages in own.items():
        assert cache.match(tokens, salt).pages == pages
    assert cache.match(tokens, "b").pages == ()
    assert cache.match(tokens, "b").partial is None
    take(pool, 8)
    assert not cache._roots, "the tree of a salt goes with its last page"


def test_equal_hashes_do_not_match() -> None:
    assert hash((-1, -1)) == hash((-1, -2)), "the premise"
    pool, cache = caching(8, 2)
    pages = learn(pool, cache, [-1, -1, -1, -1])
    for tokens, found, partial in (
        ([-1, -2, -1, -1], (), (pages[0], 1)),
        ([-2, -1, -1, -1], (), None),
        ([-1, -1, -2, -1], (pages[0],), None),
        ([-1, -1, -1, -2], (pages[0],), (pages[1], 1)),
    ):
        match = cache.match(tokens)
        assert (match.pages, match.partial) == (found, partial)


# ------------------------------------------------------------------------------------------ learning


def test_registering_step_by_step_is_registering_at_once() -> None:
    pool, cache = caching(8, 2)
    tokens, pages = [1, 2, 3, 4, 5, 6], take(pool, 3)
    cursor = None
    for computed in range(7):
        cursor = cache.register(cursor, tokens[:computed], pages[: computed // 2])
        assert cache.match(tokens).pages == tuple(pages[: computed // 2])
    assert isinstance(cursor, Node)
    assert (cursor.page, cursor.depth) == (pages[2], 3)


def test_who_computes_the_same_beside_another_registers_below_it() -> None:
    pool, cache = caching(8, 2)
    first, second = take(pool, 2), take(pool, 3)
    a = cache.register(None, [1, 2, 3, 4], first[:1])
    b = cache.register(None, [1, 2, 3, 4, 5, 6], second[:1])
    assert a is b
    cache.register(b, [1, 2, 3, 4, 5, 6], second)
    cache.register(a, [1, 2, 3, 4], first)
    assert cache.match([1, 2, 3, 4, 5, 6]).pages == (first[0], second[1], second[2])
    pool.free(reversed(first))
    pool.free(reversed(second))
    # Twice computed, once kept: second[0], and first[1] which came after second[1].
    assert (pool.num_cached, set(pool.free_pages()) >= {second[0], first[1]}) == (3, True)


def test_a_cursor_whose_node_is_gone_starts_anew() -> None:
    pool, cache = caching(4, 1)
    first, second = take(pool, 1), take(pool, 2)
    cache.register(None, [1], first)
    cursor = cache.register(None, [1, 2], second[:1])  # stands on the other one's page
    pool.free(first)
    take(pool, 2)  # evicts it
    assert cache.match([1, 2]).pages == ()
    cache.register(cursor, [1, 2], second)
    assert cache.match([1, 2]).pages == tuple(second)


def test_faults_of_the_caller_are_told() -> None:
    pool, cache = caching(4, 2)
    pages = take(pool, 2)
    cursor = cache.register(None, [1, 2, 3, 4], pages)
    with pytest.raises(AssertionError, match="past"):
        cache.register(cursor, [1, 2], pages[:1])
    with pytest.raises(AssertionError, match="do not fill"):
        cache.register(None, [1, 2, 3], pages)
    with pytest.raises(AssertionError, match="is known"):
        cache.register(None, [5, 6], pages[:1])
    with pytest.raises(AssertionError, match="no cursor"):
        cache.register("x", [1, 2], pages[:1])
    with pytest.raises(AssertionError, match="no holder"):
        cache.register(None, [7, 8], [next(iter(pool.free_pages()))])
    with pytest.raises(AssertionError, match="cache already"):
        PrefixCache(pool, 2)
    match = cache.match([1, 2, 3, 4])
    cache.clear()
    with pytest.raises(AssertionError, match="out of date"):
        cache.take(match)


# ---------------------------------------------------------------------------------- states and evicting


def test_a_cached_page_lives_again_when_it_is_taken() -> None:
    pool, cache = caching(4, 2)
    pages = learn(pool, cache, [1, 2, 3, 4])
    assert repr(pool) == "PagePool(2 free, 2 cached, 0 live of 4)"
    cursor = cache.take(cache.match([1, 2, 3, 4, 5], limit=4))
    assert (pool.num_live, pool.num_cached, pool.num_available) == (2, 0, 2)
    assert cursor is not None
    assert cursor.page == pages[1]
    cache.take(cache.match([1, 2]))
    assert [pool.count(page) for page in pages] == [2, 1]
    assert pool.allocate(3) is None, "what is live is not evicted"
    pool.free(pages)
    assert (pool.num_live, pool.num_cached, pool.check(), cache.check()) == (1, 1, [], [])


def test_free_pages_go_first_then_the_least_recently_used_leaves() -> None:
    pool, cache = caching(6, 1)
    old, new = learn(pool, cache, [1, 2]), learn(pool, cache, [3, 4])
    assert not set(take(pool, 2)) & {*old, *new}
    assert cache.evictions == 0
    assert take(pool, 1) == [old[1]], "the deepest page of the one that ended first"
    assert cache.match([1, 2]).pages == (old[0],)
    cache.take(cache.match([1]))
    pool.free(old[:1])  # of use just now
    assert [take(pool, 1) for _ in range(3)] == [[new[1]], [new[0]], [old[0]]]
    assert (pool.allocate(1), cache.evictions) == (None, 4)


def test_a_parent_goes_in_its_own_turn() -> None:
    """Not when its last child does: others may have been of no use for longer."""
    pool, cache = caching(4, 1)
    one = learn(pool, cache, [1, 2])
    other = learn(pool, cache, [8])
    cache.take(cache.match([1]))
    pool.free(one[:1])
    take(pool, 1)  # what is free
    assert [take(pool, 1) for _ in range(3)] == [[one[1]], other, one[:1]]


def test_taking_a_match_refreshes_the_page_to_copy() -> None:
    pool, cache = caching(3, 2)
    source = learn(pool, cache, [1, 2])
    other = learn(pool, cache, [3, 4])
    cache.take(cache.match([1, 9]))
    assert pool.cached_pages() == (*other, *source)
    take(pool, 2)  # one is free; the other one goes
    assert pool.cached_pages() == tuple(source)
    # With nothing else to be had, the source becomes its own copy.
    match = cache.match([1, 9])
    cache.take(match)
    assert match.partial == (take(pool, 1)[0], 1)
    assert (pool.check(), cache.check()) == ([], [])


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_all_that_is_available_can_be_had(order: tuple[int, ...]) -> None:
    """A page without a holder above a live one: its holder has computed the same beside it."""
    pool, cache = caching(8, 1)
    a, b = take(pool, 3), take(pool, 4)
    cache.register(None, [1, 2, 3], a)
    cursor = cache.register(None, [1, 2, 3, 4], b)
    pool.free(a[i] for i in order)
    assert (pool.num_free, pool.num_cached, pool.num_live) == (1, 3, 4)
    assert cache.match([1, 2, 3, 4]).pages == (*a, b[3])
    take(pool, 2)  # one more than is free
    assert cache.match([1]).pages == ()
    assert (pool.num_available, pool.check(), cache.check()) == (2, [], [])
    cache.register(cursor, [1, 2, 3, 4], b)  # B's next step puts its own pages there
    assert cache.match([1, 2, 3, 4]).pages == tuple(b)
    take(pool, 2)
    assert cache.match([1, 2, 3, 4]).pages == tuple(b)


def test_clear_forgets_live_pages_too() -> None:
    pool, cache = caching(6, 2)
    cached, live = learn(pool, cache, [1, 2]), take(pool, 2)
    cursor = cache.register(None, [3, 4, 5, 6], live, "salt")
    cache.clear()
    assert cache.match([1, 2]) == PrefixCache(PagePool(2), 2).match([1, 2])
    assert cache.match([3, 4], "salt").pages == ()
    assert (pool.num_free, pool.num_cached, pool.num_live) == (4, 0, 2)
    assert cached[0] in pool.free_pages()
    # Computed anew in the same pages, with the old cursor.
    cache.register(cursor, [3, 4, 5, 6], live, "salt")
    assert cache.match([3, 4, 5, 6], "salt").pages == tuple(live)
    cache.clear()
    pool.free(live)
    assert (pool.num_free, pool.check(), cache.check()) == (6, [], [])


def test_what_is_not_to_be_trusted_does_not_come_back() -> None:
    pool, cache = caching(8, 1)
    culprit = take(pool, 2)
    cache.register(None, [1, 2], culprit)
    match = cache.match([1, 9], limit=1)
    cursor, own = cache.take(match), take(pool, 1)
    cursor = cache.register(cursor, [1, 9], [*match.pages, *own])
    cache.forget(culprit)
    pool.free(reversed(culprit))
    assert (cache.match([1, 9]).pages, cache.match([1, 2]).pages) == ((), ())
    # The other holder goes on from the page that is not trusted: nothing of it is learnt.
    table = [*match.pages, *own, *take(pool, 1)]
    assert cache.register(cursor, [1, 9, 9], table) is None
    assert list(cache) == []
    assert (pool.check(), cache.check()) == ([], [])
    pool.free(reversed(table))
    assert (pool.num_free, cache.check()) == (8, [])
    learn(pool, cache, list(range(8)))
    assert pool.num_cached == 8, "once free, a page is like any other"


def test_check_tells_what_is_wrong() -> None:
    pool, cache = caching(4, 1)
    learn(pool, cache, [1, 2])
    assert (pool.check(), cache.check()) == ([], [])
    cache._heap.clear()
    assert cache.check()
    pool, cache = caching(4, 1)
    learn(pool, cache, [1, 2])
    pool.uncache(pool.cached_pages()[0])
    assert cache.check()


def test_statistics_count_what_was_taken() -> None:
    pool, cache = caching(4, 2)
    learn(pool, cache, [1, 2, 3, 4])
    match = cache.match([1, 2, 3, 9, 9], limit=4)
    assert cache.stats() == {"queries": 0, "hits": 0, "evictions": 0}
    cache.take(match)
    cache.take(cache.match([5, 6, 7], limit=2))
    assert cache.stats() == {"queries": 6, "hits": 3, "evictions": 0}
    take(pool, 3)
    assert cache.stats()["evictions"] == 1


def test_a_large_pool_is_quick() -> None:
    """60 000 pages, 32k-token prompts. Some 1 ms to match and 4 ms to evict 2000 on a quiet core."""
    pool, cache = caching(60_000, 16)
    prompts = [[(7 * i + seed) % 50_000 for i in range(32_768)] for seed in range(29)]
    for prompt in prompts:
        learn(pool, cache, prompt)
    take(pool, pool.num_free)
    with cpu_time() as spent:
        assert len(cache.match(prompts[3], limit=32_767).pages) == 2047
        matched = spent()
        take(pool, 2000)
        evicted = spent() - matched
    # Wide of the mark on purpose: a shared machine. What is quadratic would take minutes.
    assert matched < 0.1
    assert evicted < 0.2
