"""The gateway that most tests speak to, on real ports and on the event loop that it runs on."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
import uvloop

from tests.support.fake_router_service import bytes_reply
from tests.support.gateway_deployment import Deployment, running
from tests.support.mock_model import write_mock_model


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mock_model(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(model_dir: Path) -> AsyncIterator[Deployment]:
    async with running(model_dir) as deployment:
        yield deployment


@pytest.fixture
def deployment(shared: Deployment) -> Deployment:
    """One gateway a module: whatever a test does, the next finds it as it was."""
    assert shared.gateway.serving.num_running == 0
    shared.router.submissions.clear()
    shared.router.reply = lambda request: bytes_reply(b"Hello")
    return shared
