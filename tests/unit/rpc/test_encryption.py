"""gRPC between services with certificates: who is let in, what the others hear, rotation."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from paceline.core import tls
from paceline.core.errors import IncompatiblePeer, PacelineError, Unavailable
from paceline.core.tls import PLAIN, TlsConfig
from paceline.rpc import caller_token
from paceline.rpc.channel import connect, listen, make_server
from paceline.rpc.status import error_of
from paceline.v1 import kv_pb2, kv_pb2_grpc
from tests.support.certificates import Mount

SECRET = b"deployment"
ONE_WAY_S = 0.08


class Kv(kv_pb2_grpc.KvTransferServiceServicer):
    """Answers with the certificate that its caller has shown."""

    async def Describe(
        self, request: kv_pb2.DescribeRequest, context: Any
    ) -> kv_pb2.DescribeResponse:
        (shown,) = context.auth_context().get("x509_pem_cert", (b"none",))
        return kv_pb2.DescribeResponse(content_digest=shown.decode())

    async def KeepLeases(
        self, request_iterator: AsyncIterator[kv_pb2.LeaseBeat], context: Any
    ) -> AsyncIterator[kv_pb2.LeaseBeatReply]:
        async for beat in request_iterator:
            yield kv_pb2.LeaseBeatReply(unknown_lease_ids=beat.lease_ids)


@asynccontextmanager
async def serving(config: TlsConfig) -> AsyncIterator[str]:
    """Yields the endpoint."""
    server = make_server(SECRET, tls=config)
    kv_pb2_grpc.add_KvTransferServiceServicer_to_server(Kv(), server)  # type: ignore[no-untyped-call]
    port = listen(server, "127.0.0.1:0", config)
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


def stub(channel: grpc.aio.Channel) -> kv_pb2_grpc.KvTransferServiceStub:
    return kv_pb2_grpc.KvTransferServiceStub(channel)  # type: ignore[no-untyped-call]


async def shown(endpoint: str, config: TlsConfig) -> str:
    """The certificate that a new channel shows. Raises what its call ends with."""
    async with connect(endpoint, config) as channel:
        try:
            metadata = caller_token.metadata(SECRET)
            request = kv_pb2.DescribeRequest()
            answer = await stub(channel).Describe(request, timeout=20, metadata=metadata)
        except grpc.aio.AioRpcError as failure:
            raise error_of(failure) from failure
    return str(answer.content_digest)


async def refusal(endpoint: str, config: TlsConfig) -> PacelineError:
    with pytest.raises(PacelineError) as caught:
        await shown(endpoint, config)
    assert str(Path("/tmp")) not in caught.value.message and endpoint not in caught.value.message
    return caught.value


async def test_services_of_one_authority_show_each_other_their_certificates(mount: Mount) -> None:
    async with serving(mount.config()) as endpoint:
        assert (await shown(endpoint, mount.config())).encode() in (
            mount.folder / "tls.crt"
        ).read_bytes()


async def test_the_name_that_an_address_belongs_to_plays_no_part(mount: Mount) -> None:
    config = mount.config()
    async with (
        serving(config) as endpoint,
        connect(endpoint, config, authority="router:9100", is_shared=False) as channel,
    ):
        metadata = caller_token.metadata(SECRET)
        request = kv_pb2.DescribeRequest()
        assert await stub(channel).Describe(request, timeout=20, metadata=metadata)


async def test_a_slow_network_does_not_end_the_handshake(mount: Mount) -> None:
    """gRPC gives an attempt to connect no longer than it is told."""

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                await asyncio.sleep(ONE_WAY_S)
                writer.write(data)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = endpoint.rpartition(":")
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(forward(reader, far_writer), forward(far_reader, writer))
        carried.set()

    config, carried = mount.config(), asyncio.Event()
    async with (
        serving(config) as endpoint,
        await asyncio.start_server(carry, "127.0.0.1", 0) as slow,
    ):
        port = slow.sockets[0].getsockname()[1]
        assert await shown(f"127.0.0.1:{port}", config)
        await asyncio.wait_for(carried.wait(), 20)


async def test_a_secret_is_asked_for_all_the_same(mount: Mount) -> None:
    async with (
        serving(mount.config()) as endpoint,
        connect(endpoint, mount.config()) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub(channel).Describe(kv_pb2.DescribeRequest(), timeout=20)
    assert error_of(caught.value).field == "secret"


async def test_who_does_not_encrypt_is_told_what_to_set(mount: Mount) -> None:
    async with serving(mount.config()) as endpoint:
        error = await refusal(endpoint, PLAIN)
    assert isinstance(error, Unavailable) and "asks for TLS" in error.message
    async with serving(PLAIN) as endpoint:
        error = await refusal(endpoint, mount.config())
    assert isinstance(error, IncompatiblePeer) and error.field == "tls"
    assert "does not speak TLS: give every service PACELINE_TLS_CA" in error.message


async def test_another_authority_is_refused_by_both_ends(mount: Mount, tmp_path: Path) -> None:
    stranger = Mount(tmp_path / "other")
    async with serving(mount.config()) as endpoint:
        error = await refusal(endpoint, stranger.config())
    assert error.field == "tls" and "authority not in PACELINE_TLS_CA" in error.message


@pytest.mark.usefixtures("careless")
async def test_a_client_with_a_certificate_of_another_authority_is_refused(
    mount: Mount, tmp_path: Path
) -> None:
    stranger, ours = Mount(tmp_path / "other").config(), mount.config()
    mixed = TlsConfig(ca=ours.ca, cert=stranger.cert, key=stranger.key)
    async with serving(ours) as endpoint:
        assert "refuses our certificate" in (await refusal(endpoint, mixed)).message


@pytest.mark.usefixtures("careless")
async def test_expired_certificates_are_refused(mount: Mount, tmp_path: Path) -> None:
    late = Mount(tmp_path / "late", mount.authority)
    late.issue(expired=True)
    async with serving(mount.config()) as endpoint:
        error = await refusal(endpoint, late.config())
    assert "refuses our certificate (its time" in error.message
    async with serving(late.config()) as endpoint:
        error = await refusal(endpoint, mount.config())
    assert error.field == "tls" and error.message == "the peer's certificate has expired"


@pytest.mark.usefixtures("careless")
async def test_what_the_authority_signed_for_others_is_refused(
    mount: Mount, tmp_path: Path
) -> None:
    """An authority may serve a whole cluster."""
    neighbour = Mount(tmp_path / "neighbour", mount.authority)
    neighbour.issue("postgres")
    async with serving(mount.config()) as endpoint:
        error = await refusal(endpoint, neighbour.config())
    assert isinstance(error, IncompatiblePeer) and error.field == "tls"
    assert error.message == "the caller's certificate does not carry the name of PACELINE_TLS_NAME"
    async with serving(neighbour.config()) as endpoint:
        error = await refusal(endpoint, mount.config())
    assert "does not carry the name of PACELINE_TLS_NAME" in error.message


async def test_new_certificates_count_for_new_connections_and_streams_go_on(mount: Mount) -> None:
    config = mount.config()

    async def beats() -> AsyncIterator[kv_pb2.LeaseBeat]:
        for lease_id in ("before", "after"):
            yield kv_pb2.LeaseBeat(lease_ids=[lease_id])
            await rotated.wait()

    async def server_certificate() -> str:
        host, _, port = endpoint.rpartition(":")
        held = tls.credentials(config)
        assert held is not None
        _, writer = await asyncio.open_connection(
            host, int(port), ssl=held.client, server_hostname=config.name
        )
        found: str = writer.get_extra_info("peercert")["serialNumber"]
        writer.close()
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            await writer.wait_closed()
        return found

    rotated = asyncio.Event()
    async with serving(config) as endpoint, connect(endpoint, config) as channel:
        metadata = caller_token.metadata(SECRET)
        stream = stub(channel).KeepLeases(beats(), metadata=metadata)
        assert (await stream.read()).unknown_lease_ids == ["before"]
        serials = [await server_certificate()]
        mount.issue()
        serials.append(await server_certificate())
        assert int(serials[1], 16) == mount.serial() != int(serials[0], 16)
        assert (await shown(endpoint, config)).encode() in config.cert.read_bytes()
        rotated.set()
        assert (await stream.read()).unknown_lease_ids == ["after"]
