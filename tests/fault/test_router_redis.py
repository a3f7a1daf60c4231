"""Redis paused, emptied, restarted or full of junk: routing goes on, what is refused is counted."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from paceline.core.keys import chain_keys, root_key, tenant_salt
from paceline.router import redis_follower, worker_link
from paceline.rpc import records
from paceline.v1 import worker_pb2
from paceline.worker.ticket_check import check_ticket
from tests.support.fake_worker import DIGEST, SECRET, FakeWorker
from tests.support.redis_server import RedisServer, redis_server
from tests.support.router_bench import Bench, Client, router_bench
from tests.support.waits import until

_PROMPT = list(range(160))
_ROOT = root_key(DIGEST, tenant_salt(SECRET.encode(), "t"))
_KEYS = chain_keys(_ROOT, _PROMPT)


@pytest.fixture(scope="module")
def store() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


class Publisher:
    """What a worker writes about its pool: set, number and event in one transaction."""

    def __init__(self, bench: Bench, worker: FakeWorker) -> None:
        self._redis = bench.redis
        self._worker = worker.worker_id
        self._incarnation = worker.info.incarnation
        self.sequence = 0

    async def publish(
        self, kind: str, keys: list[bytes], *, event: bool = True, tier: str = "device"
    ) -> None:
        self.sequence += 1
        short = [key[:16] for key in keys]
        members = [key + (b"" if tier == "device" else tier.encode()) for key in short]
        owner = f"{self._worker}:{self._incarnation}"
        async with self._redis.pipeline() as pipe:
            if kind == "stored":
                pipe.sadd(f"pl:1:keys:{owner}", *members)
            elif kind == "removed":
                pipe.srem(f"pl:1:keys:{owner}", *members)
            pipe.set(f"pl:1:seq:{owner}", self.sequence)
            if event:
                fields = {"w": self._worker, "i": self._incarnation, "s": self.sequence}
                pipe.xadd("pl:1:events", {**fields, "k": kind, "b": b"".join(short), "t": tier})
            await pipe.execute()


def _blocks(bench: Bench, worker: FakeWorker) -> int:
    found = bench.router.mirrors.held_blocks(b"".join(_KEYS)).in_best_tier
    return found.get((worker.worker_id, worker.info.incarnation), 0)


def _refused(bench: Bench) -> dict[str, float]:
    samples = next(iter(bench.router.metrics.refused.collect())).samples
    return {s.labels["reason"]: s.value for s in samples if s.name.endswith("_total")}


async def test_the_index_follows_what_workers_store_and_remove(store: RedisServer) -> None:
    async with router_bench(store) as bench:
        worker, other = await bench.add("d0"), await bench.add("d1")
        publisher = Publisher(bench, worker)
        await publisher.publish("stored", _KEYS[:6])
        await until(lambda: _blocks(bench, worker) == 6)
        await publisher.publish("removed", [_KEYS[2]])
        await until(lambda: _blocks(bench, worker) == 2)
        await publisher.publish("stored", [_KEYS[2]])
        await until(lambda: _blocks(bench, worker) == 6)
        await publisher.publish("cleared", [])
        await publisher.publish("stored", _KEYS[:1])
        await asyncio.sleep(0.1)
        assert _blocks(bench, worker) == 6, "what was known counts until all is told"
        await publisher.publish("digest", [(1).to_bytes(16), _KEYS[0]])
        await until(lambda: _blocks(bench, worker) == 1)
        assert _blocks(bench, other) == 0


async def test_vllm_ascend_12002_a_hole_that_is_filled_again_counts(store: RedisServer) -> None:
    """https://github.com/vllm-project/vllm-ascend/issues/12002: match stays at one block."""
    async with router_bench(store) as bench:
        worker = await bench.add("d0")
        publisher = Publisher(bench, worker)
        await publisher.publish("stored", _KEYS[:4])
        await publisher.publish("removed", [_KEYS[1]])
        await publisher.publish("stored", _KEYS[:6])
        await until(lambda: _blocks(bench, worker) == 6)


