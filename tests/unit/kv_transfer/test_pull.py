"""Pacing and failures of a pull, over a link whose speed and answers the test decides."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from paceline.core.errors import Cancelled, DeadlineExceeded, KvMismatch, PeerGone
from paceline.core.kv_layout import PageGroup
from paceline.kv_transfer.base import CellSums, Piece
from paceline.kv_transfer.link_statistics import PIECE_SECONDS, LinkStatistics
from paceline.kv_transfer.pull import MAX_SILENCE_S, PinnedPages, pull_verified

GROUP = PageGroup("full", num_layers=32, num_heads=8, head_dim=64)  # 2 MiB a page


def expected_sums(pages: np.ndarray) -> CellSums:
    return (pages[:, None] * 10 + np.arange(GROUP.num_heads)).astype(np.uint64)


@dataclass
class ScriptedLink:
    """Answers right sums after `seconds_a_page`; the first `num_lies` answers for page 3 differ."""

    seconds_a_page: float = 0.0
    num_lies: int = 0
    transport: str = "scripted"
    pieces: list[Piece] = field(default_factory=list)
    timeouts: list[float] = field(default_factory=list)

    def read(self, piece: Piece, timeout_s: float) -> CellSums:
        self.pieces.append(piece)
        self.timeouts.append(timeout_s)
        time.sleep(self.seconds_a_page * len(piece.source_pages))
        sums = expected_sums(piece.source_pages)
        if self.num_lies and 3 in piece.source_pages:
            self.num_lies -= 1
            sums[piece.source_pages == 3, 1] += np.uint64(1)
        return sums

    def close(self) -> None: ...


def pinned(num_pages: int) -> PinnedPages:
    pages = np.arange(num_pages)
    generations = (pages + 100).astype(np.uint64)
    return PinnedPages(pages, pages[::-1].copy(), generations, expected_sums(pages))


def pull(
    link: ScriptedLink,
    pages: PinnedPages,
    statistics: LinkStatistics | None = None,
    timeout_s: float = 10,
    cancelled: threading.Event | None = None,
    report: Callable[[int, int], None] = lambda page, generation: None,
) -> CellSums:
    return pull_verified(
        link,
        pages,
        statistics or LinkStatistics(GROUP),
        deadline=time.monotonic() + timeout_s,
        cancelled=cancelled or threading.Event(),
        report=report,
    )


def test_every_page_is_asked_for_once_in_order() -> None:
    link = ScriptedLink()
    sums = pull(link, pinned(100))
    source_pages = np.concatenate([piece.source_pages for piece in link.pieces])
    destination_pages = np.concatenate([piece.destination_pages for piece in link.pieces])
    assert source_pages.tolist() == list(range(100))
    assert destination_pages.tolist() == list(range(100))[::-1]
    assert np.array_equal(sums, expected_sums(np.arange(100)))


def test_pieces_fit_the_speed_of_the_link() -> None:
    """1 ms a page: once learned, a piece takes 20 ms, whatever the first guess was."""
    statistics = LinkStatistics(GROUP)
    link = ScriptedLink(seconds_a_page=0.001)
    assert statistics.pages_per_piece() == 1
    for _ in range(3):
        pull(link, pinned(60), statistics)
    assert 5 <= statistics.pages_per_piece() <= PIECE_SECONDS / link.seconds_a_page
    assert max(len(piece.source_pages) for piece in link.pieces) <= 24


def test_a_link_that_slows_down_gets_smaller_pieces() -> None:
    statistics = LinkStatistics(GROUP)
    pull(ScriptedLink(), pinned(100), statistics)
    fast = statistics.pages_per_piece()
    slow_link = ScriptedLink(seconds_a_page=0.004)
    pull(slow_link, pinned(20), statistics)
    pull(slow_link, pinned(40), statistics)
    assert statistics.pages_per_piece() < fast / 4


def test_a_link_says_how_long_it_will_take() -> None:
    statistics = LinkStatistics(GROUP)
    for _ in range(3):
        pull(ScriptedLink(seconds_a_page=0.001), pinned(60), statistics)
    assert 0.02 < statistics.link_seconds(60) < 1
    assert statistics.link_seconds(0) == 0


def test_statistics_count_what_was_copied() -> None:
    statistics = LinkStatistics(GROUP)
    pull(ScriptedLink(seconds_a_page=0.001), pinned(10), statistics)
    tail = PinnedPages(
        np.arange(1), np.arange(1), np.zeros(1, np.uint64), expected_sums(np.arange(1)), 4
    )
    pull(ScriptedLink(), tail, statistics)
    figures = statistics.figures
    assert figures.num_bytes == 10 * GROUP.page_bytes + GROUP.page_bytes // 4
    assert figures.num_pieces >= 2
    assert figures.num_mismatches == 0
    assert figures.seconds >= 0.01
    assert figures.bytes_per_second > 0


def test_a_mismatch_is_reported_and_read_once_more() -> None:
    link, reports, statistics = ScriptedLink(num_lies=1), [], LinkStatistics(GROUP)
    sums = pull(link, pinned(6), statistics, report=lambda *seen: reports.append(seen))
    assert np.array_equal(sums, expected_sums(np.arange(6)))
    assert reports == [(3, 103)]
    assert [p.source_pages.tolist() for p in link.pieces].count([3]) >= 1
    assert statistics.figures.num_mismatches == 1


def test_a_second_mismatch_gives_up() -> None:
    link = ScriptedLink(num_lies=2)
    with pytest.raises(KvMismatch, match="page 3 arrived twice"):
        pull(link, pinned(6))
    assert sum(3 in piece.source_pages for piece in link.pieces) == 2


def test_a_cancel_is_seen_between_pieces() -> None:
    link, cancelled = ScriptedLink(seconds_a_page=0.005), threading.Event()
    threading.Timer(0.05, cancelled.set).start()
    started = time.monotonic()
    with pytest.raises(Cancelled):
        pull(link, pinned(1000), cancelled=cancelled)
    assert time.monotonic() - started < 1
    num_pieces = len(link.pieces)
    time.sleep(0.05)
    assert len(link.pieces) == num_pieces


def test_a_cancelled_pull_reads_nothing() -> None:
    link, cancelled = ScriptedLink(), threading.Event()
    cancelled.set()
    with pytest.raises(Cancelled):
        pull(link, pinned(1), cancelled=cancelled)
    assert not link.pieces


def test_the_deadline_ends_a_pull_between_pieces() -> None:
    link = ScriptedLink(seconds_a_page=0.005)
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        pull(link, pinned(1000), timeout_s=0.1)
    assert time.monotonic() - started < 1


def test_a_read_gets_what_is_left_but_never_more_than_the_silence_of_a_lease() -> None:
    link = ScriptedLink()
    pull(link, pinned(1), timeout_s=100)
    pull(link, pinned(1), timeout_s=1)
    assert link.timeouts[0] == MAX_SILENCE_S
    assert 0.5 < link.timeouts[1] <= 1


def test_a_dead_peer_ends_the_pull() -> None:
    class DeadLink(ScriptedLink):
        def read(self, piece: Piece, timeout_s: float) -> CellSums:
            raise PeerGone("the source died")

    with pytest.raises(PeerGone):
        pull(DeadLink(), pinned(3))
