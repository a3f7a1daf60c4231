"""Workers whose roles change while a router plans on them; what operators ask of it."""

import asyncio
from collections.abc import Iterator

import grpc
import pytest

from paceline.cli import router_calls
from paceline.cli.role import RoleConfig, change
from paceline.cli.router_calls import RouterCalls
from paceline.core.errors import InvalidRequest, Unavailable
from paceline.core.tls import PLAIN
from paceline.rpc import caller_token, channel
from paceline.rpc.status import error_of
from paceline.v1 import control_pb2, control_pb2_grpc, worker_pb2
from tests.support.fake_worker import DIGEST, SECRET
from tests.support.redis_server import RedisServer, redis_server
from tests.support.router_bench import Bench, router_bench
from tests.support.waits import until
from tests.support.workers import free_port

PREFILL, DECODE, BOTH = worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_DECODE, worker_pb2.ROLE_BOTH


@pytest.fixture(scope="module")
def store() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


def role_of(bench: Bench, worker_id: str) -> int:
    session = bench.router.fleet.links[worker_id].session
    return 0 if session is None else session.info.role


async def test_plans_follow_the_role_and_no_old_record_brings_it_back(store: RedisServer) -> None:
    async with router_bench(store) as bench:
        first, second = await bench.add("d0"), await bench.add("d1")
        client = await bench.client()
        (await client.generate()).check(8)
        assert not first.commands("prefill") and not second.commands("prefill")
        first.take_role(PREFILL, 1)
        await until(lambda: role_of(bench, "d0") == PREFILL)
        await bench.router.follower.discover()  # its record in Redis still says what it was
        first.take_role(DECODE, 1)  # of another time: it is no newer
        (await client.generate()).check(8)
        assert role_of(bench, "d0") == PREFILL
        assert (len(first.commands("prefill")), len(second.commands("adopt"))) == (1, 1)
        num_before = len(second.commands("run")), len(first.commands("run"))
        first.take_role(BOTH, 2)
        second.take_role(PREFILL, 1)
        await until(lambda: (role_of(bench, "d0"), role_of(bench, "d1")) == (BOTH, PREFILL))
        for _ in range(4):
            (await client.generate(max_tokens=20)).check(20)
        assert len(second.commands("run")) == num_before[0]
        assert len(first.commands("run")) + len(first.commands("adopt")) == num_before[1] + 4
        up = bench.router.metrics.worker_up
        series = [sample.labels["role"] for metric in up.collect() for sample in metric.samples]
        assert sorted(series) == ["both", "prefill"]
        await bench.check_idle()


async def test_a_stream_goes_on_where_it_is_while_the_role_changes(store: RedisServer) -> None:
    async with router_bench(store) as bench:
        worker = await bench.add("d0", step_s=0.02)
        client = await bench.client()
        answer = await client.submit(max_tokens=40)
        await until(lambda: answer.tokens.get(0))
        worker.take_role(PREFILL, 1)
        await until(lambda: answer.ended, 20)
        answer.check(40)
        assert bench.router.reasons() == ["no decode worker is connected"]
        worker.take_role(DECODE, 2)
        (await client.generate()).check(8)
        await bench.check_idle()


async def test_what_a_worker_gives_up_goes_on_and_is_nobodys_failure(store: RedisServer) -> None:
    """Also more often than a request may fail, and without the budget of retries."""
    async with router_bench(store, max_attempts=2) as bench:
        worker = await bench.add("d0", step_s=0.02)
        client = await bench.client()
        answers = [await client.submit(max_tokens=40) for _ in range(6)]
        for number in range(1, 6):
            await until(lambda: all(len(a.tokens.get(0, ())) > 4 * number for a in answers), 20)  # noqa: B023
            worker.give_up()
        await until(lambda: all(answer.ended for answer in answers), 20)
        for answer in answers:
            answer.check(40)
        session = bench.router.fleet.links["d0"].session
        assert session is not None and session.health.num_failures == 0
        await bench.check_idle()


@pytest.mark.parametrize(
    "forged", [{"worker_id": "d1"}, {"incarnation": "another"}], ids=["worker", "incarnation"]
)
async def test_a_record_of_another_ends_the_stream(
    store: RedisServer, forged: dict[str, str]
) -> None:
    async with router_bench(store) as bench:
        worker = await bench.add("d0")
        lost = bench.router.metrics.worker_lost.labels("refused")
        worker.take_role(PREFILL, 1, **forged)
        await until(lambda: lost._value.get() == 1)
        await until(lambda: role_of(bench, "d0") == DECODE)


