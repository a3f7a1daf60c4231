"""What an embedding wants from its steps: hidden states of its tokens, summed as they come."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.core.pooling import Pooling

Floats = NDArray[np.float32]
_ZERO = np.zeros(1, np.float32)


@dataclass(slots=True)
class PooledStates:
    """The mean of the hidden states of tokens [first, end) of one request, part by part in order.
    One that was preempted goes on where its sum ends."""

    first: int
    end: int
    num_seen: int = field(init=False)  # leading tokens that are in the sum, or need not be
    total: Floats = field(default_factory=lambda: _ZERO, init=False)

    def __post_init__(self) -> None:
        self.num_seen = self.first

    @classmethod
    def of(cls, pooling: Pooling, num_tokens: int) -> "PooledStates":
        return cls(num_tokens - 1 if pooling is Pooling.LAST else 0, num_tokens)

    @property
    def is_complete(self) -> bool:
        return self.num_seen == self.end

    def wanted(self, start: int, end: int) -> range:
        """Of tokens [start, end) those whose states are still to be added."""
        return range(max(start, self.num_seen), end)

    def add(self, tokens: range, total: Floats) -> None:
        """`total` [hidden]: the sum over `tokens`, the first of those that are wanted."""
        self.total = self.total + total
        self.num_seen = tokens.stop

    def mean(self) -> Floats:
        """[hidden]"""
        return self.total / np.float32(self.end - self.first)


def sums_of(states: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """states [R, hidden], `lengths` rows of each of E sequences → [E, hidden] float32"""
    parts = states.float().split(list(lengths))  # type: ignore[no-untyped-call]
    return torch.stack([part.sum(dim=0) for part in parts])
