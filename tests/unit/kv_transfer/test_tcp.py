"""What only tcp has: connections that break and are rebuilt, peers that drip, secrets."""

import contextlib
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest

from paceline.core.errors import ConfigError, IncompatiblePeer, Overloaded, PeerGone
from paceline.kv_transfer import registry
from paceline.kv_transfer import tcp_wire as wire
from paceline.kv_transfer.base import Link, Piece, TransportSettings
from paceline.kv_transfer.geometry import geometry_of
from paceline.kv_transfer.tcp_reader import MAX_CONNECTIONS
from tests.contract.ends import SETTINGS, Ends, connected
from tests.contract.pools import LARGE, SMALL, ids, make_pool, pages_of
from tests.unit.kv_transfer.proxy import Proxy, proxy_to


@pytest.fixture
def ends() -> Iterator[Ends]:
    with connected("tcp", make_pool(SMALL, 8, 1), make_pool(SMALL, 8)) as both:
        yield both


@pytest.fixture
def proxied() -> Iterator[tuple[Ends, Proxy, Link]]:
    """A link of large pages through a proxy."""
    with (
        connected("tcp", make_pool(LARGE, 16, 1), make_pool(LARGE, 16)) as ends,
        proxy_to(ends.source.address()) as proxy,
    ):
        link = ends.reader.connect(proxy.address(), timeout_s=2)
        yield ends, proxy, link
        link.close()


def test_mori_655_a_broken_connection_is_rebuilt(proxied: tuple[Ends, Proxy, Link]) -> None:
    """https://github.com/ROCm/mori/issues/655: one lost connection wedged a decode rank for good.

    50 reads before the break and 50 after; the first after it is not slow either.
    """
    ends, proxy, link = proxied
    for turn in range(100):
        if turn == 50:
            proxy.cut()
        started = time.monotonic()
        link.read(Piece(ids(turn % 16), ids(0)), timeout_s=5)
        assert time.monotonic() - started < 2
        assert np.array_equal(pages_of(ends.pool)[0], pages_of(ends.source_pool)[turn % 16])
    assert proxy.num_accepted == 2


def test_a_connection_that_breaks_during_a_copy_costs_one_new_one(
    proxied: tuple[Ends, Proxy, Link],
) -> None:
    ends, proxy, link = proxied
    every = np.arange(16)
    stop = threading.Event()

    def cut_once() -> None:
        stop.wait(0.02)
        proxy.cut()

    for _ in range(5):
        cutter = threading.Thread(target=cut_once)
        cutter.start()
        for _ in range(4):
            link.read(Piece(every, every), timeout_s=5)
        cutter.join()
    assert np.array_equal(pages_of(ends.pool), pages_of(ends.source_pool))
    assert proxy.num_accepted > 1


def test_sglang_9926_idle_connections_are_probed_from_both_ends(ends: Ends) -> None:
    """https://github.com/sgl-project/sglang/issues/9926: idle over night, then requests failed.

    The kernel's keepalive timer (type 2) runs on both ends, and fires within seconds.
    """
    port = msgspec.msgpack.decode(ends.source.address(), type=wire.TcpAddress).port
    timers = keepalive_seconds(port)
    assert len(timers) == 2
    assert all(0 < seconds <= wire.KEEPALIVE_IDLE_S for seconds in timers)


def keepalive_seconds(port: int) -> list[float]:
    """Time to the next probe of each established connection from or to `port`."""
    pattern = re.compile(rf"(:{port:04X} \w+:\w+|\w+:\w+ \w+:{port:04X}) 01 \S+ 02:(\w+)")
    lines = Path("/proc/net/tcp").read_text().splitlines()
    return [int(found[2], 16) / 100 for line in lines if (found := pattern.search(line))]


