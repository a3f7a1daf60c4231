"""A worker whose role changes while it serves: what it tells, takes, refuses and gives up."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import redis

from paceline.core.errors import ErrorCode
from paceline.core.kv_layout import PAGE_TOKENS
from paceline.rpc import records
from paceline.rpc.channel import connect
from paceline.rpc.redis_schema import worker_name
from paceline.rpc.status import error_of
from paceline.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from tests.support.fake_router import Attachment, make_request, make_ticket, token
from tests.support.mock_model import write_mock_model
from tests.support.redis_server import RedisServer
from tests.support.redis_server import redis_server as running_redis
from tests.support.waits import until, wait_beside
from tests.support.worker_pair import FAST, is_free
from tests.support.workers import SECRET, WorkerProcess, start_worker

PREFILL, DECODE, BOTH = worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_DECODE, worker_pb2.ROLE_BOTH
CROSSING_S = 6.0
SETTINGS = {**FAST, "silence_s": CROSSING_S, "stall_s": 4.0, "pool_mib": 8}


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture
def worker(tmp_path: Path, redis_server: RedisServer) -> Iterator[WorkerProcess]:
    """Starts as a decode worker; steps take a while, so that streams last."""
    model = write_mock_model(tmp_path / "model", step_s=0.02)
    started = start_worker("decode", model, worker_id="one", redis_url=redis_server.url, **SETTINGS)
    try:
        started.wait_until_ready()
        yield started
    finally:
        status = started.stop()
    assert status == 0


async def change(
    worker: WorkerProcess, role: object, *, last: bool = False, **fields: object
) -> worker_pb2.RoleState:
    """What it answers first, or last."""
    given: dict[str, object] = {"worker_id": "one", "reason": "command", **fields}
    request = worker_pb2.ChangeRoleRequest(role=role, **given)  # type: ignore[arg-type]
    async with connect(worker.endpoint) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)  # type: ignore[no-untyped-call]
        call = stub.ChangeRole(request, metadata=token(), timeout=30)
        found: list[worker_pb2.RoleState] = []
        async for state in call:
            found.append(state)
            if not last:
                break
        call.cancel()
    return found[-1]


async def test_it_tells_routers_and_redis_and_stays_who_it_is(
    worker: WorkerProcess, redis_server: RedisServer
) -> None:
    async with Attachment(worker.endpoint) as router:
        before = router.info
        assert (before.role, before.role_version) == (DECODE, 0)
        prompt = list(range(4 * PAGE_TOKENS))
        await router.run(make_request(before, prompt, max_tokens=2)).until_ended()
        state = await change(worker, BOTH)
        assert (state.role, state.version, state.num_leaving) == (BOTH, 1, 0)
        await until(lambda: router.info.role_version == 1)
        assert router.info.role == BOTH
        records.check(router.info, SECRET.encode())
        assert router.info.incarnation == before.incarnation
        again = await router.run(make_request(before, prompt, max_tokens=2)).until_ended()
        assert again.emissions[0].num_cached_tokens == 3 * PAGE_TOKENS, (
            "what it held is still there"
        )
    with contextlib.closing(redis.Redis.from_url(redis_server.url)) as store:

        def registered() -> worker_pb2.WorkerInfo:
            return records.parse(store.get(worker_name("one")) or b"", SECRET.encode())  # type: ignore[arg-type]

        await wait_beside(lambda: registered().role == BOTH, 10)
        assert registered().role_version == 1
    assert worker.metric('paceline_worker_role{role="both"}') == 1
    assert worker.metric('paceline_worker_role{role="decode"}') == 0
    changes = 'paceline_worker_role_changes_total{reason="command",role="both"}'
    assert worker.metric(changes) == 1


async def test_it_takes_what_the_new_role_allows_and_refuses_the_rest_once_routers_know(
    worker: WorkerProcess,
) -> None:
    async with Attachment(worker.endpoint) as router:
        info = router.info
        refused = router.prefill(*prefill_of(router))
        await refused.until_ended()
        assert refused.error is not None and refused.error.code is ErrorCode.UNAVAILABLE
        assert "not for a worker of the role decode" in refused.error.message
        await change(worker, PREFILL)
        crossing = await router.reserve(make_request(info, [1] * 20, max_tokens=4)).until_answered()
        assert crossing.reserved is not None, "it was sent before the news came"
        router.cancel(crossing)
        taken = await router.prefill(*prefill_of(router)).until_emitted(1)
        router.cancel(taken)
        await taken.until_ended()

        async def refusal() -> str:
            await asyncio.sleep(0.05)
            log = await router.reserve(make_request(info, [1] * 20, max_tokens=4)).until_answered()
            if log.reserved is not None:
                router.cancel(log)
            return "" if log.error is None else log.error.message

        async with asyncio.timeout(CROSSING_S + 20):
            while "reserve is not for a worker of the role prefill" not in await refusal():
                pass
    await wait_beside(lambda: is_free(worker), 10)


async def test_streams_end_by_themselves_or_are_given_up(worker: WorkerProcess) -> None:
    async with Attachment(worker.endpoint) as router:
        short = router.run(make_request(router.info, [1] * 20, max_tokens=8, ignore_eos=True))
        long = router.run(make_request(router.info, [2] * 20, max_tokens=4000, ignore_eos=True))
        await short.until_emitted(2)
        await long.until_emitted(2)
        state = await change(worker, PREFILL, drain_ms=2000)
        assert 1 <= state.num_leaving <= 2
        last = await change(worker, PREFILL, last=True)
        assert (last.role, last.version, last.num_leaving) == (PREFILL, 1, 0)
        await short.until_ended()
        await long.until_ended()
        assert short.error is None and len(short.output()) == 8
        assert long.error is not None and long.error.code is ErrorCode.UNAVAILABLE
        assert "another role" in long.error.message
    await wait_beside(lambda: is_free(worker), 10)


async def test_what_comes_back_to_its_role_is_not_given_up(worker: WorkerProcess) -> None:
    async with Attachment(worker.endpoint) as router:
        stream = router.run(make_request(router.info, [2] * 20, max_tokens=60, ignore_eos=True))
        await stream.until_emitted(1)
        await change(worker, PREFILL, drain_ms=400)
        state = await change(worker, DECODE, last=True)
        assert (state.version, state.num_leaving) == (2, 0)
        await stream.until_ended()
        assert stream.error is None and len(stream.output()) == 60


REFUSED: list[tuple[dict[str, object], str]] = [
    ({"role": 0}, "role=0: must be one of prefill, decode, both"),
    ({"role": 7}, "role=7: must be one of prefill, decode, both"),
    ({"worker_id": "two"}, "worker_id='two': this is one"),
    ({"reason": "because"}, "reason='because': must be one of command, rebalance"),
    ({"if_version": 3}, "if_version=3: the role has changed meanwhile: it is decode, 0"),
]


async def test_a_change_that_cannot_be_is_refused_with_field_and_value(
    worker: WorkerProcess,
) -> None:
    for fields, said in REFUSED:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await change(worker, **{"role": PREFILL, **fields})
        assert error_of(refused.value).message == said
    request = worker_pb2.ChangeRoleRequest(worker_id="one", role=PREFILL, reason="command")
    async with connect(worker.endpoint) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ChangeRole(request).read()
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert worker.metric("paceline_worker_role_changes_total") == 0


async def test_of_two_changes_for_one_version_one_is_made(worker: WorkerProcess) -> None:
    await change(worker, PREFILL, if_version=0)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await change(worker, BOTH, if_version=0)
    assert "has changed meanwhile" in error_of(refused.value).message
    assert (await change(worker, PREFILL, if_version=0)).version == 1, "said twice is done once"


async def test_the_role_outlives_the_rank(worker: WorkerProcess) -> None:
    await change(worker, PREFILL)
    await asyncio.to_thread(worker.renew)
    async with Attachment(worker.endpoint) as router:
        assert (router.info.role, router.info.role_version) == (PREFILL, 1)


def prefill_of(router: Attachment) -> tuple[common_pb2.TokenRequest, common_pb2.Ticket]:
    request = make_request(router.info, [5] * 40, max_tokens=4)
    return request, make_ticket(request, router.info, router.info)
