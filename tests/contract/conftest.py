from collections.abc import Iterator

import pytest

from tests.contract import by_rank
from tests.contract.ends import Ends, connected
from tests.contract.pools import SMALL, make_pool
from tests.contract.transports import LIBRARIES, ON_DEVICES, TCP_TLS, installed, know

NUM_PAGES = 12


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


@pytest.fixture
def ends(transport: str) -> Iterator[Ends]:
    """A source of random bytes and a link to it from a pool of NaN."""
    pools = [make_pool(SMALL, NUM_PAGES, seed, transport) for seed in (1, None)]
    with connected(transport, *pools) as both:
        yield both
