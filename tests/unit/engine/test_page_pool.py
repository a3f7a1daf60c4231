"""The books of the pool balance after any sequence of operations."""

from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from paceline.core.kv_layout import PageGroup
from paceline.engine.page_pool import PagePool, PageState
from paceline.engine.prefix_cache import PrefixCache

NUM_PAGES = 9
FULL = PageGroup("full", num_layers=1, num_heads=1, head_dim=2)
WINDOW = replace(FULL, name="window", window=20)
names = st.integers(0, 6)


class PoolMachine(RuleBasedStateMachine):
    """Stands for sequences (lists of pages they refer to), readers (pins), steps and transfers."""

    holders = Bundle("holders")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES, max_pinned_share=0.4, has_window=(False, True))
        self.cache = PrefixCache(self.pool, (FULL, WINDOW))
        self.index: set[bytes] = set()
        self.pins: list[tuple[int, int]] = []
        self.launched = self.retired = 0
        self.writable_by: dict[int, set[object]] = {}  # page → steps and slots under way

    @rule(
        target=holders, num=st.integers(1, 4), group=st.integers(0, 1), promised=st.integers(0, 4)
    )
    def allocate(self, num: int, group: int, promised: int) -> list[int]:
        promised = min(promised, self.pool.num_promised, num)
        fits = promised == num or self.pool.num_available + promised >= num
        fits = fits and self.pool.num_physical >= num
        before = [record.generation for record in self.pool.pages]
        pages = self.pool.allocate(num, group, promised)
        assert (pages is not None) == fits
        for page in pages or ():
            record = self.pool.pages[page]
            assert record.generation == before[page] + 1 and record.group == group
            assert not self.writable_by.get(page), "given away while something may write it"
            assert all(page != pinned for pinned, _ in self.pins)
        return pages or []

    @rule(num=st.integers(1, 3))
    def promise(self, num: int) -> None:
        if self.pool.num_available >= num:
            self.pool.promise(num)

    @rule()
    def take_promises_back(self) -> None:
        self.pool.promise(-self.pool.num_promised)

    @rule(holder=holders, name=names)
    def commit(self, holder: list[int], name: int) -> None:
        for page in holder[:1]:
            if self.pool.pages[page].key is None:
                key = bytes([name])
                group = self.pool.pages[page].group
                (named,) = self.cache.commit(group, [page], [(key, key, (name,))])
                assert self.pool.pages[named].key == key
                assert self.pool.pages[named].group == self.pool.pages[page].group

    @rule(target=holders, keys=st.lists(names, max_size=2), group=st.integers(0, 1))
    def share(self, keys: list[int], group: int) -> list[int]:
        packed = b"".join(bytes([k]) for k in keys)
        pages = []
        for i, key in enumerate(keys):
            found = self.cache._page_of[group].get(packed[i : i + 1])
            if found is None or self.pool.num_available <= 0:
                break
            pages.append(found)
            self.pool.share([found])
            assert self.pool.pages[found].checksums == (key,)
        return pages

    @rule(holder=holders, fenced=st.booleans(), slot=st.sampled_from([None, 1, 2]))
    def release(self, holder: list[int], fenced: bool, slot: int | None) -> None:
        step = self.launched if fenced and self.launched > self.retired else None
        self.pool.release(holder, step, slot)
        for page in holder:
            record = self.pool.pages[page]
            if record.refs == 0 and record.key is None:
                marks = {mark for mark in (("step", step), ("slot", slot)) if mark[1] is not None}
                self.writable_by.setdefault(page, set()).update(marks)
        holder.clear()

    @rule()
    def launch(self) -> None:
        self.launched += 1

    @rule()
    def retire(self) -> None:
        self.retired = self.launched
        self.pool.retire_step(self.retired)
        for marks in self.writable_by.values():
            marks -= {mark for mark in marks if mark[0] == "step"}  # type: ignore[index]

    @rule(slot=st.sampled_from([1, 2]))
    def close(self, slot: int) -> None:
        self.pool.close_transfer(slot)
        for marks in self.writable_by.values():
            marks.discard(("slot", slot))

    @rule(keys=st.lists(names, max_size=3, unique=True), group=st.integers(0, 1))
    def pin(self, keys: list[int], group: int) -> None:
        pinned = self.cache.pin_run([bytes([k]) for k in keys], group)
        self.pins += [(page, self.pool.pages[page].generation) for page in pinned]
        found = [self.pool.pages[page].key for page in pinned]
        assert found == [bytes([key]) for key in keys[: len(pinned)]]

    @rule(stale=st.booleans())
    def unpin(self, stale: bool) -> None:
        if self.pins:
            page, generation = self.pins[-1]
            assert self.pool.unpin(page, generation - stale) is not stale
            if not stale:
                self.pins.pop()
        assert not self.pool.unpin(NUM_PAGES, 0) and not self.pool.unpin(-1, 0)

    @rule(page=st.integers(0, NUM_PAGES - 1))
    def forget(self, page: int) -> None:
        self.cache.forget([page])

    @invariant()
    def books_balance(self) -> None:
        assert self.pool.check_integrity() == ""
        assert self.cache.check_integrity() == ""
        assert sum(self.pool.counts) == NUM_PAGES

    @invariant()
    def index_follows_the_events(self) -> None:
        for event in self.cache.take_events():
            if type(event).__name__ == "Stored":
                self.index |= set(event.keys)
            else:
                self.index -= set(event.keys)
        assert self.index == set(self.cache._page_of[0])


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_integrity_names_what_is_wrong() -> None:
    pool = PagePool(4)
    pool.allocate(1)
    pool.pages[2].refs = 1
    assert pool.check_integrity() == "page 2 is FREE, should be MAPPED"
    pool = PagePool(4)
    pool.counts[PageState.FREE] = 3
    assert "states count [3, 0, 0, 0, 0]" in pool.check_integrity()
    pool = PagePool(4)
    pool.free_pages.pop()
    assert "free list [0, 1, 2] is not [0, 1, 2, 3]" in pool.check_integrity()


