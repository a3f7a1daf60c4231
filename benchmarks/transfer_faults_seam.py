"""Where a fault strikes: at a step of the protocol, as seen from between reader and source."""

import asyncio
import contextlib
import mmap
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np

from benchmarks.transfer_faults_cases import Step
from paceline.kv_transfer.descriptor_wire import DescriptorAddress
from paceline.kv_transfer.tcp_wire import TcpAddress
from paceline.v1 import kv_pb2, worker_pb2
from tests.support.descriptor_proxy import DescriptorProxy
from tests.support.kv_proxy import Lost, Seam
from tests.support.tcp_proxy import TcpProxy
from tests.support.workers import pool_of

OVER_TCP = ("tcp", "ucx", "nixl")  # what they say to each other before pages travel, at least
COMMIT_WAIT_S = 2.0
WATCH_S = 10.0  # a link that was cut may take seconds until it is there again
SLICE_S = 0.0002
HOLD_S = 1.0  # of an unpin, for a later request's call to pass it

Strike = Callable[[], Awaitable[None]]


class DataProxies:
    """Between reader and source where pages travel, and in each Describe instead of the source."""

    def __init__(self) -> None:
        self.over_tcp: dict[str, TcpProxy] = {}
        self.descriptors: DescriptorProxy | None = None

    def put_into(self, description: kv_pb2.DescribeResponse) -> None:
        for item in description.transports:
            if item.name in OVER_TCP:
                peer = msgspec.msgpack.decode(item.address, type=TcpAddress)
                target = (peer.host, peer.port)
                proxy = self.over_tcp.setdefault(item.name, TcpProxy(target))
                proxy.target = target
                address = TcpAddress("127.0.0.1", proxy.port, peer.incarnation, peer.is_encrypted)
                item.address = msgspec.msgpack.encode(address)
            elif item.name == "shm":
                if self.descriptors is not None:
                    self.descriptors.close()
                self.descriptors = DescriptorProxy(item.address)
                item.address = self.descriptors.address

    def lead_to(self, description: kv_pb2.DescribeResponse) -> None:
        """What the reader knows as the source's address is another's from now on."""
        for item in description.transports:
            if item.name in self.over_tcp:
                peer = msgspec.msgpack.decode(item.address, type=TcpAddress)
                self.over_tcp[item.name].target = (peer.host, peer.port)
            elif item.name == "shm" and self.descriptors is not None:
                other = msgspec.msgpack.decode(item.address, type=DescriptorAddress)
                self.descriptors.target = other.socket_name
        self.reset()

    def reset(self) -> None:
        for proxy in self.over_tcp.values():
            proxy.reset()
        if self.descriptors is not None:
            self.descriptors.reset()

    def close(self) -> None:
        for proxy in self.over_tcp.values():
            proxy.close()
        if self.descriptors is not None:
            self.descriptors.close()


class StepSeam(Seam):
    """Calls `strike` once, when the armed step is reached; the message that shows it waits."""

    def __init__(self, data: DataProxies) -> None:
        self._data = data
        self.pinned: list[tuple[int, int]] = []  # (page, generation) of the last pin
        self.loses_unpin = self.holds_unpin = False
        self._passed = asyncio.Event()  # a call of a later request
        self._tasks: set[asyncio.Task[None]] = set()
        self.disarm()

    def disarm(self) -> None:
        self.step: Step | None = None
        self.is_struck = False
        self.loses_unpin = self.holds_unpin = self.swaps_beats = False
        self.num_copies = 1

    def arm(
        self,
        step: Step,
        strike: Strike,
        *,
        at_pin: Callable[[], None] = lambda: None,
        mid_read: Callable[[], "Awaitable[None]"] | None = None,
        is_committed: Callable[[], bool] = lambda: True,
    ) -> None:
        """`at_pin`: done when the reader is about to hear of a pin; `mid_read`: returns once the
        pages that it then reads begin to change."""
        self.is_struck = False
        self.step = step
        self._strike, self._at_pin, self._mid_read = strike, at_pin, mid_read
        self._is_committed = is_committed

    async def asked(self, method: str, request: Any) -> None:
        if method == "Describe":
            await self._reached(Step.CONNECT)
        elif method == "Unpin":
            await self._unpins(request)
        elif method == "Pin":
            self._passed.set()

    async def answered(self, method: str, answer: Any) -> None:
        if method == "Describe":
            self._data.put_into(answer)
        pinned = answer.rest if method == "Progress" else answer if method == "Pin" else None
        if pinned is not None and pinned.lease_id:
            refs = [ref for run in pinned.runs for ref in run.pages] + list(pinned.tails)
            self.pinned = [(ref.page, ref.generation) for ref in refs]
            await self._is_pinned()

    async def _is_pinned(self) -> None:
        if self.step is None or self.is_struck:
            return
        self._at_pin()
        if self.step is Step.MID_READ and self._mid_read is not None:
            self._in_background(self._strike_mid_read(self._mid_read()))
            await asyncio.sleep(0.05)  # it watches
        await self._reached(Step.READ)

    async def _strike_mid_read(self, begun: Awaitable[None]) -> None:
        await begun
        await self._reached(Step.MID_READ)

    async def _unpins(self, request: kv_pb2.UnpinRequest) -> None:
        await self._reached(Step.COMMIT)
        if request.complete and self.step is Step.UNPIN:
            await until(self._is_committed, COMMIT_WAIT_S)
            await self._reached(Step.UNPIN)
        if self.holds_unpin:
            self._passed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._passed.wait(), HOLD_S)
        if self.loses_unpin:
            raise Lost

    async def _reached(self, step: Step) -> None:
        """The strike goes on even if the message is given up meanwhile."""
        if self.step is step and not self.is_struck:
            self.is_struck = True
            await asyncio.shield(self._in_background(self._strike()))

    def _in_background(self, work: Awaitable[None]) -> "asyncio.Task[None]":
        async def run() -> None:
            await work

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def settle(self) -> None:
        """Waits for strikes under way."""
        await asyncio.gather(*self._tasks)


class PoolWatch:
    """Sees pages of requests change in another process's pool."""

    def __init__(self, pid: int, info: worker_pb2.WorkerInfo) -> None:
        with pool_of(pid) as fd:
            self._memory = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        num_words = info.page_bytes // 8
        words = np.frombuffer(self._memory, np.uint64)[: info.num_pages * num_words]
        self._firsts = words.reshape(-1, num_words)[:, 0]
        self._before = self._firsts.copy()

    def num_changed(self) -> int:
        return int((self._firsts != self._before).sum())

    def freeze_amid(self, pid: int) -> None:
        """Stops the process once it has changed a page: it runs in slices until then, as it copies
        all of them in less time than it takes to notice. Blocks."""
        ends = time.monotonic() + WATCH_S
        while time.monotonic() < ends:
            os.kill(pid, signal.SIGSTOP)
            if self.num_changed():
                return
            os.kill(pid, signal.SIGCONT)
            time.sleep(SLICE_S)

    def wait(self, then: Callable[[], None]) -> bool:
        """Until the first one changes, then calls `then` at once; False in vain. Blocks."""
        with contextlib.suppress(PermissionError):  # else it may look too late where cores are few
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), -15)
        ends = time.monotonic() + WATCH_S
        while not self.num_changed():
            if time.monotonic() > ends:
                return False
        then()
        return True


async def until(condition: Callable[[], bool], timeout_s: float) -> bool:
    ends = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > ends:
            return False
        await asyncio.sleep(0.01)
    return True
