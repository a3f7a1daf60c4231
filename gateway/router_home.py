"""Which router a gateway's requests belong to, beside the one that they go to.

That is the first one that it found. Who had to leave it goes back when it has returned, so that
routers have the same gateways after a restart as before; a router that is new gets its share by
lot. Where names are an order, those before the others win.
"""

import random
from collections.abc import Sequence

from paceline.gateway.router_addresses import Address

RETURN_S = (15.0, 600.0)  # shortest and longest pause between two looks, with jitter
STEADY_S = 60.0  # a router that is left sooner is gone back to later each time


class RouterHome:
    def __init__(self, *, is_ordered: bool) -> None:
        self._is_ordered = is_ordered
        self.address: Address | None = None  # the first that was used, at first
        self._seen: frozenset[Address] = frozenset()
        self._pause_s = RETURN_S[0]

    @property
    def pause_s(self) -> float:
        return self._pause_s * random.uniform(0.5, 1.5)

    def note_left(self, after_s: float) -> None:
        """A router was lost, or drains, that was used for so long."""
        longer = min(2 * self._pause_s, RETURN_S[1])
        self._pause_s = longer if after_s < STEADY_S else RETURN_S[0]

    def of(self, found: Sequence[Address], current: Address) -> Address:
        """`found`: all addresses, those of names before others first. It may lead nowhere."""
        if not found:
            return current
        home = current
        if self.address is not None and self.address in found:
            home = self.address
        new = frozenset(found) - self._seen if self._seen else frozenset()
        self._seen = frozenset(found)
        if self._is_ordered and found[0].endpoint != home.endpoint:
            home = found[0]
        else:
            peers = [a for a in found if not self._is_ordered or a.endpoint == home.endpoint]
            drawn = random.choice(peers or [home])
            home = drawn if drawn in new else home
        self.address = home
        return home
