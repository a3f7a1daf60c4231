"""Carries the events of one engine step to the streams, hand-offs and the index."""

import time
from typing import TYPE_CHECKING

from paceline.core.errors import EngineFailure, ErrorCode, PacelineError
from paceline.core.kv_layout import PAGE_TOKENS
from paceline.engine import messages
from paceline.rpc.convert import code_to_proto, error_from_proto
from paceline.worker import pins
from paceline.worker.frames import (
    embedding_to_proto,
    emission_to_proto,
    record_to_proto,
    scores_to_proto,
)
from paceline.worker.router_stream import RouterStream
from paceline.worker.slots import SlotState

if TYPE_CHECKING:
    from paceline.worker.session import Session


class StepEvents:
    """`apply` one StepOutput: events in order, then one frame for each stream they touch."""

    def __init__(self, session: "Session") -> None:
        self._session = session
        self._touched: set[RouterStream] = set()
        self._now_us = 0

    def apply(self, output: messages.StepOutput) -> None:
        session = self._session
        session.step, session.load = output.step, output.load
        self._now_us = session.rank.link.last_step_unix_us or time.time_ns() // 1000
        for event in output.events:
            if isinstance(event, messages.Stored | messages.Removed):
                session.on_keys(event)
                if session.tiering is not None:
                    session.tiering.keys_changed(event)
                continue
            slot = session.slots.get(event.slot)
            if slot is not None:
                self._touched.add(slot.stream)
                self._apply_one(event, slot)
        load = session.load_now()
        for stream in self._touched:
            stream.flush(load)
        self._touched.clear()

    def _apply_one(self, event: messages.Event, slot: SlotState) -> None:
        match event:
            case messages.Ended():
                self._ended(slot)
            case messages.Fill():
                self._session.fill(slot, event)
            case messages.HandoffReady(rest=messages.Pinned() as rest) if slot.ending:
                pins.drop(self._session, rest)
            case _ if slot.ending:
                return
            case messages.Emission():
                self._emitted(event, slot)
            case messages.PromptScored():
                slot.stream.add_emission(scores_to_proto(event, slot.router_slot))
            case messages.Embedding():
                self._embedded(event, slot)
            case messages.Failed():
                self._failed(event, slot)
            case messages.Committed():
                self._committed(event, slot)
            case messages.HandoffReady():
                self._handoff_ready(event, slot)
            case messages.Reserved():
                self._reserved(event, slot)
            case messages.Refused():
                self._refused(event, slot)

    def _emitted(self, event: messages.Emission, slot: SlotState) -> None:
        self._session.metrics.emitted(event, slot)
        if slot.trace is not None and not slot.num_emitted:
            slot.trace.emitted_first()
        slot.num_emitted += len(event.token_ids)
        if event.finish is not None:
            slot.wanted.discard(event.choice)
        emission = emission_to_proto(event, slot.router_slot, self._now_us)
        if slot.pulled_s:
            emission.pull_us = round(slot.pulled_s * 1e6)
            slot.pulled_s = 0.0
        slot.stream.add_emission(emission)

    def _embedded(self, event: messages.Embedding, slot: SlotState) -> None:
        num_tokens = len(slot.request.token_ids)
        self._session.metrics.looked_up(num_tokens, event.num_cached_tokens)
        slot.wanted.clear()
        if slot.trace is not None:
            slot.trace.emitted_first()
        slot.stream.add_emission(embedding_to_proto(event, slot.router_slot))

    def _reserved(self, event: messages.Reserved, slot: SlotState) -> None:
        slot.reserved = event
        num_cached = event.num_cached_blocks * PAGE_TOKENS
        self._session.metrics.looked_up(len(slot.request.token_ids), num_cached)
        slot.stream.add_reserved(slot.router_slot, num_cached)

    def _refused(self, event: messages.Refused, slot: SlotState) -> None:
        slot.stop_timers()
        num_free = max(event.num_pages_free, 0)
        slot.stream.add_busy(slot.router_slot, event.num_pages_needed, num_free)

    def _committed(self, event: messages.Committed, slot: SlotState) -> None:
        if slot.handoff is not None:
            slot.handoff.num_committed = event.num_blocks
            slot.handoff.notify()

    def _failed(self, event: messages.Failed, slot: SlotState) -> None:
        self._session.end(slot, error_of(event), is_over=True)

    def _handoff_ready(self, event: messages.HandoffReady, slot: SlotState) -> None:
        handoff = slot.handoff
        if handoff is None:
            self._session.end(slot, EngineFailure("a hand-off without a ticket"))
            return
        handoff.num_committed = event.num_tokens // PAGE_TOKENS
        handoff.record = record_to_proto(event, slot.request)
        if event.rest is not None:
            handoff.rest = pins.lease_pinned(self._session, handoff.ticket, event.rest)
        handoff.notify()

    def _ended(self, slot: SlotState) -> None:
        session = self._session
        session.end(slot, is_over=True)
        session.slots.close(slot)
        slot.stream.add_ended(slot.router_slot)


def error_of(event: messages.Failed) -> PacelineError:
    """The engine's word for it, as the error class that its code belongs to."""
    code = event.code if event.code is not ErrorCode.CONFIG else ErrorCode.INTERNAL
    return error_from_proto(code_to_proto(code, event.message, event.field))
