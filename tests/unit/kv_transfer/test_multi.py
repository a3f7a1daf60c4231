"""What only multi has: the choice among transports, and what happens when the chosen one fails."""

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
from structlog.testing import capture_logs

from paceline.core.errors import IncompatiblePeer, PeerGone
from paceline.kv_transfer import multi, registry
from paceline.kv_transfer import tcp_wire as wire
from paceline.kv_transfer.base import Piece, Pool
from paceline.kv_transfer.multi import MultiReader, MultiSource, export
from tests.contract.ends import SETTINGS
from tests.contract.pools import SMALL, ids, make_pool, pages_of
from tests.unit.kv_transfer.proxy import proxy_to

NUM_PAGES = 8
EVERY = np.arange(NUM_PAGES)


@pytest.fixture
def pool() -> Pool:
    return make_pool(SMALL, NUM_PAGES)


@pytest.fixture
def source() -> Iterator[MultiSource]:
    source = export(("shm", "tcp"), make_pool(SMALL, NUM_PAGES, 1), SETTINGS)
    source.start()
    yield source
    source.close()


@contextmanager
def reader_of(pool: Pool, *names: str) -> Iterator[MultiReader]:
    reader = MultiReader(names, lambda name: registry.make_reader(name, pool, SETTINGS))
    yield reader
    reader.close()


def check_arrived(pool: Pool) -> None:
    assert np.array_equal(pages_of(pool), pages_of(make_pool(SMALL, NUM_PAGES, 1)))


@pytest.mark.parametrize("names", [("shm", "tcp"), ("tcp", "shm"), ("tcp",)])
def test_the_readers_first_transport_that_connects_is_taken(
    names: tuple[str, ...], source: MultiSource, pool: Pool
) -> None:
    with reader_of(pool, *names) as reader:
        link = reader.connect(source.address(), timeout_s=2)
        assert link.transport == names[0]
        link.read(Piece(EVERY, EVERY), timeout_s=2)
        check_arrived(pool)
        link.close()


def test_a_transport_that_one_end_lacks_is_not_taken(source: MultiSource, pool: Pool) -> None:
    offered = {"tcp": source.addresses()["tcp"]}
    with reader_of(pool, "shm", "tcp") as reader:
        link = reader.connect_to(offered, timeout_s=2)
        assert link.transport == "tcp"
        link.close()
        with pytest.raises(IncompatiblePeer, match="shm: the source offers only udp") as caught:
            reader.connect_to({"udp": b""}, timeout_s=2)
        assert caught.value.field == "transport"


def test_a_link_whose_transport_dies_goes_on_with_the_next_and_says_so(
    source: MultiSource, pool: Pool
) -> None:
    with reader_of(pool, "shm", "tcp") as reader:
        link = reader.connect(source.address(), timeout_s=2)
        source.sources[0].close()
        with capture_logs() as logs, ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda page: link.read(Piece(ids(page), ids(page)), 2), EVERY))
        check_arrived(pool)
        assert link.transport == "tcp"
        (entry,) = logs
        assert entry["event"] == "a link fell back to another transport"
        assert (entry["log_level"], entry["lost"], entry["now"]) == ("warning", "shm", "tcp")
        source.sources[1].close()
        with pytest.raises(PeerGone):
            link.read(Piece(EVERY, EVERY), timeout_s=2)
        link.close()


def test_a_transport_that_hangs_leaves_the_next_one_time(source: MultiSource, pool: Pool) -> None:
    with proxy_to(source.addresses()["tcp"]) as proxy, reader_of(pool, "tcp", "shm") as reader:
        offered: Mapping[str, bytes] = {**source.addresses(), "tcp": proxy.address()}
        link = reader.connect_to(offered, timeout_s=2)
        proxy.pause()
        started = time.monotonic()
        link.read(Piece(EVERY, EVERY), timeout_s=0.6)
        assert time.monotonic() - started < 0.6
        assert link.transport == "shm"
        check_arrived(pool)
        again = reader.connect_to(offered, timeout_s=0.6)  # tcp accepts, and says no hello
        assert again.transport == "shm"
        link.close()
        again.close()


def test_a_peer_that_is_cut_off_is_gone_soon(
    source: MultiSource, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits for its KV asks elsewhere: no transport is given all of the deadline."""
    monkeypatch.setattr(wire, "SILENT_AFTER_S", 0.6)
    monkeypatch.setattr(multi, "FALL_BACK_S", 0.3)
    monkeypatch.setattr(
        registry, "_entries", {**registry._entries, "tcp2": registry._entries["tcp"]}
    )
    with proxy_to(source.addresses()["tcp"]) as proxy, reader_of(pool, "tcp", "tcp2") as reader:
        offered = {"tcp": proxy.address(), "tcp2": proxy.address()}
        link = reader.connect_to(offered, timeout_s=2)
        proxy.pause()
        started = time.monotonic()
        with pytest.raises(PeerGone):
            link.read(Piece(EVERY, EVERY), timeout_s=10)
        assert time.monotonic() - started < 2
        link.close()


def test_a_closed_link_does_not_fall_back(source: MultiSource, pool: Pool) -> None:
    with reader_of(pool, "shm", "tcp") as reader:
        link = reader.connect(source.address(), timeout_s=2)
        link.close()
        with pytest.raises(PeerGone, match="closed"):
            link.read(Piece(EVERY, EVERY), timeout_s=2)
        assert link.transport == "shm"
