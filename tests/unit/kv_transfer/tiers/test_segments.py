"""Tiers of segments: restarts, stores that fail, fill up and hang."""

import errno
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from paceline.core.errors import Cancelled, ConfigError
from paceline.kv_transfer.tiers import segments
from paceline.kv_transfer.tiers.config import FileTierConfig, PageShape, make_tiers
from paceline.kv_transfer.tiers.medium import SegmentMedium
from paceline.kv_transfer.tiers.segment_format import SegmentForm
from paceline.kv_transfer.tiers.segments import SegmentTier
from tests.contract.pools import SMALL, pages_of
from tests.contract.tiers import (
    LAYOUT,
    Bench,
    file_of,
    is_settled,
    make_file_tier,
    page_name,
)
from tests.support.waits import wait_for
from tests.unit.kv_transfer.tiers.media import MemoryMedium

SEGMENT_PAGES = 4
SEGMENT_BYTES = SegmentForm(LAYOUT, SMALL.page_bytes, SMALL.num_heads).num_bytes(SEGMENT_PAGES)


def tier_on(
    medium: SegmentMedium, num_segments: int = 3, flush_after_s: float = 0.01, layout: str = LAYOUT
) -> SegmentTier:
    sizes = num_segments * SEGMENT_BYTES, SEGMENT_BYTES
    return SegmentTier("store", SMALL, layout, medium, *sizes, flush_after_s=flush_after_s)


def settle(tier: SegmentTier) -> None:
    wait_for(lambda: is_settled(tier))


def test_a_restart_keeps_what_was_written(tmp_path: Path) -> None:
    bench = Bench([make_file_tier(tmp_path, 12, SEGMENT_PAGES)])
    bench.put(*range(10))
    bench.stack.close()  # writes out what is under way
    again = Bench([make_file_tier(tmp_path, 12, SEGMENT_PAGES)])
    assert again.pull(*range(11)) == list(range(10))
    again.check()
    again.stack.close()


def test_a_smaller_capacity_keeps_the_newest(tmp_path: Path) -> None:
    bench = Bench([make_file_tier(tmp_path, 12, SEGMENT_PAGES)])
    bench.put(*range(12))
    bench.stack.close()
    again = Bench([make_file_tier(tmp_path, 8, SEGMENT_PAGES)])
    assert again.pull(*range(12)) == list(range(4, 12))
    again.stack.close()


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4096)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _flip(offset_from_end: int) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[-offset_from_end] ^= 1
        path.write_bytes(data)

    return flip


