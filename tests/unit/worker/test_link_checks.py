"""A source's canary, and what a link's self-test finds, over real links within this process."""

import asyncio
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from structlog.testing import capture_logs

from paceline.core.errors import IncompatiblePeer, KvUnavailable, PeerGone
from paceline.engine.messages import CanaryCompared, CompareCanary
from paceline.kv_transfer.base import CellSums, Piece
from paceline.kv_transfer.link_statistics import LinkStatistics
from paceline.v1 import kv_pb2
from paceline.worker import link_checks
from paceline.worker.connectors import Reached
from paceline.worker.link_checks import APART_S, LinkChecks, LinkSpeed
from paceline.worker.rank_messages import CanaryPages
from tests.contract.ends import Ends, connected
from tests.contract.pools import SMALL, ids, make_pool, pages_of, sums_of

KEY = ("prefill-1", "incarnation-1")
OWN, ARRIVALS, SCRATCH = (4, 5), (6, 7), 8


class Rank:
    """Compares the arrival pages with those of the source, as a rank does with its own."""

    def __init__(self, ends: Ends) -> None:
        self.ends = ends
        self.distance: float | None = None
        self.num_compared = 0

    async def compare(self, call: CompareCanary) -> CanaryCompared:
        self.num_compared += 1
        arrived = pages_of(self.ends.pool)[list(ARRIVALS)]
        is_same = np.array_equal(arrived, pages_of(self.ends.source_pool)[list(OWN)])
        found = 0.0 if is_same else 1.0
        return CanaryCompared(found if self.distance is None else self.distance, 1e-3)


@pytest.fixture
def ends() -> Iterator[Ends]:
    with connected("local", make_pool(SMALL, 9, 1), make_pool(SMALL, 9)) as both:
        yield both


@pytest.fixture
def rank(ends: Ends) -> Rank:
    return Rank(ends)


def checks_of(
    rank: Rank, floor: float = 0.0, clock: Callable[[], float] = time.monotonic
) -> LinkChecks:
    sums = [tuple(row) for row in sums_of(rank.ends.pool, ids(*OWN)).tolist()]
    pages = CanaryPages(OWN, ARRIVALS, SCRATCH, sums)
    return LinkChecks(pages, rank.compare, floor, clock)


def description(ends: Ends) -> kv_pb2.DescribeResponse:
    sums = sums_of(ends.source_pool, ids(*OWN)).tolist()
    pages = zip(OWN, sums, strict=True)
    return kv_pb2.DescribeResponse(
        canary=[kv_pb2.PageRef(page=page, checksums=row) for page, row in pages]
    )


def reached(link: object) -> Reached:
    return Reached(link, LinkStatistics(SMALL))  # type: ignore[arg-type]


async def admit(checks: LinkChecks, ends: Ends) -> None:
    await checks.admit(KEY, description(ends), reached(ends.link))


async def test_the_first_pairing_compares_and_later_ones_do_not(ends: Ends, rank: Rank) -> None:
    checks = checks_of(rank)
    await admit(checks, ends)
    await admit(checks, ends)
    assert rank.num_compared == 1
    assert not checks.apart


@pytest.mark.parametrize(("distance", "shown"), [(0.5, "0.5"), (float("nan"), "NaN")])
async def test_who_fails_is_kept_apart_loudly(
    ends: Ends, rank: Rank, distance: float, shown: str
) -> None:
    checks = checks_of(rank)
    rank.distance = distance
    with pytest.raises(IncompatiblePeer) as refused:
        await admit(checks, ends)
    assert refused.value.field == "canary" and shown in refused.value.message
    with capture_logs() as logs:
        checks.keep_apart(KEY, refused.value)
    assert logs[0]["log_level"] == "error" and logs[0]["source"] == KEY[0]
    rank.distance = 0.0
    with pytest.raises(IncompatiblePeer):
        checks.refuse_apart(KEY)
    checks.refuse_apart((KEY[0], "incarnation-2"))
    await checks.admit((KEY[0], "incarnation-2"), description(ends), reached(ends.link))
    assert not checks.apart, "its next incarnation has another chance"


async def test_who_is_kept_apart_is_forgotten_once_nobody_names_it(rank: Rank) -> None:
    now = 0.0
    checks = checks_of(rank, clock=lambda: now)
    for worker in ("asked for", "registered", "gone"):
        checks.keep_apart((worker, "1"), IncompatiblePeer("canary"))
    now = APART_S - 1
    with pytest.raises(IncompatiblePeer):
        checks.refuse_apart(("asked for", "1"))
    assert checks.is_apart(("registered", "1"))
    checks.forget_gone()
    assert len(checks.apart) == 3
    now = APART_S + 1
    checks.forget_gone()
    assert list(checks.apart) == [("asked for", "1"), ("registered", "1")]
    checks.refuse_apart(("gone", "1"))


