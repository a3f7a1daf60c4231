"""How a worker leaves: what runs ends or goes on elsewhere, and whoever still reads from it may.

unready, no new work → what runs ends, while there is time for it
  → the rest is given up: its routers go on elsewhere, and find here what was computed
  → readers pull it, until none has a lease for a moment, or time is up
"""

import asyncio
import contextlib
from typing import TYPE_CHECKING

from paceline.worker.router_stream import GivenUp

if TYPE_CHECKING:
    from paceline.worker.session import Session

LAST_FRAMES_S = 0.05  # in which routers are told, if nothing else keeps us
HANDOVER = 0.25, 5.0  # of the time that there is, and at most: for readers
QUIET_S = 0.5  # without a lease, after requests were given up: nobody comes for them any more
LOOK_S = 0.02


async def leave(session: "Session", timeout_s: float) -> None:
    """Takes no longer than `timeout_s`, but for the last frames."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    share, most_s = HANDOVER
    session.start_draining()
    await asyncio.sleep(LAST_FRAMES_S)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout_at(deadline - min(share * timeout_s, most_s)):
            await session.slots.idle()
    rest = list(session.slots)
    for slot in rest:
        session.end(slot, GivenUp("the worker leaves", retry_after_s=0.1))
    await _readers_gone(session, QUIET_S if rest else 0.0, deadline)


async def _readers_gone(session: "Session", quiet_s: float, deadline: float) -> None:
    clock = asyncio.get_running_loop().time
    busy_at = clock()
    while clock() < deadline:
        if len(session.leases) or len(session.slots):
            busy_at = clock()
        elif clock() - busy_at >= quiet_s:
            return
        await asyncio.sleep(LOOK_S)