async def test_operators_see_workers_and_what_waits(store: RedisServer) -> None:
    async with router_bench(store) as bench:
        await bench.add("p0")
        await bench.add("d0", draining=True)
        async with channel.connect(f"127.0.0.1:{bench.router.port}") as connection:
            stub = control_pb2_grpc.RouterServiceStub(connection)  # type: ignore[no-untyped-call]
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Workers(control_pb2.WorkersRequest())
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            token = caller_token.metadata(SECRET.encode())
            told = await stub.Workers(control_pb2.WorkersRequest(), metadata=token)
            seen = [(w.info.worker_id, w.info.role, w.is_usable) for w in told.workers]
            assert seen == [("d0", DECODE, False), ("p0", PREFILL, True)]
            assert (told.num_queued, told.num_queued_tokens) == (0, 0)
            request = worker_pb2.ChangeRoleRequest(worker_id="p7", role=DECODE, reason="command")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.ChangeRole(request, metadata=token).read()
            said = error_of(refused.value).message
            assert said == "worker='p7': is not connected; connected are d0, p0"


async def test_operators_see_what_waits_for_each_revision(store: RedisServer) -> None:
    async with router_bench(store, max_slots_per_worker=1) as bench:
        await bench.add("d0", step_s=0.05)
        await bench.add("e0", digest="ef" * 32, model="other", step_s=0.05)
        client = await bench.client()
        answers = [await client.submit(max_tokens=20) for _ in range(3)]
        async with channel.connect(f"127.0.0.1:{bench.router.port}") as connection:
            stub = control_pb2_grpc.RouterServiceStub(connection)  # type: ignore[no-untyped-call]
            token = caller_token.metadata(SECRET.encode())
            await until(lambda: len(bench.router.coordinator.queue) == 2)
            told = await stub.Workers(control_pb2.WorkersRequest(), metadata=token)
            assert dict(told.num_queued_by_digest) == {DIGEST: 2}
            await until(lambda: all(answer.ended for answer in answers), 20)
            told = await stub.Workers(control_pb2.WorkersRequest(), metadata=token)
            assert not told.num_queued_by_digest


async def order(
    bench: Bench, worker: str, role: str, *before: int, together: asyncio.Barrier | None = None
) -> None:
    """By `paceline role`. `before`: ports of routers that are asked before; `together`: commands
    go on when all of them have looked who is there."""
    routers = tuple(f"127.0.0.1:{port}" for port in (*before, bench.router.port))
    calls = RouterCalls(routers, SECRET, PLAIN)
    look = calls.known_workers

    async def look_together() -> list[control_pb2.KnownWorker]:
        calls.known_workers = look  # type: ignore[method-assign]
        seen = await look()
        if together is not None:
            await together.wait()
        return seen

    calls.known_workers = look_together  # type: ignore[method-assign]
    config = RoleConfig(worker=worker, role=role, wait=True, router=routers, secret=SECRET)
    await change(config, calls)


async def test_two_commands_at_once_leave_one_that_decodes(store: RedisServer) -> None:
    async with router_bench(store) as bench:
        await bench.add("d0")
        await bench.add("d1")
        together = asyncio.Barrier(2)
        orders = [order(bench, name, "prefill", together=together) for name in ("d0", "d1")]
        said = await asyncio.gather(*orders, return_exceptions=True)
        refused = [one for one in said if one is not None]
        assert refused and all(isinstance(one, InvalidRequest) for one in refused)
        await until(lambda: DECODE in (role_of(bench, "d0"), role_of(bench, "d1")))
        (await (await bench.client()).generate()).check(8)


async def test_a_worker_that_hangs_is_waited_for_no_longer_than_a_while(
    store: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_calls, "ANSWER_S", 0.5)
    async with router_bench(store) as bench:
        await bench.add("d0", deaf_to_roles=True)
        with pytest.raises(Unavailable, match="the worker does not answer"):
            async with asyncio.timeout(20):
                await order(bench, "d0", "both")


async def test_a_router_that_does_not_know_the_worker_is_passed_over(store: RedisServer) -> None:
    with redis_server() as empty:
        async with router_bench(store) as bench, router_bench(empty) as newer:
            await bench.add("d0")
            await order(bench, "d0", "both", newer.router.port)
            await until(lambda: role_of(bench, "d0") == BOTH)


async def test_a_router_that_is_not_there_is_named() -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    with pytest.raises(Unavailable, match=f"router {endpoint}: the peer does not answer"):
        await RouterCalls((endpoint,), SECRET, PLAIN).known_workers()
