"""Whoever connects to the tcp source without being a reader: shut out, nothing disturbed."""

import contextlib
import pickle
import random
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from paceline.kv_transfer import tcp_server
from paceline.kv_transfer import tcp_wire as wire
from paceline.kv_transfer.base import MAX_PIECE_PAGES, Piece
from tests.contract.ends import SETTINGS, Ends, connected
from tests.contract.pools import SMALL, ids, make_pool, pages_of
from tests.support.waits import wait_for

TOKEN = wire.token_of(SETTINGS.secret, "tcp", SETTINGS.incarnation)


@pytest.fixture
def ends() -> Iterator[Ends]:
    with connected("tcp", make_pool(SMALL, 8, 1), make_pool(SMALL, 8)) as both:
        yield both


class Marker:
    """Unpickling it creates the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (open, (str(self.path), "w"))


def junk(kind: str, marker: Path) -> bytes:
    return {
        "pickle": pickle.dumps(Marker(marker)),
        "random bytes": random.Random(1).randbytes(4096),
        "one random byte": b"\xaa",
        "2 GB length": struct.pack("<I", 2 << 30),
        "2 GB hello": wire.MAGIC + struct.pack("<I", (2 << 30) - 1),
        "pickled hello": wire.MAGIC + struct.pack("<I", 60) + pickle.dumps(Marker(marker))[:60],
        "http": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    }[kind]


KINDS = [
    "pickle",
    "random bytes",
    "one random byte",
    "2 GB length",
    "2 GB hello",
    "pickled hello",
    "http",
]


def connect(ends: Ends) -> socket.socket:
    port = msgspec.msgpack.decode(ends.source.address(), type=wire.TcpAddress).port
    return socket.create_connection(("127.0.0.1", port), timeout=1)


def say_hello(connection: socket.socket) -> None:
    hello = wire.ReaderHello(wire.VERSION, SETTINGS.incarnation, TOKEN)
    connection.sendall(wire.hello_bytes(hello))
    answer = wire.receive_hello(connection, wire.SourceHello, time.monotonic() + 1)
    assert answer.refused == ""


def num_closed(connections: list[socket.socket]) -> int:
    """By the other end, which says nothing to any of them."""
    readable, _, _ = select.select(connections, [], [], 0)
    return len(readable)


def assert_closed(connection: socket.socket) -> None:
    """The other end closes within a second and says nothing."""
    started = time.monotonic()
    with contextlib.suppress(ConnectionResetError):
        assert connection.recv(1) == b""
    assert time.monotonic() - started < 1


def assert_undisturbed(ends: Ends) -> None:
    ends.link.read(Piece(ids(3), ids(4)), timeout_s=1)
    assert np.array_equal(pages_of(ends.pool)[4], pages_of(ends.source_pool)[3])


@pytest.mark.parametrize("kind", KINDS)
def test_lmdeploy_4804_junk_closes_the_connection(ends: Ends, tmp_path: Path, kind: str) -> None:
    """https://github.com/InternLM/lmdeploy/issues/4804: a pickle on an open port was executed."""
    with connect(ends) as connection:
        connection.sendall(junk(kind, tmp_path / "marker"))
        assert_closed(connection)
    assert not (tmp_path / "marker").exists()
    assert_undisturbed(ends)


@pytest.mark.parametrize("kind", KINDS)
def test_junk_after_a_good_hello_closes_it_too(ends: Ends, tmp_path: Path, kind: str) -> None:
    with connect(ends) as connection:
        say_hello(connection)
        connection.sendall(junk(kind, tmp_path / "marker"))
        assert_closed(connection)
    assert not (tmp_path / "marker").exists()
    assert_undisturbed(ends)


