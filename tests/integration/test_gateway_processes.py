"""A gateway of several real processes behind one HTTP and one gRPC port."""

import asyncio
import json
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

import grpc
import psutil
import pytest

from benchmarks.deployment import mock_model, scrape, total
from benchmarks.loadgen import Call, send_all
from paceline.cli.cluster import Cluster, ClusterSpec
from paceline.core.errors import EngineFailure
from paceline.core.metrics import GATEWAY_RUNNING, REQUEST_SUCCESS
from paceline.gateway import processes
from paceline.gateway.config import GatewayConfig
from paceline.v1 import generate_pb2, generate_pb2_grpc
from tests.support.end_to_end import prompt
from tests.support.fake_router_service import SECRET, bytes_reply
from tests.support.gateway_client import raw_request, request_bytes
from tests.support.gateway_process import GatewayProcess, gateway_process
from tests.support.key_file import entry, write
from tests.support.mock_model import write_mock_model
from tests.support.waits import until

pytestmark = [pytest.mark.slow]

NUM_PROCESSES = 3
SEVERAL = ("--processes", str(NUM_PROCESSES), "--probe-port", "0", "--drain-timeout-s", "5")
GATEWAYS = ("gateway", "gateway-1")  # processes of one
NUM_CONNECTIONS = 60  # that one of three gets none: 1 in 10^10
KEY = "k" * 32
HEADERS = ("content-type: application/json", "connection: close")


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[GatewayProcess]:
    async with gateway_process(tmp_path, *SEVERAL) as running:
        await all_listen(running)
        yield running


async def all_listen(gateway: GatewayProcess) -> None:
    await until(lambda: bool(events(gateway, "all listening")), 30)
    assert gateway.router.num_streams == NUM_PROCESSES


def events(gateway: GatewayProcess, name: str) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in gateway.log if f'"event": "{name}"' in line]
    return lines


def probe_urls(gateway: GatewayProcess) -> dict[object, str]:
    """Of the process that has each number now."""
    started = events(gateway, "listening")
    return {one["process"]: f"http://127.0.0.1:{one['probe_port']}" for one in started}


async def counted(gateway: GatewayProcess, metric: str) -> list[float]:
    """By process."""
    found = []
    for url in probe_urls(gateway).values():
        answer = await asyncio.to_thread(urlopen, f"{url}/metrics", timeout=5)
        lines = answer.read().decode().splitlines()
        found.append(sum(float(line.split()[-1]) for line in lines if line.startswith(metric)))
    return found


def request(**fields: object) -> bytes:
    body = {"model": "mock", "prompt": "Hi", "max_tokens": 5, **fields}
    return request_bytes("/v1/completions", json.dumps(body).encode(), *HEADERS)


async def complete(gateway: GatewayProcess, *, key: str = "") -> int:
    """By a connection of its own. The status."""
    data = request()
    if key:
        data = data.replace(b"\r\n", f"\r\nauthorization: Bearer {key}\r\n".encode(), 1)
    status, _, _ = await raw_request(gateway.port, data)
    return status


async def generate(gateway: GatewayProcess) -> str:
    options = [("grpc.use_local_subchannel_pool", 1)]  # a connection of its own
    async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}", options) as channel:
        stub = generate_pb2_grpc.GenerateServiceStub(channel)  # type: ignore[no-untyped-call]
        parts = stub.Generate(generate_pb2.GenerateRequest(text="Hi"))
        return "".join([part.text async for part in parts])


async def test_connections_are_spread_and_each_process_counts_its_own(
    gateway: GatewayProcess,
) -> None:
    statuses = await asyncio.gather(*(complete(gateway) for _ in range(NUM_CONNECTIONS)))
    assert Counter(statuses) == {200: NUM_CONNECTIONS}
    after_http = await counted(gateway, REQUEST_SUCCESS)
    assert sum(after_http) == NUM_CONNECTIONS and min(after_http) > 0
    texts = await asyncio.gather(*(generate(gateway) for _ in range(NUM_CONNECTIONS)))
    assert set(texts) == {"Hello"}
    by_grpc = [
        after - before
        for after, before in zip(await counted(gateway, REQUEST_SUCCESS), after_http, strict=True)
    ]
    assert sum(by_grpc) == NUM_CONNECTIONS and min(by_grpc) > 0
    for path, expected in (("/metrics", 404), ("/readyz", 200), ("/livez", 200)):
        shared = request_bytes(path, b"", *HEADERS, method="GET")
        assert (await raw_request(gateway.port, shared))[0] == expected