async def test_a_request_goes_where_its_prefix_is(store: RedisServer) -> None:
    async with router_bench(store) as bench:
        workers = [await bench.add(f"d{i}", num_cached_tokens=159) for i in range(3)]
        await Publisher(bench, workers[1]).publish("stored", _KEYS)
        await until(lambda: _blocks(bench, workers[1]) == 10)
        client = await bench.client()
        (await client.generate(prompt=_PROMPT)).check(8)
        assert [len(worker.commands("run")) for worker in workers] == [0, 1, 0]
        metrics = bench.router.metrics
        assert metrics.cached_predicted._value.get() == metrics.cached_real._value.get() == 159


async def test_a_prompt_whose_logits_are_wanted_is_computed_whatever_is_cached(
    store: RedisServer,
) -> None:
    """Decode has all of it, but pages hold no logits: prefill computes it. One that ends with its
    first token reserves nothing."""
    async with router_bench(store) as bench:
        prefill, decode = await bench.add("p0"), await bench.add("d0", num_cached_tokens=159)
        await Publisher(bench, decode).publish("stored", _KEYS)
        await until(lambda: _blocks(bench, decode) == 10)
        client = await bench.client()
        (await client.generate(prompt=_PROMPT)).check(8)
        assert not prefill.commands("prefill") and len(decode.commands("run")) == 1
        (await client.generate(prompt=_PROMPT, num_prompt_logprobs=2)).check(8)
        assert len(prefill.commands("prefill")) == len(decode.commands("reserve")) == 1
        (await client.generate(prompt=_PROMPT, max_tokens=1, num_prompt_logprobs=2)).check(1)
        assert len(decode.commands("reserve")) == 1


async def test_a_lost_event_costs_a_snapshot_of_this_worker_only(store: RedisServer) -> None:
    async with router_bench(store) as bench:
        worker, other = await bench.add("d0"), await bench.add("d1")
        publisher, steady = Publisher(bench, worker), Publisher(bench, other)
        await publisher.publish("stored", _KEYS[:2])
        await steady.publish("stored", _KEYS[:1])
        await until(lambda: _blocks(bench, worker) == 2 and _blocks(bench, other) == 1)
        resyncs = bench.router.metrics.resyncs._value.get()
        await publisher.publish("stored", _KEYS[2:4], event=False)
        await publisher.publish("stored", _KEYS[4:6])
        await until(lambda: _blocks(bench, worker) == 6)
        assert bench.router.metrics.resyncs._value.get() == resyncs + 1
        await publisher.publish("stored", _KEYS[6:], event=False)  # seen by its number alone
        await until(lambda: _blocks(bench, worker) == 10)
        assert bench.router.mirrors.workers["d1"].needs_snapshot is False


async def test_what_lies_in_the_pool_is_told_from_what_lies_below_it(store: RedisServer) -> None:
    async with router_bench(store) as bench:
        worker = await bench.add("d0")
        publisher = Publisher(bench, worker)
        await publisher.publish("stored", _KEYS[:4])
        await publisher.publish("stored", _KEYS[:7], tier="host")
        await until(lambda: _blocks(bench, worker) == 7)
        owner = (worker.worker_id, worker.info.incarnation)
        packed = b"".join(_KEYS)

        def held() -> tuple[int, int]:
            """In the best tier, and in the pool."""
            found = bench.router.mirrors.held_blocks(packed)
            return found.in_best_tier.get(owner, 0), found.in_pool.get(owner, 0)

        assert held() == (7, 4)
        await publisher.publish("stored", _KEYS, event=False, tier="file")  # found by a snapshot
        await until(lambda: _blocks(bench, worker) == 10)
        assert held() == (10, 4)
        await publisher.publish("removed", _KEYS[2:], tier="file")
        await publisher.publish("removed", _KEYS[:1])
        await until(lambda: held() == (7, 0))
        await publisher.publish("removed", _KEYS[:7], tier="host")
        await until(lambda: held() == (2, 0))


