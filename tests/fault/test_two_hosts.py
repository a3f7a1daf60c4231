"""A hand-off between hosts whose link is slow, late and lossy, and cut in the middle of a pull."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import two_hosts
from benchmarks.transfer_faults import MODEL
from tests.contract.conftest import installed
from tests.support.mock_model import write_mock_model
from tests.support.network import why_not

pytestmark = pytest.mark.slow
RETRY_S, FREE_S = 3.0, 8.0


@pytest.fixture(autouse=True)
def can_make_hosts() -> Iterator[None]:
    if reason := why_not():
        pytest.skip(reason)
    yield


@pytest.mark.parametrize("transport", two_hosts.TRANSPORTS)
def test_a_cut_ends_in_a_retry_elsewhere(transport: str, tmp_path: Path) -> None:
    installed(transport)
    model = write_mock_model(tmp_path / "model", **MODEL)
    figures = asyncio.run(two_hosts.measure_over(model, transport, num_handoffs=2, num_cuts=1))
    assert (figures["wrong_tokens"], figures["hung"], figures["retried"]) == (0, 0, 0)
    assert figures["cut_mid_pull"] == 1
    assert figures[f"retry_s_{transport}"] <= RETRY_S
    assert figures[f"free_s_{transport}"] <= FREE_S


@pytest.mark.parametrize("transport", two_hosts.TRANSPORTS)
def test_the_first_packet_of_each_connection_is_lost(transport: str, tmp_path: Path) -> None:
    """And no hand-off with it: TCP sends it again after a second."""
    installed(transport)
    model = write_mock_model(tmp_path / "model", **MODEL)
    with two_hosts.trio(model, transport) as running:
        running.lose_first_packets()
        _, found = asyncio.run(running.hand_off())
    assert (found.wrong_tokens, found.hung, found.retried) == (0, 0, 0)
