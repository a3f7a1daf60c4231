"""A gateway's requests at its routers, and what comes back from there.

find ─ use ─ the router drains: new requests to another, running ones end on the old link ─┐
 ▲        └─ the router dies: what ran goes to another after the tokens that its client has ─┤
 └───────────────── meanwhile requests wait, `router_wait_s` at most ──────────────────────┘
"""

import itertools
from collections.abc import Callable, Sequence

from prometheus_client import Counter

from paceline.core.errors import Overloaded, PacelineError, Unavailable
from paceline.gateway.config import GatewayConfig
from paceline.gateway.mailbox import Mailbox
from paceline.gateway.router_addresses import Address
from paceline.gateway.router_attachment import RouterAttachment
from paceline.gateway.router_link import RouterLink
from paceline.gateway.submission import Part, Submission
from paceline.rpc.convert import error_from_proto
from paceline.v1.common_pb2 import SlotError, TokenRequest
from paceline.v1.control_pb2 import ModelInfo, RouterFrame

_MAX_UNSENT = 4096  # submissions; cancels are bounded by the live slots
_RETRY_AFTER_S = 1.0


class RouterClient:
    """Start, submit and cancel, stop. `on_change` is called when models or attachment change;
    `moved` counts requests that went to another router, by reason."""

    def __init__(
        self, config: GatewayConfig, on_change: Callable[[], None], moved: Counter
    ) -> None:
        self._config = config
        self._on_change = on_change
        self._moved = moved
        self._attachment = RouterAttachment(config, self)
        self._slots = itertools.count(1)
        self._submissions: dict[int, Submission] = {}  # by slot
        self._waiting: dict[Part, None] = {}  # for a router, in order
        self._links: set[RouterLink] = set()
        self.models: dict[str, ModelInfo] = {}  # the last list known

    @property
    def is_attached(self) -> bool:
        return self._attachment.is_attached

    def start(self) -> None:
        self._attachment.start()

    async def stop(self) -> None:
        await self._attachment.stop()
        error = Unavailable("the gateway is shutting down", retry_after_s=_RETRY_AFTER_S)
        for slot in list(self._submissions):
            self._fail(slot, error)
        links = list(self._links)
        for link in links:
            link.close()
        for link in links:
            await link.closed()
        self._attachment.stop_timers()

    def submit(self, request: TokenRequest, mailbox: Mailbox) -> int:
        """Sends a request; its emissions go to `mailbox`. Returns the slot, which names it."""
        if not self._attachment.takes_requests:
            raise _unreachable()
        current = self._attachment.current
        num_unsent = current.num_unsent if current else len(self._waiting)
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

    def connect(self, address: Address) -> RouterLink:
        """Of RouterAttachment's Owner, as are `attached`, `detached` and `give_up`."""
        link = RouterLink(address, self._config, self)
        self._links.add(link)
        return link

    def attached(self, link: RouterLink) -> None:
        """New requests go there from now on, those that wait at once."""
        waiting, self._waiting = self._waiting, {}
        for part in waiting:
            self._place(part)
        self._set_models(link)

    def detached(self) -> None:
        self._on_change()

    def give_up(self) -> None:
        slots = {part.submission.slot for part in self._waiting}
        for slot in slots:
            self._fail(slot, _unreachable())

    def leave(self, link: RouterLink) -> None:
        """Of RouterLink's Owner, as are `end` and `take`."""
        self._attachment.leave(link)

    def end(self, link: RouterLink) -> None:
        self._links.discard(link)
        parts = [part for part in link.parts.values() if part.submission.live(part)]
        for submission in {part.submission for part in parts}:
            submission.note_loss()  # once, however many of its parts were there
        for part in parts:
            if part.link is link:  # else its submission has been given up
                self._move(link, part, "lost")

    def take(self, link: RouterLink, frame: RouterFrame) -> None:
        for emission in frame.emissions:
            part = link.parts.get(emission.slot)
            if part is not None and not part.submission.deliver(emission):
                self.cancel(part.submission.slot)
        for setback in frame.setbacks:
            if (part := link.parts.get(setback.slot)) is not None:
                part.submission.set_back(setback)
        for failed in frame.errors:
            if (part := link.parts.get(failed.slot)) is not None:
                self._take_error(link, part, failed)
        if frame.models_changed and link is self._attachment.current:
            self._set_models(link)

    def _place(self, part: Part) -> None:
        part.choices = part.submission.live(part)
        if not part.choices:
            return  # its client wants no more of it
        if self._attachment.current is None:
            self._waiting[part] = None
        else:
            self._attachment.current.submit(part)

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
            self._attachment.begin_wait()

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
