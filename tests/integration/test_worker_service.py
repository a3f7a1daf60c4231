"""What a worker shows to others beside requests: KV by name, health, its record, hard ports."""

import asyncio
import contextlib
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import redis
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from paceline.core.errors import IncompatiblePeer, KvUnavailable
from paceline.core.ids import BlockKey
from paceline.core.keys import chain_keys, root_key, tenant_salt
from paceline.rpc import records, tickets
from paceline.rpc.channel import connect
from paceline.rpc.status import error_of
from paceline.v1 import common_pb2, kv_pb2, kv_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.support.fake_router import Attachment, make_request, make_ticket, token
from tests.support.mock_model import write_mock_model
from tests.support.redis_server import RedisServer
from tests.support.redis_server import redis_server as running_redis
from tests.support.strangers import junk, listening_ports, seconds_until_closed
from tests.support.waits import until, wait_for
from tests.support.worker_pair import FAST, is_free
from tests.support.workers import SECRET, WorkerProcess, start_worker


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture(scope="module", params=["prefill", pytest.param("decode", marks=pytest.mark.slow)])
def worker(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    redis_server: RedisServer,
) -> Iterator[WorkerProcess]:
    """Of either role: both give their prefix cache to others, by the same service."""
    with contextlib.closing(redis.Redis.from_url(redis_server.url)) as store:
        store.flushall()
    model = write_mock_model(tmp_path_factory.mktemp("service") / "model")
    started = start_worker(
        request.param, model, worker_id="one", place="z1/n7", redis_url=redis_server.url, **FAST
    )
    try:
        started.wait_until_ready()
        yield started
    finally:
        status = started.stop()
    assert status == 0


def test_metrics_have_the_names_that_dashboards_know(worker: WorkerProcess) -> None:
    shown = {line.rsplit(" ", 1)[0] for line in worker.metrics()}
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert f'vllm:{name}{{engine="0",model_name="model"}}' in shown
    for reason in ("capacity", "deferred"):
        labels = f'{{engine="0",model_name="model",reason="{reason}"}}'
        assert f"vllm:num_requests_waiting_by_reason{labels}" in shown
    pool = next(line for line in shown if line.startswith("vllm:cache_config_info{"))
    assert 'block_size="16"' in pool and 'num_gpu_blocks="1024"' in pool
    assert any(line.startswith("vllm:lora_requests_info{") for line in shown)


def test_the_front_does_without_torch(worker: WorkerProcess) -> None:
    assert "libtorch" not in Path(f"/proc/{worker.pid}/maps").read_text()
    assert "libtorch" in Path(f"/proc/{worker.rank_pids()[0]}/maps").read_text()


async def test_its_place_is_told_to_routers(worker: WorkerProcess) -> None:
    async with Attachment(worker.endpoint) as router:
        assert (router.info.zone, router.info.node) == ("z1", "n7")


async def test_what_its_self_test_took_is_told_before_it_has_computed_a_prompt(
    worker: WorkerProcess,
) -> None:
    async with Attachment(worker.endpoint) as router:
        await until(lambda: router.num_frames > 0)
        assert router.load.step == 0 and router.load.prompt_token_us > 0


async def test_pages_are_pinned_by_name_and_released_by_silence(worker: WorkerProcess) -> None:
    async with Attachment(worker.endpoint) as router:
        request = make_request(router.info, list(range(64)), max_tokens=1)
        await router.run(request).until_ended()
        info = router.info
    keys = chain_keys(request.root_key, request.token_ids)
    async with connect(worker.endpoint) as channel:
        stub = kv_pb2_grpc.KvTransferServiceStub(channel)  # type: ignore[no-untyped-call]
        ticket = ticket_for("1", request, info)
        run = kv_pb2.KeyRun(keys=b"".join(keys) + bytes(32))
        pin = kv_pb2.PinRequest(ticket=ticket, runs=[run])
        pinned = await stub.Pin(pin, metadata=token())
        (found,) = pinned.runs
        assert len(found.pages) == 4  # the leading run of those that are here
        assert all(len(page.checksums) == 2 for page in found.pages)
        state = 'paceline_worker_pages{state="pinned"}'
        await asyncio.to_thread(wait_for, lambda: worker.metric(state) == 4, 2)
        expired = worker.metric("paceline_leases_expired_total")
        await asyncio.to_thread(wait_for, lambda: is_free(worker), 4)
        assert worker.metric("paceline_leases_expired_total") == expired + 1


