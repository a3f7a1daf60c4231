"""The router between real sockets: a client's stream, scripted workers, a real Redis."""

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from paceline.core.keys import tenant_digest
from paceline.router.coordinator import Coordinator
from paceline.rpc import tickets
from paceline.v1 import common_pb2
from tests.support.fake_worker import DIGEST, MODEL, SECRET, FakeWorker
from tests.support.redis_server import RedisServer, redis_server
from tests.support.router_bench import router_bench
from tests.support.waits import until


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


async def test_few_uncached_tokens_stay_on_the_decode_worker(store: RedisServer) -> None:
    async with router_bench(store, split_min_tokens=32) as bench:
        prefill, decode = await bench.add("p0"), await bench.add("d0")
        client = await bench.client()
        (await client.generate(num_prompt=32)).check(8)
        assert (len(decode.commands("run")), len(prefill.commands("prefill"))) == (1, 0)
        (await client.generate(num_prompt=33)).check(8)
        assert (len(decode.commands("run")), len(prefill.commands("prefill"))) == (1, 1)
        await bench.check_idle()


async def test_one_output_token_reserves_nothing(store: RedisServer) -> None:
    async with router_bench(store) as bench:
        workers = await bench.add("p0"), await bench.add("d0")
        client = await bench.client()
        (await client.generate(max_tokens=1)).check(1)
        assert sum(len(worker.commands("run")) for worker in workers) == 1
        assert not any(worker.commands("reserve") for worker in workers)
        await bench.check_idle()


@pytest.mark.parametrize("names", [("d0",), ("p0", "d0")])
async def test_several_choices(store: RedisServer, names: tuple[str, ...]) -> None:
    async with router_bench(store) as bench:
        for name in names:
            await bench.add(name)
        client = await bench.client()
        (await client.generate(n=4, max_tokens=10)).check(10)
        await bench.check_idle()


async def test_a_ticket_lives_as_long_as_its_request_and_a_margin(store: RedisServer) -> None:
    async with router_bench(store, ticket_margin_s=10.0) as bench:
        prefill, decode = await bench.add("p0"), await bench.add("d0")
        client = await bench.client()
        (await client.generate(budget_ms=20_000)).check(8)
        ticket = prefill.commands("prefill")[0].ticket
        adopt = decode.commands("adopt")[0]
        assert adopt.ticket == ticket and adopt.source_endpoint == prefill.info.endpoint
        tickets.check(ticket, SECRET.encode())
        assert (ticket.reader_worker, ticket.reader_incarnation) == ("d0", decode.info.incarnation)
        assert 25 < ticket.expires_unix_ms / 1000 - time.time() <= 30


async def test_a_router_with_nothing_to_say_beats(store: RedisServer) -> None:
    async with router_bench(store, beat_s=0.1) as bench:
        client = await bench.client()
        num_frames = client.num_frames
        await until(lambda: client.num_frames >= num_frames + 3, 2)


async def test_models_come_first_and_again_when_they_change(store: RedisServer) -> None:
    async with router_bench(store) as bench:
        client = await bench.client()
        assert client.models == []
        assert bench.router.reasons() == ["no decode worker is connected"]
        await bench.add("d0")
        await until(lambda: client.models)
        model = client.models[0]
        assert (model.name, model.content_digest, model.context_length) == (MODEL, DIGEST, 8192)
        assert bench.router.reasons() == []
        assert (await bench.client()).models == client.models


async def test_pools_of_different_sizes_get_the_requests_that_fit_them(
    store: RedisServer,
) -> None:
    async with router_bench(store, worker_wait_s=0.3) as bench:
        small = await bench.add("d0", context_length=1000)
        large = await bench.add("d1", context_length=4000)
        client = await bench.client()
        assert [model.context_length for model in client.models] == [4000]
        for _ in range(5):
            (await client.generate(num_prompt=1500)).check(8)
        assert (len(small.commands("run")), len(large.commands("run"))) == (0, 5)
        running = await client.submit(num_prompt=1500, max_tokens=1000)
        await until(lambda: running.tokens)
        await large.die()
        await until(lambda: running.ended)
        late = await client.generate(num_prompt=1500)
        assert running.error is not None and late.error is not None
        assert running.error.code == common_pb2.ERROR_CODE_UNAVAILABLE
        assert late.error.code == common_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED
        (await client.generate(num_prompt=500)).check(8)


async def test_each_model_has_workers_of_its_own(store: RedisServer) -> None:
    async with router_bench(store) as bench:
        pools: dict[str, list[FakeWorker]] = {"tiny": [], "other": []}
        for number, (model, digest) in enumerate([("tiny", DIGEST), ("other", "ee" * 32)] * 2):
            added = await bench.add(f"d{number}", model=model, digest=digest)
            pools[model].append(added)
        client = await bench.client()
        assert sorted(model.name for model in client.models) == ["other", "tiny"]
        for model, digest in (("tiny", DIGEST), ("other", "ee" * 32)):
            answers = [await client.submit(model=model, digest=digest) for _ in range(20)]
            await until(lambda answers=answers: all(answer.ended for answer in answers))
            for answer in answers:
                answer.check(8)
            served = [len(worker.commands("run")) for worker in pools[model]]
            assert sum(served) == 20 and min(served) > 0
        unknown = await client.generate(model="tin")
        assert unknown.error is not None
        assert unknown.error.code == common_pb2.ERROR_CODE_MODEL_NOT_FOUND


