"""`paceline explain` against a router that serves: what it decided, for those with its secret."""

import asyncio
import re
from collections.abc import Iterator

import grpc
import pytest

from paceline.cli import main as cli
from paceline.cli.explain import cost_of, lines_of
from paceline.router.decision_log import MAX_DECISIONS
from paceline.rpc import channel
from paceline.v1 import control_pb2, control_pb2_grpc
from tests.support.fake_worker import SECRET
from tests.support.redis_server import RedisServer, redis_server
from tests.support.router_bench import Bench, router_bench
from tests.support.waits import until


@pytest.fixture(scope="module")
def store() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


class Explain:
    """Runs the command; `lines` is what it printed, without what the router logs meanwhile."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.lines: list[str] = []
        self.error = ""

    async def __call__(self, bench: Bench, *arguments: str) -> int:
        return await self.of(f"127.0.0.1:{bench.router.port}", *arguments)

    async def of(self, routers: str, *arguments: str) -> int:
        self._capsys.readouterr()
        given = ["explain", "--router", routers, *arguments]
        code = await asyncio.to_thread(cli.main, given)
        told = self._capsys.readouterr()
        self.lines = [line for line in told.out.splitlines() if not re.match(r"\d{4}-", line)]
        self.error = told.err
        return code


@pytest.fixture
def explain(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Explain:
    monkeypatch.setenv("PACELINE_EXPLAIN_SECRET", SECRET)
    return Explain(capsys)


async def test_the_terms_of_each_worker_that_was_considered_are_printed(
    store: RedisServer, explain: Explain
) -> None:
    async with router_bench(store) as bench:
        for name in ("p0", "d0", "d1"):
            await bench.add(name)
        assert await explain(bench) == 0
        assert explain.lines == ["The router has decided nothing yet."]
        client = await bench.client()
        for num_prompt in (100, 20):
            (await client.generate(num_prompt=num_prompt)).check(8)
        assert await explain(bench) == 0
        split, *considered, whole, second, third = explain.lines
        assert re.fullmatch(
            r"\d\d:\d\d:\d\d request-1 attempt 0 of tiny: prefill on p0, decode on d[01]"
            r" \(100 tokens, 8 to come\)",
            split,
        )
        assert considered[0] == "  * prefill p0: uncached 100 = 100, 0 cached"
        assert {line[4:14] for line in considered[1:]} == {"decode  d0", "decode  d1"}
        assert sorted(line[2] for line in considered[1:]) == [" ", "*"]
        assert "uncached 12 " in considered[1], "an eighth: it is pulled"
        assert re.search(r"request-2 attempt 0 of tiny: whole on d[01] \(20 tokens", whole)
        assert {second[2], third[2]} == {"*", " "}
        assert await explain(bench, "--request", "request-1", "--last", "1") == 0
        assert not any("request-2" in line for line in explain.lines)


async def test_requests_in_quarantine_are_told_of(store: RedisServer, explain: Explain) -> None:
    async with router_bench(store) as bench:
        for name in ("d0", "d1"):
            await bench.add(name, poison=666)
        client = await bench.client()
        await client.generate(prompt=[666] * 20)
        assert await explain(bench, "--last", "1") == 0
        assert re.fullmatch(
            r"\d\d:\d\d:\d\d request-1 is in quarantine for (600|5\d\d) s more: d0, d1 died of it"
            r" \(fingerprint [0-9a-f]{12}\)",
            explain.lines[-1],
        )


def test_terms_that_round_to_0_are_left_out() -> None:
    worker = control_pb2.ConsideredWorker(uncached=0.2, running=32.6, pull=0.4)
    assert cost_of(worker) == "uncached 0 + running 33 = 33, 0 cached"


def test_a_worker_that_can_do_both_is_marked_where_it_was_taken() -> None:
    decision = control_pb2.Decision(prefill_worker="b0", decode_worker="d0")
    for name, is_prefill in (("b0", True), ("d0", False), ("b0", False)):
        decision.considered.add(worker_id=name, is_prefill=is_prefill)
    assert [line[2] for line in list(lines_of(decision))[1:]] == ["*", "*", " "]


async def test_all_routers_are_asked_and_their_decisions_are_put_in_order(
    store: RedisServer, explain: Explain
) -> None:
    async with router_bench(store) as one, router_bench(store) as other:
        ports = [bench.router.port for bench in (one, other)]
        for bench, name in ((one, "d0"), (other, "d1")):
            await bench.add(name)
        for number in range(4):
            client = await (one, other)[number % 2].client()
            answer = await client.generate(num_prompt=20, request_id=f"turn-{number}")
            answer.check(8)
        gone = "127.0.0.1:1"
        routers = ",".join([f"127.0.0.1:{ports[0]}", gone, f"localhost:{ports[1]}"])
        assert await explain.of(routers, "--last", "3") == 0
        heads = [line for line in explain.lines if not line.startswith(" ")]
        assert [head.split()[1] for head in heads] == ["turn-1", "turn-2", "turn-3"]
        assert heads[1].endswith(f" by 127.0.0.1:{ports[0]}")
        assert heads[2].endswith(f" by localhost:{ports[1]} (127.0.0.1:{ports[1]})")
        assert f"paceline: router {gone}: " in explain.error
        assert await explain.of(gone) == 1


async def test_outsiders_are_told_nothing(
    store: RedisServer, explain: Explain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_EXPLAIN_SECRET", "a secret of somebody else")
    async with router_bench(store) as bench:
        await bench.add("d0")
        (await (await bench.client()).generate()).check(8)
        assert await explain(bench) == 1
        name = f"router 127.0.0.1:{bench.router.port}"
        assert not explain.lines
        assert f"paceline: {name}: the caller has another secret\n" in explain.error
        async with channel.connect(f"127.0.0.1:{bench.router.port}") as connection:
            stub = control_pb2_grpc.RouterServiceStub(connection)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Explain(control_pb2.ExplainRequest(num_decisions=10))
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_only_the_last_decisions_are_kept(store: RedisServer) -> None:
    async with router_bench(store) as bench:
        await bench.add("d0")
        client = await bench.client()
        for _ in range(MAX_DECISIONS + 10):
            answer = await client.submit(num_prompt=1, max_tokens=1)
        await until(lambda: answer.ended)
        kept = bench.router.coordinator.decisions.last(10 * MAX_DECISIONS)
        assert len(kept) == MAX_DECISIONS
        assert kept[-1].request_id == f"request-{MAX_DECISIONS + 10}"
