"""What a link has done so far, and how much of it fits in one piece."""

import threading
from dataclasses import dataclass

from paceline.core.kv_layout import PageGroup
from paceline.kv_transfer.base import MAX_PIECE_PAGES, Piece

PIECE_SECONDS = 0.020  # a cancel waits for one piece
_FIRST_GUESS = 200e6  # bytes per second: a slow network, so that the first piece is short
_MAX_GROWTH = 8.0  # from one piece to the next


@dataclass(frozen=True, slots=True)
class LinkFigures:
    num_bytes: int
    num_pieces: int
    num_mismatches: int  # pages that did not arrive as promised
    seconds: float  # spent in reads, of all threads together
    bytes_per_second: float  # current estimate


class LinkStatistics:
    """One a link, shared by all pulls over it. Thread-safe."""

    def __init__(self, group: PageGroup) -> None:
        self._group = group
        self._lock = threading.Lock()
        self._figures = LinkFigures(0, 0, 0, 0.0, _FIRST_GUESS)

    @property
    def group(self) -> PageGroup:
        return self._group

    @property
    def token_bytes(self) -> float:
        """Of one page group."""
        return self._group.page_bytes / self._group.page_tokens

    @property
    def figures(self) -> LinkFigures:
        return self._figures

    def pages_per_piece(self) -> int:
        num_bytes = int(self._figures.bytes_per_second * PIECE_SECONDS)
        return min(max(1, num_bytes // self._group.page_bytes), MAX_PIECE_PAGES)

    def link_seconds(self, num_pages: int) -> float:
        """What copying so many pages takes, as the link is estimated now."""
        return num_pages * self._group.page_bytes / self._figures.bytes_per_second

    def add_piece(self, piece: Piece, seconds: float, num_mismatches: int) -> None:
        page_tokens = self._group.page_tokens
        num_tokens = page_tokens if piece.num_tokens is None else piece.num_tokens
        num_bytes = len(piece.source_pages) * self._group.page_bytes * num_tokens // page_tokens
        with self._lock:
            old = self._figures
            self._figures = LinkFigures(
                num_bytes=old.num_bytes + num_bytes,
                num_pieces=old.num_pieces + 1,
                num_mismatches=old.num_mismatches + num_mismatches,
                seconds=old.seconds + seconds,
                bytes_per_second=_learn(old.bytes_per_second, num_bytes, seconds),
            )


def _learn(estimate: float, num_bytes: int, seconds: float) -> float:
    """Slower counts at once, so that one piece at most takes too long; faster counts by half.

    A piece that was over soon was small: it shows the latency of the link, not its speed.
    """
    measured = num_bytes / max(seconds, 1e-9)
    if measured >= estimate:
        return (estimate + min(measured, _MAX_GROWTH * estimate)) / 2
    return estimate if seconds < PIECE_SECONDS / 4 else measured
