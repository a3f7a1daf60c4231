"""Token sequences that an output may not complete: their last token is masked where it would."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]

_ANY, _NONE = -1, -2  # no token ids


class BadWords:
    """All words of a request are compared with the end of its output at once."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        longest = max(map(len, words)) - 1
        self._last = np.array([word[-1] for word in words], np.int64)
        self._beginnings = np.full((len(words), longest), _ANY, np.int64)
        for row, word in zip(self._beginnings, words, strict=True):
            row[longest - len(word) + 1 :] = word[:-1]

    def banned(self, output: Int64s) -> Int64s:
        """Ids that may not come after `output`."""
        longest = self._beginnings.shape[1]
        tail = np.full(longest, _NONE, np.int64)
        num_known = min(longest, len(output))
        tail[longest - num_known :] = output[len(output) - num_known :]
        matches = (self._beginnings == tail) | (self._beginnings == _ANY)
        banned: Int64s = self._last[matches.all(axis=1)]
        return banned
