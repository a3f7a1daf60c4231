"""The tiers of a worker, as one incarnation of its rank uses them.

    Stored by the pool → Offload: Pin → copy into the first tier → Unpin
    a request          → offer: how far pool and tiers lead → Submit → Fill → Pulled…, Filled

Tiers outlive the rank: content names mean the same to the next one.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from paceline.core.ids import BlockKey
from paceline.core.keys import chain_keys
from paceline.core.kv_layout import PAGE_TOKENS, PageGroup
from paceline.engine import messages
from paceline.kv_transfer.base import LocalPool
from paceline.kv_transfer.tiers.base import PageName
from paceline.kv_transfer.tiers.stack import TierStack
from paceline.worker.offload import Offload
from paceline.worker.tier_fill import TierFill

if TYPE_CHECKING:
    from paceline.worker.session import Session
    from paceline.worker.slots import SlotState

NUM_THREADS = 3  # one that offloads, the others fill


class Tiering:
    """On the event loop; copies run in threads of its own."""

    def __init__(self, session: "Session", stack: TierStack, pool: LocalPool | None) -> None:
        assert pool is not None, "the configuration allows no tiers without"
        self.session = session
        self.stack = stack
        self.pool = pool
        self.threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tier")
        self.fills: set[TierFill] = set()  # that run, with a slot or without
        self._groups: Sequence[PageGroup] = session.rank.ready.groups
        self._in_pool: set[bytes] = set()
        self._offload = Offload(self)

    def keys_changed(self, event: messages.Stored | messages.Removed) -> None:
        if isinstance(event, messages.Stored):
            self._in_pool.update(event.keys)
            self._offload.add(event.keys)
        else:
            self._in_pool.difference_update(event.keys)

    def offer(self, slot: "SlotState") -> int:
        """Leading blocks of a request that the pool has, and the tiers after it."""
        request = slot.request
        keys = slot.keys = chain_keys(request.root_key, request.token_ids)
        self.stack.touch(
            [PageName(key, i) for key in reversed(keys) for i in range(len(self._groups))]
        )
        num_here = next((i for i, key in enumerate(keys) if key not in self._in_pool), len(keys))
        num_blocks = self._reach(keys, num_here)
        return num_blocks if num_blocks > num_here else 0

    def fill(self, event: messages.Fill, slot: "SlotState") -> None:
        """Pages of a slot wait for what was offered."""
        if slot.ending:
            self.session.send(messages.TransferClosed(slot.number))
        else:
            slot.fill = TierFill(self, slot, event)

    async def close(self) -> None:
        """After the slots have ended: waits for the copies."""
        await self._offload.close()
        for fill in list(self.fills):
            await fill.finished()
        self.threads.shutdown(wait=False)

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
