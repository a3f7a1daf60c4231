"""A nixl link: one-sided reads from one source."""

import threading
import time
from typing import Protocol

from paceline.core.errors import PeerGone
from paceline.kv_transfer.base import MAX_PIECE_PAGES, CellSums, LocalPool, Piece
from paceline.kv_transfer.geometry import check_destination_pages, check_source_pages
from paceline.kv_transfer.nixl_agent import NixlAgent
from paceline.kv_transfer.nixl_read import NixlRead
from paceline.kv_transfer.nixl_wire import NixlEndpoint
from paceline.kv_transfer.tcp_client import TcpClient


class Agents(Protocol):
    """Who owns the agent that all links read with."""

    def agent(self) -> NixlAgent: ...

    def replace(self, agent: NixlAgent) -> None:
        """Ends every read through `agent`; the next read takes another."""
        ...


class NixlLink:
    """The connection to the source stays open as a sign of life: nixl itself does not notice
    that a source has closed."""

    transport = "nixl"

    def __init__(
        self, pool: LocalPool, agents: Agents, client: TcpClient, endpoint: NixlEndpoint
    ) -> None:
        self._pool = pool
        self._agents = agents
        self._client = client
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._attached: tuple[NixlAgent, str] | None = None  # the agent, its name for the source
        self._num_reads = 0
        self._closed = False

    def read(self, piece: Piece, timeout_s: float) -> CellSums:
        assert len(piece.source_pages) <= MAX_PIECE_PAGES
        check_source_pages(piece.source_pages, self._client.num_source_pages)
        check_destination_pages(piece.destination_pages, self._pool.num_pages)
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._num_reads += 1
        try:
            self._check_alive()
            agent, peer = self.attach()
            address = self._endpoint.base_address
            parts = (piece, deadline, self._is_alive, self._agents.replace)
            sums = NixlRead(self._pool, agent, peer, address, *parts).run()
            self._check_alive()
            return sums
        finally:
            with self._lock:
                self._num_reads -= 1
                self._detach_when_closed()

    def close(self) -> None:
        """Reads that are going on end with PeerGone."""
        with self._lock:
            self._closed = True
            self._detach_when_closed()
        self._client.close()

    def attach(self) -> tuple[NixlAgent, str]:
        """The agent to read with, and its name for the source. Raises PeerGone."""
        agent = self._agents.agent()
        with self._lock:
            if self._attached is None or self._attached[0] is not agent:
                self._attached = agent, agent.add_peer(self._endpoint.metadata)
            return self._attached

    def _is_alive(self) -> bool:
        return not self._closed and self._client.is_usable()

    def _check_alive(self) -> None:
        if not self._is_alive():
            raise PeerGone("the link is closed" if self._closed else "the source died or closed")

    def _detach_when_closed(self) -> None:
        if self._closed and not self._num_reads and self._attached is not None:
            agent, _ = self._attached
            self._attached = None
            agent.remove_peer(self._endpoint.metadata)
