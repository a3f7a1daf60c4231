"""One thing goes wrong at one step of a hand-off, over each transport: the cases of the benchmark.

Timers are short, and each transport gets some of the cases; `benchmarks.transfer_faults` has all.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from benchmarks.transfer_faults import MODEL
from benchmarks.transfer_faults_bench import run_cases
from benchmarks.transfer_faults_cases import Case, Fault, Step, quick_cases
from benchmarks.transfer_faults_hand import Outcome
from benchmarks.transfer_faults_workers import SHORT
from tests.contract.transports import installed
from tests.support.mock_model import write_mock_model

pytestmark = pytest.mark.slow
FEW = [
    Case(Fault.FLIP_SOURCE, Step.READ),
    Case(Fault.EVICT, Step.READ),
    Case(Fault.KILL_READER, Step.MID_READ),
    Case(Fault.KILL_SOURCE, Step.MID_READ),
]
CASES = {
    "tcp": quick_cases("tcp"),
    "shm": [*FEW, Case(Fault.STOP_READER, Step.COMMIT), Case(Fault.SUCCESSOR, Step.CONNECT)],
    "nixl": FEW,
    "ucx": FEW,
}
HYBRID = {"layer_windows": [512, 0] * 4}
NUM_CUTS = 10


@pytest.mark.parametrize("transport", CASES)
def test_nothing_is_wrong_leaked_or_hung(transport: str, tmp_path: Path) -> None:
    installed(transport)
    model = write_mock_model(tmp_path / "model", **MODEL)
    found = asyncio.run(run_cases(model, transport, SHORT, CASES[transport]))
    retried, partial = found.retried, found.partial
    assert found == Outcome(retried=retried, partial=partial)
    assert retried > 0  # a fault that costs nothing has not struck


@pytest.mark.parametrize("layout", [{}, HYBRID], ids=["plain", "hybrid"])
def test_vllm_backport_33_cut_connections_give_no_wrong_token(
    layout: dict[str, Any], tmp_path: Path
) -> None:
    """https://github.com/wtdcode/vllm-backport/issues/33: the established connection is cut between
    handshake and read, in both layouts of the cache (here 10 times each, of 20 for 2,000 requests);
    the request is answered right, and the next one goes over a connection made anew."""
    model = write_mock_model(tmp_path / "model", **MODEL, **layout)
    cases = [Case(Fault.RESET, Step.READ)] * NUM_CUTS
    found = asyncio.run(run_cases(model, "tcp", SHORT, cases))
    assert found == Outcome(retried=NUM_CUTS)