async def test_who_computes_is_told_who_holds_more_of_the_prompt(store: RedisServer) -> None:
    """From pools alone, by tickets that the holder takes; nobody is named who has no more."""
    async with router_bench(store, split_min_tokens=0) as bench:
        workers = {name: await bench.add(name) for name in ("p0", "d0", "d1", "d2")}
        for name, num_blocks, tier in (("p0", 3, "device"), ("d0", 9, "device"), ("d1", 9, "host")):
            publisher = Publisher(bench, workers[name])
            await publisher.publish("stored", _KEYS[:num_blocks], tier=tier)
        await Publisher(bench, workers["d2"]).publish("stored", _KEYS[:2])
        held = bench.router.mirrors.held_blocks
        await until(lambda: len(held(b"".join(_KEYS)).in_best_tier) == 4)
        client = await bench.client()
        await client.generate(prompt=_PROMPT)
        (prefill,) = [c.prefill for c in workers["p0"].received if c.HasField("prefill")]
        (hint,) = prefill.hints
        assert (hint.num_blocks, hint.num_own_blocks) == (9, 3)
        assert hint.source_endpoint == workers["d0"].info.endpoint
        ticket = hint.ticket
        check_ticket(workers["d0"].info, SECRET.encode(), ticket, source_is_here=True)
        check_ticket(workers["p0"].info, SECRET.encode(), ticket, source_is_here=False)
        await workers["d0"].die()
        await until(lambda: bench.router.fleet.links["d0"].session is None)
        await client.generate(prompt=_PROMPT)
        prefill = [c.prefill for c in workers["p0"].received if c.HasField("prefill")][-1]
        assert not prefill.hints


async def test_llm_d_router_2853_a_restart_voids_what_the_worker_had(store: RedisServer) -> None:
    """https://github.com/llm-d/llm-d-router/issues/2853: prefixes of the old life are credited."""
    prompts = [[number] * 64 for number in range(100)]
    chains = [chain_keys(_ROOT, prompt) for prompt in prompts]
    async with router_bench(store) as bench:
        worker = await bench.add("d0")
        publisher, metrics = Publisher(bench, worker), bench.router.metrics

        def num_credited() -> int:
            lookup = bench.router.mirrors.held_blocks
            return sum(bool(lookup(b"".join(chain)).in_best_tier) for chain in chains)

        for chain in chains:
            await publisher.publish("stored", chain)
        await until(lambda: num_credited() == 100)
        await worker.die()
        await worker.start()
        restarted = time.perf_counter()
        await until(lambda: num_credited() == 0)
        await bench.up(worker)
        assert time.perf_counter() - restarted < 2
        client = await bench.client()
        for prompt in prompts[:10]:
            (await client.generate(prompt=prompt)).check(8)
        assert metrics.cached_predicted._value.get() == metrics.cached_real._value.get() == 0
        await Publisher(bench, worker).publish("stored", chains[0])
        await until(lambda: num_credited() == 1)


