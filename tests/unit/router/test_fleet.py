"""What the router remembers of workers that are gone."""

import asyncio
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

from paceline.router.config import RouterConfig
from paceline.router.fleet import MODEL_MEMORY_S, Fleet
from paceline.router.metrics import RouterMetrics
from paceline.router.worker_session import Nobody, WorkerSession
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


async def test_the_share_of_other_routers_is_learned_from_what_workers_tell() -> None:
    """One that serves alone has nobody beside it, however much its workers do for it."""
    fleet = Fleet(RouterConfig(secret="s" * 16), RouterMetrics())
    session = session_of(fleet, 0, 0.0)
    now = asyncio.get_running_loop().time()
    with ExitStack() as slots:
        for _ in range(3):
            slots.enter_context(session.fly(Nobody(), 100))
        for num_running, expected in ((3, 0.0), (9, 2.0), (3, 0.0)):
            load = worker_pb2.Load(num_running=num_running - 1, num_waiting=1)
            session.handle(worker_pb2.WorkerFrame(load=load), now)
            for _ in range(60):
                now += 1.5
                fleet.decay(now)
            assert abs(fleet.others - expected) < 0.01
