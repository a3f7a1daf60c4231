"""Calls of a source's KvTransferService over a channel that follows the certificates."""

import grpc

from paceline.core.errors import PeerGone
from paceline.core.tls import TlsConfig, credentials
from paceline.rpc.channel import connect
from paceline.v1 import kv_pb2_grpc


class SourceCalls:
    """`stub` makes the calls. After `renew` it is another one, whose connection uses the files of
    now: calls under way end over the old channel, which is closed at the next renewal. `close`
    cancels those under way; whoever asks for the stub afterwards hears that the peer is gone."""

    def __init__(self, endpoint: str, tls: TlsConfig) -> None:
        self._endpoint = endpoint
        self._tls = tls
        self._channels: list[grpc.aio.Channel] = []  # the newest last
        self._connect()

    @property
    def are_outdated(self) -> bool:
        return credentials(self._tls) is not self._credentials

    @property
    def stub(self) -> kv_pb2_grpc.KvTransferServiceStub:
        if not self._channels:
            raise PeerGone("the link to the source was closed")
        return self._stub

    async def renew(self) -> None:
        self._connect()
        await self._close(self._channels[:-2])

    async def close(self) -> None:
        await self._close(list(self._channels))

    def _connect(self) -> None:
        self._credentials = credentials(self._tls)
        # Of its own: that of a peer whose link has just failed may still be closing.
        channel = connect(self._endpoint, self._tls, is_shared=False)
        self._channels.append(channel)
        self._stub = kv_pb2_grpc.KvTransferServiceStub(channel)  # type: ignore[no-untyped-call]

    async def _close(self, channels: list[grpc.aio.Channel]) -> None:
        for channel in channels:
            self._channels.remove(channel)
            await channel.close(None)
