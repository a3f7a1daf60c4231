"""One read over nixl: batches in flight ahead of the one that is summed."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import structlog

from paceline.core.errors import PeerGone
from paceline.kernels.pages import sum_pages
from paceline.kv_transfer.base import CellSums, LocalPool, Piece
from paceline.kv_transfer.nixl_agent import NixlAgent, Transfer
from paceline.kv_transfer.nixl_regions import regions_of

_log = structlog.get_logger("paceline.kv_transfer")

BATCH_BYTES = 4 << 20  # of one transfer
WINDOW = 3  # transfers of one read, in flight or waiting to be
POLL_S = 0.05  # between looks at whether the source lives
END_S = 1.0  # for transfers in flight whose read has failed; then their agent is replaced


@dataclass(frozen=True, slots=True)
class NixlRead:
    pool: LocalPool
    agent: NixlAgent
    peer: str
    source_address: int  # of the source's pool
    piece: Piece
    deadline: float
    is_alive: Callable[[], bool]
    replace: Callable[[NixlAgent], None]

    def run(self) -> CellSums:
        """Returns, or raises PeerGone, when nothing of it is in flight any more."""
        num_pages = len(self.piece.source_pages)
        step = max(1, BATCH_BYTES // self.pool.group.page_bytes)
        batches = [slice(i, i + step) for i in range(0, num_pages, step)]
        sums = np.empty((num_pages, self.pool.group.num_heads), dtype=np.uint64)
        submit = self.agent.submit if len(batches) > 1 else self.agent.post
        pending: deque[Transfer] = deque()
        num_submitted = 0
        try:
            for i, batch in enumerate(batches):
                while num_submitted < min(len(batches), i + WINDOW):
                    pending.append(self._transfer_of(batches[num_submitted]))
                    submit(pending[-1])
                    num_submitted += 1
                self._finish(pending[0])
                pending.popleft()
                sums[batch] = self._sums(batch)
        finally:
            self._settle(pending)
        return sums

    def _transfer_of(self, batch: slice) -> Transfer:
        group, piece = self.pool.group, self.piece
        local = regions_of(
            self.agent.base_address, piece.destination_pages[batch], group, piece.num_tokens
        )
        remote = regions_of(self.source_address, piece.source_pages[batch], group, piece.num_tokens)
        return Transfer(self.peer, local, remote)

    def _finish(self, transfer: Transfer) -> None:
        while not self.agent.wait(transfer, POLL_S):
            if not self.is_alive():
                raise PeerGone("the source died or closed, or the link was closed")
            if time.monotonic() >= self.deadline:
                raise PeerGone("the source is silent")
        if transfer.error:
            raise PeerGone(f"the read failed: {transfer.error}")

    def _sums(self, batch: slice) -> CellSums:
        pages = self.piece.destination_pages[batch]
        return sum_pages(self.pool.memory, pages, self.pool.group, self.piece.num_tokens)

    def _settle(self, pending: deque[Transfer]) -> None:
        """What cannot be cancelled may still write into our pages: waits, and at last ends it."""
        for transfer in pending:
            self.agent.give_up(transfer)
        ends = time.monotonic() + END_S
        if not all(self.agent.wait(t, max(0.0, ends - time.monotonic())) for t in pending):
            _log.error("a nixl read does not end; its agent is replaced", peer=self.peer)
            self.replace(self.agent)
