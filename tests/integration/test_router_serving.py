"""The router between real sockets: a client's stream, scripted workers, a real Redis."""

from collections.abc import Iterator

import pytest

from tests.support.redis_server import RedisServer, redis_server
from tests.support.router_bench import router_bench


@pytest.fixture(scope="module")
def store() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


async def test_whole_on_decode_without_a_prefill_worker(store: RedisServer) -> None:
    async with router_bench(store) as bench:
        decode = await bench.add("d0")
        client = await bench.client()
        answer = await client.generate(max_tokens=20)
        answer.check(20)
        assert len(decode.commands("run")) == 1
        await bench.check_idle()


async def test_prefill_and_decode_apart(store: RedisServer) -> None:
    async with router_bench(store) as bench:
        prefill, decode = await bench.add("p0"), await bench.add("d0")
        client = await bench.client()
        answer = await client.generate(max_tokens=20)
        answer.check(20)
        assert [len(decode.commands(k)) for k in ("run", "reserve", "adopt")] == [0, 1, 1]
        assert len(prefill.commands("prefill")) == 1
        await bench.check_idle()
