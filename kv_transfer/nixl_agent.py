"""A NIXL agent of ours: one registered pool, and one thread that posts and polls transfers.

That thread is where bytes are copied when NIXL copies them by itself (between processes of one
host, inside of the call that posts): who waits sums what arrived meanwhile.
"""

import importlib
import importlib.util
import os
import secrets
import threading
from collections import deque
from typing import Any

import numpy as np

from paceline.core.errors import ConfigError, PeerGone
from paceline.kv_transfer.base import LocalPool
from paceline.kv_transfer.nixl_regions import Regions

PACKAGES = ("nixl_cu12", "nixl_cu13")
MAX_IN_FLIGHT = 8  # transfers posted at once, of all readers of the agent
_MIN_PAUSE_S, _MAX_PAUSE_S = 50e-6, 1e-3  # between two looks at transfers that went on
_THREAD_PAUSE_US = 10_000  # of NIXL's own thread, which events wake, too; with 0 it never sleeps


class Transfer:
    """One READ. It is over when it failed, or all its bytes are here."""

    def __init__(self, peer: str, local: Regions, remote: Regions) -> None:
        self.peer, self.local, self.remote = peer, local, remote
        self.handle: int | None = None  # while NIXL has it
        self.is_over = False
        self.error = ""


class NixlAgent:
    """Thread-safe. `metadata` is what a peer needs to read from the pool; `scratch` names a few
    bytes that a first read may overwrite."""

    def __init__(self, role: str, pool: LocalPool) -> None:
        """Raises ConfigError when NIXL cannot be started."""
        self._nixl = nixl = _load()
        self._errors = tuple(v for k, v in vars(nixl).items() if k.endswith("Error"))  # no base
        config = nixl.nixlAgentConfig()
        config.useProgThread = True  # both ends have to answer while a connection is made
        config.pthrDelay = _THREAD_PAUSE_US
        config.syncMode = nixl.NIXL_THREAD_SYNC_STRICT
        self.base_address: int = np.frombuffer(pool.memory, np.uint8).ctypes.data
        self._spare = np.zeros(8, np.uint64)
        self.scratch = np.array([(self._spare.ctypes.data, self._spare.nbytes, 0)], np.uint64)
        regions = [(self.base_address, pool.memory.nbytes, 0, ""), (*self.scratch[0].tolist(), "")]
        try:
            self._agent = nixl.nixlAgent(f"{role}-{secrets.token_hex(8)}", config)
            backend = self._agent.createBackend("UCX", {})
            self._agent.registerMem(nixl.nixlRegDList(nixl.DRAM_SEG, regions), [backend])
            self.metadata: bytes = self._agent.getLocalMD()
        except self._errors as error:
            raise ConfigError("transport", "nixl", f"NIXL cannot be started: {error}") from None
        self._peers: dict[bytes, tuple[str, int]] = {}  # by metadata: name, links
        self._changed = threading.Condition()
        self._in_use = threading.Lock()  # by a thread that posts
        self._waiting: deque[Transfer] = deque()
        self._posted: list[Transfer] = []
        self.is_closed = False
        self._thread = threading.Thread(target=self._run, name="nixl", daemon=True)
        self._thread.start()

    def add_peer(self, metadata: bytes) -> str:
        """The peer's name. Raises PeerGone for metadata that NIXL does not take."""
        with self._changed:
            name, num_links = self._peers.get(metadata, ("", 0))
            try:
                name = name or self._agent.loadRemoteMD(metadata).decode()
            except self._errors as error:
                raise PeerGone(f"nixl does not take the peer's metadata: {error}") from None
            self._peers[metadata] = name, num_links + 1
        return name

    def remove_peer(self, metadata: bytes) -> None:
        """Undoes one `add_peer`; the transfers that it was for must be over."""
        with self._changed:
            name, num_links = self._peers[metadata]
            if num_links > 1:
                self._peers[metadata] = name, num_links - 1
                return
            del self._peers[metadata]
            if not self.is_closed:
                self._agent.invalidateRemoteMD(name)

    def estimated_seconds(self, peer: str, local: Regions, remote: Regions) -> float:
        """What UCX expects of such a read; 0 where it does not know. Raises PeerGone."""
        try:
            handle = self._prepare(peer, local, remote)
            microseconds: int = self._agent.estimateXferCost(handle)[0]
            self._agent.releaseXferReq(handle)
        except self._errors as error:
            raise PeerGone(f"nixl cannot read from the peer: {error}") from None
        return microseconds / 1e6

    def post(self, transfer: Transfer) -> None:
        """In the calling thread, which has nothing else to do meanwhile: 0.1 ms less than by ours.
        What does not end at once is polled by ours."""
        with self._in_use:
            if self.is_closed:
                transfer.is_over, transfer.error = True, "the agent was replaced"
                return
            self._start(transfer)
            with self._changed:
                if not transfer.is_over:
                    self._posted.append(transfer)
                    self._changed.notify_all()

    def submit(self, transfer: Transfer) -> None:
        """To be posted in turn by our thread."""
        with self._changed:
            if self.is_closed:
                transfer.is_over, transfer.error = True, "the agent was replaced"
                return
            self._waiting.append(transfer)
            self._changed.notify_all()

    def wait(self, transfer: Transfer, timeout_s: float) -> bool:
        """Whether it is over."""
        with self._changed:
            return self._changed.wait_for(lambda: transfer.is_over, timeout_s)

    def give_up(self, transfer: Transfer) -> None:
        """It ends at once if it was not posted yet; one in flight cannot be cancelled."""
        with self._changed:
            if transfer in self._waiting:
                self._waiting.remove(transfer)
                transfer.is_over, transfer.error = True, "given up"

    def close(self) -> None:
        """Ends all transfers: with its UCX worker gone, nothing is written any more."""
        with self._in_use, self._changed:
            self.is_closed = True
            self._changed.notify_all()
        self._thread.join()
        left = [*self._posted, *self._waiting]
        for transfer in left:
            if transfer.handle is not None:
                self._agent.releaseXferReq(transfer.handle)
                transfer.handle = None
        self._agent = None  # its last reference: NIXL destroys it
        with self._changed:
            for transfer in left:
                transfer.is_over, transfer.error = True, "the agent was closed"
            self._changed.notify_all()

    def _run(self) -> None:
        pause_s = _MIN_PAUSE_S
        while not self.is_closed:
            self._post_waiting()
            progressed = sum(map(self._poll, self._posted)) > 0  # every one, not up to the first
            with self._changed:
                if progressed:
                    self._posted = [t for t in self._posted if not t.is_over]
                    self._changed.notify_all()
                    pause_s = _MIN_PAUSE_S
                elif self._posted:
                    self._changed.wait(pause_s)
                    pause_s = min(2 * pause_s, _MAX_PAUSE_S)
                elif not self._waiting and not self.is_closed:
                    self._changed.wait()

    def _post_waiting(self) -> None:
        while len(self._posted) < MAX_IN_FLIGHT:
            with self._changed:
                if not self._waiting:
                    return
                transfer = self._waiting.popleft()
                self._posted.append(transfer)
            self._start(transfer)
            if transfer.is_over:  # whoever waits for it goes on while the next one is copied
                with self._changed:
                    self._posted.remove(transfer)
                    self._changed.notify_all()

    def _start(self, transfer: Transfer) -> None:
        try:
            transfer.handle = self._prepare(transfer.peer, transfer.local, transfer.remote)
            self._take(transfer, self._agent.postXferReq(transfer.handle))
        except self._errors as error:
            self._end(transfer, str(error))

    def _poll(self, transfer: Transfer) -> bool:
        try:
            self._take(transfer, self._agent.getXferStatus(transfer.handle))
        except self._errors as error:
            self._end(transfer, str(error))
        return transfer.is_over

    def _take(self, transfer: Transfer, status: Any) -> None:
        if status == self._nixl.NIXL_SUCCESS:
            self._end(transfer, "")
        elif status != self._nixl.NIXL_IN_PROG:
            self._end(transfer, f"nixl reports {status}")

    def _end(self, transfer: Transfer, error: str) -> None:
        if transfer.handle is not None:
            self._agent.releaseXferReq(transfer.handle)
            transfer.handle = None
        transfer.error = error
        transfer.is_over = True

    def _prepare(self, peer: str, local: Regions, remote: Regions) -> int:
        nixl = self._nixl
        lists = [nixl.nixlXferDList(nixl.DRAM_SEG, regions) for regions in (local, remote)]
        handle: int = self._agent.createXferReq(nixl.NIXL_READ, *lists, peer, b"", [])
        return handle


def _load() -> Any:
    """NIXL's bindings. Its Python classes above them are left out: with them its thread never
    sleeps, and they print."""
    package = next(name for name in PACKAGES if importlib.util.find_spec(name))
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    return importlib.import_module(f"{package}._bindings")
