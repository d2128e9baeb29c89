"""PagePool: exact books under any order of calls (B006, B007)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.engine import PagePool


def test_page_0_is_never_handed_out() -> None:
    pool = PagePool(6)
    assert sorted(pool.allocate(5) or []) == [1, 2, 3, 4, 5]
    assert (pool.num_free, pool.num_live) == (0, 5)
    assert pool.check() == []


def test_allocate_takes_all_or_nothing() -> None:
    pool = PagePool(4)
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    assert pool.allocate(0) == []
    assert repr(pool) == "PagePool(3 free, 0 live of 3)"


def test_a_shared_page_returns_with_its_last_holder() -> None:
    pool = PagePool(3)
    (page,) = pool.allocate(1) or []
    pool.share([page])
    assert pool.count(page) == 2
    pool.free([page])
    assert (pool.num_live, pool.check()) == (1, [])
    pool.free([page])
    assert (pool.num_live, pool.check()) == (0, [])


@pytest.mark.parametrize("page", [0, -1, 3, 2])
def test_freeing_what_is_not_live_is_a_fault(page: int) -> None:
    pool = PagePool(4)
    assert pool.allocate(1) == [1]
    with pytest.raises(AssertionError):
        pool.free([page])
    pool.share([1])
    with pytest.raises(AssertionError):  # what comes before is let go all the same: its pages are not lost
        pool.free([1, 1, page])
    assert (pool.num_free, pool.check()) == (3, [])
    with pytest.raises(AssertionError):
        pool.share([page])
    assert pool.check() == []


def test_check_tells_what_is_wrong() -> None:
    pool = PagePool(4)
    pool.allocate(2)
    pool._free.append(1)  # as a double free would, without the assertion
    assert pool.check()


@settings(deadline=None, max_examples=200)
@given(st.integers(2, 12), st.lists(st.tuples(st.sampled_from(["take", "share", "drop"]), st.integers(0, 8))))
def test_books_are_exact_under_any_order_of_calls(num_pages: int, calls: list[tuple[str, int]]) -> None:
    pool, tables = PagePool(num_pages), []
    for what, number in calls:
        if what == "take" and (pages := pool.allocate(number)) is not None:
            tables.append(pages)
        elif what == "share" and tables:
            tables.append(list(tables[number % len(tables)]))
            pool.share(tables[-1])
        elif what == "drop" and tables:
            pool.free(tables.pop(number % len(tables)))
        held = [page for table in tables for page in table]
        assert pool.check() == []
        assert pool.num_live == len(set(held))
        assert pool.num_free == num_pages - 1 - pool.num_live
        assert set(pool.free_pages()).isdisjoint(held)
        assert all(pool.count(page) == held.count(page) for page in range(1, num_pages))
