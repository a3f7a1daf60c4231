from collections.abc import Iterator

import pytest

from tests.contract.ends import Ends, connected
from tests.contract.pools import SMALL, make_pool

NUM_PAGES = 12


@pytest.fixture(params=["local", "shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    """Every transport of the product; a new one is added here and must pass the whole suite."""
    name: str = request.param
    return name


@pytest.fixture
def ends(transport: str) -> Iterator[Ends]:
    """A source of random bytes and a link to it from a pool of NaN."""
    with connected(transport, make_pool(SMALL, NUM_PAGES, 1), make_pool(SMALL, NUM_PAGES)) as both:
        yield both
