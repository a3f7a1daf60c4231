"""A NIXL that checks in which order it is called, in place of the real one."""

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.core.errors import PeerGone
from paceline.kv_transfer import nixl_agent, nixl_read
from paceline.kv_transfer.base import LocalPool, Piece
from paceline.kv_transfer.nixl_agent import NixlAgent
from paceline.kv_transfer.nixl_read import NixlRead
from tests.contract.pools import SMALL, ids, make_pool

ROUNDS = 1000


class NixlError(Exception):
    pass


class StrictNixl:
    """Transfers are in progress while the link is stalled. A handle that is released before its
    transfer has ended, twice, or used after that is noted."""

    def __init__(self) -> None:
        self.is_stalled = False
        self.num_looks = 0  # at transfers that go on
        self.live: dict[int, bool] = {}  # handle → whether it has ended
        self.num_released = 0
        self.problems: list[str] = []

    def createBackend(self, name: str, options: dict[str, str]) -> str:
        return name

    def registerMem(self, regions: Any, backends: list[str]) -> None: ...

    def getLocalMD(self) -> bytes:
        return b"metadata"

    def createXferReq(self, *parts: Any) -> int:
        handle = self.num_released + len(self.live)
        self.live[handle] = False
        return handle

    def postXferReq(self, handle: int) -> str:
        return self._look(handle)

    def getXferStatus(self, handle: int) -> str:
        self.num_looks += 1
        return self._look(handle)

    def releaseXferReq(self, handle: int) -> None:
        if not self.live.pop(handle, False):
            self.problems.append(f"handle {handle} was released while it was in use, or twice")
        self.num_released += 1

    def _look(self, handle: int) -> str:
        if handle not in self.live:
            self.problems.append(f"handle {handle} was used after its release")
        self.live[handle] = not self.is_stalled
        return "in progress" if self.is_stalled else "success"


@pytest.fixture
def nixl(monkeypatch: pytest.MonkeyPatch) -> Iterator[StrictNixl]:
    strict = StrictNixl()
    api = SimpleNamespace(
        NixlError=NixlError,
        NIXL_THREAD_SYNC_STRICT=1,
        NIXL_READ="read",
        NIXL_SUCCESS="success",
        NIXL_IN_PROG="in progress",
        DRAM_SEG="dram",
        nixlAgentConfig=SimpleNamespace,
        nixlAgent=lambda name, config: strict,
        nixlRegDList=lambda kind, regions: regions,
        nixlXferDList=lambda kind, regions: regions,
    )
    monkeypatch.setattr(nixl_agent, "_load", lambda: api)
    yield strict


def test_nixl_2067_a_handle_is_not_released_while_its_transfer_is_pending(
    nixl: StrictNixl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """https://github.com/ai-dynamo/nixl/issues/2067: a transfer on a stalled link is let go at
    once, then the link recovers; a thousand times, with a stub that checks the order."""
    monkeypatch.setattr(nixl_read, "POLL_S", 0.0005)
    pool = make_pool(SMALL, 2)
    assert isinstance(pool, LocalPool)
    agent = NixlAgent("reader", pool)
    replaced: list[NixlAgent] = []

    def is_alive() -> bool:
        """Asked first when the reader has waited; the link recovers behind its back."""
        nixl.is_stalled = False
        return False

    def read() -> None:
        deadline = time.monotonic() + 5
        piece = Piece(ids(0), ids(1))
        NixlRead(pool, agent, "peer", 0, piece, deadline, is_alive, replaced.append).run()

    for _ in range(ROUNDS):
        nixl.is_stalled = True
        with pytest.raises(PeerGone, match="died or closed"):
            read()
    assert not nixl.problems
    assert not replaced and not nixl.live
    assert (nixl.num_released, nixl.num_looks >= ROUNDS) == (ROUNDS, True)
    agent.close()


def test_a_transfer_that_never_ends_takes_its_agent_with_it(
    nixl: StrictNixl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only that lets go of its handle: until then nothing may use the pages again."""
    monkeypatch.setattr(nixl_read, "END_S", 0.1)
    pool = make_pool(SMALL, 2)
    assert isinstance(pool, LocalPool)
    agent = NixlAgent("reader", pool)
    nixl.is_stalled = True
    left: list[int] = []

    def replace(stuck: NixlAgent) -> None:
        left.append(len(nixl.live))
        stuck.close()

    piece, deadline = Piece(ids(0), ids(1)), time.monotonic() + 0.1
    with pytest.raises(PeerGone, match="silent"):
        NixlRead(pool, agent, "peer", 0, piece, deadline, lambda: True, replace).run()
    assert left == [1]
    assert agent.is_closed and not nixl.live
