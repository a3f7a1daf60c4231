"""Sequences that wait, by priority, then arrival."""

import heapq

from paceline.engine.sequence import Sequence, Stage


class WaitingQueue:
    """A heap from which a sequence that stopped waiting vanishes when it comes to the top."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int, int], int, Sequence]] = []
        self._pushes = 0
        self._live: dict[Sequence, tuple[int, int]] = {}  # → push that counts, pages it needs
        self.num_tokens = 0
        self.num_pages = 0

    def __len__(self) -> int:
        return len(self._live)

    def push(self, sequence: Sequence, num_pages: int = 0) -> None:
        """`num_pages`: how many it waits for."""
        sequence.stage = Stage.WAITING
        self._pushes += 1
        self._live[sequence] = self._pushes, num_pages
        self.num_tokens += sequence.num_remaining
        self.num_pages += num_pages
        heapq.heappush(self._heap, (sequence.order, self._pushes, sequence))

    def discard(self, sequence: Sequence) -> None:
        counted = self._live.pop(sequence, None)
        if counted is not None:
            self.num_tokens -= sequence.num_remaining
            self.num_pages -= counted[1]
            if len(self._heap) > 2 * len(self._live) + 16:
                self._heap = [entry for entry in self._heap if self._counts(entry)]
                heapq.heapify(self._heap)

    def first(self) -> Sequence | None:
        while self._heap and not self._counts(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def is_before(self, sequence: Sequence) -> bool:
        """Whether someone here comes before `sequence`."""
        first = self.first()
        return first is not None and first.order < sequence.order

    def pages_before(self, sequence: Sequence) -> int:
        """Pages that must be left for those before `sequence`: at most what all here need."""
        return self.num_pages if self.is_before(sequence) else 0

    def members(self) -> list[Sequence]:
        return list(self._live)

    def _counts(self, entry: tuple[tuple[int, int, int], int, Sequence]) -> bool:
        counted = self._live.get(entry[2])
        return counted is not None and counted[0] == entry[1]
