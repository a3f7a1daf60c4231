"""Slots of one incarnation: the engine's number of a request, and the router's on its stream."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from paceline.core.errors import Overloaded
from paceline.core.ids import BlockKey
from paceline.engine.messages import RequestSpec, Reserved
from paceline.worker.router_stream import RouterStream
from paceline.worker.slot_trace import SlotTrace

if TYPE_CHECKING:
    from paceline.worker.adoption import Adoption
    from paceline.worker.handoffs import Handoff
    from paceline.worker.page_fill import PageFill
    from paceline.worker.prefix_offers import Offer


@dataclass(slots=True, eq=False)
class SlotState:
    """One attempt at a request, from its command to `Ended`."""

    number: int  # the engine's, never used twice
    router_slot: int  # the router's, on `stream`
    stream: RouterStream
    request: RequestSpec
    is_reservation: bool = False  # its pages are filled from outside, until its Adopt
    deadline: asyncio.TimerHandle | None = None
    hold: asyncio.TimerHandle | None = None  # of a reservation that nobody adopted yet
    reserved: Reserved | None = None
    adoption: "Adoption | None" = None
    offer: "Offer | None" = None  # of another worker
    fill: "PageFill | None" = None
    num_pulled_tokens: int = 0  # of the offer
    keys: list[BlockKey] = field(default_factory=list)  # of its full blocks, where tiers need them
    handoff: "Handoff | None" = None
    ending: bool = False  # nothing more is emitted; `Ended` is awaited
    num_emitted: int = 0
    pulled_s: float = 0.0  # in pulls, and not told yet
    trace: SlotTrace | None = None  # None: the request is not traced
    wanted: set[int] = field(init=False)  # choices that are neither finished nor cancelled

    def __post_init__(self) -> None:
        self.wanted = set(self.request.choices)

    @property
    def decodes(self) -> bool:
        """It makes more than the first token of its prompt, which any role can do."""
        num_forced = len(self.request.token_ids) - self.request.num_prompt_tokens
        return self.request.pooling is None and self.request.sampling.max_tokens - num_forced > 1

    def stop_timers(self) -> None:
        for timer in (self.deadline, self.hold):
            if timer is not None:
                timer.cancel()


@dataclass(slots=True)
class SlotTable:
    max_slots: int
    _by_number: dict[int, SlotState] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))
    _is_empty: asyncio.Event = field(default_factory=asyncio.Event)

    def open(self, stream: RouterStream, router_slot: int, request: RequestSpec) -> SlotState:
        """Raises Overloaded at the bound. The caller has checked that `router_slot` is new."""
        if len(self._by_number) >= self.max_slots:
            raise Overloaded(f"the worker holds {self.max_slots} requests", retry_after_s=1.0)
        slot = SlotState(next(self._numbers), router_slot, stream, request)
        self._by_number[slot.number] = slot
        self._is_empty.clear()
        stream.slots[router_slot] = slot
        return slot

    def get(self, number: int) -> SlotState | None:
        return self._by_number.get(number)

    def close(self, slot: SlotState) -> None:
        slot.stop_timers()
        if slot.trace is not None:
            decodes = slot.handoff is None and slot.request.pooling is None
            slot.trace.ended(is_reservation=slot.is_reservation, decodes=decodes)
        self._by_number.pop(slot.number, None)
        slot.stream.slots.pop(slot.router_slot, None)
        if not self._by_number:
            self._is_empty.set()

    async def idle(self) -> None:
        """Returns once no slot is held."""
        if self._by_number:
            await self._is_empty.wait()

    def __iter__(self) -> Iterator[SlotState]:
        return iter(list(self._by_number.values()))

    def __len__(self) -> int:
        return len(self._by_number)
