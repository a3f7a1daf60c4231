"""Leases on pages of this worker's pool: who reads them, and for how long they stay.

A lease belongs to a reader, (worker id, incarnation), and to the hand-off that it reads for. Its
reader's beats list it; one that is unlisted twice, older than any pull, or whose reader was silent
too long, is released. All state, no I/O: the caller unpins what a call returns.
"""

import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from paceline.core.errors import Overloaded
from paceline.core.ids import LeaseId

Reader = tuple[str, str]  # worker id, incarnation
HandoffKey = tuple[str, int]  # request id, attempt
PageLives = list[tuple[int, int]]  # (page, generation)

MAX_LEASES = 16_384
MAX_READERS = 4096  # whose last beat is known
MAX_LEASE_S = 120.0  # twice what a reader takes for a range at the most


@dataclass(slots=True)
class Lease:
    reader: Reader
    handoff: HandoffKey
    opened: float
    is_awaited: bool = False  # its reader may not know of it yet: no beat is expected to list it
    pages: PageLives = field(default_factory=list)
    num_unlisted: int = 0


def new_lease_id() -> LeaseId:
    return LeaseId(secrets.token_hex(8))


class LeaseTable:
    def __init__(
        self, max_pages: int, silence_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_pages = max_pages
        self._silence_s = silence_s
        self._clock = clock
        self._leases: dict[LeaseId, Lease] = {}
        self._heard: dict[Reader, float] = {}
        self._num_promised = 0
        self.num_pages = 0
        self.num_expired = 0

    def __len__(self) -> int:
        return len(self._leases)

    def promise(self, num_pages: int) -> None:
        """Before a pin: raises Overloaded when pins would exceed their share of the pool."""
        if self.num_pages + self._num_promised + num_pages > self._max_pages:
            raise Overloaded(f"readers may pin at most {self._max_pages} pages", retry_after_s=0.1)
        self._num_promised += num_pages

    def keep(self, num_promised: int) -> None:
        """The pin that was promised has happened, or will not."""
        self._num_promised -= num_promised

    def open(self, reader: Reader, handoff: HandoffKey, *, is_awaited: bool = False) -> LeaseId:
        """A new lease, to add pins to. Raises Overloaded when there are too many.

        `is_awaited`: its reader learns of it later, while the hand-off lasts (see `expect`)."""
        if len(self._leases) >= MAX_LEASES:
            raise Overloaded("too many leases", retry_after_s=0.1)
        made, now = new_lease_id(), self._clock()
        self._leases[made] = Lease(reader, handoff, now, is_awaited)
        self._heard[reader] = now
        return made

    def add(self, lease_id: LeaseId, pages: PageLives) -> bool:
        """False when the lease ended while the pages were being pinned: unpin them."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return False
        lease.pages.extend(pages)
        self.num_pages += len(pages)
        return True

    def release(self, lease_id: str, reader: Reader) -> PageLives:
        """Ends a lease of `reader`. Unknown ones hold nothing."""
        lease = self._leases.get(LeaseId(lease_id))
        if lease is None or lease.reader != reader:
            return []
        del self._leases[LeaseId(lease_id)]
        self.num_pages -= len(lease.pages)
        return lease.pages

    def expect(self, lease_id: str) -> None:
        """Its hand-off has ended: the reader must know of the lease by now."""
        lease = self._leases.get(LeaseId(lease_id))
        if lease is not None:
            lease.is_awaited = False

    def revoke(self, handoff: HandoffKey) -> PageLives:
        """Ends the leases of a hand-off."""
        return self._release_where(lambda lease: lease.handoff == handoff)

    def beat(self, reader: Reader, listed: Iterable[str]) -> tuple[PageLives, list[str]]:
        """Pages of leases unlisted twice in a row, and the listed ids that are not alive here."""
        if reader in self._heard or len(self._heard) < MAX_READERS:
            self._heard[reader] = self._clock()
        named = set(listed)
        for lease_id, lease in self._leases.items():
            if lease.reader != reader:
                continue
            if lease_id in named:
                lease.num_unlisted, lease.is_awaited = 0, False
            elif not lease.is_awaited:
                lease.num_unlisted += 1
        dropped = self._release_where(lambda lease: lease.num_unlisted >= 2)
        unknown = [name for name in named if not self._is_held(name, reader)]
        return dropped, unknown

    def is_silent(self, reader: Reader, since: float) -> bool:
        """Nothing heard of `reader` for the limit, counted from `since` at the earliest."""
        return self._clock() - max(self._heard.get(reader, 0.0), since) > self._silence_s

    def sweep(self) -> PageLives:
        """Pages of readers that were silent too long, and of leases that are too old."""
        now, before = self._clock(), len(self._leases)
        gone = {r for r, heard in self._heard.items() if heard < now - self._silence_s}
        dropped = self._release_where(
            lambda lease: lease.reader in gone or lease.opened < now - MAX_LEASE_S
        )
        self.num_expired += before - len(self._leases)
        for reader in gone:
            del self._heard[reader]
        return dropped

    def _release_where(self, ends: Callable[[Lease], bool]) -> PageLives:
        ended = [(name, lease.reader) for name, lease in self._leases.items() if ends(lease)]
        return [page for name, reader in ended for page in self.release(name, reader)]

    def _is_held(self, lease_id: str, reader: Reader) -> bool:
        lease = self._leases.get(LeaseId(lease_id))
        return lease is not None and lease.reader == reader
