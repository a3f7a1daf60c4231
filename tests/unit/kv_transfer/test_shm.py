"""What only shm has: who may ask, and what memory a reader dares to map."""

import contextlib
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from paceline.core.errors import ConfigError, IncompatiblePeer, PeerGone
from paceline.kv_transfer import descriptor_source, registry
from paceline.kv_transfer.base import LocalPool, Piece
from paceline.kv_transfer.descriptor_wire import VERSION, DescriptorAddress, DescriptorHello
from paceline.kv_transfer.geometry import geometry_of
from paceline.kv_transfer.host import host_identity
from tests.contract.ends import SETTINGS, Ends, connected
from tests.contract.pools import SMALL, ids, make_pool


@pytest.fixture
def ends() -> Iterator[Ends]:
    with connected("shm", make_pool(SMALL, 8, 1), make_pool(SMALL, 8)) as both:
        yield both


def address_of(ends: Ends) -> DescriptorAddress:
    return msgspec.msgpack.decode(ends.source.address(), type=DescriptorAddress)


def test_a_pool_that_cannot_be_mapped_is_not_exported() -> None:
    memory = memoryview(bytearray(SMALL.page_bytes))
    with pytest.raises(ConfigError, match="needs a pool in a memfd"):
        registry.make_source("shm", LocalPool(memory, SMALL, 1), SETTINGS)
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    with pytest.raises(ConfigError, match="sealed size"):
        registry.make_source("shm", LocalPool(memory, SMALL, 1, fd), SETTINGS)
    os.close(fd)


def test_readers_get_a_descriptor_that_cannot_write(ends: Ends) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(1)
        connection.connect(address_of(ends).socket_name)
        _, (fd,), _, _ = socket.recv_fds(connection, 1024, 1)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(fd, b"x", 0)
        os.close(fd)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_gets_nothing(ends: Ends) -> None:
    program = (
        "import os, socket, sys\nos.setuid(65534)\n"
        "connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "connection.settimeout(2)\n"
        f"connection.connect({address_of(ends).socket_name!r})\n"
        "print(socket.recv_fds(connection, 1024, 1)[:2])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "(b'', [])"
    ends.link.read(Piece(ids(0), ids(0)), timeout_s=1)


@pytest.mark.parametrize(
    ("field", "value"), [("host", "another"), ("incarnation", "incarnation-0")]
)
def test_a_source_that_is_not_the_expected_one_is_refused(
    ends: Ends, field: str, value: str
) -> None:
    address = msgspec.structs.replace(address_of(ends), **{field: value})
    with pytest.raises(IncompatiblePeer) as caught:
        ends.reader.connect(msgspec.msgpack.encode(address), timeout_s=1)
    assert caught.value.field == field


@contextlib.contextmanager
def lying_source(fds: list[int], num_pages: int) -> Iterator[bytes]:
    """Answers one reader with a good hello and the wrong memory; yields its address."""
    geometry = geometry_of(LocalPool(memoryview(b""), SMALL, num_pages))
    size = num_pages * SMALL.page_bytes
    hello = msgspec.msgpack.encode(DescriptorHello(VERSION, SETTINGS.incarnation, geometry, size))
    name = f"\0paceline-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(name)
        listener.listen()

        def answer() -> None:
            with listener.accept()[0] as connection:
                socket.send_fds(connection, [hello], fds)

        thread = threading.Thread(target=answer)
        thread.start()
        yield msgspec.msgpack.encode(DescriptorAddress(host_identity(), name, SETTINGS.incarnation))
        thread.join()


def test_memory_that_can_shrink_is_not_mapped(ends: Ends) -> None:
    """A source that truncates it later would kill its readers by SIGBUS."""
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 8 * SMALL.page_bytes)
    with (
        lying_source([fd], 8) as address,
        pytest.raises(IncompatiblePeer, match="could shrink") as caught,
    ):
        ends.reader.connect(address, timeout_s=1)
    assert caught.value.field == "pool_bytes"
    os.close(fd)


def test_memory_shorter_than_it_was_said_to_be_is_not_mapped(ends: Ends) -> None:
    with (
        lying_source([ends.source_pool.fd], 9) as address,
        pytest.raises(IncompatiblePeer) as caught,
    ):
        ends.reader.connect(address, timeout_s=1)
    assert caught.value.field == "pool_bytes"


def test_an_answer_without_memory_is_a_dead_peer(ends: Ends) -> None:
    with lying_source([], 8) as address, pytest.raises(PeerGone):
        ends.reader.connect(address, timeout_s=1)


def test_a_source_without_descriptors_waits_for_some_and_does_not_spin(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []
    wait = descriptor_source._wait
    monkeypatch.setattr(descriptor_source, "_wait", lambda s: looks.append(1) or wait(s))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as reader:
        highest = max(map(int, os.listdir("/proc/self/fd")))
        with contextlib.ExitStack() as taken:
            while (fd := os.dup(reader.fileno())) < highest:  # none is left below the limit
                taken.callback(os.close, fd)
            taken.callback(os.close, fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, (fd + 1, hard))
            taken.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
            reader.connect(address_of(ends).socket_name)
            time.sleep(0.5)
            assert len(looks) < 100
        reader.settimeout(5)
        assert reader.recv(1), "it is greeted in the end"


def test_connections_are_bounded(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptor_source, "MAX_CONNECTIONS", 2)
    address = ends.source.address()
    second = ends.reader.connect(address, timeout_s=1)
    with pytest.raises(PeerGone):
        ends.reader.connect(address, timeout_s=1)
    second.close()
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:  # the source notices that it left, then has room again
        with contextlib.suppress(PeerGone):
            ends.reader.connect(address, timeout_s=1).close()
            return
    pytest.fail("a reader that left still counts")
