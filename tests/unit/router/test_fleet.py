"""What the router remembers of workers that are gone."""

from types import SimpleNamespace
from typing import Any

from paceline.router.config import RouterConfig
from paceline.router.fleet import MODEL_MEMORY_S, Fleet
from paceline.router.metrics import RouterMetrics
from paceline.router.worker_session import WorkerSession
from paceline.v1 import worker_pb2


def session_of(fleet: Fleet, revision: int, now: float) -> WorkerSession:
    """The only worker there is."""
    info = worker_pb2.WorkerInfo(
        worker_id="w", model="m", content_digest=f"{revision:064x}", context_length=1000 + revision
    )
    session = WorkerSession(info, now)
    link: Any = SimpleNamespace(session=session)
    fleet.links["w"] = link
    return session


async def test_revisions_that_are_long_gone_are_forgotten() -> None:
    config = RouterConfig(secret="s" * 16, worker_wait_s=30.0)
    fleet = Fleet(config, RouterMetrics())
    for revision in range(200):
        now = revision * 10.0
        session_of(fleet, revision, now)
        fleet.refresh_models(now)
        assert len(fleet._last_usable) <= MODEL_MEMORY_S / 10 + 1
        assert fleet.last_usable(f"{revision:064x}") == now
    assert fleet.last_usable(f"{198:064x}") == 1980.0, "one that is just gone is remembered"
    fleet.links.clear()
    fleet.refresh_models(1990.0 + MODEL_MEMORY_S - 1)
    assert [model.unavailable for model in fleet.models()] == [True]
    fleet.refresh_models(1990.0 + MODEL_MEMORY_S + 1)
    assert fleet.models() == [] and fleet._last_usable == {}
