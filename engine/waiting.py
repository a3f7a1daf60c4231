"""Sequences that wait, by priority, then arrival."""

import heapq

from paceline.engine.sequence import Sequence, Stage


class WaitingQueue:
    """A heap from which a sequence that stopped waiting vanishes when it comes to the top."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int, int], int, Sequence]] = []
        self._pushes = 0
        self._live: dict[Sequence, int] = {}  # → push that counts
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._live)

    def push(self, sequence: Sequence) -> None:
        sequence.stage = Stage.WAITING
        self._pushes += 1
        self._live[sequence] = self._pushes
        self.num_tokens += sequence.num_remaining
        heapq.heappush(self._heap, (sequence.order, self._pushes, sequence))

    def discard(self, sequence: Sequence) -> None:
        if self._live.pop(sequence, None) is not None:
            self.num_tokens -= sequence.num_remaining
            if len(self._heap) > 2 * len(self._live) + 16:
                self._heap = [entry for entry in self._heap if self._counts(entry)]
                heapq.heapify(self._heap)

    def first(self) -> Sequence | None:
        while self._heap and not self._counts(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def members(self) -> list[Sequence]:
        return list(self._live)

    def _counts(self, entry: tuple[tuple[int, int, int], int, Sequence]) -> bool:
        return self._live.get(entry[2]) == entry[1]
