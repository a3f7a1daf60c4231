from collections.abc import Iterator

import pytest

from paceline.kv_transfer import registry
from tests.contract import by_rank
from tests.contract.ends import CUDA_IPC, Ends, connected
from tests.contract.pools import SMALL, make_pool

NUM_PAGES = 12


@pytest.fixture(params=["local", "shm", "tcp", CUDA_IPC, "shm_by_rank"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every transport of the product; a new one is added here and must pass the whole suite.

    `shm_by_rank`: as a front reads into a pool that only its rank can reach.
    """
    name: str = request.param
    if name == "shm_by_rank":
        entries = {**registry._entries, name: registry.Entry(by_rank.__name__)}
        monkeypatch.setattr(registry, "_entries", entries)
    yield name
    by_rank.close_all()


@pytest.fixture
def ends(transport: str) -> Iterator[Ends]:
    """A source of random bytes and a link to it from a pool of NaN."""
    pools = [make_pool(SMALL, NUM_PAGES, seed, transport) for seed in (1, None)]
    with connected(transport, *pools) as both:
        yield both