async def test_a_stop_drains_streams_of_all_and_leaves_nothing(gateway: GatewayProcess) -> None:
    gateway.router.reply = lambda request: bytes_reply(b"0123456789", interval_s=0.1)
    children = psutil.Process(gateway.process.pid).children()
    assert len(children) == NUM_PROCESSES
    connections = [
        await asyncio.open_connection("127.0.0.1", gateway.port) for _ in range(NUM_CONNECTIONS)
    ]
    for _, writer in connections:
        writer.write(request(stream=True, max_tokens=10))
    for reader, _ in connections:
        await reader.readuntil(b'"text":"1"')
    assert min(await counted(gateway, GATEWAY_RUNNING)) > 0
    gateway.process.send_signal(signal.SIGTERM)
    for reader, writer in connections:
        rest = await asyncio.wait_for(reader.read(), 10)
        assert b'"text":"9"' in rest and b"[DONE]" in rest
        writer.close()
    assert await asyncio.wait_for(gateway.process.wait(), 10) == 0
    assert not any(child.is_running() for child in children)
    for port in (gateway.port, gateway.grpc_port):
        with pytest.raises(ConnectionError):
            await asyncio.open_connection("127.0.0.1", port)


async def test_one_that_is_killed_is_started_again_while_the_others_serve(
    gateway: GatewayProcess,
) -> None:
    router = gateway.router
    router.reply = lambda request: bytes_reply(b"0123456789" * 3, interval_s=0.1)
    streams = [
        await asyncio.open_connection("127.0.0.1", gateway.port) for _ in range(NUM_CONNECTIONS)
    ]
    for reader, writer in streams:
        writer.write(request(stream=True, max_tokens=30))
        await reader.readuntil(b'"text":"0"')
    running = await counted(gateway, GATEWAY_RUNNING)
    router.reply = lambda request: bytes_reply(b"Hello")
    router.attach_s = 1.0  # a process that listened before it has a router would answer with 503
    victim = psutil.Process(gateway.process.pid).children()[0]
    victim.kill()
    victim.wait(5)
    while not events(gateway, "process started again"):  # nobody meets the one that starts
        assert await complete(gateway) == 200
        await asyncio.sleep(0.01)
    num_complete = 0
    for reader, writer in streams:
        with suppress(ConnectionError):
            num_complete += b"[DONE]" in await asyncio.wait_for(reader.read(), 10)
        writer.close()
    lost = len(streams) - num_complete
    assert lost in running and lost < len(streams)
    (ended,) = events(gateway, "process ended")
    assert ended["why"] == "a process of the gateway was killed by SIGKILL"
    for _ in range(NUM_CONNECTIONS):
        assert await complete(gateway) == 200
    assert min(await counted(gateway, REQUEST_SUCCESS)) > 0
    gateway.process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(gateway.process.wait(), 10) == 0


async def test_one_that_stands_still_is_ended_and_started_again(tmp_path: Path) -> None:
    async with gateway_process(tmp_path, *SEVERAL, "--stall-s", "3") as gateway:
        await all_listen(gateway)
        await asyncio.sleep(4)  # who goes on is left alone
        assert not events(gateway, "process ended")
        victim = psutil.Process(gateway.process.pid).children()[1]
        victim.suspend()
        await until(lambda: bool(events(gateway, "process started again")), 15)
        (told,) = events(gateway, "process stands still")
        assert [one["process"] for one in events(gateway, "process ended")] == [told["process"]]
        for _ in range(NUM_CONNECTIONS):
            assert await complete(gateway) == 200


async def test_a_hangup_has_all_read_their_key_file_again(tmp_path: Path) -> None:
    """None dies of it, not even one that is starting again meanwhile."""
    keys = write(tmp_path / "keys.toml", entry("acme", [KEY]))
    async with gateway_process(tmp_path, *SEVERAL, "--api-keys", str(keys)) as gateway:
        await all_listen(gateway)
        gateway.process.send_signal(signal.SIGHUP)
        await until(lambda: len(events(gateway, "key file read")) == NUM_PROCESSES, 10)
        told = {one["process"] for one in events(gateway, "key file read")}
        assert told == set(range(NUM_PROCESSES))
        psutil.Process(gateway.process.pid).children()[0].kill()
        await until(lambda: bool(events(gateway, "process ended")), 10)
        while not events(gateway, "process started again"):
            gateway.process.send_signal(signal.SIGHUP)
            await asyncio.sleep(0.05)
        assert len(events(gateway, "process ended")) == 1
        assert await complete(gateway, key=KEY) == 200