@pytest.mark.parametrize("spoil", [_cut, _empty, _flip(1), _flip(56), _flip(4090)])
def test_a_file_that_was_torn_is_deleted_and_the_others_are_kept(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    tier = make_file_tier(tmp_path, 12, SEGMENT_PAGES)
    bench = Bench([tier])
    bench.put(*range(8))
    path, _ = file_of(tmp_path, tier, page_name(1))
    bench.stack.close()
    spoil(path)
    (path.parent / "0000000000000099.tmp").write_bytes(b"unfinished")
    (path.parent / "notes.kv").write_bytes(b"not ours")
    again = Bench([make_file_tier(tmp_path, 12, SEGMENT_PAGES)])
    assert again.pull(*range(8)) == [4, 5, 6, 7]
    assert not path.exists()
    assert {p.name for p in path.parent.iterdir()} == {"lock", "notes.kv", "0000000000000002.kv"}
    again.put(1)
    assert again.pull(1) == [1]
    again.stack.close()


def test_pages_of_another_layout_are_not_found() -> None:
    medium = MemoryMedium()
    bench = Bench([tier_on(medium)])
    bench.put(1)
    bench.stack.close()
    assert medium.objects
    again = Bench([tier_on(medium, layout="other")])
    assert again.pull(1) == [] and not medium.objects


def test_a_page_that_was_wrong_when_it_came_is_never_found_again() -> None:
    medium = MemoryMedium()
    bench = Bench([tier_on(medium)])
    batch = bench.batch([1, 2, 3])
    batch.checksums[1, 0] += 1
    assert bench.stack.put(batch).tolist() == [1]
    bench.stack.close()
    again = Bench([tier_on(medium)])
    assert again.pull(1, 2, 3) == [1, 3]
    assert not again.tiers[0].holds(page_name(2))


def test_each_process_has_a_folder_of_its_own(tmp_path: Path) -> None:
    first, second = make_file_tier(tmp_path), make_file_tier(tmp_path)
    one, two = Bench([first]), Bench([second])
    one.put(1)
    two.put(2)
    one.stack.close()
    two.stack.close()
    assert sorted(p.parent.name for p in tmp_path.glob("*/*.kv")) == ["0", "1"]


def test_a_folder_that_cannot_be_had_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    wanted = FileTierConfig(str(tmp_path / "file"), capacity_mib=1)
    with pytest.raises(ConfigError, match=r"tiers\[0\]\.path=.*cannot be used: Not a directory"):
        make_tiers([wanted], PageShape(SMALL, LAYOUT))


def test_a_store_that_does_not_take_pages_costs_them_and_no_more() -> None:
    medium = MemoryMedium(write_errors=[errno.EIO])
    tier = tier_on(medium)
    bench = Bench([tier])
    bench.put(*range(4))
    settle(tier)
    assert bench.pull(*range(4)) == []
    assert (tier.figures.num_errors, tier.figures.num_dropped) == (1, 4)
    bench.put(*range(4))
    settle(tier)
    assert bench.pull(*range(4)) == [0, 1, 2, 3]
    bench.check()


def test_a_full_disk_costs_the_oldest_segment() -> None:
    medium = MemoryMedium(write_errors=[0, 0, errno.ENOSPC])
    tier = tier_on(medium, num_segments=8)
    bench = Bench([tier])
    for start in (0, 4, 8):
        bench.put(*range(start, start + 4))
        settle(tier)
    assert bench.pull(*range(12)) == list(range(4, 12))
    bench.check()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mounted = tmp_path / "disk"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(mounted)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    yield mounted
    subprocess.run(["umount", str(mounted)], check=True)


def test_mooncake_2475_a_disk_that_fills_up_never_serves_a_partial_page(small_disk: Path) -> None:
    """https://github.com/kvcache-ai/Mooncake/issues/2475: the disk is smaller than the capacity."""
    tier = make_file_tier(small_disk, 400, SEGMENT_PAGES)
    bench = Bench([tier])
    for number in range(0, 200, 4):
        bench.put(*range(number, number + 4))
    settle(tier)
    held = [number for number in range(200) if tier.holds(page_name(number))]
    assert bench.pull(*held[:60]) == held[:60]  # what is left is right
    assert len(held) >= 8 and 199 in held
    assert tier.figures.num_evictions > 0 and tier.figures.num_mismatches == 0
    (small_disk / "log").write_bytes(bytes(1000))
    bench.stack.close()
    again = Bench([make_file_tier(small_disk, 400, SEGMENT_PAGES)])
    assert again.pull(*held[:60]) == held[:60]
    again.stack.close()


def test_a_store_that_hangs_costs_the_hit_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    medium = MemoryMedium()
    tier = tier_on(medium)
    bench = Bench([tier])
    bench.put(*range(4))
    settle(tier)
    medium.may_read.clear()
    started = time.monotonic()
    names, to = [page_name(2)], np.array([0])
    pages_of(bench.pool)[:] = 0xFF
    came = bench.stack.pull(names, bench.pool, to, started + 0.1, threading.Event())
    assert came == {} and time.monotonic() - started < 2
    assert not tier.holds(page_name(2))  # nor is the next request held up
    assert bench.stack.pull(names, bench.pool, to, started + 9, threading.Event()) == {}
    assert time.monotonic() - started < 2
    medium.may_read.set()
    wait_for(lambda: medium.num_hanging == 0)
    assert (pages_of(bench.pool) == 0xFF).all()  # the pages are another's by now
    monkeypatch.setattr(tier._reader, "_rests_until", 0.0)
    assert bench.pull(*range(4)) == [0, 1, 2, 3]


def test_a_pull_from_a_store_that_hangs_ends_soon_after_it_is_cancelled() -> None:
    medium = MemoryMedium()
    tier = tier_on(medium)
    bench = Bench([tier])
    bench.put(*range(4))
    settle(tier)
    medium.may_read.clear()
    cancelled = threading.Event()
    threading.Timer(0.05, cancelled.set).start()
    started = time.monotonic()
    with pytest.raises(Cancelled):
        bench.stack.pull([page_name(2)], bench.pool, np.array([0]), started + 5, cancelled)
    assert time.monotonic() - started < 1
    assert tier.holds(page_name(2)) and tier.figures.num_errors == 0  # the store was not late
    medium.may_read.set()
    assert bench.pull(2) == [2]
    bench.check()


def test_a_store_that_fails_to_read_costs_the_hit() -> None:
    medium = MemoryMedium()
    tier = tier_on(medium)
    bench = Bench([tier])
    bench.put(*range(4))
    settle(tier)
    medium.read_error = errno.EIO
    assert bench.pull(*range(4)) == []
    assert tier.figures.num_errors == 1
    medium.read_error = 0
    assert bench.pull(*range(4)) == [0, 1, 2, 3]


def test_a_store_that_is_away_at_the_start_is_found_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until then it takes no pages: nobody knows what it holds, nor under which numbers."""
    monkeypatch.setattr(segments, "START_S", 0.1)
    monkeypatch.setattr(segments, "ASK_AGAIN_S", 0.05)
    medium = MemoryMedium()
    bench = Bench([tier_on(medium)])
    bench.put(*range(12))
    bench.stack.close()
    medium.num_unlisted = 1_000_000
    again = Bench([tier_on(medium)])
    tier = again.tiers[0]
    again.put(50)
    assert again.pull(0, 50) == [] and tier.figures.num_dropped == 1
    medium.num_unlisted = 0
    wait_for(lambda: tier.holds(page_name(0)))
    assert again.pull(*range(12)) == list(range(12))
    again.put(50, 51, 52, 53)
    settle(tier)  # the memory refuses to hold one number twice
    assert again.pull(*range(50, 54)) == [50, 51, 52, 53]
    assert len(medium.objects) == 3
    again.check()
    again.stack.close()


def test_a_store_that_hangs_at_the_start_keeps_nobody_from_starting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(segments, "START_S", 0.1)
    medium = MemoryMedium()
    bench = Bench([tier_on(medium)])
    bench.put(*range(4))
    bench.stack.close()
    medium.may_read.clear()
    again = Bench([tier_on(medium)])
    again.put(50)
    assert again.pull(0, 50) == [] and medium.num_hanging
    medium.may_read.set()
    wait_for(lambda: again.tiers[0].holds(page_name(0)))
    assert again.pull(*range(4)) == list(range(4))
    medium.may_read.clear()
    closing = Bench([tier_on(medium)])
    started = time.monotonic()
    closing.stack.close()
    assert time.monotonic() - started < 5
    medium.may_read.set()
    again.stack.close()


def test_a_store_that_is_behind_costs_pages_not_time() -> None:
    medium = MemoryMedium()
    tier = tier_on(medium)
    bench = Bench([tier])
    medium.may_write.clear()
    started = time.monotonic()
    bench.stack.put(bench.batch(range(40)))
    assert time.monotonic() - started < 1
    assert tier.figures.num_dropped == 40 - 3 * SEGMENT_PAGES
    assert bench.pull(*range(40)) == list(range(12))  # found before they are written
    medium.may_write.set()
    settle(tier)
    assert bench.pull(*range(40)) == list(range(12))
    bench.check()


def test_a_bug_in_a_stores_client_costs_the_hit_and_no_thread() -> None:
    medium = MemoryMedium(bugs=1)
    tier = tier_on(medium)
    bench = Bench([tier])
    bench.put(*range(4))
    settle(tier)
    assert not tier.holds(page_name(0)) and tier.figures.num_dropped == 4
    bench.put(*range(4))
    settle(tier)
    for _ in range(medium.num_readers):
        medium.bugs = 1
        assert bench.pull(*range(4)) == []
    assert bench.pull(*range(4)) == [0, 1, 2, 3]
    bench.check()


def test_a_store_that_does_not_delete_is_never_filled_beyond_the_capacity() -> None:
    medium = MemoryMedium()
    tier = tier_on(medium)
    bench = Bench([tier])
    medium.deletes = False
    for start in range(0, 40, 4):
        bench.put(*range(start, start + 4))
        settle(tier)
        assert sum(medium.sizes().values()) <= 3 * SEGMENT_BYTES
    assert bench.pull(*range(40)) == list(range(4, 12))  # what is there goes on to be found
    bench.stack.close()
    bench = Bench([tier := tier_on(medium, num_segments=2)])
    bench.put(*range(40, 44))
    settle(tier)
    assert set(medium.objects) == {1, 2, 3}
    medium.deletes = True
    bench.put(*range(44, 48))
    settle(tier)
    assert bench.pull(*range(48)) == [*range(8, 12), *range(44, 48)]
    assert sum(medium.sizes().values()) <= 2 * SEGMENT_BYTES
    bench.check()


def test_a_folder_that_somebody_has_emptied_takes_pages_as_before(tmp_path: Path) -> None:
    tier = make_file_tier(tmp_path, 12, SEGMENT_PAGES)
    bench = Bench([tier])
    bench.put(*range(12))
    settle(tier)
    for path in tmp_path.rglob("*.kv"):
        path.unlink()
    for start in range(12, 24, 4):
        bench.put(*range(start, start + 4))
        settle(tier)
    assert bench.pull(*range(24)) == list(range(12, 24))
    assert tier.figures.num_dropped == tier.figures.num_errors == 0
    bench.stack.close()


def test_of_names_that_are_wanted_the_last_stays_longest() -> None:
    tier = tier_on(MemoryMedium())
    bench = Bench([tier])
    for start in (0, 4, 8):
        bench.put(*range(start, start + 4))
        settle(tier)
    tier.touch([page_name(n) for n in (5, 1, 9)])
    tier.touch([page_name(n) for n in (10, 6, 3, 11, 2)])
    bench.put(12, 13, 14, 15)
    settle(tier)
    assert not tier.holds(page_name(4)) and tier.holds(page_name(0)) and tier.holds(page_name(8))


class SegmentMachine(RuleBasedStateMachine):
    """What is found is right, and known to the listener, whatever store and process go through."""

    def __init__(self) -> None:
        super().__init__()
        self.medium = MemoryMedium()
        self._start()

    def _start(self) -> None:
        self.tier = tier_on(self.medium, flush_after_s=60)
        self.bench = Bench([self.tier])

    @rule(chosen=st.lists(st.integers(0, 20), max_size=9), wrong=st.sets(st.integers(0, 20)))
    def put(self, chosen: list[int], wrong: set[int]) -> None:
        batch = self.bench.batch(chosen)
        rows = [row for row, number in enumerate(chosen) if number in wrong]
        batch.checksums[rows, 0] += 1
        assert set(self.tier.put(batch, wait_s=5).tolist()) <= set(rows)

    @rule(chosen=st.lists(st.integers(0, 20), max_size=6, unique=True))
    def pull(self, chosen: list[int]) -> None:
        expected = [number for number in chosen if self.tier.holds(page_name(number))]
        assert set(self.bench.pull(*chosen)) <= set(expected)

    @rule(codes=st.lists(st.sampled_from([0, errno.EIO, errno.ENOSPC]), max_size=3))
    def fail(self, codes: list[int]) -> None:
        self.medium.write_errors = codes

    @rule(data=st.data())
    def spoil(self, data: st.DataObject) -> None:
        """Bytes change in the store: of pages, or of an index."""
        if numbers := sorted(self.medium.objects):
            number = data.draw(st.sampled_from(numbers))
            content = bytearray(self.medium.objects[number])
            content[data.draw(st.integers(0, len(content) - 1))] ^= 0x55
            self.medium.objects[number] = bytes(content)

    @rule(crashes=st.booleans())
    def restart(self, crashes: bool) -> None:
        if crashes:  # what was not written is gone
            settle_written(self.tier)
            self.medium = MemoryMedium(objects=dict(self.medium.objects))
        else:
            self.tier.close()
            self.medium.write_errors = []
        self._start()

    @invariant()
    def store_is_bounded(self) -> None:
        settle_written(self.tier)
        assert sum(map(len, self.medium.objects.values())) <= 3 * SEGMENT_BYTES
        self.bench.check()

    def teardown(self) -> None:
        self.tier.close()


def settle_written(tier: SegmentTier) -> None:
    """Full segments are written; the open one may wait."""
    open_one = tier._writer._open
    wait_for(
        lambda: all(
            s.buffer is None for s in list(tier._books.segments.values()) if s is not open_one
        ),
        5,
    )


TestSegments = SegmentMachine.TestCase
TestSegments.settings = settings(max_examples=12, stateful_step_count=15, deadline=None)
