"""What only nixl has: reads in software are refused, and a read that does not end is ended."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from paceline.core.errors import IncompatiblePeer, PeerGone
from paceline.kv_transfer import nixl_reader, registry
from paceline.kv_transfer.base import Piece, TransportSettings
from tests.contract.pools import LARGE, make_pool, pages_of
from tests.contract.source_process import NUM_PAGES, SEED, source_process
from tests.contract.transports import installed

pytestmark = pytest.mark.slow
EVERY = np.arange(NUM_PAGES)
SETTINGS = TransportSettings("of the reader")


@pytest.fixture(autouse=True)
def only_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all that UCX knows, for both ends."""
    installed("nixl")
    monkeypatch.setenv("UCX_TLS", "tcp")


def test_reads_in_software_are_refused(tmp_path: Path) -> None:
    reader = registry.make_reader("nixl", make_pool(LARGE, 1), SETTINGS)
    with (
        source_process("nixl", tmp_path) as source,
        pytest.raises(IncompatiblePeer, match="in software over TCP"),
    ):
        reader.connect(source.address, timeout_s=5)
    reader.close()


def test_a_read_that_does_not_end_is_ended_and_the_next_source_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_reader, "MIN_BYTES_PER_SECOND", 0)
    pool = make_pool(LARGE, NUM_PAGES)
    reader = registry.make_reader("nixl", pool, SETTINGS)
    expected = pages_of(make_pool(LARGE, NUM_PAGES, SEED))
    with source_process("nixl", tmp_path) as source:
        link = reader.connect(source.address, timeout_s=5)
        descriptors = len(os.listdir("/proc/self/fd"))
        source.process.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(PeerGone, match="silent"):
            link.read(Piece(EVERY, EVERY), timeout_s=0.3)
        assert time.monotonic() - started < 0.3 + 1 + 3
        before = pages_of(pool).copy()
    link.close()
    assert len(os.listdir("/proc/self/fd")) <= descriptors - 10  # the agent's networks are closed
    assert np.array_equal(pages_of(pool), before)
    monkeypatch.delenv("UCX_TLS")  # all others are faster
    with source_process("nixl", tmp_path) as source:
        again = reader.connect(source.address, timeout_s=5)
        again.read(Piece(EVERY, EVERY), timeout_s=20)
        assert np.array_equal(pages_of(pool), expected)
        again.close()
    reader.close()
