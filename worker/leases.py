"""Leases on pages of this worker's pool: who reads them, and for how long they stay.

A lease belongs to a reader: (worker id, incarnation). Its reader's beats list it; one that is
unlisted twice, or whose reader was silent too long, is released. All state, no I/O: the caller
unpins what a call returns.
"""

import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from paceline.core.errors import Overloaded, PeerGone
from paceline.core.ids import LeaseId

Reader = tuple[str, str]  # worker id, incarnation
PinnedPages = list[tuple[int, int]]  # (page, generation)

MAX_LEASES = 16_384


@dataclass(slots=True)
class Lease:
    reader: Reader
    pages: PinnedPages = field(default_factory=list)
    num_unlisted: int = 0


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

    def open(self, reader: Reader, lease_id: str) -> LeaseId:
        """The lease to add pins to: a new one when `lease_id` is empty.

        Raises PeerGone when that lease has ended, Overloaded when there are too many.
        """
        if lease_id:
            lease = self._leases.get(LeaseId(lease_id))
            if lease is None or lease.reader != reader:
                raise PeerGone("the lease has ended")
            return LeaseId(lease_id)
        if len(self._leases) >= MAX_LEASES:
            raise Overloaded("too many leases", retry_after_s=0.1)
        made = LeaseId(secrets.token_hex(8))
        self._leases[made] = Lease(reader)
        self._heard[reader] = self._clock()
        return made

    def add(self, lease_id: LeaseId, pages: PinnedPages) -> bool:
        """False when the lease ended while the pages were being pinned: unpin them."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return False
        lease.pages.extend(pages)
        self.num_pages += len(pages)
        return True

    def release(self, lease_id: str, reader: Reader | None = None) -> PinnedPages:
        """Ends a lease; a `reader` can end only its own. Unknown ones hold nothing."""
        lease = self._leases.get(LeaseId(lease_id))
        if lease is None or (reader is not None and lease.reader != reader):
            return []
        del self._leases[LeaseId(lease_id)]
        self.num_pages -= len(lease.pages)
        return lease.pages

    def beat(self, reader: Reader, listed: Iterable[str]) -> tuple[PinnedPages, list[str]]:
        """Pages of leases unlisted twice in a row, and the listed ids that are not alive here."""
        self._heard[reader] = self._clock()
        named = set(listed)
        dropped: PinnedPages = []
        for lease_id, lease in list(self._leases.items()):
            if lease.reader != reader:
                continue
            lease.num_unlisted = 0 if lease_id in named else lease.num_unlisted + 1
            if lease.num_unlisted >= 2:
                dropped += self.release(lease_id)
        unknown = [name for name in named if not self._is_held(name, reader)]
        return dropped, unknown

    def is_silent(self, reader: Reader, since: float) -> bool:
        """Nothing heard of `reader` for the limit, counted from `since` at the earliest."""
        return self._clock() - max(self._heard.get(reader, 0.0), since) > self._silence_s

    def sweep(self) -> PinnedPages:
        """Pages of readers that were silent too long."""
        limit = self._clock() - self._silence_s
        gone = {reader for reader, heard in self._heard.items() if heard < limit}
        dropped: PinnedPages = []
        for lease_id, lease in list(self._leases.items()):
            if lease.reader in gone:
                dropped += self.release(lease_id)
                self.num_expired += 1
        for reader in gone:
            del self._heard[reader]
        return dropped

    def _is_held(self, lease_id: str, reader: Reader) -> bool:
        lease = self._leases.get(LeaseId(lease_id))
        return lease is not None and lease.reader == reader
