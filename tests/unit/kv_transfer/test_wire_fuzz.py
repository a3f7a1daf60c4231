"""Whatever bytes come, the wire's decoders end at once, in little memory, with an error of ours."""

import socket
import time
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import IncompatiblePeer, PeerGone
from paceline.kv_transfer import multi, tcp_server
from paceline.kv_transfer import tcp_wire as wire
from paceline.kv_transfer.base import MAX_PIECE_PAGES
from paceline.kv_transfer.descriptor_wire import DescriptorAddress, DescriptorHello
from paceline.kv_transfer.geometry import Geometry, decode_peer
from paceline.kv_transfer.nixl_wire import NixlEndpoint
from tests.contract.ends import SETTINGS

MOST_BYTES = 4 * wire.MAX_HELLO_BYTES  # that one message may make us take
KINDS = (
    wire.TcpAddress,
    wire.ReaderHello,
    wire.SourceHello,
    DescriptorAddress,
    DescriptorHello,
    NixlEndpoint,
    multi.Addresses,
)

GOOD_HELLO = wire.hello_bytes(
    wire.ReaderHello(wire.VERSION, SETTINGS.incarnation, b"token", b"endpoint")
)
GOOD_ANSWER = wire.hello_bytes(
    wire.SourceHello(wire.VERSION, "", Geometry(8, "full", 2, 2, 3, 8, "float32", 16))
)
GOOD_REQUEST = wire.REQUEST.pack(wire.REQUEST_MAGIC, 3, 0) + bytes(24)


@st.composite
def damaged(draw: st.DrawFn, good: bytes) -> bytes:
    """`good`, cut, with bytes changed, or with others in between."""
    data = bytearray(good)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(["cut", "change", "insert"])):
            case "cut":
                del data[at:]
            case "change":
                data[at : at + 1] = draw(st.binary(min_size=1, max_size=4))
            case "insert":
                data[at:at] = draw(st.binary(max_size=64))
    return bytes(data)


def messages(good: bytes) -> st.SearchStrategy[bytes]:
    return st.one_of(damaged(good), st.binary(max_size=256))


def fed(data: bytes, read: Callable[[socket.socket], object]) -> object:
    """What `read` makes of `data`, after which the peer says no more. None: an error of ours."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        started = time.monotonic()
        try:
            return read(ours)
        except (PeerGone, IncompatiblePeer):
            return None
        finally:
            assert time.monotonic() - started < 1


@settings(deadline=None)
@given(messages(GOOD_HELLO))
def test_hellos_of_readers(data: bytes) -> None:
    hello = fed(data, lambda s: wire.receive_hello(s, wire.ReaderHello, time.monotonic() + 1))
    assert hello is None or isinstance(hello, wire.ReaderHello)


@settings(deadline=None)
@given(messages(GOOD_ANSWER))
def test_hellos_of_sources(data: bytes) -> None:
    hello = fed(data, lambda s: wire.receive_hello(s, wire.SourceHello, time.monotonic() + 1))
    assert hello is None or isinstance(hello, wire.SourceHello)


@settings(deadline=None)
@given(messages(GOOD_REQUEST))
def test_requests_for_pages(data: bytes) -> None:
    request = fed(data, lambda s: tcp_server._receive_request(s, 16))
    if request is not None:
        pages, num_tokens = request  # type: ignore[misc]
        assert 1 <= len(pages) <= MAX_PIECE_PAGES and 0 <= num_tokens <= 16


@settings(deadline=None)
@given(st.sampled_from(KINDS), st.binary(max_size=200))
def test_addresses_and_what_a_library_says(kind: type[object], data: bytes) -> None:
    try:
        assert decode_peer(data, kind, "address") is not None
    except IncompatiblePeer as error:
        assert error.field == "address"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head", [b"\xdd", b"\xdf", b"\xdb", b"\xc6"])
def test_a_length_without_its_bytes_takes_no_memory(kind: type[object], head: bytes) -> None:
    """Of an array, a map, a text and bytes: four thousand million of them."""
    tracemalloc.start()
    with pytest.raises(IncompatiblePeer):
        decode_peer(head + b"\xff" * 4 + b"\xa1" * 100, kind, "address")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < MOST_BYTES


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(IncompatiblePeer):
        decode_peer(b"\x91" * 60_000, wire.SourceHello, "hello")
