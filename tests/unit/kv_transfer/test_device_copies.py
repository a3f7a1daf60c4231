"""Bursts and pauses of copies on a device; what a lane does there is for the contract suite."""

import threading
import time

import numpy as np
import pytest
import torch

from paceline.core.errors import Overloaded
from paceline.kv_transfer import copy_pace, device_copies
from paceline.kv_transfer.base import CellSums, DevicePool, Piece
from paceline.kv_transfer.copy_pace import CopyPace
from paceline.kv_transfer.copy_share import FIRST_SHARE
from paceline.kv_transfer.device_copies import DeviceCopies
from tests.contract.pools import SMALL

NUM_PAGES = 32


class Lane:
    """Takes `burst_s` for each burst; sums are the source pages. Keeps what it was called with."""

    burst_s = 0.0
    bursts: list[list[int]] = []
    programs: list[int | None] = []
    num_running = 0
    most_running = 0

    def __init__(self, pool: DevicePool) -> None: ...

    def copy(
        self,
        words: torch.Tensor,
        source: torch.Tensor,
        piece: Piece,
        max_programs: int | None = None,
    ) -> CellSums:
        Lane.num_running += 1
        Lane.most_running = max(Lane.most_running, Lane.num_running)
        time.sleep(Lane.burst_s)
        Lane.num_running -= 1
        Lane.bursts.append(piece.source_pages.tolist())
        Lane.programs.append(max_programs)
        return np.repeat(piece.source_pages[:, None], SMALL.num_heads, 1).astype(np.uint64)

    def seconds(self) -> float:
        return Lane.burst_s


@pytest.fixture
def busy() -> threading.Event:
    return threading.Event()


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch, busy: threading.Event) -> DeviceCopies:
    monkeypatch.setattr(device_copies, "_Lane", Lane)
    monkeypatch.setattr(device_copies, "BURST_BYTES", 5 * SMALL.page_bytes)
    memory = torch.zeros(NUM_PAGES * SMALL.page_bytes, dtype=torch.uint8)
    made = DeviceCopies(DevicePool(memory, SMALL, NUM_PAGES, pace=CopyPace(busy.is_set)))
    monkeypatch.setattr(Lane, "bursts", [])
    monkeypatch.setattr(Lane, "programs", [])
    monkeypatch.setattr(Lane, "most_running", 0)
    monkeypatch.setattr(Lane, "burst_s", 0.004)
    return made


def copy(
    copies: DeviceCopies, num_pages: int, timeout_s: float = 5.0, device: str = "cpu"
) -> CellSums:
    """From a source on `device`."""
    source_pages = np.arange(num_pages)[::-1].copy()
    piece = Piece(source_pages, np.arange(num_pages))
    return copies.copy(torch.empty(0, device=device), piece, time.monotonic() + timeout_s)


def test_a_copy_is_one_burst_while_nothing_is_computed(copies: DeviceCopies) -> None:
    assert copy(copies, 12)[:, 0].tolist() == list(range(12))[::-1]
    assert [len(burst) for burst in Lane.bursts] == [12]
    assert Lane.programs == [None]


def test_bursts_beside_a_batch_pause_so_that_they_take_their_share(
    copies: DeviceCopies, busy: threading.Event
) -> None:
    busy.set()
    started = time.monotonic()
    assert copy(copies, 12)[:, 0].tolist() == list(range(12))[::-1]
    assert [len(burst) for burst in Lane.bursts] == [5, 5, 2]
    assert time.monotonic() - started > 2 * Lane.burst_s / FIRST_SHARE


def test_all_lanes_share_the_pauses(copies: DeviceCopies, busy: threading.Event) -> None:
    busy.set()
    threads = [threading.Thread(target=copy, args=(copies, 5)) for _ in range(3)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Lane.most_running == 1
    assert time.monotonic() - started > 2 * Lane.burst_s / FIRST_SHARE


def test_from_another_device_few_programs_copy_without_pauses(
    copies: DeviceCopies, busy: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy(copies, 5, device="meta")
    assert Lane.programs == [None], "as many as there may be, while nothing is computed"
    monkeypatch.setattr(Lane, "seconds", lambda lane: 60.0)  # pauses would be as long as may be
    monkeypatch.setattr(copy_pace, "_MAX_PAUSE_S", 10.0)
    busy.set()
    started = time.monotonic()
    assert copy(copies, 12, device="meta")[:, 0].tolist() == list(range(12))[::-1]
    assert Lane.programs[1:] == [device_copies.LINK_PROGRAMS] * 3
    assert time.monotonic() - started < 10


def test_a_copy_that_its_pauses_make_too_slow_is_refused_as_overload(
    copies: DeviceCopies, busy: threading.Event
) -> None:
    busy.set()
    with pytest.raises(Overloaded, match="of 32 pages were copied in time"):
        copy(copies, 32, timeout_s=0.03)
    assert len(Lane.bursts) < 7


def test_more_copies_than_lanes_wait_for_one_until_their_deadline(
    copies: DeviceCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lane, "burst_s", 0.2)
    threads = [threading.Thread(target=copy, args=(copies, 1)) for _ in range(4)]
    for thread in threads:
        thread.start()
    while Lane.num_running < 4:
        time.sleep(0.001)
    with pytest.raises(Overloaded, match="4 other copies are in flight"):
        copy(copies, 1, timeout_s=0.01)
    copy(copies, 1, timeout_s=5)
    for thread in threads:
        thread.join()
