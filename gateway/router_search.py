"""Finds a router that takes requests: tries all addresses, one soon after the other."""

import asyncio
import random
from collections.abc import Callable, Collection, Sequence

from paceline.gateway.router_addresses import Address, RouterAddresses
from paceline.gateway.router_link import RouterLink

_STAGGER_S = 0.3  # an address that says nothing for so long is not waited for alone
_OPEN_S = 10.0  # for the last ones; a router that starts looks for its workers for three
_MIN_BACKOFF_S, _MAX_BACKOFF_S = 0.1, 1.0  # between rounds, with jitter


class RouterSearch:
    """`connect` makes a link of an address. A link that hears nothing ends by itself."""

    def __init__(
        self, addresses: RouterAddresses, connect: Callable[[Address], RouterLink]
    ) -> None:
        self._addresses = addresses
        self._connect = connect

    async def find(self, avoided: Collection[Address]) -> RouterLink:
        """Until there is one. `avoided` are tried last."""
        backoff_s = _MIN_BACKOFF_S
        while (link := await self._try_all(avoided)) is None:
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
        return link

    async def addresses(self) -> list[Address]:
        """All, those of names before others first."""
        return await self._addresses.look_up(())

    async def try_one(self, address: Address) -> RouterLink | None:
        """None: it does not take requests."""
        link = self._connect(address)
        try:
            return await _first_open([link], _OPEN_S)
        finally:
            if not link.is_open:
                link.close()

    async def _try_all(self, avoided: Collection[Address]) -> RouterLink | None:
        """The first that opens; the others are closed."""
        tried: list[RouterLink] = []
        found = None
        try:
            for address in await self._addresses.look_up(avoided):
                tried.append(self._connect(address))
                if (found := await _first_open(tried, _STAGGER_S)) is not None:
                    return found
            found = await _first_open(tried, _OPEN_S)
            return found
        finally:
            for link in tried:
                if link is not found:
                    link.close()


async def _first_open(links: Sequence[RouterLink], timeout_s: float) -> RouterLink | None:
    """None when all have failed, or time is up."""
    clock = asyncio.get_running_loop().time
    deadline_s = clock() + timeout_s
    while (found := next((link for link in links if link.is_open), None)) is None:
        trying = {link.opened for link in links if not link.opened.done()}
        left_s = deadline_s - clock()
        if not trying or left_s <= 0:
            break
        await asyncio.wait(trying, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
    return found
