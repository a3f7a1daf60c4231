"""What only ucx has: its environment, and reads that are cut off in the middle."""

import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from paceline.core.errors import ConfigError, PeerGone
from paceline.kv_transfer import registry
from paceline.kv_transfer.base import Piece, TransportSettings
from paceline.kv_transfer.ucx_worker import UcxChannel
from tests.contract.ends import SETTINGS, connected
from tests.contract.pools import LARGE, SMALL, make_pool
from tests.contract.source_process import NUM_PAGES, source_process
from tests.contract.transports import installed

EVERY = np.arange(NUM_PAGES)


@pytest.fixture(autouse=True)
def ucx_is_installed() -> None:
    installed("ucx")


def test_an_environment_that_ucx_cannot_start_with_is_a_config_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", "no_such_transport")
    with pytest.raises(ConfigError, match="UCX cannot be started"):
        registry.make_source("ucx", make_pool(SMALL, 1), SETTINGS)


def test_the_source_ends_what_it_sends_before_its_reader_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A UCX that had bytes for a peer which closed died in one of a hundred reads cut off so."""
    closed: list[str] = []
    close = UcxChannel.close

    def close_and_tell(channel: UcxChannel) -> None:
        is_reader = threading.current_thread().name == "reads"
        if is_reader:
            closed.append("reader")
        close(channel)
        if not is_reader:
            closed.append("source")

    monkeypatch.setattr(UcxChannel, "close", close_and_tell)
    with connected("ucx", make_pool(LARGE, NUM_PAGES, 1), make_pool(LARGE, NUM_PAGES)) as ends:

        def read() -> None:
            with pytest.raises(PeerGone):
                while True:
                    ends.link.read(Piece(EVERY, EVERY), timeout_s=10)

        reading = threading.Thread(target=read, name="reads")
        reading.start()
        time.sleep(0.1)
        ends.link.close()
        reading.join(10)
        assert closed[:2] == ["source", "reader"]


@pytest.mark.slow
def test_reads_that_are_cut_off_again_and_again_leave_no_descriptors(tmp_path: Path) -> None:
    reader = registry.make_reader(
        "ucx", make_pool(LARGE, NUM_PAGES), TransportSettings("of the reader")
    )
    counts = []
    with source_process("ucx", tmp_path) as source:
        link = reader.connect(source.address, timeout_s=5)
        for _ in range(6):
            link.read(Piece(EVERY, EVERY), timeout_s=10)
            counts.append(len(list(Path("/proc/self/fd").iterdir())))
            source.process.send_signal(signal.SIGSTOP)
            with pytest.raises(PeerGone):
                link.read(Piece(EVERY, EVERY), timeout_s=0.1)
            source.process.send_signal(signal.SIGCONT)
        link.close()
    reader.close()
    assert max(counts[2:]) <= counts[1]