_BAD: list[tuple[dict[str, Any], int, str]] = [
    ({"model": "other"}, common_pb2.ERROR_CODE_MODEL_NOT_FOUND, "model"),
    ({"digest": "ee" * 32}, common_pb2.ERROR_CODE_UNAVAILABLE, ""),
    ({"max_tokens": 0}, common_pb2.ERROR_CODE_INVALID_REQUEST, "max_tokens"),
    ({"ttft_ms": -1.0}, common_pb2.ERROR_CODE_INVALID_REQUEST, "ttft_ms"),
    ({"itl_ms": float("nan")}, common_pb2.ERROR_CODE_INVALID_REQUEST, "itl_ms"),
    ({"tenant_weight": -1.0}, common_pb2.ERROR_CODE_INVALID_REQUEST, "tenant_weight"),
    ({"num_prompt_tokens": 0}, common_pb2.ERROR_CODE_INVALID_REQUEST, "num_prompt_tokens"),
    ({"num_prompt_tokens": 101}, common_pb2.ERROR_CODE_INVALID_REQUEST, "num_prompt_tokens"),
    ({"request_id": ""}, common_pb2.ERROR_CODE_INVALID_REQUEST, "request_id"),
    ({"choices": [0, 0]}, common_pb2.ERROR_CODE_INVALID_REQUEST, "choices"),
    ({"choices": [1]}, common_pb2.ERROR_CODE_INVALID_REQUEST, "choices"),
    ({"block_keys": b"short"}, common_pb2.ERROR_CODE_INVALID_REQUEST, "block_keys"),
    ({"num_prompt_tokens": 92}, common_pb2.ERROR_CODE_INVALID_REQUEST, "token_ids"),
    ({"num_prompt": 8185}, common_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED, "max_tokens"),
    ({"max_tokens": 8093}, common_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED, "max_tokens"),
]


async def test_bad_requests_are_answered_and_disturb_nothing(store: RedisServer) -> None:
    async with router_bench(store) as bench:
        decode = await bench.add("d0")
        client = await bench.client()
        good = await client.submit(max_tokens=60)
        for fields, code, field in _BAD:
            bad = await client.generate(**fields)
            assert bad.error is not None
            assert (bad.error.code, bad.error.field, bad.num_ends) == (code, field, 1), fields
        await until(lambda: good.ended)
        good.check(60)
        assert len(decode.commands("run")) == 1
        await bench.check_idle()


async def test_a_request_id_in_use_is_refused_and_the_first_goes_on(store: RedisServer) -> None:
    async with router_bench(store) as bench:
        await bench.add("d0")
        clients = await bench.client(), await bench.client()
        first = await clients[0].submit(max_tokens=30, request_id="same")
        await until(lambda: first.tokens)
        for client in clients:
            second = await client.generate(request_id="same")
            assert second.error is not None and second.error.field == "request_id"
        await until(lambda: first.ended)
        first.check(30)
        (await clients[1].generate(request_id="same")).check(8)
        await bench.check_idle()


async def test_a_slot_in_use_ends_both_requests(store: RedisServer) -> None:
    async with router_bench(store) as bench:
        await bench.add("d0", step_s=0.02)
        client = await bench.client()
        first = await client.submit(max_tokens=1000)
        await until(lambda: first.tokens)
        await client.submit(slot=first.slot)
        await until(lambda: first.error)
        assert first.error is not None and first.error.field == "slot"
        await bench.check_idle()


async def test_health_and_probes_follow_the_workers(store: RedisServer) -> None:
    async with router_bench(store) as bench, httpx.AsyncClient() as http:
        base = f"http://127.0.0.1:{bench.router.probe_port}"
        assert (await http.get(base + "/livez")).status_code == 200
        assert (await http.get(base + "/readyz")).status_code == 503
        await bench.add("d0")
        assert (await http.get(base + "/readyz")).status_code == 200
        client = await bench.client()
        (await client.generate(max_tokens=4)).check(4)
        text = (await http.get(base + "/metrics")).text
        assert 'paceline_router_worker_up{role="decode",worker="d0"} 1.0' in text
        assert 'paceline_router_plans_total{kind="whole"} 1.0' in text
        assert "paceline_router_token2_gap_seconds_count 1.0" in text


async def test_a_bug_of_ours_is_told_with_the_requests_id(
    store: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the name that gateways have for it, so that one search finds a request in all logs."""

    async def broken(coordinator: Coordinator, line: object) -> None:
        raise ZeroDivisionError

    async with router_bench(store) as bench:
        await bench.add("d0")
        client = await bench.client()
        monkeypatch.setattr(Coordinator, "_run", broken)
        with capture_logs() as lines:
            answer = await client.generate(request_id="a-b", tenant="one")
        assert answer.error is not None and "internal error" in answer.error.message
        (line,) = (line for line in lines if line["log_level"] == "error")
        assert (line["event"], line["request_ids"]) == ("request failed", ["a-b"])
        assert line["tenant"] == tenant_digest(SECRET.encode(), "one")
