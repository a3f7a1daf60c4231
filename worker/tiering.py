"""The tiers of a worker, as one incarnation of its rank uses them.

    Stored by the pool → Offload: Pin → copy into the first tier → Unpin
    a request          → offer: how far pool and tiers lead (thread) → Submit
                         → Fill → TierOrigin: Pulled…

Tiers outlive the rank: content names mean the same to the next one.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import structlog

from paceline.core.ids import BlockKey
from paceline.core.keys import chain_keys
from paceline.core.kv_layout import PAGE_TOKENS, PageGroup
from paceline.engine import messages
from paceline.kv_transfer.base import LocalPool
from paceline.kv_transfer.tiers.base import PageName
from paceline.kv_transfer.tiers.stack import TierStack
from paceline.worker.offload import Offload
from paceline.worker.tier_fill import TierOrigin

if TYPE_CHECKING:
    from paceline.worker.session import Session
    from paceline.worker.slots import SlotState

NUM_FILL_THREADS = 2

SlotCommand = messages.Cancel | messages.Follow | messages.Keep | messages.LetGo

_log = structlog.get_logger("paceline.worker")


class Tiering:
    """On the event loop; copies, and looks at long prompts, run in threads of its own. A slow store
    keeps threads that fill, never the one that offloads."""

    def __init__(self, session: "Session", stack: TierStack, pool: LocalPool | None) -> None:
        assert pool is not None, "the configuration allows no tiers without"
        self.session = session
        self.stack = stack
        self.pool = pool
        self.fill_threads = ThreadPoolExecutor(NUM_FILL_THREADS, thread_name_prefix="tier-fill")
        self.offload_thread = ThreadPoolExecutor(1, thread_name_prefix="tier-offload")
        self._offer_thread = ThreadPoolExecutor(1, thread_name_prefix="tier-offer")
        self._submissions: set[asyncio.Task[None]] = set()
        self._held_back: dict[int, list[SlotCommand]] = {}  # by slot that is not submitted yet
        self._groups: Sequence[PageGroup] = session.rank.ready.groups
        self._in_pool: set[bytes] = set()
        self._offload = Offload(self)

    def keys_changed(self, event: messages.Stored | messages.Removed) -> None:
        if isinstance(event, messages.Stored):
            self._in_pool.update(event.keys)
            self._offload.add(event.keys)
        else:
            self._in_pool.difference_update(event.keys)

    def submit(self, slot: "SlotState", *, prefill_only: bool) -> None:
        """Sends the request to the rank, with what is offered of it. Those that are submitted
        first come first."""
        self._held_back[slot.number] = []
        task = asyncio.create_task(self._submit(slot, prefill_only))
        self._submissions.add(task)
        task.add_done_callback(self._submissions.discard)

    async def _submit(self, slot: "SlotState", prefill_only: bool) -> None:
        loop = asyncio.get_running_loop()
        num_offered = slot.offer.num_blocks if slot.offer is not None else 0
        try:
            num_held = await loop.run_in_executor(self._offer_thread, self.offer, slot)
            num_offered = max(num_offered, num_held)
        except Exception:  # then the request computes all of its prompt
            _log.exception("nothing could be offered for a reason of ours")
        send = self.session.send
        send(messages.Submit(slot.number, slot.request, prefill_only, num_offered))
        for command in self._held_back.pop(slot.number):
            send(command)

    def holds_back(self, command: SlotCommand) -> bool:
        """True: it is sent behind the Submit of its slot, without which it would mean nothing."""
        held_back = self._held_back.get(command.slot)
        if held_back is None:
            return False
        held_back.append(command)
        return True

    def offer(self, slot: "SlotState") -> int:
        """Leading blocks of a request that the pool has, and the tiers after it. Milliseconds for
        long prompts: for a thread."""
        request = slot.request
        keys = slot.keys = chain_keys(request.root_key, request.token_ids)
        self.stack.touch(
            [PageName(key, i) for key in reversed(keys) for i in range(len(self._groups))]
        )
        num_here = next((i for i, key in enumerate(keys) if key not in self._in_pool), len(keys))
        num_blocks = self._reach(keys, num_here)
        return num_blocks if num_blocks > num_here else 0

    def origin(self, slot: "SlotState") -> TierOrigin:
        """Of what was offered."""
        return TierOrigin(self, slot)

    async def close(self) -> None:
        """After the slots have ended, and their fills: waits for the copies."""
        for submission in self._submissions:
            submission.cancel()
        await asyncio.gather(*self._submissions, return_exceptions=True)
        await self._offload.close()
        for threads in (self.fill_threads, self.offload_thread, self._offer_thread):
            threads.shutdown(wait=False)

    def _reach(self, keys: Sequence[BlockKey], start: int) -> int:
        """How far the tiers lead from `start`: all groups of full attention, and of the others what
        the token after it sees. What is before `start` counts as here."""
        holds = self.stack.holds
        full = [i for i, group in enumerate(self._groups) if not group.window]
        num_in_row = {i: 0 for i, group in enumerate(self._groups) if group.window}
        reached = start
        for block, key in enumerate(keys[start:], start):
            if not all(holds(PageName(key, i)) for i in full):
                break
            end = block + 1
            for i, count in num_in_row.items():
                num_in_row[i] = count + 1 if holds(PageName(key, i)) else 0
            if all(
                count >= end - max(start, self._groups[i].first_block(end * PAGE_TOKENS))
                for i, count in num_in_row.items()
            ):
                reached = end
        return reached