@pytest.mark.parametrize(
    ("num_pages", "num_tokens"), [(0, 0), (MAX_PIECE_PAGES + 1, 0), (2**32 - 1, 0), (1, 17)]
)
def test_requests_are_bounded(ends: Ends, num_pages: int, num_tokens: int) -> None:
    with connect(ends) as connection:
        say_hello(connection)
        connection.sendall(wire.REQUEST.pack(wire.REQUEST_MAGIC, num_pages, num_tokens))
        assert_closed(connection)
    assert_undisturbed(ends)


@pytest.mark.parametrize("page", [-1, 8, 2**62])
def test_page_numbers_are_checked_at_the_source(ends: Ends, page: int) -> None:
    """A peer that skips the reader's own check still reads nothing beyond the pool."""
    with connect(ends) as connection:
        say_hello(connection)
        for pages in ([0, page], [2]):
            request = wire.REQUEST.pack(wire.REQUEST_MAGIC, len(pages), 0)
            connection.sendall(request + np.array(pages, "<i8").tobytes())
            reply = wire.receive(connection, wire.REPLY.size, time.monotonic() + 1)
            if page in pages:
                assert wire.REPLY.unpack(reply) == (wire.NO_SUCH_PAGE, page)
        assert wire.REPLY.unpack(reply) == (wire.OK, SMALL.page_bytes)
        arrived = wire.receive(connection, SMALL.page_bytes, time.monotonic() + 1)
        assert arrived == pages_of(ends.source_pool)[2].tobytes()


def test_another_version_is_named(ends: Ends) -> None:
    with connect(ends) as connection:
        hello = wire.ReaderHello(wire.VERSION + 1, SETTINGS.incarnation, TOKEN)
        connection.sendall(wire.hello_bytes(hello))
        answer = wire.receive_hello(connection, wire.SourceHello, time.monotonic() + 1)
        assert answer == wire.SourceHello(wire.VERSION, "version", None)
        assert_closed(connection)


def test_who_says_nothing_is_shut_out(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_server, "HELLO_TIMEOUT_S", 0.2)
    with connect(ends) as silent, connect(ends) as half:
        half.sendall(wire.MAGIC[:3])
        assert_closed(silent)
        assert_closed(half)
    assert_undisturbed(ends)


def test_half_a_request_does_not_hold_a_thread(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_server, "REQUEST_TIMEOUT_S", 0.2)
    with connect(ends) as connection:
        say_hello(connection)
        connection.sendall(wire.REQUEST.pack(wire.REQUEST_MAGIC, 5, 0))
        assert_closed(connection)


def test_readers_are_bounded(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_server, "MAX_CONNECTIONS", 3)
    with connect(ends) as first, connect(ends) as second:
        say_hello(first)
        say_hello(second)
        with connect(ends) as too_many:
            hello = wire.ReaderHello(wire.VERSION, SETTINGS.incarnation, TOKEN)
            too_many.sendall(wire.hello_bytes(hello))
            assert_closed(too_many)
        assert_undisturbed(ends)


def test_strangers_give_way_to_whoever_comes_later(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many connect and say nothing: a reader is greeted, beside a link that reads on, and
    there are never more threads than the bounds allow."""
    monkeypatch.setattr(tcp_server, "HELLO_TIMEOUT_S", 60)
    monkeypatch.setattr(tcp_server, "MAX_CONNECTIONS", 4)
    monkeypatch.setattr(tcp_server, "MAX_STRANGERS", 4)

    def num_threads() -> int:
        return sum(thread.name == "tcp-source-reader" for thread in threading.enumerate())

    with contextlib.ExitStack() as crowd:
        strangers = []
        for _ in range(40):
            strangers.append(crowd.enter_context(connect(ends)))
            assert num_threads() <= 4 + 2 * 4
        wait_for(lambda: num_closed(strangers) >= 36)  # all have been looked at
        wait_for(lambda: num_threads() <= 1 + 4)  # the link's, and strangers who were not shut out
        say_hello(crowd.enter_context(connect(ends)))
        assert_undisturbed(ends)
