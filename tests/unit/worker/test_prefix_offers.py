"""Which prefix a worker pulls, by what pulling and computing are measured to take."""

from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.core.errors import PeerGone
from paceline.core.kv_layout import PAGE_TOKENS
from paceline.kv_transfer.base import Piece
from paceline.kv_transfer.link_statistics import LinkStatistics
from paceline.rpc import tickets
from paceline.v1 import common_pb2, worker_pb2
from paceline.worker.prefix_offers import LEAST_S, TRIAL_S, Offer, PrefixOffers
from paceline.worker.pull_choice import FIRST_LATENCY_S, REMEASURE_S, LinkPrice, Outcome
from tests.contract.pools import SMALL

SECRET = b"a secret of the tests"
INFO = worker_pb2.WorkerInfo(worker_id="reader", incarnation="r1", content_digest="ab")
SLOW_S, FAST_S = 1e-3, 1e-7  # a prompt token


@dataclass
class Rig:
    """A session as far as offers know it, with links to `connected`."""

    token_s: float = SLOW_S
    connected: dict[tuple[str, str], LinkStatistics] = field(default_factory=dict)
    counts: Counter[Outcome] = field(default_factory=Counter)
    dialled: list[str] = field(default_factory=list)
    now: float = 100.0

    def __post_init__(self) -> None:
        session: Any = SimpleNamespace(
            info=INFO,
            secret=SECRET,
            load=SimpleNamespace(token_s=self.token_s),
            peers=SimpleNamespace(find=self._find, get=self._get),
            metrics=SimpleNamespace(
                offered=self._count, asked_of_others=lambda _: None, had_of_others=lambda _: None
            ),
            connectors=SimpleNamespace(group=SMALL),
            rank=SimpleNamespace(ready=SimpleNamespace(groups=(SMALL,))),
            background=self._in_background,
        )
        self.offers = PrefixOffers(session)

    def choose(self, *hints: worker_pb2.PrefixHint, num_tokens: int = 1000) -> Offer | None:
        slot: Any = SimpleNamespace(request=SimpleNamespace(token_ids=range(num_tokens)))
        return self.offers.choose(slot, hints)

    def _find(self, key: tuple[str, str]) -> Any:
        statistics = self.connected.get(key)
        return None if statistics is None else SimpleNamespace(statistics=statistics)

    async def _get(self, ticket: common_pb2.Ticket, endpoint: str) -> None:
        raise PeerGone("nobody is there")

    def _in_background(self, call: Any, hint: worker_pb2.PrefixHint) -> None:
        self.dialled.append(hint.ticket.source_worker)

    def _count(self, outcome: Outcome, num_tokens: int) -> None:
        self.counts[outcome] += num_tokens


def link_of(bytes_per_second: float) -> LinkStatistics:
    statistics = LinkStatistics(SMALL)
    for _ in range(30):  # as pieces show it
        piece: Any = Piece(range(100), range(100), None)  # type: ignore[arg-type]
        statistics.add_piece(piece, 100 * SMALL.page_bytes / bytes_per_second, 0)
    return statistics


def hint(
    source: str = "holder", num_blocks: int = 50, num_own_blocks: int = 0, **ticket: Any
) -> worker_pb2.PrefixHint:
    fields = {
        "request_id": "request",
        "source_worker": source,
        "source_incarnation": "s1",
        "reader_worker": "reader",
        "reader_incarnation": "r1",
        "content_digest": "ab",
        "expires_unix_ms": 1 << 62,
        **ticket,
    }
    made = tickets.sign(common_pb2.Ticket(**fields), SECRET)
    return worker_pb2.PrefixHint(ticket=made, num_blocks=num_blocks, num_own_blocks=num_own_blocks)


HOLDER = ("holder", "s1")


def test_it_is_pulled_where_that_is_faster() -> None:
    rig = Rig(connected={HOLDER: link_of(1e9)})
    offer = rig.choose(hint(num_own_blocks=20))
    assert offer is not None and (offer.num_blocks, offer.num_missing) == (50, 30)
    assert offer.price.compute_s == pytest.approx(30 * PAGE_TOKENS * SLOW_S)
    assert offer.price.pull_s == pytest.approx(FIRST_LATENCY_S + 30 * SMALL.page_bytes / 1e9)
    assert not rig.counts  # counted when it is known what came


def test_the_last_token_is_always_computed() -> None:
    rig = Rig(connected={HOLDER: link_of(1e9)})
    offer = rig.choose(hint(), num_tokens=32)
    assert offer is not None and offer.num_blocks == 1
    assert rig.choose(hint(), num_tokens=16) is None


def test_a_link_that_was_never_measured_is_tried_once() -> None:
    """Its latency is a guess. What is old is doubted, too: nothing else would ever correct it."""
    rig = Rig(token_s=FAST_S, connected={HOLDER: link_of(1e9)})
    offer = rig.choose(hint())
    assert offer is not None
    rig.offers.learn(offer, Outcome.PULLED, took_s=0.006, num_pages=50)
    assert rig.choose(hint()) is None
    assert rig.counts == {Outcome.CHEAPER: 800}


