"""Transports that the contract is tested over, those of tests included."""

import pytest

from paceline.kv_transfer import registry
from tests.contract import by_rank, tcp_tls
from tests.contract.ends import CUDA_IPC, CUDA_IPC_ACROSS
from tests.contract.pools import ACROSS

SLOW_NIXL = pytest.param("nixl", marks=pytest.mark.slow)  # starting it takes 0.1 s and more
LIBRARIES = ["ucx", SLOW_NIXL]
ON_DEVICES = [CUDA_IPC, CUDA_IPC_ACROSS]
TCP_TLS = pytest.param("tcp_tls", marks=pytest.mark.slow)
OF_TESTS = {
    "shm_by_rank": registry.Entry(by_rank.__name__),
    "tcp_tls": registry.Entry(tcp_tls.__name__),
    ACROSS: registry.Entry("paceline.kv_transfer.cuda_ipc", on_device=True),
}


def know(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it is one that only these tests have."""
    if name in OF_TESTS:
        monkeypatch.setattr(registry, "_entries", {**registry._entries, name: OF_TESTS[name]})


def installed(transport: str) -> str:
    """Skips the test where the transport's extra is not installed."""
    if reason := registry.problem_of(transport):
        pytest.skip(f"{transport} {reason}")
    return transport