def test_a_peer_that_falls_silent_is_given_up_before_the_deadline(
    proxied: tuple[Ends, Proxy, Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a link that was cut: nothing says so. The peer is not asked once more."""
    monkeypatch.setattr(wire, "SILENT_AFTER_S", 0.6)
    _, proxy, link = proxied
    proxy.pause()
    started = time.monotonic()
    with pytest.raises(PeerGone, match="silent"):
        link.read(Piece(ids(1), ids(1)), timeout_s=10)
    assert 0.6 < time.monotonic() - started < 2.5
    assert proxy.num_accepted == 1


def test_a_link_that_is_slow_is_not_silent(
    proxied: tuple[Ends, Proxy, Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "SILENT_AFTER_S", 0.6)
    ends, proxy, link = proxied
    proxy.bytes_per_s = LARGE.page_bytes  # 0.09 s for what the proxy takes at once
    started = time.monotonic()
    link.read(Piece(ids(1), ids(1)), timeout_s=10)
    assert time.monotonic() - started > 0.8
    assert np.array_equal(pages_of(ends.pool)[1], pages_of(ends.source_pool)[1])


def test_a_link_that_idled_works_at_once(ends: Ends) -> None:
    time.sleep(0.5)
    started = time.monotonic()
    for _ in range(20):
        ends.link.read(Piece(ids(1), ids(1)), timeout_s=5)
    assert time.monotonic() - started < 2


def test_a_link_whose_connections_are_all_busy_is_overloaded_not_gone(
    proxied: tuple[Ends, Proxy, Link],
) -> None:
    """The peer is well: the worker must wait for its turn, not forget the peer."""
    ends, proxy, link = proxied
    proxy.pause()
    with ThreadPoolExecutor(MAX_CONNECTIONS) as threads:
        for i in range(MAX_CONNECTIONS):
            threads.submit(link.read, Piece(ids(i), ids(i)), 5)
        time.sleep(0.05)
        with pytest.raises(Overloaded, match="busy"):
            link.read(Piece(ids(9), ids(9)), timeout_s=0.1)
        proxy.resume()
    assert np.array_equal(pages_of(ends.pool)[:4], pages_of(ends.source_pool)[:4])


@contextlib.contextmanager
def misbehaving_source(answers: bytes, drip: bytes, ends: Ends) -> Iterator[bytes]:
    """Says hello well, then `answers` a request, then drips; yields its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def serve() -> None:
        with contextlib.suppress(OSError), listener.accept()[0] as connection:
            connection.recv(4096)
            hello = wire.SourceHello(wire.VERSION, "", geometry_of(ends.source_pool))
            connection.sendall(wire.hello_bytes(hello))
            connection.recv(4096)
            connection.sendall(answers)
            while not stop.wait(0.02):
                connection.sendall(drip)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        port = listener.getsockname()[1]
        yield msgspec.msgpack.encode(wire.TcpAddress("127.0.0.1", port, SETTINGS.incarnation))
    finally:
        stop.set()
        thread.join()
        listener.close()


def test_a_source_that_drips_does_not_outlast_the_timeout(ends: Ends) -> None:
    reply = wire.REPLY.pack(wire.OK, SMALL.page_bytes)
    with misbehaving_source(reply, b"x", ends) as address:
        link = ends.reader.connect(address, timeout_s=2)
        started = time.monotonic()
        with pytest.raises(PeerGone, match="silent"):
            link.read(Piece(ids(0), ids(0)), timeout_s=0.3)
        assert time.monotonic() - started < 1
        link.close()


@pytest.mark.parametrize(
    "reply",
    [
        wire.REPLY.pack(wire.OK, 1 << 40),
        wire.REPLY.pack(wire.OK, SMALL.page_bytes - 8),
        wire.REPLY.pack(0, SMALL.page_bytes),
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
    ],
)
def test_an_answer_that_makes_no_sense_is_a_dead_peer(ends: Ends, reply: bytes) -> None:
    with misbehaving_source(reply, b"", ends) as address:
        link = ends.reader.connect(address, timeout_s=2)
        with pytest.raises(PeerGone):
            link.read(Piece(ids(0), ids(0)), timeout_s=0.3)
        assert (pages_of(ends.pool) == 0xFF).all()
        link.close()


def test_a_reader_without_the_secret_is_refused(ends: Ends) -> None:
    stranger = TransportSettings(SETTINGS.incarnation, secret=b"guessed")
    reader = registry.make_reader("tcp", make_pool(SMALL, 1), stranger)
    with pytest.raises(IncompatiblePeer, match="refused our secret") as caught:
        reader.connect(ends.source.address(), timeout_s=2)
    assert caught.value.field == "secret"


def test_a_source_of_another_incarnation_is_refused(ends: Ends) -> None:
    address = msgspec.msgpack.decode(ends.source.address(), type=wire.TcpAddress)
    old = msgspec.structs.replace(address, incarnation="incarnation-0")
    with pytest.raises(IncompatiblePeer, match="refused our incarnation") as caught:
        ends.reader.connect(msgspec.msgpack.encode(old), timeout_s=2)
    assert caught.value.field == "incarnation"


def test_a_process_that_took_over_the_port_is_no_peer(proxied: tuple[Ends, Proxy, Link]) -> None:
    """The link knew a source that is gone; who answers now has another incarnation."""
    _, proxy, link = proxied
    successor_settings = TransportSettings("incarnation-2", secret=SETTINGS.secret)
    successor = registry.make_source("tcp", make_pool(LARGE, 1, 2), successor_settings)
    successor.start()
    address = msgspec.msgpack.decode(successor.address(), type=wire.TcpAddress)
    proxy.target = (address.host, address.port)
    proxy.cut()
    with pytest.raises(PeerGone, match="the source was replaced"):
        link.read(Piece(ids(0), ids(0)), timeout_s=2)
    successor.close()


def test_it_listens_where_it_is_told_and_says_how_it_is_reached() -> None:
    settings = TransportSettings("i", host="127.0.0.1", advertised_host="worker-7.example")
    source = registry.make_source("tcp", make_pool(SMALL, 1), settings)
    address = msgspec.msgpack.decode(source.address(), type=wire.TcpAddress)
    assert address.host == "worker-7.example"
    assert address.port > 0
    source.close()
    with pytest.raises(ConfigError, match=r"host='192\.0\.2\.1': cannot be bound"):
        registry.make_source("tcp", make_pool(SMALL, 1), TransportSettings("i", host="192.0.2.1"))