def test_integrity_of_some_pages_names_what_is_wrong_with_them_and_with_the_sums() -> None:
    pool = PagePool(4)
    pool.allocate(1)
    pool.pages[2].refs = 1
    assert pool.check_integrity(range(2)) == ""
    assert pool.check_integrity(range(2, 4)) == "page 2 is FREE, should be MAPPED"
    pool = PagePool(4)
    pool.pages[3].fences = -1
    assert "page 3 has a negative counter" in pool.check_integrity(range(3, 4))
    pool = PagePool(4)
    assert pool.check_integrity(range(1)) == ""
    pool.free_pages.pop()
    wrong = "states count [4, 0, 0, 0, 0], lists of free and cached [3, 0] of 4"
    assert pool.check_integrity(range(1)) == wrong
    pool = PagePool(4)
    pool.num_promised = -1
    assert pool.check_integrity(range(1)) == "-1 pages are promised"


def test_integrity_of_some_pages_follows_their_names() -> None:
    pool = PagePool(4)
    cache = PrefixCache(pool, (FULL,))
    pages = pool.allocate(2) or []
    for page, key in zip(pages, (b"a", b"b"), strict=True):
        cache.commit(0, [page], [(key, b"", ())])
    assert cache.check_integrity(range(4)) == ""
    pool.pages[pages[1]].key = b"c"
    assert cache.check_integrity(range(pages[1])) == ""
    assert cache.check_integrity(range(4)) == f"the name of page {pages[1]} leads elsewhere"


def test_evicts_the_least_recently_used_and_the_end_of_a_chain_first() -> None:
    pool = PagePool(4)
    cache = PrefixCache(pool, (FULL,))
    chain = pool.allocate(3)
    assert chain is not None
    for i, page in enumerate(chain):
        cache.commit(0, [page], [(bytes([i]), b"", ())])
    pool.release(chain)
    assert pool.allocate(3) == [3, chain[2], chain[1]]
    assert [event.keys for event in cache.take_events()][1:] == [[b"\2", b"\1"]]


def test_pins_never_take_a_promised_page_or_more_than_their_share() -> None:
    pool = PagePool(8, max_pinned_share=0.5)
    cache = PrefixCache(pool, (FULL,))
    pages = pool.allocate(8) or []
    keys = [bytes([i]) for i in range(8)]
    for page, key in zip(pages, keys, strict=True):
        cache.commit(0, [page], [(key, b"", ())])
    pool.release(pages[:6])
    assert len(cache.pin_run(keys)) == 4
    assert cache.pin_run(keys[6:]) == pages[6:], "pages in use here cost nothing to pin"
    pool.promise(2)
    assert cache.pin_run(keys[4:]) == []


def test_what_is_shared_in_a_window_is_held_back_from_new_requests() -> None:
    pool = PagePool(8, has_window=(False, True))
    pages = {group: pool.allocate(2, group) or [] for group in (0, 1)}
    assert pool.num_available == 4
    pool.share(pages[0])
    assert pool.num_available == 4
    pool.share(pages[1])
    assert pool.num_available == 2 and pool.num_physical == 4
    assert pool.allocate(3) is None
    pool.num_overlaps += 1
    assert pool.check_integrity() == "3 overlaps are counted, pages have 2"
    pool.num_overlaps -= 1
    pool.release(pages[1])
    assert pool.num_available == 4
