"""Which prefix of a request another worker shall give us: chosen from a router's hints.

    hints → choose: the source that spares the most time, if any does → offered to the engine
          → PrefixPull, of what is not here when the request's turn comes → pulled: what came of it

Hints are about names, and may be wrong: then there is a miss, and never an error.
"""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.core.errors import KvUnavailable, PacelineError
from paceline.core.kv_layout import PAGE_TOKENS
from paceline.kv_transfer.link_statistics import LinkStatistics
from paceline.v1 import worker_pb2
from paceline.worker.peers import MAX_PEERS
from paceline.worker.pull_choice import CONNECT_S, LinkPrice, Outcome, Price, compute_seconds
from paceline.worker.quarantine import PeerKey
from paceline.worker.ticket_check import check_ticket

if TYPE_CHECKING:
    from paceline.worker.session import Session
    from paceline.worker.slots import SlotState

AVOID_S = 5.0  # a source that failed or refused
TRIAL_S = 0.1  # for a pull that is expected to be too slow
LEAST_S = 0.02  # for any: one piece of a copy


@dataclass(frozen=True, slots=True)
class Offer:
    """`num_blocks` leading blocks of a request: what is not here comes from the hint's source, by
    the index `num_missing` of them."""

    hint: worker_pb2.PrefixHint
    num_blocks: int
    num_missing: int
    price: Price

    def timeout_s(self, num_blocks: int) -> float:
        """For a pull of so many. Never longer than computing takes; less where a pull only shows
        how long it takes."""
        longest_s = self.price.compute_s * num_blocks / self.num_missing
        return max(LEAST_S, longest_s if self.price.spared_s > 0 else min(longest_s, TRIAL_S))

    @property
    def source(self) -> PeerKey:
        return source_of(self.hint)


class PrefixOffers:
    """Of one incarnation; on the event loop."""

    def __init__(self, session: "Session") -> None:
        self._session = session
        self._prices: dict[PeerKey, LinkPrice] = {}
        self._avoided: dict[PeerKey, float] = {}  # until then

    def choose(self, slot: "SlotState", hints: Sequence[worker_pb2.PrefixHint]) -> Offer | None:
        """None: all that is not here is computed."""
        offers = [self._offer(slot, hint) for hint in hints if self._is_valid(hint)]
        offers = [offer for offer in offers if offer.num_missing > 0]
        if not offers:
            return None
        now = time.monotonic()
        usable = [offer for offer in offers if self._avoided.get(offer.source, 0.0) <= now]
        if not usable:
            self._count(Outcome.AVOIDED, offers[0].num_missing)
            return None
        best = max(usable, key=lambda offer: offer.price.spared_s)
        is_connected = self._session.peers.find(best.source) is not None
        is_doubtful = is_connected and self._price(best.source).is_doubtful
        if best.price.spared_s > 0 or is_doubtful:
            return best
        if not is_connected:
            self._session.background(self._connect, best.hint)
        would_be_worth_it = best.price.spared_s + CONNECT_S > 0 and not is_connected
        self._count(Outcome.CONNECTING if would_be_worth_it else Outcome.CHEAPER, best.num_missing)
        return None

    def pulled(self, offer: Offer, outcome: Outcome, num_wanted: int, num_came: int) -> None:
        """What became of `num_wanted` blocks that were asked for."""
        self._session.metrics.asked_of_others(num_wanted * PAGE_TOKENS)
        self._session.metrics.had_of_others(num_came * PAGE_TOKENS)
        self._count(Outcome.PULLED, num_came)
        if outcome is not Outcome.PULLED:
            self._count(outcome, num_wanted - num_came)
        if outcome in (Outcome.FAILED, Outcome.REFUSED):
            self._avoid(offer.source)

    def learn(self, offer: Offer, outcome: Outcome, took_s: float, num_pages: int) -> None:
        """From a pull that has ended, or was left to itself."""
        peer, price = self._session.peers.find(offer.source), self._price(offer.source)
        if outcome is Outcome.LATE:
            price.observe_late(took_s)
        elif peer is not None and outcome is not Outcome.FAILED:
            price.observe(took_s, peer.statistics.link_seconds(num_pages))

    def _is_valid(self, hint: worker_pb2.PrefixHint) -> bool:
        with contextlib.suppress(KvUnavailable):
            session = self._session
            check_ticket(session.info, session.secret, hint.ticket, source_is_here=False)
            return True
        return False

    def _offer(self, slot: "SlotState", hint: worker_pb2.PrefixHint) -> Offer:
        """The last token is always computed."""
        most = (len(slot.request.token_ids) - 1) // PAGE_TOKENS
        num_blocks = min(hint.num_blocks, most)
        num_missing = max(0, num_blocks - hint.num_own_blocks)
        compute_s = compute_seconds(num_missing * PAGE_TOKENS, self._session.load.token_s)
        price = Price(self._pull_seconds(source_of(hint), num_missing), compute_s)
        return Offer(hint, num_blocks, num_missing, price)

    def _pull_seconds(self, source: PeerKey, num_blocks: int) -> float:
        session = self._session
        num_pages = num_blocks * len(session.rank.ready.groups)
        latency_s = self._price(source).latency_s
        peer = session.peers.find(source)
        if peer is not None:
            return latency_s + peer.statistics.link_seconds(num_pages)
        unmeasured = LinkStatistics(session.connectors.group)
        return CONNECT_S + latency_s + unmeasured.link_seconds(num_pages)

    def _price(self, source: PeerKey) -> LinkPrice:
        _forget_some(self._prices)
        return self._prices.setdefault(source, LinkPrice())

    def _avoid(self, source: PeerKey) -> None:
        _forget_some(self._avoided)
        self._avoided[source] = time.monotonic() + AVOID_S

    async def _connect(self, hint: worker_pb2.PrefixHint) -> None:
        """For the next one."""
        try:
            await self._session.peers.get(hint.ticket, hint.source_endpoint)
        except PacelineError:
            self._avoid(source_of(hint))

    def _count(self, outcome: Outcome, num_blocks: int) -> None:
        self._session.metrics.offered(outcome, num_blocks * PAGE_TOKENS)


def source_of(hint: worker_pb2.PrefixHint) -> PeerKey:
    return hint.ticket.source_worker, hint.ticket.source_incarnation


def _forget_some(by_source: dict[PeerKey, Any]) -> None:
    """The oldest, at a bound that no deployment reaches."""
    if len(by_source) >= 2 * MAX_PEERS:
        del by_source[next(iter(by_source))]