async def test_a_canary_that_arrives_wrong_is_no_failure_of_it(ends: Ends, rank: Rank) -> None:
    checks, made = checks_of(rank), description(ends)
    pages_of(ends.source_pool)[OWN[1]] += 1
    with pytest.raises(KvUnavailable):
        await checks.admit(KEY, made, reached(ends.link))
    assert rank.num_compared == 0 and not checks.apart


@pytest.mark.parametrize("made", [kv_pb2.DescribeResponse(), None])
async def test_a_source_without_a_canary_like_ours_is_refused(
    ends: Ends, rank: Rank, made: kv_pb2.DescribeResponse | None
) -> None:
    if made is None:
        made = description(ends)
        made.canary[1].checksums.append(5)
    with pytest.raises(IncompatiblePeer) as refused:
        await checks_of(rank).admit(KEY, made, reached(ends.link))
    assert refused.value.field == "canary"


async def test_pairings_at_once_do_not_mix_their_arrivals(ends: Ends, rank: Rank) -> None:
    checks = checks_of(rank)
    others = [(f"prefill-{i}", "1") for i in range(5)]
    made = [(key, description(ends), reached(ends.link)) for key in others]
    await asyncio.gather(*(checks.admit(*one) for one in made))
    assert rank.num_compared == 5


class SlowLink:
    transport = "slow"

    def __init__(self, seconds: float, link: object) -> None:
        self.seconds = seconds
        self.link = link
        self.pieces: list[Piece] = []

    def read(self, piece: Piece, timeout_s: float) -> CellSums:
        self.pieces.append(piece)
        time.sleep(self.seconds)
        return self.link.read(piece, timeout_s)  # type: ignore[attr-defined,no-any-return]

    def close(self) -> None: ...


async def test_a_self_test_is_bounded_and_writes_the_scratch_page_only(
    ends: Ends, rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_checks, "TEST_BYTES", 20 * SMALL.page_bytes)
    monkeypatch.setattr(link_checks, "TEST_PIECE_BYTES", 4 * SMALL.page_bytes)
    link = SlowLink(0.0, ends.link)
    before = pages_of(ends.pool).copy()
    speed = await checks_of(rank).self_test("prefill-1", description(ends), reached(link))
    assert speed is not None and speed.bytes_per_second > 0 and speed.seconds > 0
    assert sum(len(p.source_pages) for p in link.pieces if p.num_tokens is None) == 20
    after = pages_of(ends.pool)
    assert np.array_equal(after[:SCRATCH], before[:SCRATCH])
    assert {page for piece in link.pieces for page in piece.source_pages.tolist()} == set(OWN)


class ThrottledLink(SlowLink):
    """Moves so many bytes a second; a read that takes too long breaks it."""

    def read(self, piece: Piece, timeout_s: float) -> CellSums:
        self.seconds = len(piece.source_pages) * SMALL.page_bytes / 2e6
        if self.seconds > timeout_s:
            time.sleep(timeout_s)
            raise PeerGone("the source has been silent")
        return super().read(piece, timeout_s)


async def test_a_link_too_slow_for_a_whole_piece_is_told_of(ends: Ends, rank: Rank) -> None:
    """4 MiB would take it two seconds."""
    link = ThrottledLink(0.0, ends.link)
    speed = await checks_of(rank, floor=50e6).self_test(
        "prefill-1", description(ends), reached(link)
    )
    assert speed is not None and 1e6 < speed.bytes_per_second < 2e6
    assert sum(len(p.source_pages) for p in link.pieces) * SMALL.page_bytes / 2e6 < 1


async def test_a_slow_link_is_told_of(ends: Ends, rank: Rank) -> None:
    checks = checks_of(rank, floor=1e9)
    with capture_logs() as logs:
        speed = await checks.self_test(
            "prefill-1", description(ends), reached(SlowLink(0.02, ends.link))
        )
    assert speed is not None and speed.seconds >= 0.02
    assert [(log["log_level"], log["source"]) for log in logs] == [("warning", "prefill-1")]
    assert "below 1e+03" in checks.slowness(speed)
    assert checks.slowness(LinkSpeed(2e9, 1e-6)) == ""


async def test_a_link_that_breaks_meanwhile_has_no_figures(ends: Ends, rank: Rank) -> None:
    made = description(ends)
    ends.source.close()
    assert await checks_of(rank).self_test("prefill-1", made, reached(ends.link)) is None
