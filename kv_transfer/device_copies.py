"""Copies pages from a mapped pool into the pool of this process, on a device, beside its compute.

A burst is one kernel on a stream of its own, and costs the same few calls however many pages it
moves. It runs at full speed: a kernel that holds a few multiprocessors for long costs a decode step
more, for fewer bytes, than short bursts on all of them. Beside a batch there are pauses between
bursts, as long as what they cost the batch calls for; the batch computes at higher priority.

From another device a link of a tenth of that speed brings the pages. Programs that wait for it
would hold every multiprocessor, so beside a batch there are only as many as keep the link busy,
and no pauses.
"""

import queue
import threading
import time

import numpy as np
import torch

from paceline.core.errors import Overloaded
from paceline.core.kv_layout import WORD_BYTES, PageGroup
from paceline.kernels.pages import copy_pages_on_device
from paceline.kv_transfer.base import MAX_PIECE_PAGES, CellSums, DevicePool, Piece

NUM_LANES = 4  # copies at once
BURST_BYTES = 1 << 30  # beside a batch, as measured on an H200 (docs/transports.md)
LINK_PROGRAMS = 64  # from another device; docs/transports.md has what others cost


class DeviceCopies:
    """Thread-safe. Compiles its kernels and allocates its buffers when it is made."""

    def __init__(self, pool: DevicePool) -> None:
        self._pool = pool
        self._words = as_pages(pool.memory, pool.group, pool.num_pages)
        self._burst_pages = max(1, BURST_BYTES // pool.group.page_bytes)
        self._link_turn = threading.Lock()  # of a burst over a link, beside a batch
        self._free: queue.SimpleQueue[_Lane] = queue.SimpleQueue()
        device = pool.memory.device
        scratch = torch.zeros((2, self._words.shape[1]), dtype=torch.int64, device=device)
        pages = np.zeros(1, np.int64), np.ones(1, np.int64)
        for _ in range(NUM_LANES):
            lane = _Lane(pool)
            for num_tokens in (None, 1):
                lane.copy(scratch, scratch, Piece(*pages, num_tokens))
            self._free.put(lane)

    def copy(self, source: torch.Tensor, piece: Piece, deadline: float) -> CellSums:
        """From `source`, words [pages, page_bytes / 8], whose pages exist, as do ours.

        A burst that has begun is waited for, as nothing can stop it. Raises Overloaded when no
        lane is free, or not all is copied, before `deadline`, on time.monotonic().
        """
        try:
            lane = self._free.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise Overloaded(f"{NUM_LANES} other copies are in flight") from None
        try:
            return self._in_bursts(lane, source, piece, deadline)
        finally:
            self._free.put(lane)

    def _in_bursts(
        self, lane: "_Lane", source: torch.Tensor, piece: Piece, deadline: float
    ) -> CellSums:
        num_pages = len(piece.source_pages)
        if not self._pool.pace.is_busy():
            return lane.copy(self._words, source, piece).copy()
        sums = np.empty((num_pages, self._pool.group.num_heads), np.uint64)
        for start in range(0, num_pages, self._burst_pages):
            if start and time.monotonic() > deadline:
                raise Overloaded(f"{start} of {num_pages} pages were copied in time")
            rows = slice(start, start + self._burst_pages)
            pages = piece.source_pages[rows], piece.destination_pages[rows]
            sums[rows] = self._paced(lane, source, Piece(*pages, piece.num_tokens))
        return sums

    def _paced(self, lane: "_Lane", source: torch.Tensor, burst: Piece) -> CellSums:
        """One burst at a time, whatever the lane, and when the batch allows it."""
        if source.device != self._words.device:
            with self._link_turn:
                return lane.copy(self._words, source, burst, LINK_PROGRAMS)
        sums = np.empty(0, np.uint64)

        def copy() -> float:
            nonlocal sums
            sums = lane.copy(self._words, source, burst)
            return lane.seconds()

        self._pool.pace.burst(copy)
        return sums


class _Lane:
    """A stream, and memory for what one burst needs beside the pages."""

    def __init__(self, pool: DevicePool) -> None:
        device, heads = pool.memory.device, pool.group.num_heads
        self._group = pool.group
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._begun = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._done = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._ids = torch.empty(2 * MAX_PIECE_PAGES, dtype=torch.int64, device=device)
        self._sums = torch.empty((MAX_PIECE_PAGES, heads), dtype=torch.int64, device=device)
        self._host_ids = torch.empty_like(self._ids, device="cpu", pin_memory=True)
        self._host_sums = torch.empty_like(self._sums, device="cpu", pin_memory=True)

    def copy(
        self,
        words: torch.Tensor,
        source: torch.Tensor,
        piece: Piece,
        max_programs: int | None = None,
    ) -> CellSums:
        """Returns when it is done. The sums are valid until the next call."""
        num_pages = len(piece.source_pages)
        host_ids, ids = self._host_ids[: 2 * num_pages], self._ids[: 2 * num_pages]
        host_sums, sums = self._host_sums[:num_pages], self._sums[:num_pages]
        np.concatenate((piece.destination_pages, piece.source_pages), out=host_ids.numpy())
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            ids.copy_(host_ids, non_blocking=True)
            self._begun.record()
            copy_pages_on_device(
                words, source, ids, sums, self._group, piece.num_tokens, max_programs
            )
            host_sums.copy_(sums, non_blocking=True)
            self._done.record()
        self._done.synchronize()
        return host_sums.numpy().view(np.uint64)

    def seconds(self) -> float:
        """Of the last burst, on the device."""
        milliseconds: float = self._begun.elapsed_time(self._done)
        return milliseconds / 1000


def as_pages(memory: torch.Tensor, group: PageGroup, num_pages: int) -> torch.Tensor:
    """Bytes of a pool as words: int64 [pages, page_bytes / 8]."""
    used = memory[: num_pages * group.page_bytes].view(torch.int64)
    return used.view(num_pages, group.page_bytes // WORD_BYTES)
