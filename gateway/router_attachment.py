"""Which router gets requests: one at a time, and the next one when it leaves.

find ─ use ─ it drains, or dies ─ find … ; without one for `router_wait_s` requests are given up
        └─ another one is where they belong, and open ─ use that; what runs ends where it is
"""

import asyncio
from typing import Protocol

import structlog

from paceline.gateway.config import GatewayConfig
from paceline.gateway.router_addresses import Address, RouterAddresses
from paceline.gateway.router_home import RouterHome
from paceline.gateway.router_link import RouterLink
from paceline.gateway.router_search import RouterSearch

_UNNOTICED_S = 1.0  # a gap between two routers that readiness does not show
_STEADY_S, _PAUSE_S = 1.0, 0.1  # a router that was used for less is not followed at once

logger = structlog.stdlib.get_logger("paceline.gateway")


class Owner(Protocol):
    """Whose requests go there; never blocks."""

    def connect(self, address: Address) -> RouterLink: ...

    def attached(self, link: RouterLink) -> None:
        """To a router that takes requests now."""

    def detached(self) -> None:
        """For so long that readiness shows it."""

    def give_up(self) -> None:
        """What waits for a router: there was none for too long."""


class RouterAttachment:
    """Start, use `current`, stop."""

    def __init__(self, config: GatewayConfig, owner: Owner) -> None:
        self._owner = owner
        links = config.links
        self._wait_s = links.router_wait_s
        addresses = RouterAddresses(links.router, is_spread=links.spread_routers)
        self._search = RouterSearch(addresses, owner.connect)
        self._home = RouterHome(is_ordered=not links.spread_routers)
        self._used_at_s = 0.0  # the current one, from then on
        self._left = asyncio.Event()  # the current one
        self._last: Address | None = None
        self._gap: asyncio.TimerHandle | None = None  # until readiness shows it
        self._wait: asyncio.TimerHandle | None = None  # for a router, until it is given up
        self._tasks: list[asyncio.Task[None]] = []
        self.current: RouterLink | None = None
        self.is_attached = False  # true also in the moment between two routers
        self.takes_requests = False  # that may have to wait for a router

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._keep(), name="router-attachment"),
            asyncio.create_task(self._look_back(), name="router-return"),
        ]

    async def stop(self) -> None:
        """No router is looked for any more; timers end with `stop_timers`."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def stop_timers(self) -> None:
        for timer in filter(None, (self._gap, self._wait)):
            timer.cancel()

    def leave(self, link: RouterLink) -> None:
        """It takes no new requests."""
        if link is not self.current:
            return
        self.current = None
        self._home.note_left(asyncio.get_running_loop().time() - self._used_at_s)
        self._left.set()
        self._gap = asyncio.get_running_loop().call_later(_UNNOTICED_S, self._show_gap)
        self.begin_wait()

    def begin_wait(self) -> None:
        """What a router gives back when its drain is over waits as long as what came before."""
        if self._wait is not None:
            self._wait.cancel()
        self._wait = asyncio.get_running_loop().call_later(self._wait_s, self._give_up)

    async def _keep(self) -> None:
        while True:
            try:
                if self.current is None:
                    self._use(await self._search.find({self._last} if self._last else ()))
                await self._until_left()
            except Exception:  # a client that ends here would never find a router again
                logger.exception("router client failed")
                await asyncio.sleep(_PAUSE_S)

    async def _until_left(self) -> None:
        clock = asyncio.get_running_loop().time
        began_s = clock()
        await self._left.wait()
        if clock() - began_s < _STEADY_S:
            await asyncio.sleep(_PAUSE_S)

    async def _look_back(self) -> None:
        while True:
            await asyncio.sleep(self._home.pause_s)
            try:
                await self._return()
            except Exception:  # as above
                logger.exception("router client failed")

    async def _return(self) -> None:
        """To the router where requests belong, if that is another one and takes them."""
        found = await self._search.addresses()
        if self.current is None:
            return
        home = self._home.of(found, self.current.address)
        if home == self.current.address:
            return
        link = await self._search.try_one(home)
        former = self.current
        if link is None or former is None:
            if link is not None:
                link.close()
            return
        self._use(link)
        former.drain()

    def _use(self, link: RouterLink) -> None:
        self.current, self._last = link, link.address
        self._used_at_s = asyncio.get_running_loop().time()
        self._home.address = self._home.address or link.address
        self.is_attached = self.takes_requests = True
        self._left.clear()
        self.stop_timers()
        self._owner.attached(link)

    def _show_gap(self) -> None:
        self.is_attached = False
        self._owner.detached()

    def _give_up(self) -> None:
        self.takes_requests = False
        self._owner.give_up()
