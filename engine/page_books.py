"""Proof that the books of a page pool balance."""

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.engine.page_pool import PagePool


def books_problem(pool: "PagePool", fenced: Iterable[int]) -> str:
    """The first thing that is wrong with `pool`, empty if nothing is. `fenced`: page per fence."""
    pages = range(pool.num_pages)
    problems = (
        _state_problem(pool, pages),
        _count_problem(pool),
        _list_problem(pool),
        _fence_problem(pool, pages, Counter(fenced)),
        _promise_problem(pool),
    )
    return next((problem for problem in problems if problem), "")


def slice_problem(pool: "PagePool", pages: range, fenced: Iterable[int]) -> str:
    """The same of some pages, and of the sums: what can be told in the time of these pages."""
    problems = (
        _sums_problem(pool),
        _state_problem(pool, pages),
        _fence_problem(pool, pages, Counter(fenced)),
    )
    return next((problem for problem in problems if problem), "")


def _sums_problem(pool: "PagePool") -> str:
    listed = [len(pool.free_pages), len(pool.cached_pages)]
    counted = [pool.num_free, pool.num_cached]
    if listed != counted or sum(pool.counts) != pool.num_pages:
        return f"states count {pool.counts}, lists of free and cached {listed} of {pool.num_pages}"
    return f"{pool.num_promised} pages are promised" if pool.num_promised < 0 else ""


def _state_problem(pool: "PagePool", pages: range) -> str:
    for page in pages:
        record = pool.pages[page]
        if min(record.refs, record.pins, record.fences) < 0:
            return f"page {page} has a negative counter: {record}"
        if record.state is not record.proper_state():
            return f"page {page} is {record.state.name}, should be {record.proper_state().name}"
    return ""


def _count_problem(pool: "PagePool") -> str:
    states = Counter(int(record.state) for record in pool.pages)
    counted = [states[i] for i in range(len(pool.counts))]
    if counted != pool.counts or sum(pool.counts) != pool.num_pages:
        return f"states count {pool.counts}, pages say {counted}, pool has {pool.num_pages}"
    return ""


def _list_problem(pool: "PagePool") -> str:
    free = {p for p, record in enumerate(pool.pages) if record.state.name == "FREE"}
    cached = {p for p, record in enumerate(pool.pages) if record.state.name == "CACHED"}
    if len(pool.free_pages) != len(free) or set(pool.free_pages) != free:
        return f"free list {sorted(pool.free_pages)} is not {sorted(free)}"
    if set(pool.cached_pages) != cached:
        return f"cached list {sorted(pool.cached_pages)} is not {sorted(cached)}"
    return ""


def _fence_problem(pool: "PagePool", pages: range, fenced: Counter[int]) -> str:
    for page in pages:
        fences = pool.pages[page].fences
        if fences != fenced[page]:
            return f"page {page} counts {fences} fences, {fenced[page]} are known"
    return ""


def _promise_problem(pool: "PagePool") -> str:
    if pool.num_promised < 0:
        return f"{pool.num_promised} pages are promised"
    shared = [max(0, r.refs - 1) for r in pool.pages if pool.has_window[r.group]]
    if sum(shared) != pool.num_overlaps:
        return f"{pool.num_overlaps} overlaps are counted, pages have {sum(shared)}"
    return ""
