"""Sources in processes of their own that are stopped and killed: PeerGone in time, never a hang."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from paceline.core.errors import KvUnavailable, PeerGone
from paceline.kv_transfer import registry
from paceline.kv_transfer.base import Link, Piece, Pool, Reader, TransportSettings
from tests.contract.pools import ACROSS, LARGE, ids, make_pool, pages_of, sums_of
from tests.contract.source_process import NUM_PAGES, SEED, SourceProcess, source_process
from tests.contract.transports import ON_DEVICES, installed, know

EVERY = np.arange(NUM_PAGES)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("ucx", "nixl")]


@pytest.fixture(params=["shm", "tcp", "multi", *SLOW, *ON_DEVICES])
def process_transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    know(request.param, monkeypatch)
    return installed(request.param)


@pytest.fixture
def peer(process_transport: str, tmp_path: Path) -> Iterator[SourceProcess]:
    with source_process(source_transport(process_transport), tmp_path) as running:
        yield running


def source_transport(transport: str) -> str:
    """Its source's is like any other's."""
    return "cuda_ipc" if transport == ACROSS else transport


@pytest.fixture
def pool(process_transport: str) -> Pool:
    return make_pool(LARGE, NUM_PAGES, None, process_transport)


@pytest.fixture
def reader(process_transport: str, pool: Pool) -> Reader:
    return registry.make_reader(process_transport, pool, TransportSettings("of the reader"))


@pytest.fixture
def link(reader: Reader, peer: SourceProcess) -> Iterator[Link]:
    link = reader.connect(peer.address, timeout_s=5)
    yield link
    link.close()


def test_pages_come_from_another_process(link: Link, pool: Pool) -> None:
    expected = make_pool(LARGE, NUM_PAGES, SEED)
    sums = link.read(Piece(EVERY, EVERY[::-1].copy()), timeout_s=10)
    assert np.array_equal(sums, sums_of(expected, EVERY))


def test_a_source_killed_during_a_copy_is_gone_at_once_and_leaves_nothing(
    link: Link, reader: Reader, peer: SourceProcess, tmp_path: Path
) -> None:
    before = set(os.listdir("/dev/shm"))
    failed_at: list[float] = []

    def read_until_it_fails() -> None:
        with pytest.raises(PeerGone):
            while True:
                link.read(Piece(EVERY, EVERY), timeout_s=30)
        failed_at.append(time.monotonic())

    threads = [threading.Thread(target=read_until_it_fails) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    killed_at = time.monotonic()
    peer.process.kill()
    for thread in threads:
        thread.join(timeout=10)
    assert len(failed_at) == 2
    assert max(failed_at) - killed_at < 2
    with pytest.raises(PeerGone):
        link.read(Piece(ids(0), ids(0)), timeout_s=30)
    with pytest.raises(PeerGone):
        reader.connect(peer.address, timeout_s=30)
    assert time.monotonic() - killed_at < 3
    assert set(os.listdir("/dev/shm")) <= before
    assert not list(tmp_path.iterdir())


def test_a_stopped_source_costs_no_more_than_the_timeout(
    link: Link, reader: Reader, peer: SourceProcess, pool: Pool
) -> None:
    """Who reads its memory does not need the source to run; others get PeerGone in time."""
    peer.process.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    if link.transport in ("shm", "nixl", "cuda_ipc"):
        link.read(Piece(EVERY, EVERY), timeout_s=0.3)
    else:
        with pytest.raises(PeerGone):
            link.read(Piece(EVERY, EVERY), timeout_s=0.3)
    with pytest.raises(PeerGone):
        reader.connect(peer.address, timeout_s=0.3)
    assert time.monotonic() - started < 2
    before = pages_of(pool).copy()
    peer.process.send_signal(signal.SIGCONT)
    time.sleep(0.1)
    assert np.array_equal(pages_of(pool), before)  # a read that has raised writes nothing more
    link.read(Piece(EVERY, EVERY), timeout_s=10)


def test_a_restarted_source_is_not_taken_for_the_old_one(
    link: Link, peer: SourceProcess, process_transport: str, tmp_path: Path
) -> None:
    """Identity is the incarnation: the old link stays dead although a new source is up."""
    peer.process.kill()
    peer.process.wait()
    transport = source_transport(process_transport)
    with source_process(transport, tmp_path), pytest.raises(KvUnavailable):
        link.read(Piece(ids(0), ids(0)), timeout_s=2)
