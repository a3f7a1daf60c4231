"""tcp through TLS: who is let in, what the others hear, rotation."""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from paceline.core.errors import IncompatiblePeer, PacelineError, PeerGone
from paceline.core.tls import PLAIN, TlsConfig
from paceline.kv_transfer import registry, tcp_server, tls_socket
from paceline.kv_transfer import tcp_wire as wire
from paceline.kv_transfer.base import Link, Piece
from tests.contract.ends import SETTINGS, connected
from tests.contract.pools import LARGE, SMALL, ids, make_pool, pages_of
from tests.contract.transports import installed
from tests.support.certificates import Mount


@contextmanager
def serving(config: TlsConfig) -> Iterator[bytes]:
    """Yields the address of a source."""
    source = registry.make_source("tcp", make_pool(SMALL, 2, 1), replace(SETTINGS, tls=config))
    source.start()
    yield source.address()
    source.close()


def connect(address: bytes, config: TlsConfig) -> Link:
    settings = replace(SETTINGS, tls=config)
    return registry.make_reader("tcp", make_pool(SMALL, 2), settings).connect(address, 2)


def disguised(address: bytes, *, is_encrypted: bool) -> bytes:
    """As if the source had been started anew with other settings behind it."""
    peer = msgspec.msgpack.decode(address, type=wire.TcpAddress)
    changed = wire.TcpAddress(peer.host, peer.port, peer.incarnation, is_encrypted)
    return msgspec.msgpack.encode(changed)


def refusal(address: bytes, config: TlsConfig) -> PacelineError:
    started = time.monotonic()
    with pytest.raises((PeerGone, IncompatiblePeer)) as caught:
        connect(address, config)
    assert time.monotonic() - started < 2
    assert "/" not in caught.value.message
    return caught.value  # type: ignore[no-any-return]


def test_large_pages_arrive_whole(mount: Mount) -> None:
    pools = make_pool(LARGE, 3, 1), make_pool(LARGE, 3)
    with connected("tcp", *pools, replace(SETTINGS, tls=mount.config())) as ends:
        ends.link.read(Piece(ids(0, 2), ids(1, 0)), timeout_s=10)
    assert np.array_equal(pages_of(pools[1])[[1, 0]], pages_of(pools[0])[[0, 2]])


