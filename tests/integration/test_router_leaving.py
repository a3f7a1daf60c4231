"""Routers that come and go: what a gateway hears, and requests that another router has begun."""

import asyncio
from collections.abc import Iterator

import grpc
import pytest

from paceline.router import service
from paceline.rpc.epochs import ATTEMPTS_PER_EPOCH
from paceline.v1 import common_pb2
from tests.support.fake_worker import MODEL, tokens_of
from tests.support.redis_server import RedisServer, redis_server
from tests.support.router_bench import Bench, flush, router_bench
from tests.support.waits import until


@pytest.fixture(scope="module")
def store() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


async def test_a_router_that_drains_says_so_and_gives_back_what_it_does_not_finish(
    store: RedisServer,
) -> None:
    async with router_bench(store, drain_timeout_s=0.5) as bench:
        await bench.add("d0", step_s=0.02)
        client = await bench.client()
        longer = await client.submit(max_tokens=1000)
        await until(lambda: longer.tokens)
        drain = asyncio.create_task(bench.router.drain())
        await until(lambda: client.is_told_to_leave)
        refused = await client.generate()
        assert refused.is_given_back and not longer.ended
        late = await asyncio.wait_for(attach(bench), 5)
        assert late is grpc.StatusCode.UNAVAILABLE
        await drain
        await until(lambda: longer.ended)
        assert longer.is_given_back
        assert longer.tokens[0] == tokens_of(longer.seed, 0, len(longer.tokens[0]))


async def attach(bench: Bench) -> grpc.StatusCode:
    """How a new stream ends."""
    client = await bench.client(is_heard=False)
    return await client.call.code()


@pytest.mark.parametrize("workers", [("d0",), ("p0", "d0")])
async def test_a_request_goes_on_under_the_next_epoch_after_its_tokens(
    store: RedisServer, workers: tuple[str, ...]
) -> None:
    async with router_bench(store) as bench:
        for name in workers:
            await bench.add(name, step_s=0.02)
        client = await bench.client()
        first = await client.submit(max_tokens=40, request_id="moved")
        await until(lambda: len(first.tokens.get(0, ())) > 3)
        again = await client.go_on(first, epoch=7)
        await until(lambda: first.ended and again.ended, 20)
        again.check(40)
        if len(workers) == 2:
            attempts = {p.ticket.attempt for p in bench.workers["p0"].commands("prefill")}
            assert attempts == {0, 7 * ATTEMPTS_PER_EPOCH}, "no hand-off is taken for another"
        await bench.check_idle()


async def test_an_epoch_beyond_the_bound_is_refused(store: RedisServer) -> None:
    async with router_bench(store) as bench:
        await bench.add("d0")
        refused = await (await bench.client()).generate(epoch=4096)
        assert refused.error is not None and "epoch=4096" in refused.error.message
        assert refused.error.code == common_pb2.ERROR_CODE_INVALID_REQUEST


@pytest.mark.parametrize(("settle_s", "hello_s", "is_awaited"), [(3, 0.5, True), (0.3, 2, False)])
async def test_a_router_that_starts_speaks_when_its_workers_had_time_to_answer(
    store: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    settle_s: float,
    hello_s: float,
    is_awaited: bool,
) -> None:
    monkeypatch.setattr(service, "SETTLE_S", settle_s)
    await flush(store)
    bench = Bench(store)
    try:
        for name in ("d0", "d1"):
            bench.workers[name] = await bench.prepare(name, hello_s=hello_s * (name == "d1"))
            await bench.register(bench.workers[name])
        await bench.router.start()
        client = await bench.client()
        await until(lambda: bench.router.fleet.has_decode_worker())
        assert client.num_frames > 0 and not client.knows_models, "it beats, and says no more"
        assert bench.router.reasons() == ["workers are being connected to"]
        await until(lambda: client.knows_models)
        assert [model.name for model in client.models] == [MODEL]
        assert len(list(bench.router.fleet.sessions())) == 1 + is_awaited
        assert not bench.router.reasons()
    finally:
        await bench.close()


async def test_a_router_without_workers_says_that_there_are_none(store: RedisServer) -> None:
    async with router_bench(store) as bench:
        client = await bench.client()
        await until(lambda: client.knows_models)
        assert client.models == []
