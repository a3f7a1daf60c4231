"""A UCX that fails or is silent, in place of the real one: nobody waits for it for ever."""

import os
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.core.errors import PeerGone
from paceline.kv_transfer import ucx_worker
from paceline.kv_transfer.ucx_transfer import UcxTransfer
from paceline.kv_transfer.ucx_worker import UcxWorker
from tests.support.waits import wait_for


class UCXError(Exception):
    pass


class Request:
    """Completes when the test says so."""

    completed = False
    error = ""

    def end(self, error: str = "") -> None:
        self.completed, self.error = True, error

    def check_error(self) -> None:
        if self.error:
            raise UCXError(self.error)


class FakeUcx:
    """ucxx's worker and endpoint. Requests never complete by themselves."""

    address = memoryview(b"address")

    def __init__(self) -> None:
        self.epoll_file_descriptor = os.eventfd(0)
        self.fails_with: Exception | None = None
        self.close_fails = False
        self.num_closed = 0
        self.may_progress = threading.Event()
        self.may_progress.set()
        self.requests: list[Request] = []

    def init_blocking_progress_mode(self) -> None:
        pass

    def progress(self) -> None:
        self.may_progress.wait(5)
        if self.fails_with is not None:
            raise self.fails_with

    def arm(self) -> bool:
        return True

    def create_endpoint_from_worker_address(self, address: Any, **options: Any) -> "FakeUcx":
        return self

    def close_blocking(self) -> None:
        self.num_closed += 1
        if self.close_fails:
            raise UCXError("endpoint timed out")

    def tag_recv(self, part: Any, tag: int) -> Any:
        self.requests.append(Request())
        return self.requests[-1]

    def wake(self) -> None:
        os.eventfd_write(self.epoll_file_descriptor, 1)


@pytest.fixture
def ucx(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeUcx]:
    fake = FakeUcx()
    api = SimpleNamespace(
        Feature=SimpleNamespace(TAG=1, WAKEUP=2),
        UCXContext=lambda *options, **flags: None,
        UCXWorker=lambda context: fake,
        UCXError=UCXError,
        UCXAddress=SimpleNamespace(create_from_buffer=bytes),
        UCXXTag=int,
    )
    monkeypatch.setattr(ucx_worker, "_load", lambda: (api, bytes))
    yield fake
    os.close(fake.epoll_file_descriptor)


def soon() -> float:
    return time.monotonic() + 2


def test_a_failure_of_ucx_ends_all_that_wait_for_it(ucx: FakeUcx) -> None:
    worker = UcxWorker()
    channel = worker.open(b"peer", soon())
    transfer = UcxTransfer([memoryview(b"part")], 0)
    ucx.fails_with = RuntimeError("the network is gone")
    channel.start(transfer, is_send=False)
    began = time.monotonic()
    with pytest.raises(PeerGone, match="the network is gone"):
        channel.finish(transfer, 1, soon(), lambda: True)
    channel.close()
    for _ in range(2):
        with pytest.raises(PeerGone, match="the network is gone"):
            worker.open(b"peer", soon())
    worker.close()
    assert time.monotonic() - began < 1.9


def test_a_channel_that_does_not_close_well_is_closed(ucx: FakeUcx) -> None:
    worker = UcxWorker()
    ucx.close_fails = True
    worker.open(b"peer", soon()).close()
    worker.open(b"another", soon()).close()
    worker.close()
    assert not worker.failure


@pytest.mark.parametrize("then", ["they end", "they rest"])
def test_an_endpoint_is_closed_when_its_messages_end_or_rest(
    ucx: FakeUcx, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """UCX may die of one that is closed under traffic."""
    monkeypatch.setattr(ucx_worker, "_QUIET_S", 60 if then == "they end" else 0.3)
    worker = UcxWorker()
    channel = worker.open(b"peer", soon())
    channel.start(UcxTransfer([memoryview(b"part")] * 2, 0), is_send=False)
    wait_for(lambda: len(ucx.requests) == 2, 2)
    closing = threading.Thread(target=channel.close)
    closing.start()
    ucx.requests[0].end()
    ucx.wake()
    closing.join(0.1)
    assert closing.is_alive() and not ucx.num_closed
    if then == "they rest":
        wait_for(lambda: ucx.num_closed)
    ucx.requests[1].end()
    ucx.wake()
    closing.join(5)
    assert channel.is_released and ucx.num_closed == 1 and len(ucx.requests) == 2
    worker.close()


def test_a_silent_ucx_is_waited_for_no_longer_than_the_deadline(ucx: FakeUcx) -> None:
    worker = UcxWorker()
    ucx.may_progress.clear()
    with pytest.raises(PeerGone, match="silent"):
        for _ in range(2):  # the first may come before the silence
            worker.open(b"peer", time.monotonic() + 0.1)
    ucx.may_progress.set()
    worker.close()


def test_sglang_36707_nothing_is_released_while_a_message_is_unresolved(ucx: FakeUcx) -> None:
    """https://github.com/sgl-project/sglang/pull/36707: one chunk of a room has failed and another
    is unresolved; what ends of the room meanwhile must not release it."""
    worker = UcxWorker()
    channel = worker.open(b"peer", soon())
    transfer = UcxTransfer([memoryview(b"part")] * 3, 0)
    channel.start(transfer, is_send=False)
    wait_for(lambda: len(ucx.requests) == 3, 2)
    failed, second, unresolved = ucx.requests
    failed.end("the chunk has failed")
    ucx.wake()
    with pytest.raises(PeerGone, match="the chunk has failed"):
        channel.finish(transfer, 3, soon(), lambda: True)
    closing = threading.Thread(target=channel.close)
    closing.start()
    second.end()
    for _ in range(3):
        ucx.wake()
        closing.join(0.05)
        assert closing.is_alive() and not channel.is_released
    unresolved.end("cancelled")
    ucx.wake()
    closing.join(2)
    assert not closing.is_alive() and channel.is_released
    worker.close()
