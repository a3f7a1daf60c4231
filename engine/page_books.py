"""Proof that the books of a page pool balance."""

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.engine.page_pool import PagePool


def books_problem(pool: "PagePool", fenced: Iterable[int]) -> str:
    """The first thing that is wrong with `pool`, empty if nothing is. `fenced`: page per fence."""
    problems = (
        _state_problem(pool),
        _count_problem(pool),
        _list_problem(pool),
        _fence_problem(pool, Counter(fenced)),
        _promise_problem(pool),
    )
    return next((problem for problem in problems if problem), "")


def _state_problem(pool: "PagePool") -> str:
    for page, record in enumerate(pool.pages):
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


def _fence_problem(pool: "PagePool", fenced: Counter[int]) -> str:
    for page, record in enumerate(pool.pages):
        if record.fences != fenced[page]:
            return f"page {page} counts {record.fences} fences, {fenced[page]} are known"
    return ""


def _promise_problem(pool: "PagePool") -> str:
    if pool.num_promised < 0:
        return f"{pool.num_promised} pages are promised"
    shared = [max(0, r.refs - 1) for r in pool.pages if pool.has_window[r.group]]
    if sum(shared) != pool.num_overlaps:
        return f"{pool.num_overlaps} overlaps are counted, pages have {sum(shared)}"
    return ""
