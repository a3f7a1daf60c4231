"""What a session does every second: says that it lives, looks who else does, checks its books."""

import asyncio
import time
from typing import TYPE_CHECKING

import structlog

from paceline.core.errors import KvUnavailable, Unavailable
from paceline.engine import messages
from paceline.worker.link_figures import link_figures
from paceline.worker.rank_messages import Ping

if TYPE_CHECKING:
    from paceline.worker.session import Session

_log = structlog.get_logger("paceline.worker")


class Housekeeping:
    """`run` until cancelled."""

    def __init__(self, session: "Session") -> None:
        self._session = session
        self._timers = session.config.timers
        self._settled_output = -1  # after which all was let go and all pages were looked at

    async def run(self) -> None:
        """Every second: says that we live, and looks who else does."""
        session, timers = self._session, self._timers
        while True:
            started = time.monotonic()
            session.send(Ping())
            session.watch.beat()
            if session.watch.quiet_s > 2 * timers.stall_s:
                session.lose("the rank process does not answer")
            self._sweep()
            await asyncio.sleep(timers.beat_s)
            if time.monotonic() - started > timers.silence_s:
                self._wake_up()

    def _sweep(self) -> None:
        session = self._session
        load = session.load_now()
        links = link_figures(session.peers.connected(), len(session.info.most_pages))
        oldest = time.monotonic() - self._timers.silence_s
        for stream in list(session.streams):
            if stream.last_heard < oldest:
                session.end_stream(stream, Unavailable("the router is silent"))
            else:
                stream.flush(load, beat=True, links=links)
        session.unpin(session.leases.sweep())
        for handoff in session.handoffs.abandoned(session.leases.is_silent, time.time() * 1000):
            slot = session.slots.get(handoff.slot_number)
            if slot is not None:
                session.end(slot, KvUnavailable("nobody took the KV"))
        session.peers.sweep()
        session.metrics.observe(session)
        is_settled = session.num_outputs == self._settled_output and not len(session.leases)
        if not len(session.slots) and not is_settled:
            session.background(self._check_books, messages.CheckIntegrity())

    async def _check_books(self, call: messages.CheckIntegrity) -> None:
        """While nothing runs, until all is let go and all pages were looked at: their states must
        add up to the pool."""
        session = self._session
        output = session.num_outputs
        integrity = await session.rank.link.call(call)
        assert isinstance(integrity, messages.Integrity)
        session.metrics.observe_pages(integrity)
        held = integrity.num_mapped + integrity.num_pinned + integrity.num_quarantined
        self._settled_output = output if integrity.is_round and not held else -1
        if integrity.problem:
            _log.error("page books do not balance", problem=integrity.problem)

    def _wake_up(self) -> None:
        """We were paused past the limit: others have given our slots up, so do we."""
        session = self._session
        for stream in list(session.streams):
            session.end_stream(stream, Unavailable("the worker was paused"))
