"""Reader of nixl: all its links read through one agent, in which the pool is registered.

An agent can be replaced: a read that neither ends nor can be cancelled ends with its agent.
"""

import threading
import time

import numpy as np

from paceline.core.errors import IncompatiblePeer, PeerGone
from paceline.kv_transfer import tcp_wire as wire
from paceline.kv_transfer.base import LocalPool, TransportSettings
from paceline.kv_transfer.geometry import decode_peer
from paceline.kv_transfer.nixl_agent import NixlAgent, Transfer
from paceline.kv_transfer.nixl_link import NixlLink
from paceline.kv_transfer.nixl_regions import regions_of
from paceline.kv_transfer.nixl_wire import NixlEndpoint
from paceline.kv_transfer.tcp_client import TcpClient

# Below it UCX reads by messages over TCP, which the source's UCX answers in software (12 MB/s are
# expected then): slower than `tcp`, and a source whose reader dies meanwhile is aborted by an
# assertion of UCX (seen with 1.5.1).
MIN_BYTES_PER_SECOND = 100e6


class NixlReader:
    transport = "nixl"

    def __init__(self, pool: LocalPool, settings: TransportSettings) -> None:
        self._pool = pool
        self._settings = settings
        self._lock = threading.Lock()
        self._agent: NixlAgent | None = None  # until the first link

    def connect(self, address: bytes, timeout_s: float) -> NixlLink:
        deadline = time.monotonic() + timeout_s
        peer = decode_peer(address, wire.TcpAddress, "address")
        token = wire.token_of(self._settings.secret, self.transport, peer.incarnation)
        hello = wire.ReaderHello(wire.VERSION, peer.incarnation, token)
        client = TcpClient(self._pool, peer, hello, self._settings.tls, deadline)
        try:
            endpoint = decode_peer(client.endpoint, NixlEndpoint, "endpoint")
            link = NixlLink(self._pool, self, client, endpoint)
            self._check(*link.attach(), endpoint.base_address, deadline)
        except BaseException:
            client.close()
            raise
        return link

    def agent(self) -> NixlAgent:
        with self._lock:
            if self._agent is None:
                self._agent = NixlAgent("reader", self._pool)
            return self._agent

    def replace(self, agent: NixlAgent) -> None:
        """Ends every read through `agent`; the next one makes another."""
        with self._lock:
            if self._agent is agent:
                self._agent = None
                agent.close()

    def close(self) -> None:
        with self._lock:
            if self._agent is not None:
                self._agent.close()
                self._agent = None

    def _check(self, agent: NixlAgent, peer: str, source_address: int, deadline: float) -> None:
        """Asks what a page would take, then reads a few bytes, which opens the connection."""
        group, page = self._pool.group, np.zeros(1, np.int64)
        local = regions_of(agent.base_address, page, group, None)
        remote = regions_of(source_address, page, group, None)
        seconds = agent.estimated_seconds(peer, local, remote)
        if seconds and group.page_bytes / seconds < MIN_BYTES_PER_SECOND:
            raise IncompatiblePeer(
                "no RDMA between the ends, and nixl would read in software over TCP",
                field="transport",
            )
        scratch = agent.scratch
        remote[0, 1] = scratch[0, 1]
        first = Transfer(peer, scratch, remote)
        agent.submit(first)
        if not agent.wait(first, max(0.0, deadline - time.monotonic())):
            raise PeerGone("the source does not answer nixl")
        if first.error:
            raise PeerGone(f"the source does not answer nixl: {first.error}")
