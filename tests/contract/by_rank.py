"""Transport `shm_by_rank`: shm, read by a rank's links on behalf of a front.

Both ends of the calls are in this process; what ZeroMQ would carry goes through msgpack.
"""

import asyncio
import threading

import msgspec

from paceline.kv_transfer.base import LocalPool, Pool, TransportSettings
from paceline.kv_transfer.shm import make_source, why_unreachable
from paceline.worker.rank_links import RankLinks
from paceline.worker.rank_messages import LinkReply, RankCommand
from paceline.worker.rank_reader import LinkCalls, RankReader

__all__ = ["close_all", "make_reader", "make_source", "why_unreachable"]

_fronts: list["Front"] = []


class Front:
    """An event loop in a thread, as a front has one, and the links of its rank."""

    def __init__(self, pool: LocalPool, settings: TransportSettings) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.bugs: list[None] = []
        self.links = RankLinks(pool, settings, self._reply, lambda: self.bugs.append(None))
        self.links.start(["shm"])
        self.calls = asyncio.run_coroutine_threadsafe(self._make_calls(), self.loop).result()

    async def _make_calls(self) -> LinkCalls:
        return LinkCalls(self._send)

    def _send(self, command: RankCommand) -> None:
        packed = msgspec.msgpack.encode(command)
        received = msgspec.msgpack.decode(packed, type=RankCommand)
        self.links.handle(received)  # type: ignore[arg-type]

    def _reply(self, reply: LinkReply) -> None:
        received = msgspec.msgpack.decode(msgspec.msgpack.encode(reply), type=LinkReply)
        self.loop.call_soon_threadsafe(self.calls.reply, received)

    def close(self) -> None:
        self.links.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


def make_reader(pool: Pool, settings: TransportSettings) -> RankReader:
    assert isinstance(pool, LocalPool)
    front = Front(pool, settings)
    _fronts.append(front)
    return RankReader("shm", front.calls, pool.group, pool.num_pages)


def close_all() -> None:
    """Closes what readers were made of. None of them may have met a bug."""
    while _fronts:
        front = _fronts.pop()
        front.close()
        assert not front.bugs