def test_nobody_who_listens_sees_the_pages(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = bytearray()
    take = tls_socket.TlsSocket._fill

    def listen(self: tls_socket.TlsSocket) -> int:
        num_bytes = take(self)
        heard.extend(self._chunk[:num_bytes])
        return num_bytes

    monkeypatch.setattr(tls_socket.TlsSocket, "_fill", listen)
    pools = make_pool(SMALL, 3, 1), make_pool(SMALL, 3)
    with connected("tcp", *pools, replace(SETTINGS, tls=mount.config())) as ends:
        ends.link.read(Piece(ids(0), ids(0)), timeout_s=5)
    page = pages_of(pools[0])[0].tobytes()
    assert len(heard) > len(page)
    assert page[:16] not in heard and wire.MAGIC not in heard


def test_both_ends_must_encrypt_and_hear_what_to_set(mount: Mount) -> None:
    for source, reader in ((mount.config(), PLAIN), (PLAIN, mount.config())):
        with serving(source) as address:
            error = refusal(address, reader)
            assert isinstance(error, IncompatiblePeer) and error.field == "tls"
            assert "give every service PACELINE_TLS_CA" in error.message
            behind = refusal(disguised(address, is_encrypted=reader.is_on), reader)
            assert isinstance(behind, PeerGone)
            assert reader is PLAIN or "PACELINE_TLS_CA" in behind.message


def test_another_authority_is_refused(mount: Mount, tmp_path: Path) -> None:
    stranger = Mount(tmp_path / "other").config()
    with serving(mount.config()) as address:
        assert "authority not in PACELINE_TLS_CA" in refusal(address, stranger).message


@pytest.mark.usefixtures("careless")
def test_certificates_of_readers_are_checked_too(mount: Mount, tmp_path: Path) -> None:
    ours, stranger = mount.config(), Mount(tmp_path / "other").config()
    late = Mount(tmp_path / "late", mount.authority)
    late.issue(expired=True)
    neighbour = Mount(tmp_path / "neighbour", mount.authority)
    neighbour.issue("postgres")
    with serving(ours) as address:
        mixed = TlsConfig(ca=ours.ca, cert=stranger.cert, key=stranger.key)
        error = refusal(address, mixed)
        assert error.field == "tls"
        assert "refuses our certificate: its authority" in error.message
        error = refusal(address, late.config())
        assert error.message == "the peer refuses our certificate: it has expired"
        refusal(address, neighbour.config())
    for mounted, why in ((late, "has expired"), (neighbour, "name of PACELINE_TLS_NAME")):
        with serving(mounted.config()) as address:
            assert why in refusal(address, ours).message


def test_the_secret_is_asked_for_all_the_same(mount: Mount) -> None:
    settings = replace(SETTINGS, tls=mount.config(), secret=b"guessed")
    reader = registry.make_reader("tcp", make_pool(SMALL, 2), settings)
    with serving(mount.config()) as address, pytest.raises(IncompatiblePeer) as caught:
        reader.connect(address, 2)
    assert caught.value.field == "secret"


def test_new_certificates_count_for_new_connections_and_links_go_on(
    mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    serials = []
    shake = tls_socket.TlsSocket.shake_hands

    def note(self: tls_socket.TlsSocket, name: str, deadline: float) -> None:
        shake(self, name, deadline)
        serials.append(int(str(dict(self._tls.getpeercert() or {})["serialNumber"]), 16))

    monkeypatch.setattr(tls_socket.TlsSocket, "shake_hands", note)
    config, first = mount.config(), mount.serial()
    with serving(config) as address:
        old = connect(address, config)
        mount.issue()
        old.read(Piece(ids(0), ids(0)), timeout_s=2)
        connect(address, config).close()
        old.close()
    assert serials == [first, first, mount.serial(), mount.serial()]


def test_who_begins_tls_and_falls_silent_is_shut_out(
    mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_server, "HELLO_TIMEOUT_S", 0.2)
    with serving(mount.config()) as address:
        peer = msgspec.msgpack.decode(address, type=wire.TcpAddress)
        with socket.create_connection((peer.host, peer.port), timeout=5) as silent:
            silent.sendall(b"\x16\x03\x01")
            assert silent.recv(1) == b""


def test_a_connection_whose_keys_are_worn_out_is_replaced(
    mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = make_pool(SMALL, 2, 1), make_pool(SMALL, 2)
    with connected("tcp", *pools, replace(SETTINGS, tls=mount.config())) as ends:
        (first,) = ends.link._idle  # type: ignore[attr-defined]
        monkeypatch.setattr(tls_socket, "MAX_BYTES", 1)
        ends.link.read(Piece(ids(0), ids(0)), timeout_s=2)
        (second,) = ends.link._idle  # type: ignore[attr-defined]
    assert second is not first


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ucx", "nixl"])
def test_fabrics_hand_over_their_keys_inside_tls(
    mount: Mount, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    installed(name)
    hellos = []
    shake = tls_socket.TlsSocket.shake_hands
    monkeypatch.setattr(
        tls_socket.TlsSocket,
        "shake_hands",
        lambda self, *rest: (shake(self, *rest), hellos.append(self)),
    )
    pools = make_pool(LARGE, 2, 1), make_pool(LARGE, 2)
    with connected(name, *pools, replace(SETTINGS, tls=mount.config())) as ends:
        ends.link.read(Piece(ids(1), ids(0)), timeout_s=20)
    assert np.array_equal(pages_of(pools[1])[0], pages_of(pools[0])[1])
    assert len(hellos) == 2


@pytest.mark.parametrize("name", ["ucx", "nixl"])
def test_where_encryption_is_required_fabrics_must_be_declared(mount: Mount, name: str) -> None:
    required = mount.config(encryption="required")
    declared = mount.config(encryption="required", fabric_encrypted=True)
    assert "set tls_fabric_encrypted" in registry.why_confined(name, required)
    assert registry.why_confined(name, declared) == ""
    assert registry.why_confined(name, mount.config()) == ""
    for host_only in ("shm", "cuda_ipc", "tcp"):
        assert registry.why_confined(host_only, required) == ""


def test_auto_leaves_out_what_may_not_be_used(
    mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_is_of_use", lambda name, on_device: name != "cuda_ipc")
    assert registry.names_of(("auto",), tls=mount.config(encryption="required")) == ["shm", "tcp"]
    assert "ucx" in registry.names_of(("auto",), tls=mount.config())