async def test_a_worker_that_says_it_begins_is_dialled_at_once(
    store: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new one, and one that was away for so long that nobody tries often any more."""
    monkeypatch.setattr(redis_follower, "DISCOVER_S", 3600.0)
    monkeypatch.setattr(worker_link, "BACKOFF_S", (3600.0, 3600.0))
    async with router_bench(store) as bench:
        await until(lambda: bench.router.follower.looked.is_set())
        worker = await bench.prepare("d0")
        bench.workers["d0"] = worker
        for _ in range(2):
            await bench.register(worker)
            await Publisher(bench, worker).publish("cleared", [])
            await bench.up(worker)
            await worker.die()
            await until(lambda: not list(bench.router.fleet.sessions()))
            await worker.start()


@asynccontextmanager
async def _traffic(client: Client) -> AsyncIterator[list[float]]:
    """Twenty requests a second; yields the times that each took. None may fail."""
    taken: list[float] = []

    async def send() -> None:
        while True:
            started = time.perf_counter()
            (await client.generate(max_tokens=3)).check(3)
            taken.append(time.perf_counter() - started)
            await asyncio.sleep(0.05)

    task = asyncio.create_task(send())
    yield taken
    assert not task.done(), task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _p90(taken: list[float]) -> float:
    return sorted(taken)[len(taken) * 9 // 10]


async def test_litellm_35273_a_paused_redis_slows_nobody(store: RedisServer) -> None:
    """https://github.com/BerriAI/litellm/pull/35273: no timeout reached the client."""
    async with router_bench(store, redis_timeout_s=0.3) as bench:
        worker = await bench.add("d0")
        publisher = Publisher(bench, worker)
        await publisher.publish("stored", _KEYS[:5])
        await until(lambda: _blocks(bench, worker) == 5)
        async with _traffic(await bench.client()) as taken:
            await until(lambda: len(taken) > 10)
            usual = _p90(taken)
            taken.clear()
            store.pause()
            try:
                await until(lambda: not bench.router.follower.is_up)
                await asyncio.sleep(3)  # longer than the lease
            finally:
                store.resume()
            assert _blocks(bench, worker) == 5
            await until(lambda: bench.router.follower.is_up)
            await publisher.publish("stored", _KEYS[5:])
            await until(lambda: _blocks(bench, worker) == 10)
        assert len(taken) > 15 and _p90(taken) < max(0.25, 2 * usual)


async def test_a_redis_that_dies_and_comes_back_empty(store: RedisServer) -> None:
    async with router_bench(store, redis_timeout_s=0.3) as bench:
        worker = await bench.add("d0")
        publisher = Publisher(bench, worker)
        await publisher.publish("stored", _KEYS[:5])
        await until(lambda: _blocks(bench, worker) == 5)
        async with _traffic(await bench.client()):
            await bench.redis.flushall()
            await asyncio.sleep(0.3)
            store.kill()
            await until(lambda: not bench.router.follower.is_up)
            await asyncio.sleep(0.5)
            store.restart()
            await until(lambda: bench.router.follower.is_up)
            newcomer = await bench.add("d1")
            await Publisher(bench, newcomer).publish("stored", _KEYS[:3])
            await until(lambda: _blocks(bench, newcomer) == 3)
            await publisher.publish("stored", _KEYS)  # the worker tells all again
            await until(lambda: _blocks(bench, worker) == 10)


async def test_a_router_without_redis_says_so_and_starts(store: RedisServer) -> None:
    async with router_bench(store, redis_timeout_s=0.3) as bench:
        store.kill()
        await asyncio.sleep(0.3)
        assert bench.router.follower.is_up is False
        assert bench.router.reasons() == ["no decode worker is connected"]
        store.restart()
        await bench.add("d0")
        (await (await bench.client()).generate()).check(8)


async def test_lazyllm_1154_records_of_strangers_are_refused(store: RedisServer) -> None:
    """https://github.com/LazyAGI/LazyLLM/issues/1154: who can write to Redis redirects traffic."""
    async with router_bench(store) as bench:
        worker = await bench.add("d0")
        await Publisher(bench, worker).publish("stored", _KEYS[:5])
        stranger = FakeWorker("d0", worker_pb2.ROLE_DECODE, bench.cluster)
        await stranger.start()
        forged = worker_pb2.WorkerInfo()
        forged.CopyFrom(worker.info)
        forged.endpoint = stranger.info.endpoint
        bench.workers.clear()  # nobody renews the true record
        junk = {
            "d0": forged.SerializeToString(),
            "d1": records.sign(forged, b"a guessed secret").SerializeToString(),
            "d2": worker.info.SerializeToString(),  # genuine, under another name
            "d3": os.urandom(100),
            "d4": b"x" * (1 << 20),
        }
        for name, value in junk.items():
            await bench.redis.set(f"pl:1:worker:{name}", value)
        await bench.redis.lpush("pl:1:worker:d5", "a list")
        await bench.router.follower.discover()
        assert _refused(bench)["record"] >= 4 and _refused(bench)["record_key"] >= 1
        assert set(bench.router.fleet.links) == {"d0"}
        (await (await bench.client()).generate()).check(8)
        assert stranger.received == [] and worker.commands("run")
        await worker.die()
        await stranger.die()


async def test_junk_in_events_sets_and_numbers_is_refused_and_counted(store: RedisServer) -> None:
    async with router_bench(store) as bench:
        worker = await bench.add("d0")
        publisher = Publisher(bench, worker)
        await publisher.publish("stored", _KEYS[:2])
        await until(lambda: _blocks(bench, worker) == 2)
        owner = {"w": "d0", "i": worker.info.incarnation}
        for fields in (
            {"hello": "world"},
            {**owner, "s": "3", "k": "stored", "b": b"x" * 15},
            {**owner, "s": "many", "k": "stored", "b": b""},
            {**owner, "s": "9" * 30, "k": "stored", "b": b""},
            {**owner, "s": "3", "k": "exploded", "b": b""},
            {**owner, "s": "3", "k": "stored", "b": b"x" * (2 << 20)},
            {"w": b"\xff", "i": b"\xff", "s": "1", "k": "stored", "b": b""},
            {**owner, "s": "3", "k": "stored", "b": b"", "t": b"\xff"},
            {**owner, "s": "3", "k": "stored", "b": b"", "t": "t" * 33},
        ):
            await bench.redis.xadd("pl:1:events", fields)
        await until(lambda: _refused(bench).get("event_form", 0) == 4)
        await until(lambda: _refused(bench).get("tier_form", 0) == 2)
        assert (_refused(bench)["event_size"], _refused(bench)["sequence_form"]) == (1, 2)
        await publisher.publish("stored", _KEYS[2:5])
        await until(lambda: _blocks(bench, worker) == 5)
        incarnation = worker.info.incarnation
        await bench.redis.sadd(f"pl:1:keys:d0:{incarnation}", b"short", b"x" * 100_000)
        await publisher.publish("stored", _KEYS[5:6], event=False)
        await until(lambda: _refused(bench).get("key_form", 0) >= 2)
        await until(lambda: _blocks(bench, worker) == 6)


async def test_keys_of_the_wrong_type_cost_the_hint_and_nothing_else(store: RedisServer) -> None:
    async with router_bench(store) as bench:
        worker = await bench.add("d0")
        client = await bench.client()
        await bench.redis.delete("pl:1:events")
        await bench.redis.set("pl:1:events", "a string")
        owner = f"d0:{worker.info.incarnation}"
        await bench.redis.set(f"pl:1:keys:{owner}", "a string")
        await bench.redis.lpush(f"pl:1:seq:{owner}", "a list")
        await asyncio.sleep(0.5)
        (await client.generate()).check(8)
        await bench.router.follower.discover()
        assert _refused(bench)["key_type"] >= 1
        await bench.redis.delete("pl:1:events", f"pl:1:keys:{owner}", f"pl:1:seq:{owner}")
        await Publisher(bench, worker).publish("stored", _KEYS[:3])
        await until(lambda: _blocks(bench, worker) == 3, 10)


@pytest.mark.parametrize("reason", ["keys_type", "keys_size"])
async def test_a_key_set_that_is_none_or_too_large_costs_its_worker_what_is_known_of_it(
    store: RedisServer, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    async with router_bench(store) as bench:
        worker, other = await bench.add("d0"), await bench.add("d1")
        await Publisher(bench, other).publish("stored", _KEYS[:3])
        publisher, owner = Publisher(bench, worker), f"d0:{worker.info.incarnation}"
        await publisher.publish("stored", _KEYS[:2])
        await until(lambda: _blocks(bench, worker) == 2 and _blocks(bench, other) == 3)
        if reason == "keys_type":
            await bench.redis.set(f"pl:1:keys:{owner}", "a string")
        else:
            monkeypatch.setattr(bench.router.index, "max_keys", 10)
            await bench.redis.sadd(f"pl:1:keys:{owner}", *(os.urandom(16) for _ in range(40)))
        await bench.redis.set(f"pl:1:seq:{owner}", 9)  # something was missed: all is read again
        await until(lambda: _refused(bench).get(reason, 0) >= 1, 10)
        assert (_blocks(bench, worker), _blocks(bench, other)) == (0, 3)
        (await (await bench.client()).generate()).check(8)


async def test_workers_without_a_lease_stay_while_their_stream_lives(store: RedisServer) -> None:
    async with router_bench(store) as bench:
        worker = await bench.add("d0")
        bench.workers.clear()
        await bench.redis.delete("pl:1:worker:d0")
        await bench.router.follower.discover()
        (await (await bench.client()).generate()).check(8)
        await worker.die()
        await until(lambda: "d0" not in bench.router.fleet.links)
        assert "d0" not in bench.router.mirrors.workers
