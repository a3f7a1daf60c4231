"""Embeddings at a router with scripted workers: where they run, wait and run again."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from paceline.v1 import common_pb2
from tests.support.fake_worker import FakeWorker
from tests.support.redis_server import RedisServer, redis_server
from tests.support.router_bench import Answer, router_bench
from tests.support.waits import until

MEAN = common_pb2.POOLING_MEAN


@pytest.fixture(scope="module")
def store() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


def embedding(**fields: Any) -> dict[str, Any]:
    return {"pooling": common_pb2.POOLING_LAST, "choices": [], "max_tokens": 1, **fields}


def check(answer: Answer) -> None:
    """It has one emission, of the first four tokens as a fake worker embeds them."""
    assert answer.error is None and answer.tokens == {0: []} and answer.last is not None
    first = answer.seed * 31
    assert np.frombuffer(answer.last.embedding, "<f4").tolist() == [first + i for i in range(4)]
    assert answer.last.prompt_times.prefill_us > 0


def runs(*workers: FakeWorker) -> list[int]:
    return [len(worker.commands("run")) for worker in workers]


async def test_they_run_on_prefill_workers_alone(store: RedisServer) -> None:
    """While those are full they wait, though a decode worker has room."""
    async with router_bench(store, max_slots_per_worker=2) as bench:
        prefill, decode = await bench.add("p0", prefill_s=0.2), await bench.add("d0")
        client = await bench.client()
        answers = [await client.submit(**embedding()) for _ in range(5)]
        await until(lambda: all(answer.ended for answer in answers), 20)
        for answer in answers:
            check(answer)
        assert runs(prefill, decode) == [5, 0]
        assert not decode.commands("reserve") and not prefill.commands("prefill")
        await bench.check_idle()


async def test_decode_workers_make_them_where_nobody_else_can(store: RedisServer) -> None:
    async with router_bench(store) as bench:
        decode = await bench.add("d0")
        client = await bench.client()
        check(await client.generate(**embedding()))
        prefill = await bench.add("p0", draining=True)
        await until(
            lambda: next(s for s in bench.router.fleet.sessions() if s.is_prefill).load.draining
        )
        check(await client.generate(**embedding()))
        assert runs(prefill, decode) == [0, 2]
        await bench.check_idle()


async def test_another_prefill_worker_makes_it_when_one_dies(store: RedisServer) -> None:
    async with router_bench(store) as bench:
        dying, decode = await bench.add("p0", prefill_s=30.0), await bench.add("d0")
        client = await bench.client()
        answer = await client.submit(**embedding())
        await until(lambda: dying.commands("run"))
        other = await bench.add("p1")
        await dying.die()
        await until(lambda: answer.ended, 20)
        check(answer)
        assert runs(dying, other, decode) == [1, 1, 0]
        await bench.check_idle()


async def test_a_cancelled_one_ends_at_its_worker(store: RedisServer) -> None:
    async with router_bench(store) as bench:
        prefill = await bench.add("p0", prefill_s=30.0)
        client = await bench.client()
        answer = await client.submit(**embedding())
        await until(lambda: prefill.commands("run"))
        await client.cancel(answer)
        await until(lambda: prefill.commands("cancel"))
        await bench.check_idle()


async def test_a_prompt_that_fills_the_context_is_taken_and_a_longer_one_is_not(
    store: RedisServer,
) -> None:
    async with router_bench(store) as bench:
        await bench.add("p0", context_length=256)
        client = await bench.client()
        check(await client.generate(**embedding(num_prompt=256)))
        answer = await client.generate(**embedding(num_prompt=257))
        assert answer.error is not None
        assert answer.error.code == common_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED
        answer = await client.generate(**embedding(pooling=9))
        assert answer.error is not None and answer.error.field == "pooling"
        await bench.check_idle()


async def test_a_full_queue_refuses_them_as_others(store: RedisServer) -> None:
    async with router_bench(store, max_slots_per_worker=1, queue_limit=2) as bench:
        await bench.add("p0", prefill_s=30.0)
        client = await bench.client()
        answers = [await client.submit(**embedding(pooling=MEAN)) for _ in range(5)]
        await until(lambda: sum(answer.ended for answer in answers) == 2)
        errors = [answer.error.code for answer in answers if answer.error is not None]
        assert errors == [common_pb2.ERROR_CODE_OVERLOADED] * 2
        for answer in answers:
            await client.cancel(answer)
        await bench.check_idle()
