"""Sources that are not read from for a while, because their own bytes were wrong.

A page that arrived wrong is reported to its source, which hashes its own and drops what is bad. A
wrong link, or a page that was reused meanwhile, speaks against nobody. A source that confirms that
its bytes were bad, or says nothing, gets a strike for it; after a few it is left alone for a while
that doubles each time.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import structlog

from paceline.core.errors import KvUnavailable

PeerKey = tuple[str, str]  # worker id, incarnation

STRIKES, WITHIN_S = 3, 60.0  # a single bad page is dropped, and no more is known of its worker
FIRST_S, LONGEST_S = 10.0, 300.0
MAX_SOURCES = 1024  # remembered

_log = structlog.get_logger("paceline.worker")


class Verdict(StrEnum):
    """Of a source on a page that arrived wrong: causes of mismatches."""

    SOURCE = "source"  # its own bytes were wrong: it has dropped them
    LINK = "link"  # its bytes are right: they changed on the way
    GONE = "gone"  # the page has been given to something else
    SILENT = "silent"


@dataclass(slots=True)
class Record:
    strikes: deque[float] = field(default_factory=lambda: deque(maxlen=STRIKES))
    until: float = 0.0
    seconds: float = FIRST_S / 2  # of its last stay


class Quarantine:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._records: dict[PeerKey, Record] = {}

    def __len__(self) -> int:
        return len(self.held())

    def held(self) -> list[PeerKey]:
        """Those who are in it now."""
        return [key for key in self._records if self.holds(key)]

    def holds(self, key: PeerKey) -> bool:
        record = self._records.get(key)
        return record is not None and record.until > self._clock()

    def judge(self, key: PeerKey, verdict: Verdict) -> bool:
        """Whether the source goes into quarantine for this."""
        if verdict not in (Verdict.SOURCE, Verdict.SILENT) or self.holds(key):
            return False
        record = self._record(key)
        now = self._clock()
        record.strikes.append(now)
        if len(record.strikes) < STRIKES or record.strikes[0] < now - WITHIN_S:
            return False
        record.strikes.clear()
        record.seconds = min(2 * record.seconds, LONGEST_S)
        record.until = now + record.seconds
        found = {"source": key[0], "cause": verdict, "seconds": record.seconds}
        _log.error("a source is in quarantine", **found)
        return True

    def refuse(self, key: PeerKey) -> None:
        """Raises KvUnavailable while the source is in quarantine."""
        if self.holds(key):
            raise KvUnavailable("the source is in quarantine: its KV was wrong")

    def _record(self, key: PeerKey) -> Record:
        if key not in self._records:
            if len(self._records) >= MAX_SOURCES:
                del self._records[next(iter(self._records))]
            self._records[key] = Record()
        return self._records[key]