async def test_a_pin_that_is_not_allowed_is_a_miss_like_any_other(worker: WorkerProcess) -> None:
    """A forged, expired or foreign ticket, or another tenant's salt: the answer has the form of one
    for blocks that are not here, and nothing is held."""
    async with Attachment(worker.endpoint) as router:
        request = make_request(router.info, list(range(64)), max_tokens=1)
        await router.run(request).until_ended()
        info = router.info
    held = chain_keys(request.root_key, request.token_ids)
    salt = tenant_salt(SECRET.encode(), "another tenant")
    others = chain_keys(root_key(info.content_digest, salt), request.token_ids)
    good = ticket_for("9", request, info)
    refused_before = worker.metric("paceline_pins_refused_total")
    async with connect(worker.endpoint) as channel:
        stub = kv_pb2_grpc.KvTransferServiceStub(channel)  # type: ignore[no-untyped-call]

        async def pin(
            ticket: common_pb2.Ticket, keys: list[BlockKey], *, with_tail: bool = False
        ) -> kv_pb2.PinResponse:
            asked = kv_pb2.PinRequest(
                ticket=ticket, runs=[kv_pb2.KeyRun(keys=b"".join(keys))], with_tail=with_tail
            )
            answer: kv_pb2.PinResponse = await stub.Pin(asked, metadata=token())
            return answer

        absent = await pin(good, [BlockKey(bytes(32))])
        misses = [await pin(good, list(others))]
        for changed in changed_tickets(good, info):
            misses.append(await pin(changed, list(held)))
        failures = []
        for ticket in (good, *changed_tickets(good, info)):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await pin(ticket, list(held), with_tail=True)
            failures.append((failed.value.code(), failed.value.details()))
        for changed in changed_tickets(good, info):
            await stub.Unpin(kv_pb2.UnpinRequest(ticket=changed), metadata=token())
        for miss in misses:
            assert len(miss.lease_id) == len(absent.lease_id) and miss.lease_id != absent.lease_id
            miss.lease_id = absent.lease_id
            assert miss.SerializeToString() == absent.SerializeToString()
        assert len(set(failures)) == 1
        for lease in (absent, *misses):
            unpin = kv_pb2.UnpinRequest(ticket=good, lease_id=lease.lease_id)
            await stub.Unpin(unpin, metadata=token())
    num_refused = worker.metric("paceline_pins_refused_total") - refused_before
    assert num_refused == 3 * len(changed_tickets(good, info))
    await asyncio.to_thread(wait_for, lambda: is_free(worker), 4)


def changed_tickets(
    good: common_pb2.Ticket, source: worker_pb2.WorkerInfo
) -> list[common_pb2.Ticket]:
    """Forged, for others at either end, for another model, and expired."""
    forged = common_pb2.Ticket()
    forged.CopyFrom(good)
    forged.reader_worker = "somebody else"
    made = [forged]
    for field, value in (
        ("source_worker", "another"),
        ("source_incarnation", "another"),
        ("content_digest", "ab" * 32),
        ("expires_unix_ms", 1),
    ):
        ticket = common_pb2.Ticket()
        ticket.CopyFrom(good)
        setattr(ticket, field, value)
        made.append(tickets.sign(ticket, SECRET.encode()))
    return made


async def test_strangers_are_refused(worker: WorkerProcess) -> None:
    async with connect(worker.endpoint) as channel:
        kv = kv_pb2_grpc.KvTransferServiceStub(channel)  # type: ignore[no-untyped-call]
        attach = worker_pb2_grpc.WorkerServiceStub(channel).Attach()  # type: ignore[no-untyped-call]
        calls = (
            kv.Describe(kv_pb2.DescribeRequest()),
            kv.Pin(kv_pb2.PinRequest()),
            kv.Unpin(kv_pb2.UnpinRequest()),
            kv.Report(kv_pb2.ReportRequest()),
            kv.Progress(kv_pb2.ProgressRequest()).read(),
            kv.KeepLeases().read(),
            attach.read(),
        )
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_reader_cannot_end_the_lease_of_another(worker: WorkerProcess) -> None:
    async with Attachment(worker.endpoint) as router:
        request = make_request(router.info, list(range(64)), max_tokens=1)
        await router.run(request).until_ended()
        info = router.info
    keys = b"".join(chain_keys(request.root_key, request.token_ids))
    mine, others = ticket_for("3", request, info), ticket_for("4", request, info)
    async with connect(worker.endpoint) as channel:
        stub = kv_pb2_grpc.KvTransferServiceStub(channel)  # type: ignore[no-untyped-call]
        pin = kv_pb2.PinRequest(ticket=mine, runs=[kv_pb2.KeyRun(keys=keys)])
        pinned = await stub.Pin(pin, metadata=token())
        state = 'paceline_worker_pages{state="pinned"}'
        await asyncio.to_thread(wait_for, lambda: worker.metric(state) == 4, 2)
        lease_id = pinned.lease_id
        unpin = kv_pb2.UnpinRequest(ticket=others, lease_id=lease_id)
        await stub.Unpin(unpin, metadata=token())
        await asyncio.sleep(2 * float(str(FAST["beat_s"])))
        assert worker.metric(state) == 4
        unpin = kv_pb2.UnpinRequest(ticket=mine, lease_id=lease_id)
        await stub.Unpin(unpin, metadata=token())
    await asyncio.to_thread(wait_for, lambda: is_free(worker), 1)