async def test_one_that_stands_still_while_it_starts_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs longer than it gets here."""
    monkeypatch.setattr(processes, "START_S", 0.05)
    model = write_mock_model(tmp_path / "mock")
    config = GatewayConfig(model=model, port=0, grpc_port=0, secret=SECRET, processes=2)
    with pytest.raises(EngineFailure, match="was killed by SIGKILL"):
        await asyncio.wait_for(processes.Processes(config).serve(), 10)
    assert not psutil.Process().children()


async def test_none_outlives_a_parent_that_is_killed(gateway: GatewayProcess) -> None:
    children = psutil.Process(gateway.process.pid).children()
    gateway.process.kill()
    await until(lambda: not any(child.is_running() for child in children), 5)


def test_a_whole_deployment_with_two() -> None:
    worker = {"num_threads": 1, "pool_mib": 16}
    settings = {"prefill": worker, "decode": worker}
    with mock_model() as model:
        spec = ClusterSpec(model, routers=2, gateways=2, settings=settings, drain_timeout_s=20)
        cluster = Cluster(spec)
        cluster.start()
        try:
            call = Call({"model": model.name, "prompt": prompt(20), "max_tokens": 4})
            answers = asyncio.run(send_all(cluster.base_url, [call] * NUM_CONNECTIONS, 16))
            assert all(answer.is_complete for answer in answers)
            counted = [total(scrape(cluster.urls[name]), REQUEST_SUCCESS) for name in GATEWAYS]
            assert sum(counted) == NUM_CONNECTIONS and min(counted) > 0
            shown = [json.load(urlopen(f"{url}/debug/requests")) for url in cluster.operator_urls]
            assert [len(one["ended"]) for one in shown] == counted
        finally:
            clean = cluster.stop()
        assert clean


async def test_a_tenant_has_one_limit_in_all_processes(tmp_path: Path) -> None:
    keys = write(
        tmp_path / "keys.toml",
        entry("acme", ["sk-acme"], requests_per_minute=12),
        entry("other", ["sk-other"]),
    )
    async with gateway_process(tmp_path, *SEVERAL, "--api-keys", str(keys)) as gateway:
        await all_listen(gateway)
        asked = (complete(gateway, key="sk-acme") for _ in range(NUM_CONNECTIONS))
        seen = Counter(await asyncio.gather(*asked))
        assert 12 <= seen[200] <= 13 and seen[200] + seen[429] == NUM_CONNECTIONS
        assert await complete(gateway, key="sk-other") == 200
        for child in psutil.Process(gateway.process.pid).children():
            child.kill()
        await until(lambda: len(events(gateway, "process started again")) == NUM_PROCESSES, 30)
        seen = Counter([await complete(gateway, key="sk-acme") for _ in range(NUM_CONNECTIONS)])
        assert seen[429] > NUM_CONNECTIONS - 12  # a restart gives no new minute


async def test_a_taken_port_and_a_wrong_file_are_told_once(tmp_path: Path) -> None:
    async with gateway_process(tmp_path, *SEVERAL) as first:
        await all_listen(first)
        for name, port in (("port", first.port), ("grpc_port", first.grpc_port)):
            flag = f"--{name.replace('_', '-')}"
            async with gateway_process(tmp_path, *SEVERAL, flag, str(port), listens=False) as other:
                assert await asyncio.wait_for(other.process.wait(), 20) == 2
            (line,) = (line for line in other.log if line.startswith("paceline:"))
            assert f"{name}={port}: cannot listen" in line
    keys = write(tmp_path / "keys.toml", "[tenants")
    asked = (*SEVERAL, "--api-keys", str(keys))
    async with gateway_process(tmp_path, *asked, listens=False) as other:
        assert await asyncio.wait_for(other.process.wait(), 20) == 2
    (line,) = (line for line in other.log if line.startswith("paceline:"))
    assert "api_keys='keys.toml'" in line
    with socket.socket() as free:
        free.bind(("127.0.0.1", first.port))
