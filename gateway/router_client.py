"""The gateway's way to a router: requests go to one at a time, and on to another when it leaves.

find ─ use ─ the router drains: new requests to another, running ones end on the old link ─┐
 ▲        └─ the router dies: what ran goes to another after the tokens that its client has ─┤
 └───────────────── meanwhile requests wait, `router_wait_s` at most ──────────────────────┘
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence

import structlog
from prometheus_client import Counter

from paceline.core.errors import Overloaded, PacelineError, Unavailable
from paceline.gateway.config import GatewayConfig
from paceline.gateway.mailbox import Mailbox
from paceline.gateway.router_addresses import Address, RouterAddresses
from paceline.gateway.router_link import RouterLink
from paceline.gateway.router_search import RouterSearch
from paceline.gateway.submission import Part, Submission
from paceline.rpc.convert import error_from_proto
from paceline.v1.common_pb2 import SlotError, TokenRequest
from paceline.v1.control_pb2 import ModelInfo, RouterFrame

_UNNOTICED_S = 1.0  # a gap between two routers that readiness does not show
_STEADY_S, _PAUSE_S = 1.0, 0.1  # a router that was used for less is not followed at once
_MAX_UNSENT = 4096  # submissions; cancels are bounded by the live slots
_RETRY_AFTER_S = 1.0

logger = structlog.stdlib.get_logger("paceline.gateway")


class RouterClient:
    """Start, submit and cancel, stop. `on_change` is called when models or attachment change;
    `moved` counts requests that went to another router, by reason."""

    def __init__(
        self, config: GatewayConfig, on_change: Callable[[], None], moved: Counter
    ) -> None:
        self._config = config
        self._on_change = on_change
        self._moved = moved
        self._search = RouterSearch(
            RouterAddresses(config.router, is_spread=config.spread_routers), self._connect
        )
        self._slots = itertools.count(1)
        self._submissions: dict[int, Submission] = {}  # by slot
        self._waiting: dict[Part, None] = {}  # for a router, in order
        self._links: set[RouterLink] = set()
        self._current: RouterLink | None = None
        self._left = asyncio.Event()  # the current one
        self._last: Address | None = None
        self._takes_requests = False
        self._gap: asyncio.TimerHandle | None = None  # until readiness shows it
        self._wait: asyncio.TimerHandle | None = None  # for a router, until it is given up
        self._task: asyncio.Task[None] | None = None
        self.is_attached = False  # true also in the moment between two routers
        self.models: dict[str, ModelInfo] = {}  # the last list known

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_attached(), name="router-client")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        error = Unavailable("the gateway is shutting down", retry_after_s=_RETRY_AFTER_S)
        for slot in list(self._submissions):
            self._fail(slot, error)
        links = list(self._links)
        for link in links:
            link.close()
        for link in links:
            await link.closed()
        self._stop_timers()

    def submit(self, request: TokenRequest, mailbox: Mailbox) -> int:
        """Sends a request; its emissions go to `mailbox`. Returns the slot, which names it."""
        if not self._takes_requests:
            raise _unreachable()
        num_unsent = self._current.num_unsent if self._current else len(self._waiting)
        if num_unsent >= _MAX_UNSENT:
            raise Overloaded("too many requests wait for the router", retry_after_s=_RETRY_AFTER_S)
        slot = next(self._slots)
        submission = self._submissions[slot] = Submission(slot, request, mailbox)
        self._place(submission.parts[0])
        return slot

    def cancel(self, slot: int, choices: Sequence[int] = ()) -> None:
        """Ends some choices of a slot or, without `choices`, the slot. Later frames are dropped."""
        submission = self._submissions.get(slot)
        if submission is None:
            return
        for choice in choices:
            submission.end(choice)
        for part in submission.parts:
            mine = [choice for choice in part.choices if choice in choices]
            if part.link is not None and (mine or not choices):
                part.link.cancel(part, mine)
        if not choices:
            self.forget(slot)

    def forget(self, slot: int) -> None:
        """A slot all of whose choices the router has ended."""
        submission = self._submissions.pop(slot, None)
        for part in submission.parts if submission else ():
            self._waiting.pop(part, None)
            if part.link is not None:
                part.link.forget(part)

    def _fail(self, slot: int, error: PacelineError) -> None:
        submission = self._submissions[slot]
        self.cancel(slot)
        submission.fail(error)

    # --- which router -------------------------------------------------------------------------

    async def _keep_attached(self) -> None:
        while True:
            try:
                if self._current is None:
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

    def _connect(self, address: Address) -> RouterLink:
        link = RouterLink(address, self._config, self)
        self._links.add(link)
        return link

    def _use(self, link: RouterLink) -> None:
        """New requests go there from now on, those that wait at once."""
        self._current, self._last = link, link.address
        self.is_attached = self._takes_requests = True
        self._left.clear()
        self._stop_timers()
        waiting, self._waiting = self._waiting, {}
        for part in waiting:
            self._place(part)
        self._set_models(link)

    def leave(self, link: RouterLink) -> None:
        """Of RouterLink's Owner, as are `end` and `take`."""
        if link is not self._current:
            return
        self._current = None
        self._left.set()
        self._gap = asyncio.get_running_loop().call_later(_UNNOTICED_S, self._show_gap)
        self._begin_wait()

    def _begin_wait(self) -> None:
        """What a router gives back when its drain is over waits as long as what came before."""
        if self._wait is not None:
            self._wait.cancel()
        call_later = asyncio.get_running_loop().call_later
        self._wait = call_later(self._config.router_wait_s, self._give_up)

    def end(self, link: RouterLink) -> None:
        self._links.discard(link)
        parts = [part for part in link.parts.values() if part.submission.live(part)]
        for submission in {part.submission for part in parts}:
            submission.num_losses += 1  # once, however many of its parts were there
        for part in parts:
            if part.link is link:  # else its submission has been given up
                self._move(link, part, "lost")

    def _show_gap(self) -> None:
        self.is_attached = False
        self._on_change()

    def _give_up(self) -> None:
        self._takes_requests = False
        slots = {part.submission.slot for part in self._waiting}
        for slot in slots:
            self._fail(slot, _unreachable())

    def _stop_timers(self) -> None:
        for timer in filter(None, (self._gap, self._wait)):
            timer.cancel()

    # --- what goes there, and what comes back -------------------------------------------------

    def _place(self, part: Part) -> None:
        part.choices = part.submission.live(part)
        if not part.choices:
            return  # its client wants no more of it
        if self._current is None:
            self._waiting[part] = None
        else:
            self._current.submit(part)

    def _move(self, link: RouterLink, part: Part, reason: str) -> None:
        """What `link` will not finish goes to another router, or waits for one."""
        link.forget(part)
        submission = part.submission
        if not submission.live(part):
            return
        if not submission.may_move(part):
            error = Unavailable("the request could not be completed", retry_after_s=_RETRY_AFTER_S)
            self._fail(submission.slot, error)
            return
        self._moved.labels(reason).inc()
        for rest in submission.rest_of(part, self._slots):
            self._place(rest)
        if self._waiting:
            self._begin_wait()

    def take(self, link: RouterLink, frame: RouterFrame) -> None:
        for emission in frame.emissions:
            part = link.parts.get(emission.slot)
            if part is not None and not part.submission.deliver(emission):
                self.cancel(part.submission.slot)
        for failed in frame.errors:
            if (part := link.parts.get(failed.slot)) is not None:
                self._take_error(link, part, failed)
        if frame.models_changed and link is self._current:
            self._set_models(link)

    def _take_error(self, link: RouterLink, part: Part, failed: SlotError) -> None:
        if failed.elsewhere:
            link.drain()
            self._move(link, part, "drained")
        else:
            link.forget(part)
            self._fail(part.submission.slot, error_from_proto(failed.error))

    def _set_models(self, link: RouterLink) -> None:
        self.models = {model.name: model for model in link.models}
        self._on_change()


def _unreachable() -> Unavailable:
    return Unavailable("no router is reachable", retry_after_s=_RETRY_AFTER_S)
