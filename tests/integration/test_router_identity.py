"""Who a worker is, and which workers may work together."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from paceline.core.keys import chain_keys, root_key, tenant_salt
from paceline.v1 import common_pb2
from tests.support.fake_worker import DIGEST, SECRET
from tests.support.redis_server import RedisServer, redis_server
from tests.support.router_bench import Answer, Bench, Client, router_bench
from tests.support.waits import until

_OTHER = "ef" * 32


@pytest.fixture(scope="module")
def store() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


async def test_vllm_55776_two_revisions_of_a_model_are_never_paired(store: RedisServer) -> None:
    """https://github.com/vllm-project/vllm/pull/55776: a rolling update mixes KV of revisions."""
    async with router_bench(store) as bench:
        prefill = await bench.add("p0", digest=_OTHER)
        old = await bench.add("d0")
        client = await bench.client()
        (await client.generate()).check(8)
        assert prefill.commands("prefill") == [] and len(old.commands("run")) == 1
        new = await bench.add("d1", digest=_OTHER)
        (await client.generate(digest=_OTHER)).check(8)
        (await client.generate()).check(8)
        assert len(prefill.commands("prefill")) == len(new.commands("adopt")) == 1
        assert len(old.commands("run")) == 2 and old.commands("reserve") == []


async def test_a_request_is_not_continued_on_another_revision(store: RedisServer) -> None:
    async with router_bench(store, worker_wait_s=0.3) as bench:
        old = await bench.add("d0", step_s=0.02)
        await bench.add("d1", digest=_OTHER)
        client = await bench.client()
        answer = await client.submit(max_tokens=100)
        await until(lambda: answer.tokens)
        await old.die()
        await until(lambda: answer.ended)
        assert answer.error is not None
        assert answer.error.code == common_pb2.ERROR_CODE_UNAVAILABLE
        await bench.check_idle()


async def test_a_key_root_under_another_secret_is_refused(store: RedisServer) -> None:
    async with router_bench(store) as bench:
        await bench.add("d0")
        root = root_key(DIGEST, tenant_salt(b"not " + SECRET.encode(), "t"))
        client = await bench.client()
        answer = await client.generate(root_key=root, block_keys=b"".join(chain_keys(root, [1])))
        assert answer.error is not None
        assert answer.error.code == common_pb2.ERROR_CODE_UNAVAILABLE


async def test_a_gateway_without_the_secret_is_turned_away(store: RedisServer) -> None:
    async with router_bench(store) as bench:
        decode = await bench.add("d0")
        stranger = Client(bench.router.port, secret="another secret of 16 bytes")
        assert await stranger.call.code() is grpc.StatusCode.UNAUTHENTICATED
        await stranger.close()
        assert stranger.num_frames == 0 and decode.commands("run") == []


async def test_another_worker_at_a_known_address_gets_no_work(store: RedisServer) -> None:
    async with router_bench(store) as bench:
        worker = await bench.add("d0")
        await worker.die()
        await until(lambda: not any(bench.router.fleet.sessions()))
        bench.workers.clear()
        key, record = "pl:1:worker:d0", worker.info.SerializeToString()
        worker.worker_id = "d9"  # the same port, somebody else
        await worker.start()
        await bench.redis.set(key, record)
        await bench.router.follower.discover()
        client = await bench.client()
        answer = await client.generate(budget_ms=700)
        assert answer.error is not None
        assert not any(bench.router.fleet.sessions()) and worker.commands("run") == []
        await worker.die()


async def test_a_draining_worker_finishes_and_gets_nothing_new(store: RedisServer) -> None:
    async with router_bench(store) as bench:
        leaving, staying = await bench.add("d0", step_s=0.02), await bench.add("d1")
        client = await bench.client()
        running = [await client.submit(max_tokens=30) for _ in range(4)]
        await until(lambda: leaving.commands("run"))
        leaving.draining = True
        await until(lambda: bench.router.fleet.links["d0"].session.load.draining)
        num_before = len(leaving.commands("run"))
        for _ in range(5):
            (await client.generate()).check(8)
        await until(lambda: all(answer.ended for answer in running))
        for answer in running:
            answer.check(30)
        assert len(leaving.commands("run")) == num_before and staying.commands("run")
        await bench.check_idle()


async def _waiting_while_the_only_worker_drains(bench: Bench, **fields: Any) -> tuple[Answer, ...]:
    """One that runs on d0, of the old generation, and one that waits for it."""
    old = await bench.add("d0", step_s=0.02)
    client = await bench.client()
    running = await client.submit(max_tokens=60)
    await until(lambda: running.tokens)
    waiting = await client.submit(**fields)
    await until(lambda: len(bench.router.coordinator.queue) == 1)
    old.draining = True
    await until(lambda: all(s.load.draining for s in bench.router.fleet.sessions()))
    return running, waiting


async def test_what_waits_for_a_generation_that_leaves_goes_to_the_one_that_comes(
    store: RedisServer,
) -> None:
    """Its prompt is read alike there; names of its blocks are those of the new one."""
    async with router_bench(store, max_slots_per_worker=1, worker_wait_s=10) as bench:
        answers = await _waiting_while_the_only_worker_drains(bench)
        new = await bench.add("d1", digest=_OTHER)
        await until(lambda: all(answer.ended for answer in answers))
        answers[0].check(60)
        answers[1].check(8)
        assert len(new.commands("run")) == 1, "what runs stays where it is"
        salt = tenant_salt(SECRET.encode(), "t")
        assert new.commands("run")[0].request.root_key == root_key(_OTHER, salt)
        late = await bench.clients[0].generate()  # made before its gateway heard of the new one
        late.check(8)
        await bench.check_idle()


@pytest.mark.parametrize(
    ("worker", "fields"),
    [
        ({"serving_digest": "99" * 32}, {}),
        ({"context_length": 100}, {}),
        ({}, {"pooling": common_pb2.POOLING_LAST, "choices": []}),
    ],
    ids=["other tokens", "no room", "vectors"],
)
async def test_what_the_new_generation_cannot_serve_alike_ends_with_an_error(
    store: RedisServer, worker: dict[str, Any], fields: dict[str, Any]
) -> None:
    async with router_bench(store, max_slots_per_worker=1, worker_wait_s=0.5) as bench:
        running, waiting = await _waiting_while_the_only_worker_drains(bench, **fields)
        new = await bench.add("d1", digest=_OTHER, **worker)
        await until(lambda: running.ended and waiting.ended)
        running.check(60)
        assert waiting.error is not None
        assert waiting.error.code == common_pb2.ERROR_CODE_UNAVAILABLE
        assert new.commands("run") == []
        await bench.check_idle()
