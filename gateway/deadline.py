"""How long a request may take, from its arrival to its last token."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from paceline.core.errors import DeadlineExceeded
from paceline.gateway.metrics import now_s

_EARLY_S = 0.02  # that a timer may fire too soon: loops round, and know the time of their last turn


@dataclass(frozen=True, slots=True)
class Deadline:
    """Made when a request has arrived."""

    limit_s: float
    started_s: float = field(default_factory=now_s)

    def left_s(self) -> float:
        """At least a millisecond: what has no time left fails in its own way."""
        return max(0.001, self.started_s + self.limit_s - now_s())

    @property
    def is_over(self) -> bool:
        """Also for who was told so by a timer."""
        return now_s() >= self.started_s + self.limit_s - _EARLY_S

    def error(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"not finished within {self.limit_s:g} s")

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Cuts what runs inside. Raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(self.left_s()):
                yield
        except TimeoutError:
            raise self.error() from None