def ticket_for(
    incarnation: str, request: common_pb2.TokenRequest, source: worker_pb2.WorkerInfo
) -> common_pb2.Ticket:
    reader = worker_pb2.WorkerInfo(worker_id="reader", incarnation=incarnation)
    return make_ticket(request, source, reader)


async def test_a_lease_that_is_not_listed_twice_is_released(worker: WorkerProcess) -> None:
    async with Attachment(worker.endpoint) as router:
        request = make_request(router.info, list(range(64)), max_tokens=1)
        await router.run(request).until_ended()
        info = router.info
    async with connect(worker.endpoint) as channel:
        stub = kv_pb2_grpc.KvTransferServiceStub(channel)  # type: ignore[no-untyped-call]
        ticket = ticket_for("2", request, info)
        keys = b"".join(chain_keys(request.root_key, request.token_ids))
        pin = kv_pb2.PinRequest(ticket=ticket, runs=[kv_pb2.KeyRun(keys=keys)])
        kept, dropped = [(await stub.Pin(pin, metadata=token())).lease_id for _ in range(2)]
        call = stub.KeepLeases(metadata=token())

        async def beat(*lease_ids: str) -> list[str]:
            message = kv_pb2.LeaseBeat(
                reader_worker="reader", reader_incarnation="2", lease_ids=lease_ids
            )
            await call.write(message)
            return list((await call.read()).unknown_lease_ids)

        assert await beat(kept, dropped, "stranger") == ["stranger"]
        assert await beat(kept) == []
        assert await beat(kept) == []
        assert await beat(kept, dropped) == [dropped]
        call.cancel()
        unpin = kv_pb2.UnpinRequest(ticket=ticket, lease_id=kept)
        await stub.Unpin(unpin, metadata=token())
    await asyncio.to_thread(wait_for, lambda: is_free(worker), 2)


async def test_another_model_is_refused_by_name(worker: WorkerProcess) -> None:
    """R027: equal shapes, other weights. https://github.com/vllm-project/vllm/pull/55776"""
    async with connect(worker.endpoint) as channel:
        stub = kv_pb2_grpc.KvTransferServiceStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Describe(kv_pb2.DescribeRequest(content_digest="ab" * 32), metadata=token())
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    error = error_of(refused.value)
    assert isinstance(error, IncompatiblePeer) and error.field == "content_digest"


async def test_the_successor_of_a_source_says_that_it_is_another_not_that_its_model_is(
    worker: WorkerProcess,
) -> None:
    """Else a hint of before a rolling update would have its reader keep the dead one apart, and
    raise an alarm."""
    request = kv_pb2.DescribeRequest(content_digest="ab" * 32, source_incarnation="before")
    async with connect(worker.endpoint) as channel:
        stub = kv_pb2_grpc.KvTransferServiceStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Describe(request, metadata=token())
    error = error_of(refused.value)
    assert isinstance(error, KvUnavailable) and error.field == "source_incarnation"


async def test_sglang_40125_a_slot_number_that_is_posted_twice_costs_its_stream_alone(
    worker: WorkerProcess,
) -> None:
    """R035. https://github.com/sgl-project/sglang/issues/40125: 400 for the second, and the worker
    serves the next request."""
    async with Attachment(worker.endpoint) as other, Attachment(worker.endpoint) as router:
        beside = other.run(
            make_request(other.info, list(range(30)), max_tokens=40, ignore_eos=True)
        )
        request = make_request(router.info, list(range(40)), max_tokens=200, ignore_eos=True)
        for _ in range(2):
            router.send(run=worker_pb2.RunWhole(slot=77, request=request))
        async with asyncio.timeout(5):
            await router.closed.wait()
        assert router.status is grpc.StatusCode.INVALID_ARGUMENT
        assert len((await beside.until_ended()).output()) == 40
        again = other.run(make_request(other.info, list(range(40)), max_tokens=5, ignore_eos=True))
        assert len((await again.until_ended()).output()) == 5
    await asyncio.to_thread(wait_for, lambda: is_free(worker), 5)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"weights": "00"}, "weights"),
        ({"kv_dtype": "bfloat16"}, "kv_dtype"),
        ({"config": "00", "weights": "00"}, "config"),
        ({"quantization": "00"}, "quantization"),
        ({"weights": "0" * 10_000, "unheard_of": "1"}, "weights"),
    ],
)
async def test_what_differs_of_another_model_is_named(
    worker: WorkerProcess, changed: dict[str, str], field: str
) -> None:
    """Before a transport's address is told."""
    async with connect(worker.endpoint) as channel:
        stub = kv_pb2_grpc.KvTransferServiceStub(channel)  # type: ignore[no-untyped-call]
        async with Attachment(worker.endpoint) as router:
            digest = router.info.content_digest
        same = kv_pb2.DescribeRequest(content_digest=digest)
        parts = dict((await stub.Describe(same, metadata=token())).content_parts)
        assert parts["kv_dtype"] == "float32"
        other = kv_pb2.DescribeRequest(content_digest="ab" * 32, content_parts={**parts, **changed})
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Describe(other, metadata=token())
    error = error_of(refused.value)
    assert isinstance(error, IncompatiblePeer) and error.field == field
    assert all(name in error.message for name in set(changed) & set(parts))
    assert len(error.message) < 400


