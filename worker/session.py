"""All that lives and dies with one incarnation of the rank.

Pages, pins, slots and links mean nothing to the next incarnation, so they are held in one object
that is closed as a whole. Everything here runs on the event loop; copies run in threads.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from paceline.core.errors import Cancelled, EngineFailure, PacelineError, Unavailable
from paceline.core.tracing import OFF, Tracing
from paceline.engine import messages
from paceline.engine.messages import StepOutput
from paceline.kv_transfer.tiers.stack import TierStack
from paceline.v1 import worker_pb2
from paceline.worker import pins
from paceline.worker.config import WorkerConfig
from paceline.worker.connectors import Connectors
from paceline.worker.frames import load_to_proto
from paceline.worker.handoffs import HandoffTable
from paceline.worker.housekeeping import Housekeeping
from paceline.worker.leases import LeaseTable, PageLives
from paceline.worker.link_checks import LinkChecks
from paceline.worker.metrics import WorkerMetrics
from paceline.worker.page_fill import Origin, PageFill
from paceline.worker.peers import PeerDirectory
from paceline.worker.prefix_offers import PrefixOffers
from paceline.worker.prefix_pull import PrefixPull
from paceline.worker.pull_threads import PullThreads
from paceline.worker.rank_messages import LinkReply, RankCommand
from paceline.worker.rank_process import RankProcess
from paceline.worker.rank_watch import RankWatch
from paceline.worker.role import WorkerRole
from paceline.worker.router_stream import RouterStream
from paceline.worker.slots import SlotState, SlotTable
from paceline.worker.step_events import StepEvents
from paceline.worker.tiering import SlotCommand, Tiering

if TYPE_CHECKING:
    from paceline.worker.adoption import Adoption

Q = TypeVar("Q")
MAX_KEPT = 4096  # prompts of a router that are evicted last
KeysChanged = Callable[[messages.Stored | messages.Removed], None]


class Session:
    """Slots, streams, leases, hand-offs and peers of one rank process.

    `run` returns, with the reason, when the rank is lost; `close` then ends everything.
    """

    def __init__(
        self,
        config: WorkerConfig,
        rank: RankProcess,
        info: worker_pb2.WorkerInfo,
        connectors: Connectors,
        metrics: WorkerMetrics,
        on_keys: KeysChanged,
        role: WorkerRole,
        tiers: TierStack | None = None,
        tracing: Tracing = OFF,
    ) -> None:
        self.config = config
        self.secret = config.secret.encode()
        self.rank = rank
        self.info = info
        self.connectors = connectors
        self.metrics = metrics
        self.on_keys = on_keys
        self.role = role
        self.tracing = tracing
        self.draining = False
        self.step = 0
        num_pages = rank.ready.num_pages
        links, timers = config.links, config.timers
        self.load = messages.Load(0, 0, 0, num_pages, num_pages, 0)
        self.slots = SlotTable(config.max_slots)
        self.streams: set[RouterStream] = set()
        self.leases = LeaseTable(int(num_pages * links.max_pinned_share), timers.silence_s)
        self.handoffs = HandoffTable()
        canary, floor = rank.ready.canary, links.link_floor_mb_s * 1e6
        checks = LinkChecks(canary, rank.link.call, floor)
        self.peers = PeerDirectory(config, info, connectors, checks, rank.ready.content_parts)
        self.pull_threads = PullThreads(config.pull_threads)
        self.adoptions: set[Adoption] = set()  # whose task runs, with a slot or without
        self.fills: set[PageFill] = set()  # that run, with a slot or without
        self.prefix_offers = PrefixOffers(self)
        self.tiering = None if tiers is None else Tiering(self, tiers, rank.local_pool())
        self._events = StepEvents(self)
        on_cpu = config.compute.device == "cpu"
        self.watch = RankWatch(timers.beat_s, rank.program.pid, on_cpu=on_cpu)
        self.num_outputs = 0  # of the rank, so far
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._background: set[asyncio.Task[object]] = set()

    # --- to the rank ---

    def send(self, command: RankCommand) -> None:
        try:
            self.rank.link.send(command)
        except Unavailable as error:
            self.lose(error.message)

    def send_to_slot(self, command: SlotCommand) -> None:
        """To one that was submitted, though the rank may not have heard of it yet."""
        if self.tiering is None or not self.tiering.holds_back(command):
            self.send(command)

    def lose(self, reason: str) -> None:
        if not self._lost.done():
            self._lost.set_result(reason)

    @property
    def is_stalled(self) -> bool:
        return self.watch.quiet_s > self.config.timers.stall_s

    # --- slots ---

    def submit(
        self,
        slot: SlotState,
        hints: Sequence[worker_pb2.PrefixHint] = (),
        *,
        prefill_only: bool = False,
    ) -> None:
        """To be computed here, behind what tiers and other workers have of it."""
        slot.offer = self.prefix_offers.choose(slot, hints)
        if self.tiering is None:
            num_offered = 0 if slot.offer is None else slot.offer.num_blocks
            self.send(messages.Submit(slot.number, slot.request, prefill_only, num_offered))
        else:
            self.tiering.submit(slot, prefill_only=prefill_only)

    def keep(self, slot: SlotState, limit_s: float) -> None:
        """What it leaves is evicted last, as long as its router's stream lives."""
        self.send_to_slot(messages.Keep(slot.number))
        kept, router_slot = slot.stream.kept, slot.router_slot
        if len(kept) >= MAX_KEPT:
            self.let_go(slot.stream, next(iter(kept)))
        loop = asyncio.get_running_loop()
        timer = loop.call_later(limit_s, self.let_go, slot.stream, router_slot)
        kept[router_slot] = slot.number, timer

    def let_go(self, stream: RouterStream, router_slot: int) -> None:
        if (kept := stream.kept.pop(router_slot, None)) is not None:
            number, timer = kept
            timer.cancel()
            self.send_to_slot(messages.LetGo(number))

    def fill(self, slot: SlotState, event: messages.Fill) -> None:
        """Pages of a slot wait for what was offered."""
        if slot.ending:
            self.send(messages.TransferClosed(slot.number))
            return
        origins: list[Origin] = []
        if self.tiering is not None:
            origins.append(self.tiering.origin(slot))
        if slot.offer is not None:
            origins.append(PrefixPull(self, slot, slot.offer, event.runs))
        slot.fill = PageFill(self, slot, event, origins)

    def end(
        self, slot: SlotState, error: PacelineError | None = None, *, is_over: bool = False
    ) -> None:
        """Ends a slot from this side: nothing of it is emitted any more, `Ended` follows.

        `is_over`: the engine has ended it already.
        """
        if slot.ending:
            return
        slot.ending = True
        slot.stop_timers()
        if error is not None:
            if slot.trace is not None:
                slot.trace.error = error.code.value
            slot.stream.add_error(slot.router_slot, error)
            slot.stream.flush(self.load_now())
        if slot.handoff is not None:
            self.handoffs.close(slot.handoff, error or Cancelled("the request has ended"))
            pins.end_handoff(self, slot.handoff)
        if not is_over:
            self.send_to_slot(messages.Cancel(slot.number))
        transfer = slot.adoption or slot.fill
        is_copying = transfer is not None and transfer.stop()
        if (slot.is_reservation or slot.fill is not None) and not is_copying:
            self.send(messages.TransferClosed(slot.number))

    def end_stream(self, stream: RouterStream, end: PacelineError) -> None:
        """A stream that ends, ends every slot on it."""
        self.streams.discard(stream)
        stream.close(end)
        for slot in list(stream.slots.values()):
            self.end(slot)
        for router_slot in list(stream.kept):
            self.let_go(stream, router_slot)

    def start_draining(self) -> None:
        """Routers learn it now, not with the next beat: that we leave is no loss then."""
        self.draining = True
        for stream in list(self.streams):
            stream.flush(self.load_now(), beat=True)

    def announce(self) -> None:
        """Tells routers, at once, what has changed of `info`."""
        for stream in list(self.streams):
            stream.add_info(self.info)
            stream.flush(self.load_now())

    def load_now(self) -> worker_pb2.Load:
        return load_to_proto(self.load, self.step, self.watch.rounds, self.draining)

    # --- pages of ours that others read ---

    def unpin(self, pages: PageLives) -> None:
        """Lets go of pages in the background; the rank's pool thread answers at once."""
        if pages:
            self.background(self.rank.link.call, messages.Unpin(pages))

    def background(self, call: Callable[[Q], Awaitable[object]], message: Q) -> None:
        """Makes a call that nobody waits for: when it fails, a lease or a beat makes up for it."""
        task = asyncio.create_task(_swallow(call, message))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def serve_in(self, handler: "asyncio.Task[Any] | None") -> None:
        """A handler of a call that lasts: it is cancelled when the session closes."""
        if handler is not None:
            self._background.add(handler)
            handler.add_done_callback(self._background.discard)

    # --- life ---

    async def run(self) -> str:
        """Serves until the rank is lost; returns why."""
        exited = asyncio.create_task(self.rank.program.wait())
        loops = (
            asyncio.create_task(self._receive()),
            asyncio.create_task(Housekeeping(self).run()),
        )
        tasks: tuple[asyncio.Future[Any], ...] = (*loops, exited)
        try:
            await asyncio.wait((*tasks, self._lost), return_when=asyncio.FIRST_COMPLETED)
            if exited.done():
                return f"the rank process ended with status {exited.result()}"
            for task in tasks:
                if task.done():
                    task.result()  # a bug of ours: let it be seen
            return self._lost.result()
        finally:
            for task in tasks:
                task.cancel()

    def end_streams(self) -> None:
        """The rank is lost: routers learn it by the end of their streams."""
        for stream in list(self.streams):
            for slot in list(stream.slots.values()):
                self.end(slot, is_over=True)
            for _, timer in stream.kept.values():
                timer.cancel()
            self.streams.discard(stream)
            stream.close(Unavailable("the worker starts anew", retry_after_s=1.0))

    async def close(self) -> None:
        """Waits for the copies into the pool, then frees it. Those of the rank end with it."""
        await self.rank.stop()
        await asyncio.gather(*[adoption.finished() for adoption in self.adoptions])
        await asyncio.gather(*[fill.finished() for fill in self.fills])
        if self.tiering is not None:
            await self.tiering.close()
        for slot in self.slots:
            self.slots.close(slot)
        for task in self._background:
            task.cancel()
        self.pull_threads.close()
        await self.peers.close()
        await asyncio.to_thread(self.connectors.close)
        await self.rank.close()

    async def _receive(self) -> None:
        while True:
            output = await self.rank.link.receive()
            if isinstance(output, LinkReply):
                self.rank.link_calls.reply(output)
                continue
            if not isinstance(output, StepOutput):
                raise EngineFailure(f"the rank sent {type(output).__name__}")
            self.watch.hear(output)
            self.num_outputs += 1
            self._events.apply(output)
            await asyncio.sleep(0)  # the frames of this step leave before we look for the next


async def _swallow(call: Callable[[Q], Awaitable[object]], message: Q) -> None:
    with contextlib.suppress(PacelineError, grpc.aio.AioRpcError):
        await call(message)
