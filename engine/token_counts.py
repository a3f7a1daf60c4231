"""Which tokens a sequence holds, and how often its output does: what penalties depend on.

Made of prompt and output alone, so any worker that continues a request makes the same.
"""

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]


class TokenCounts:
    """Distinct ids, each with its number in the output; a prompt that does not count is empty."""

    __slots__ = ("_counts", "_ids", "_places")

    def __init__(self, prompt: Int64s, output: Int64s) -> None:
        self._ids = np.unique(np.concatenate((prompt, output)))
        self._counts = np.zeros(len(self._ids), np.int64)
        np.add.at(self._counts, np.searchsorted(self._ids, output), 1)
        self._places = {token_id: place for place, token_id in enumerate(self._ids.tolist())}

    @property
    def ids(self) -> Int64s:
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> Int64s:
        return self._counts[: len(self._places)]

    def add(self, token_id: int) -> None:
        """One more output token."""
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            num_new = len(self._ids) // 2 + 64
            self._ids = np.concatenate((self._ids, np.zeros(num_new, np.int64)))
            self._counts = np.concatenate((self._counts, np.zeros(num_new, np.int64)))
        self._ids[place] = token_id
        self._counts[place] += 1
