"""What is kept goes last, and no page is held for it."""

import pytest

from paceline.engine.kept_prompts import MAX_KEPT, KeptPrompts
from paceline.engine.messages import Emission, Keep, LetGo, Release, Submit
from paceline.engine.page_pool import PagePool
from tests.unit.engine.benches import bench, prompt, request


def named(pool: PagePool, names: str) -> list[int]:
    """Pages of a sequence that has ended, each of a name."""
    pages = pool.allocate(len(names))
    assert pages is not None
    for page, name in zip(pages, names, strict=True):
        pool.pages[page].key = name.encode()
    return pages


def left(pool: PagePool, pages: list[int]) -> list[int]:
    return [page for page in pages if pool.pages[page].key is not None]


def fill(pool: PagePool, num_pages: int) -> None:
    """So many pages are taken, and leave names of their own."""
    taken = pool.allocate(num_pages)
    assert taken is not None
    for page in taken:
        pool.pages[page].key = f"other {page} {pool.pages[page].generation}".encode()
    pool.release(taken)


@pytest.mark.parametrize("num_rounds", [1, 30])
def test_kept_pages_outlast_many_times_the_pool(num_rounds: int) -> None:
    pool = PagePool(20)
    kept = KeptPrompts(pool)
    ours, usual = named(pool, "abcde"), named(pool, "vwxyz")
    kept.keep(1, ours)
    pool.release(ours)
    pool.release(usual)
    for _ in range(num_rounds):
        fill(pool, 15)
    assert left(pool, ours) == ours
    assert not [p for p in usual if pool.pages[p].key in (b"v", b"w", b"x", b"y", b"z")]
    assert pool.num_physical == 20 and not pool.check_integrity()
    kept.let_go(1)
    fill(pool, 15)
    assert left(pool, ours) == ours, "as if used just now"
    fill(pool, 20)
    assert [pool.pages[page].key for page in ours] != [b"a", b"b", b"c", b"d", b"e"]


def test_pages_that_are_needed_go_all_the_same_and_are_not_kept_in_their_next_life() -> None:
    pool = PagePool(10)
    kept = KeptPrompts(pool)
    ours = named(pool, "abcdefghij")
    kept.keep(1, ours)
    pool.release(ours)
    fill(pool, 10)
    assert not any(page.num_keepers for page in pool.pages)
    kept.let_go(1)
    assert not any(page.num_keepers for page in pool.pages)


def test_a_prompt_that_two_streams_share_is_kept_for_the_last_of_them() -> None:
    pool = PagePool(10)
    kept = KeptPrompts(pool)
    ours = named(pool, "abc")
    for slot in (1, 2):
        kept.keep(slot, ours)
    pool.release(ours)
    kept.let_go(1)
    for _ in range(5):
        fill(pool, 7)
    assert left(pool, ours) == ours and pool.pages[ours[0]].key == b"a"
    kept.let_go(2)
    assert not any(page.num_keepers for page in pool.pages) and not len(kept)


def test_the_number_of_slots_is_bounded() -> None:
    pool = PagePool(4)
    kept = KeptPrompts(pool)
    ours = named(pool, "ab")
    for slot in range(MAX_KEPT + 10):
        kept.keep(slot, ours)
    assert len(kept) == MAX_KEPT == pool.pages[ours[0]].num_keepers


@pytest.mark.parametrize(("commands", "num_cached"), [((), 0), ((Keep(1),), 192)])
def test_the_prompt_of_a_prefilled_slot_outlasts_those_that_come_after_it(
    commands: tuple[Keep, ...], num_cached: int
) -> None:
    spec = request(prompt(200), max_tokens=50)
    b = bench(num_pages=40).handle(Submit(1, spec, prefill_only=True), *commands).run()
    b.handle(Release(1)).run()
    for slot in range(2, 12):
        b.handle(Submit(slot, request(prompt(200, slot), max_tokens=1))).run()
    b.handle(Submit(99, request(prompt(200), max_tokens=1))).run()
    assert b.of(Emission, 99)[0].num_cached_tokens == num_cached
    b.handle(LetGo(1), LetGo(7)).run().assert_idle()
    assert not any(page.num_keepers for page in b.engine.cache.pool.pages)


def test_who_is_let_go_before_its_end_leaves_nothing_kept() -> None:
    b = bench().handle(Submit(1, request(prompt(100)), prefill_only=True), Keep(1)).run()
    b.handle(LetGo(1), Release(1)).run().assert_idle()
    assert not any(page.num_keepers for page in b.engine.cache.pool.pages)
