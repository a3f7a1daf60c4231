from collections.abc import Iterator

import pytest

from paceline.kv_transfer import registry
from tests.contract import by_rank, tcp_tls
from tests.contract.ends import CUDA_IPC, CUDA_IPC_ACROSS, Ends, connected
from tests.contract.pools import ACROSS, SMALL, make_pool

NUM_PAGES = 12


SLOW_NIXL = pytest.param("nixl", marks=pytest.mark.slow)  # starting it takes 0.1 s and more
LIBRARIES = ["ucx", SLOW_NIXL]


ON_DEVICES = [CUDA_IPC, CUDA_IPC_ACROSS]
TCP_TLS = pytest.param("tcp_tls", marks=pytest.mark.slow)
OF_TESTS = {
    "shm_by_rank": registry.Entry(by_rank.__name__),
    "tcp_tls": registry.Entry(tcp_tls.__name__),
    ACROSS: registry.Entry("paceline.kv_transfer.cuda_ipc", on_device=True),
}


@pytest.fixture(
    params=["local", "shm", "tcp", "multi", *LIBRARIES, *ON_DEVICES, "shm_by_rank", TCP_TLS]
)
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every transport of the product; a new one is added here and must pass the whole suite.

    `shm_by_rank`: as a front reads into a pool that only its rank can reach. `tcp_tls`: tcp with
    certificates.
    """
    name: str = request.param
    know(name, monkeypatch)
    yield installed(name)
    by_rank.close_all()


def know(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it is one that only these tests have."""
    if name in OF_TESTS:
        monkeypatch.setattr(registry, "_entries", {**registry._entries, name: OF_TESTS[name]})


def installed(transport: str) -> str:
    """Skips the test where the transport's extra is not installed."""
    if reason := registry.problem_of(transport):
        pytest.skip(f"{transport} {reason}")
    return transport


@pytest.fixture
def ends(transport: str) -> Iterator[Ends]:
    """A source of random bytes and a link to it from a pool of NaN."""
    pools = [make_pool(SMALL, NUM_PAGES, seed, transport) for seed in (1, None)]
    with connected(transport, *pools) as both:
        yield both
