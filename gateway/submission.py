"""A request while routers work on it, with all that another router needs to go on with it."""

import asyncio
from array import array
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from paceline.core.errors import PacelineError
from paceline.gateway.jobs import ttft_left_ms
from paceline.gateway.mailbox import Mailbox
from paceline.rpc.epochs import MAX_EPOCH, MAX_LOST_WORKERS
from paceline.v1.common_pb2 import Emission, TokenRequest, WorkerLife
from paceline.v1.control_pb2 import SlotSetback

if TYPE_CHECKING:
    from paceline.gateway.router_link import RouterLink

MAX_LOSSES = 3  # routers that may die under a request: one more, and it is taken for the cause
FORGIVEN_S = 60.0  # after so long without one, losses and failures before count no more


class Part:
    """Choices of a submission that one router works on; at first all. `link`: None while it waits
    for a router."""

    __slots__ = ("choices", "link", "slot", "submission")

    def __init__(self, submission: "Submission", slot: int, choices: tuple[int, ...]) -> None:
        self.submission = submission
        self.slot = slot  # its name at the router
        self.choices = choices
        self.link: RouterLink | None = None


class Submission:
    """`logs[i]` are the tokens of choice i so far; a choice that has ended has none."""

    __slots__ = (
        "_deadline_s",
        "_failed_s",
        "_lost_s",
        "_mailbox",
        "_next_epoch",
        "_num_failures",
        "_num_losses",
        "_request",
        "logs",
        "lost_workers",
        "parts",
        "slot",
    )

    def __init__(self, slot: int, request: TokenRequest, mailbox: Mailbox) -> None:
        self.slot = slot
        self._mailbox = mailbox
        self._num_losses = 0
        self._lost_s = self._failed_s = float("-inf")  # when one was counted last
        self._num_failures = 0  # of attempts, at all routers
        self.lost_workers: deque[WorkerLife] = deque(maxlen=MAX_LOST_WORKERS)
        choices = tuple(request.choices) or (0,)  # an embedding names none, and is one
        self.logs = {choice: array("I") for choice in choices}
        self.parts = [Part(self, slot, choices)]
        self._request = request
        self._next_epoch = 0
        self._deadline_s = _now_s() + request.budget_ms / 1000

    def may_move(self, part: Part) -> bool:
        """Each router that goes on with something of it needs an epoch, also of what waits."""
        waiting = [one for one in self.parts if one.link is None and one is not part]
        num_wanted = sum(bool(self.live(one)) for one in waiting) + len(self._groups(part))
        has_epochs = self._next_epoch + num_wanted <= MAX_EPOCH + 1
        return self._num_losses <= MAX_LOSSES and has_epochs

    def deliver(self, emission: Emission) -> bool:
        """False: the client lags too far behind."""
        log = self.logs.get(emission.choice)
        if log is not None:
            log.extend(emission.token_ids)
            if emission.finish:
                del self.logs[emission.choice]
        emission.slot = self.slot
        return self._mailbox.deliver(emission)

    def set_back(self, setback: SlotSetback) -> None:
        before, self._failed_s = self._failed_s, _now_s()
        known = self._num_failures if self._failed_s - before <= FORGIVEN_S else 0
        self._num_failures = max(known, setback.num_failures)
        if setback.HasField("lost") and setback.lost not in self.lost_workers:
            self.lost_workers.append(setback.lost)

    def note_loss(self) -> None:
        """Of a router, with something of it."""
        before, self._lost_s = self._lost_s, _now_s()
        self._num_losses = 1 + (self._num_losses if self._lost_s - before <= FORGIVEN_S else 0)

    def fail(self, error: PacelineError) -> None:
        self._mailbox.fail(error)

    def end(self, choice: int) -> None:
        """It is wanted no more."""
        self.logs.pop(choice, None)

    def live(self, part: Part) -> tuple[int, ...]:
        return tuple(choice for choice in part.choices if choice in self.logs)

    def rest_of(self, part: Part, slots: Iterator[int]) -> list[Part]:
        """In the place of a part that its router has not finished."""
        self.parts.remove(part)
        parts = [Part(self, next(slots), group) for group in self._groups(part)]
        self.parts += parts
        return parts

    def _groups(self, part: Part) -> list[tuple[int, ...]]:
        """Of its choices, as they go on: each by itself once there are tokens."""
        live = self.live(part)
        if live and not any(self.logs[choice] for choice in live):
            return [live]
        return [(choice,) for choice in live]

    def for_router(self, part: Part) -> TokenRequest:
        """Under the next epoch: the prompt, and the tokens so far, which are never drawn again."""
        epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1
        if epoch == 0:
            return self._request
        request = TokenRequest()
        request.CopyFrom(self._request)
        request.epoch = epoch
        request.token_ids.extend(self.logs[part.choices[0]])
        if _now_s() - self._failed_s <= FORGIVEN_S:
            request.num_failures = self._num_failures
        request.lost_workers.extend(self.lost_workers)
        if request.choices:
            request.choices[:] = part.choices
        request.budget_ms = max(1, round((self._deadline_s - _now_s()) * 1000))
        spent_ms = self._request.budget_ms - request.budget_ms
        request.ttft_ms = ttft_left_ms(self._request.ttft_ms, spent_ms)
        return request


def _now_s() -> float:
    return asyncio.get_running_loop().time()
