"""Three workers on the mock model, a proxy between two of them, and one fault at a time.

The reader pulls from the source through the proxies; the spare tells what is right, and takes over
as a router would have it: what was emitted is forced, nothing is sampled again.
"""

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from benchmarks.common import show
from benchmarks.transfer_faults_cases import Case, Fault, Step
from benchmarks.transfer_faults_hand import Hand, Outcome
from benchmarks.transfer_faults_seam import DataProxies, PoolWatch, StepSeam, Strike, until
from benchmarks.transfer_faults_workers import READY_S, Timers, Workers, num_held
from paceline.rpc.channel import connect
from paceline.v1 import kv_pb2, kv_pb2_grpc
from tests.support.fake_router import Attachment, make_request, token
from tests.support.kv_proxy import KvProxy
from tests.support.tcp_proxy import TcpProxy
from tests.support.worker_pair import is_free
from tests.support.workers import flip_a_byte

PROMPT_TOKENS = 1600  # 100 pages of 128 KiB
FILLERS = 5  # other prompts: together more pages than the pool has
TRIES = 3  # of a pair that was disturbed


class Bench:
    """Runs cases one after the other. Made by `bench`."""

    def __init__(self, workers: Workers, data: DataProxies, seam: StepSeam, proxy: KvProxy) -> None:
        self.workers = workers
        self.data, self.seam, self.proxy = data, seam, proxy
        self.calls = TcpProxy(("127.0.0.1", proxy.port))  # of the reader to the KvProxy
        self.timers = workers.timers
        self._num_prompts = 0
        self._partial = 0
        self._wakers: set[asyncio.Task[None]] = set()
        self._are_connected = False

    async def run(self, case: Case) -> Outcome:
        if case.step is Step.CONNECT and self._are_connected:
            await asyncio.to_thread(self.workers.running["source"].renew)
        found = Outcome()
        self._partial = 0
        endpoint = self.workers.running["spare"].endpoint
        async with Attachment(endpoint) as spare:
            async with self._attached("source") as source, self._attached("reader") as reader:
                num_requests = 3 if case.fault in (Fault.DUPLICATE, Fault.REORDER) else 1
                hands = [self._hand(source, reader, spare) for _ in range(num_requests)]
                for hand in hands:
                    await hand.prepare()
                self._arm(case, source, hands[0])
                for ended in await asyncio.gather(*(hand.run() for hand in hands)):
                    found.add(ended)
                await self.seam.settle()
                found.missed += not self.seam.is_struck
                self.seam.disarm()
            await asyncio.gather(*self._wakers)
            for name in ("source", "reader"):
                self.workers.signal(name, signal.SIGCONT)
            await self._heal()
            if case.fault in (Fault.RESET, Fault.STOP_SOURCE, Fault.STOP_READER):
                found.add(await self._work_again(spare))
            found.leaked_blocks += await self._leaked()
        found.partial = self._partial
        self._are_connected = case.fault not in (
            Fault.KILL_SOURCE, Fault.KILL_READER, Fault.SUCCESSOR
        )  # fmt: skip
        return found

    async def _work_again(self, spare: Attachment) -> Outcome:
        """As nobody has died: what was broken may cost one more request."""
        found = Outcome()
        for _ in range(TRIES):
            async with self._attached("source") as source, self._attached("reader") as reader:
                hand = self._hand(source, reader, spare)
                await hand.prepare()
                ended = await hand.run()
            found.add(ended)
            if not ended.retried:
                found.retried = 0  # those of the case itself count
                return found
        found.unusable = 1
        return found

    def _attached(self, name: str) -> Attachment:
        return Attachment(self.workers.running[name].endpoint)

    def _hand(self, source: Attachment, reader: Attachment, spare: Attachment) -> Hand:
        endpoint = f"127.0.0.1:{self.calls.port}"
        return Hand(source, reader, spare, self.next_prompt(), endpoint, self.timers)

    def next_prompt(self) -> list[int]:
        self._num_prompts += 1
        chance = random.Random(self._num_prompts)
        return [chance.randrange(256) for _ in range(PROMPT_TOKENS)]

    # --- what goes wrong ---

    def _arm(self, case: Case, source: Attachment, hand: Hand) -> None:
        seam, workers = self.seam, self.workers
        seam.num_copies = 2 if case.fault is Fault.DUPLICATE else 1
        seam.holds_unpin = seam.swaps_beats = case.fault is Fault.REORDER
        reader = workers.running["reader"]
        watch = PoolWatch(reader.pid, source.info)
        rank = reader.rank_pids()[0]
        strike = self._strikes(source, hand)[case.fault]

        async def strike_now() -> None:
            if case.step is Step.MID_READ:
                self._partial += 0 < watch.num_changed() < len(seam.pinned)
            await strike()
            is_held = case.step in (Step.MID_READ, Step.COMMIT)
            if is_held and case.fault is not Fault.STOP_READER:
                workers.signal("reader", signal.SIGCONT)

        def hold_the_commit() -> None:
            os.kill(rank, signal.SIGSTOP)

        async def mid_read() -> None:
            await asyncio.to_thread(watch.freeze_amid, reader.pid)

        seam.arm(
            case.step,
            strike_now,
            at_pin=hold_the_commit if case.step is Step.COMMIT else lambda: None,
            mid_read=mid_read,
            is_committed=hand.has_decoded,
        )

    def _strikes(self, source: Attachment, hand: Hand) -> dict[Fault, Strike]:
        async def nothing() -> None: ...

        async def lose_unpin() -> None:
            self.seam.loses_unpin = True

        async def evict() -> None:
            await self._evict(source, hand)

        async def flip_source() -> None:
            await until(hand.is_prefilled, READY_S)  # else the source itself reads what is wrong
            page, _ = self.seam.pinned[len(self.seam.pinned) // 2]
            flip_a_byte(self.workers.running["source"].pid, page * source.info.page_bytes + 77)

        async def flip_wire() -> None:
            self.data.over_tcp["tcp"].flip_a_byte(after=3 * source.info.page_bytes)

        def killing(name: str) -> Strike:
            async def kill() -> None:
                await asyncio.to_thread(self.workers.kill, name)

            return kill

        def stopping(name: str) -> Strike:
            async def stop() -> None:
                self.workers.signal(name, signal.SIGSTOP)
                self._wakers.add(waker := asyncio.create_task(self._wake(name)))
                waker.add_done_callback(self._wakers.discard)

            return stop

        async def reset() -> None:
            self.calls.reset()
            self.data.reset()

        return {
            Fault.KILL_SOURCE: killing("source"),
            Fault.KILL_READER: killing("reader"),
            Fault.STOP_SOURCE: stopping("source"),
            Fault.STOP_READER: stopping("reader"),
            Fault.RESET: reset,
            Fault.SUCCESSOR: self._succeed,
            Fault.EVICT: evict,
            Fault.FLIP_SOURCE: flip_source,
            Fault.FLIP_WIRE: flip_wire,
            Fault.LOSE_UNPIN: lose_unpin,
            Fault.DUPLICATE: nothing,
            Fault.REORDER: nothing,
        }

    async def _wake(self, name: str) -> None:
        await asyncio.sleep(self.timers.stop_s)
        self.workers.signal(name, signal.SIGCONT)

    async def _succeed(self) -> None:
        running = self.workers.running
        await asyncio.to_thread(self.workers.kill, "source")
        running["source"] = running.pop("successor")
        self.proxy.source = running["source"].endpoint
        async with (
            Attachment(self.proxy.source) as successor,
            connect(self.proxy.source) as channel,
        ):
            stub = kv_pb2_grpc.KvTransferServiceStub(channel)  # type: ignore[no-untyped-call]
            request = kv_pb2.DescribeRequest(
                content_digest=successor.info.content_digest,
                layout_digest=successor.info.layout_digest,
            )
            description = await stub.Describe(request, metadata=token())
        self.data.lead_to(description)

    async def _evict(self, source: Attachment, hand: Hand) -> None:
        """The router gives the reader up, and other prompts take all pages of the source."""
        hand.revoke()
        fillers = [
            source.run(make_request(source.info, self.next_prompt(), max_tokens=1))
            for _ in range(FILLERS)
        ]
        await asyncio.gather(*(filler.until_ended(READY_S) for filler in fillers))

    # --- and is well again ---

    async def _heal(self) -> None:
        running = self.workers.running
        for name in ("source", "reader"):
            if running[name].process.poll() is not None:
                self.workers.start(name)
        if "successor" not in running:
            self.workers.start("successor")
        await self.workers.until_ready(*running)
        self.proxy.source = running["source"].endpoint

    async def _leaked(self) -> int:
        """Pages that source and reader still hold when all had time to be free."""
        left = 0
        ends = time.monotonic() + self.timers.limit_s
        for name in ("source", "reader"):
            worker = self.workers.running[name]
            while not await asyncio.to_thread(is_free, worker):
                if time.monotonic() > ends:
                    left += max(1, await asyncio.to_thread(num_held, worker))
                    break
                await asyncio.sleep(0.1)
        return left


@asynccontextmanager
async def bench(model: Path, transport: str, timers: Timers) -> AsyncIterator[Bench]:
    """Workers that are ready, and what stands between them."""
    workers = Workers(model, transport, timers)
    async with AsyncExitStack() as stack:
        stack.callback(workers.stop_all)
        for name in ("source", "reader", "spare", "successor"):
            workers.start(name)
        await workers.until_ready(*workers.running)
        data = DataProxies()
        stack.callback(data.close)
        seam = StepSeam(data)
        proxy = KvProxy(workers.running["source"].endpoint, seam)
        await proxy.start()
        stack.push_async_callback(proxy.close)
        made = Bench(workers, data, seam, proxy)
        stack.callback(made.calls.close)
        yield made


async def run_cases(model: Path, transport: str, timers: Timers, cases: list[Case]) -> Outcome:
    total = Outcome()
    async with bench(model, transport, timers) as running:
        for case in cases:
            began = time.monotonic()
            found = await running.run(case)
            total.add(found)
            show(f"{transport}: {case}, {time.monotonic() - began:.1f} s: {found}")
    return total