def test_a_slow_link_is_left_alone_where_computing_is_faster() -> None:
    rig = Rig(connected={HOLDER: link_of(1e4)})
    offer = rig.choose(hint())
    assert offer is not None and offer.price.spared_s < 0
    rig.offers.learn(offer, Outcome.MISSING, took_s=0.1, num_pages=0)
    assert rig.choose(hint()) is None
    rig.connected[HOLDER] = link_of(1e9)
    assert rig.choose(hint()) is not None


def test_who_spares_most_is_taken() -> None:
    rig = Rig(connected={("near", "s1"): link_of(1e9), ("far", "s1"): link_of(1e5)})
    offer = rig.choose(hint("far", 55), hint("near", 50), hint("near", 20))
    assert offer is not None and offer.source == ("near", "s1") and offer.num_blocks == 50


def test_little_does_not_wait_for_a_connection_much_does() -> None:
    rig = Rig()
    assert rig.choose(hint(num_blocks=2)) is None
    assert rig.counts == {Outcome.CONNECTING: 32} and rig.dialled == ["holder"]
    assert rig.choose(hint(num_blocks=50)) is not None


def test_of_a_rank_that_has_computed_nothing_much_is_pulled() -> None:
    rig = Rig(token_s=0.0, connected={HOLDER: link_of(1e9)})
    offer = rig.choose(hint())
    assert offer is not None and offer.price.spared_s > 0


@pytest.mark.parametrize(
    "fields",
    [
        {"reader_incarnation": "r0"},
        {"reader_worker": "another"},
        {"content_digest": "cd"},
        {"expires_unix_ms": 1},
    ],
)
def test_a_hint_without_a_good_ticket_is_passed_over(fields: dict[str, Any]) -> None:
    rig = Rig(connected={HOLDER: link_of(1e9)})
    assert rig.choose(hint(**fields)) is None
    forged = hint()
    forged.ticket.tenant = "another"
    assert rig.choose(forged) is None


def test_a_hint_of_nothing_new_is_passed_over() -> None:
    rig = Rig(connected={HOLDER: link_of(1e9)})
    assert rig.choose(hint(num_blocks=20, num_own_blocks=20)) is None
    assert rig.choose(hint(num_blocks=0)) is None
    assert rig.choose() is None and not rig.counts


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.REFUSED])
def test_a_source_that_failed_is_left_alone_for_a_while(outcome: Outcome) -> None:
    rig = Rig(connected={HOLDER: link_of(1e9), ("other", "s1"): link_of(1e9)})
    offer = rig.choose(hint())
    assert offer is not None
    rig.offers.pulled(offer, outcome, num_wanted=50, num_came=10)
    assert rig.counts == {Outcome.PULLED: 160, outcome: 640}
    assert rig.choose(hint()) is None
    assert rig.counts[Outcome.AVOIDED] == 800
    assert rig.choose(hint(), hint("other", 5)) is not None


def test_what_was_missing_or_late_speaks_against_nobody() -> None:
    rig = Rig(connected={HOLDER: link_of(1e9)})
    for outcome in (Outcome.MISSING, Outcome.LATE, Outcome.PULLED):
        offer = rig.choose(hint())
        assert offer is not None
        rig.offers.pulled(offer, outcome, num_wanted=50, num_came=50)
    assert rig.counts[Outcome.PULLED] == 3 * 800


def test_who_is_late_again_and_again_is_not_asked() -> None:
    """A source that was stopped, or whose link became slow."""
    rig = Rig(connected={HOLDER: link_of(1e9)})
    num_late = 0
    while (offer := rig.choose(hint())) is not None:
        num_late += 1
        rig.offers.learn(offer, Outcome.LATE, offer.timeout_s(50), num_pages=0)
    assert num_late == 2


def test_a_pull_is_given_what_computing_its_blocks_takes() -> None:
    rig = Rig(connected={HOLDER: link_of(1e9)})
    offer = rig.choose(hint(num_own_blocks=20))
    assert offer is not None
    assert offer.timeout_s(30) == pytest.approx(0.48)
    assert offer.timeout_s(50) == pytest.approx(0.8)  # its own blocks were evicted meanwhile
    assert offer.timeout_s(1) == LEAST_S
    slow = Rig(connected={HOLDER: link_of(1e4)}).choose(hint())
    assert slow is not None and slow.timeout_s(50) == TRIAL_S


async def test_who_cannot_be_reached_is_left_alone() -> None:
    rig = Rig()
    await rig.offers._connect(hint())
    assert rig.choose(hint()) is None and not rig.dialled


def test_a_latency_follows_what_pulls_take() -> None:
    now = [0.0]
    price = LinkPrice(lambda: now[0])
    assert price.is_doubtful
    for _ in range(20):
        price.observe(took_s=0.03, link_s=0.01)
    assert price.latency_s == pytest.approx(0.02, rel=0.01) and not price.is_doubtful
    price.observe(took_s=0.001, link_s=0.002)
    assert 0 < price.latency_s < 0.02
    now[0] = REMEASURE_S + 1
    assert price.is_doubtful
