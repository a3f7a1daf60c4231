"""Pulls over every connector: what arrives is verified, cancelled in time, and never wrong."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from paceline.core.errors import Cancelled, KvMismatch
from paceline.kv_transfer.base import CellSums, Piece
from paceline.kv_transfer.link_statistics import LinkStatistics
from paceline.kv_transfer.pull import PinnedPages, Report, pull_verified
from tests.contract.ends import Ends, connected
from tests.contract.pools import LARGE, edited, ids, make_pool, pages_of, sums_of


def pull(
    ends: Ends,
    pages: PinnedPages,
    report: Report = lambda page, generation: None,
    cancelled: threading.Event | None = None,
) -> CellSums:
    return pull_verified(
        ends.link,
        pages,
        LinkStatistics(ends.pool.group),
        deadline=time.monotonic() + 10,
        cancelled=cancelled or threading.Event(),
        report=report,
    )


@pytest.mark.parametrize("num_tokens", [None, 3])
def test_a_pull_returns_the_promised_sums(ends: Ends, num_tokens: int | None) -> None:
    pages = ends.pin(ids(11, 2, 5), ids(0, 7, 3), num_tokens)
    assert np.array_equal(pull(ends, pages), pages.checksums)
    arrived = sums_of(ends.pool, pages.destination_pages, num_tokens)
    assert np.array_equal(arrived, pages.checksums)


def test_do_eks_84_a_page_reused_after_the_pin_is_never_taken_for_the_old(ends: Ends) -> None:
    """https://github.com/aws-samples/aws-do-eks/pull/84: late reads of released pages passed."""
    pages = ends.pin(ids(4, 5, 6), ids(0, 1, 2))
    with edited(ends.source_pool) as source:
        source[5] = source[9]  # another prompt's KV
    reports: list[tuple[int, int]] = []
    with pytest.raises(KvMismatch, match="page 5 arrived twice"):
        pull(ends, pages, lambda page, generation: reports.append((page, generation)))
    assert reports == [(5, 7)]


def test_one_flipped_bit_is_found(ends: Ends) -> None:
    pages = ends.pin(ids(4), ids(0))
    with edited(ends.source_pool) as source:
        source[4, 100] ^= 1
    with pytest.raises(KvMismatch):
        pull(ends, pages)


def test_a_page_that_the_report_repairs_is_read_again(ends: Ends) -> None:
    pages = ends.pin(ids(4, 5), ids(0, 1))
    good = pages_of(ends.source_pool)[5].copy()
    with edited(ends.source_pool) as source:
        source[5, :8] ^= 0xFF

    def repair(page: int, generation: int) -> None:
        with edited(ends.source_pool) as source:
            source[page] = good

    assert np.array_equal(pull(ends, pages, repair), pages.checksums)
    assert np.array_equal(pages_of(ends.pool)[1], good)


def test_vllm_44238_what_returns_is_what_was_promised_under_concurrent_damage(
    transport: str,
) -> None:
    """https://github.com/vllm-project/vllm/issues/44238: a transfer was done, its bytes differed.

    5 parallel pulls of whole pages and tails, 10 rounds, while a page of the source flickers.
    """
    pools = make_pool(LARGE, 10, 4, transport), make_pool(LARGE, 20, None, transport)
    with connected(transport, *pools) as ends:
        stop = threading.Event()
        flicker = threading.Thread(target=flicker_page, args=(ends, 3, stop))
        pins = {}
        for lane in range(5):
            source_pages, to = ids(lane, lane + 5), ids(2 * lane, 2 * lane + 1)
            pins[lane] = ends.pin(source_pages, to, num_tokens=5 if lane % 2 else None)
        flicker.start()
        with ThreadPoolExecutor(5) as threads:
            lanes = list(threads.map(lambda lane: ten_rounds(ends, pins[lane]), range(5)))
        stop.set()
        flicker.join()
    assert "wrong" not in lanes[3]
    assert [set(lane) for lane in lanes if lane is not lanes[3]] == [{"verified"}] * 4


def flicker_page(ends: Ends, page: int, stop: threading.Event) -> None:
    while not stop.wait(0.0005):
        with edited(ends.source_pool) as source:
            source[page, ::97] ^= 0xFF


def ten_rounds(ends: Ends, pages: PinnedPages) -> list[str]:
    return [pull_or_mismatch(ends, pages) for _ in range(10)]


def pull_or_mismatch(ends: Ends, pages: PinnedPages) -> str:
    try:
        pull(ends, pages)
    except KvMismatch:
        return "mismatch"
    arrived = sums_of(ends.pool, pages.destination_pages, pages.num_tokens)
    return "verified" if np.array_equal(arrived, pages.checksums) else "wrong"


def test_a_cancel_stops_after_the_piece_in_flight(transport: str) -> None:
    pools = [make_pool(LARGE, 16, seed, transport) for seed in (5, None)]
    with connected(transport, *pools) as ends:
        every = np.arange(16)
        pages = ends.pin(every, every)
        cancelled = threading.Event()

        class CancellingLink:
            transport = ends.link.transport
            num_reads = 0

            def read(self, piece: Piece, timeout_s: float) -> CellSums:
                self.num_reads += 1
                cancelled.set()
                return ends.link.read(piece, timeout_s)

            def close(self) -> None: ...

        link = CancellingLink()
        with pytest.raises(Cancelled):
            pull_verified(
                link,
                pages,
                LinkStatistics(LARGE),
                deadline=time.monotonic() + 10,
                cancelled=cancelled,
                report=lambda page, generation: None,
            )
        assert link.num_reads == 1
        time.sleep(0.05)
        untouched = (pages_of(ends.pool) == 0xFF).all(axis=1)
        assert 0 < untouched.sum() < 16  # a piece arrived, and nothing after it