async def test_health_and_reflection_answer(worker: WorkerProcess) -> None:
    async with connect(worker.endpoint) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "paceline.v1.WorkerService", "paceline.v1.KvTransferService"):
            async with asyncio.timeout(5):  # it follows /readyz by a moment
                async for answer in health.Watch(health_pb2.HealthCheckRequest(service=service)):
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        break
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        question = reflection_pb2.ServerReflectionRequest(list_services="")
        async for reply in reflection.ServerReflectionInfo(iter([question])):
            names = {item.name for item in reply.list_services_response.service}
            assert "paceline.v1.WorkerService" in names
            break


async def test_junk_on_any_port_does_nothing(worker: WorkerProcess, tmp_path: Path) -> None:
    """R080. https://github.com/InternLM/lmdeploy/issues/4804"""
    marker = tmp_path / "marker"
    ports = listening_ports([worker.pid, *worker.rank_pids()])
    assert {worker.port, worker.probe_port} < ports  # and that of the tcp transport
    for port in ports:
        for message in junk(marker):
            assert await asyncio.to_thread(seconds_until_closed, port, message) < 1
    assert not marker.exists()
    assert not worker.not_ready()
    async with Attachment(worker.endpoint) as router:
        log = await router.run(make_request(router.info, [1, 2, 3], max_tokens=2)).until_ended()
        assert len(log.output()) == 2


async def test_redis_knows_the_worker_and_what_it_holds(
    worker: WorkerProcess, redis_server: RedisServer
) -> None:
    client = redis.Redis.from_url(redis_server.url)
    async with Attachment(worker.endpoint) as router:
        request = make_request(router.info, list(range(100, 180)), max_tokens=1)
        await router.run(request).until_ended()
        info = router.info
    record = records.parse(client.get("pl:1:worker:one"), SECRET.encode())
    assert record == info
    keys = {key[:16] for key in chain_keys(request.root_key, request.token_ids)}
    name = f"pl:1:keys:one:{info.incarnation}"
    await asyncio.to_thread(wait_for, lambda: keys <= client.smembers(name), 2)
    events = [fields for _, fields in client.xrange("pl:1:events")]
    assert events[0][b"k"] == b"cleared"
    packed = [event[b"b"] for event in events]
    assert keys <= {part[i : i + 16] for part in packed for i in range(0, len(part), 16)}
    sequences = [int(event[b"s"]) for event in events]
    assert sequences == list(range(1, len(events) + 1))
    assert int(client.get(f"pl:1:seq:one:{info.incarnation}")) == sequences[-1]
    client.close()


async def test_a_paused_redis_delays_nothing_and_is_made_good(
    worker: WorkerProcess, redis_server: RedisServer
) -> None:
    """R086. https://github.com/BerriAI/litellm/pull/35273"""
    client = redis.Redis.from_url(redis_server.url)
    redis_server.pause()
    try:
        async with Attachment(worker.endpoint) as router:
            waits = []
            for round_ in range(10):
                request = make_request(router.info, [round_] * 40, max_tokens=1)
                started = time.monotonic()
                await router.run(request).until_ended()
                waits.append(time.monotonic() - started)
                await asyncio.sleep(0.15)  # longer than the socket timeout in all
            assert statistics.median(waits) < 0.3
            assert not worker.not_ready()
            info = router.info
    finally:
        redis_server.resume()
    keys = {key[:16] for key in chain_keys(request.root_key, request.token_ids)}
    name = f"pl:1:keys:one:{info.incarnation}"
    await asyncio.to_thread(wait_for, lambda: keys <= client.smembers(name), 5)
    client.flushall()
    await asyncio.to_thread(wait_for, lambda: keys <= client.smembers(name), 5)
    client.close()
