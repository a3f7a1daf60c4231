"""From one router to another: drains, deaths, addresses that lead nowhere."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from paceline.gateway import submission
from paceline.gateway.main import GatewayServer
from paceline.v1.common_pb2 import TokenRequest, WorkerLife
from paceline.v1.control_pb2 import SlotSetback
from tests.support.fake_router_service import FakeRouter, Reply, bytes_reply, embedding_of
from tests.support.gateway_deployment import gateway_config, model_info, running
from tests.support.waits import until as until_within

TEXT = "takes a while"


async def until(holds: Callable[[], bool]) -> float:
    """Patience is not what is tested here."""
    return await until_within(holds, 20)


async def until_sent(router: FakeRouter, num_submissions: int) -> None:
    await until(lambda: len(router.submissions) == num_submissions)


def slowly(request: TokenRequest) -> Reply:
    return bytes_reply(TEXT.encode(), interval_s=0.02)


def content(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


@asynccontextmanager
async def two_routers(model_dir: Path, **settings: Any) -> AsyncIterator[tuple[Any, ...]]:
    """(deployment, the router in use, the other one)."""
    other = FakeRouter([model_info(model_dir)])
    other.reply = slowly
    await other.start()
    try:
        async with running(model_dir, other.endpoint, **settings) as deployment:
            deployment.router.reply = slowly
            yield deployment, deployment.router, other
    finally:
        await other.stop()


async def test_a_router_that_drains_finishes_what_runs_and_gets_nothing_new(
    model_dir: Path,
) -> None:
    async with two_routers(model_dir) as (deployment, old, new):
        running_one = asyncio.create_task(deployment.chat())
        await until(lambda: len(old.submissions) == 1)
        old.drain()
        await until(lambda: new.num_attached == 1)
        later = await asyncio.gather(*(deployment.chat() for _ in range(4)))
        assert {content(answer) for answer in [*later, await running_one]} == {TEXT}
        assert (len(old.submissions), len(new.submissions)) == (1, 4)
        await until(lambda: old.num_streams == 0)


async def test_what_a_draining_router_refuses_or_gives_back_goes_elsewhere(
    model_dir: Path,
) -> None:
    async with two_routers(model_dir) as (deployment, old, new):
        old.reply = lambda request: bytes_reply(TEXT.encode(), interval_s=0.2)
        streaming = asyncio.create_task(deployment.chat())
        await until(lambda: len(old.submissions) == 1)
        await asyncio.sleep(0.25)
        old.is_draining = True  # and the gateway has not heard of it
        refused = asyncio.create_task(deployment.chat())
        await until(lambda: len(new.submissions) == 1)
        assert (len(old.submissions), new.submissions[0].request.epoch) == (2, 1)
        old.hand_over()
        assert content(await refused) == content(await streaming) == TEXT
        given_back = new.submissions[1].request
        assert len(given_back.token_ids) > given_back.num_prompt_tokens, "it goes on"
        metrics = (await deployment.http.get("/metrics")).text
        assert 'requests_moved_total{reason="drained"} 2.0' in metrics


async def test_choices_go_on_by_themselves_and_ended_ones_stay_ended(model_dir: Path) -> None:
    async with two_routers(model_dir) as (deployment, old, new):

        def numbered(interval_s: float) -> Reply:
            return Reply([[ord(c)] for c in "_ is it"], interval_s=interval_s, names_choice=True)

        old.reply, new.reply = lambda _: numbered(0.2), lambda _: numbered(0.0)
        asked = asyncio.create_task(deployment.chat(n=3, stop="1 i"))
        await until(lambda: bool(old.submissions and old.submissions[0].cancelled_choices))
        await old.stop()
        answer = (await asked).json()["choices"]
        assert [choice["message"]["content"] for choice in answer] == ["0 is it", "", "2 is it"]
        moved = [submission.request for submission in new.submissions]
        assert [list(request.choices) for request in moved] == [[0], [2]]
        assert [request.epoch for request in moved] == [1, 2]
        assert len({request.request_id for request in moved}) == 1


@pytest.mark.parametrize(("num_epochs", "status"), [(3, 503), (4, 200)])
async def test_a_move_that_wants_more_epochs_than_are_left_is_not_begun(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, num_epochs: int, status: int
) -> None:
    """A router would refuse the last one: for the client that is nothing that it did."""
    monkeypatch.setattr("paceline.gateway.submission.MAX_EPOCH", num_epochs - 1)
    async with two_routers(model_dir) as (deployment, old, new):
        old.reply = lambda _: bytes_reply(TEXT.encode(), interval_s=0.2)
        asked = asyncio.create_task(deployment.chat(n=3))
        await until_sent(old, 1)
        await asyncio.sleep(0.3)
        old.cut()
        answer = await asked
        assert answer.status_code == status, answer.text
        assert len(new.submissions) == (3 if status == 200 else 0)


async def test_the_next_router_hears_of_attempts_that_failed_and_of_workers_that_were_lost(
    model_dir: Path,
) -> None:
    """It counts on from there: routers in turn are no way around the bounds of one."""
    lives = [WorkerLife(worker_id=f"d{i}", incarnation="a") for i in (0, 1, 0)]
    async with two_routers(model_dir) as (deployment, old, new):

        def set_back(request: TokenRequest) -> Reply:
            number = request.epoch
            setback = SlotSetback(num_failures=number + 1, lost=lives[number])
            return bytes_reply(TEXT.encode(), interval_s=0.05, setback=setback)

        old.reply = new.reply = set_back
        asked = asyncio.create_task(deployment.chat())
        await until_sent(old, 1)
        await asyncio.sleep(0.2)
        old.cut()
        await until_sent(new, 1)
        await asyncio.sleep(0.2)
        new.cut()
        await until(lambda: len([*old.submissions, *new.submissions]) == 3)
        assert content(await asked) == TEXT
        sent = [s.request for s in (*old.submissions, *new.submissions)]
        first, second, third = sorted(sent, key=lambda request: request.epoch)
        assert (first.num_failures, list(first.lost_workers)) == (0, [])
        assert (second.num_failures, list(second.lost_workers)) == (1, lives[:1])
        assert (third.num_failures, list(third.lost_workers)) == (2, lives[:2])


async def test_a_request_that_ends_its_routers_is_given_up(model_dir: Path) -> None:
    async with running(model_dir) as deployment:
        router = deployment.router

        def deadly(request: TokenRequest) -> Reply:
            router.cut()
            return slowly(request)

        router.reply = deadly
        answer = await deployment.chat()
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "unavailable"
        assert [s.request.epoch for s in router.submissions] == [0, 1, 2, 3]
        router.reply = slowly
        await until(lambda: not deployment.gateway.serving.reasons())
        assert content(await deployment.chat()) == TEXT


async def test_routers_that_were_lost_long_ago_do_not_count(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "FORGIVEN_S", 0.0)
    async with running(model_dir) as deployment:
        router = deployment.router

        def dies_five_times(request: TokenRequest) -> Reply:
            if request.epoch < 5:
                router.cut()
            return slowly(request)

        router.reply = dies_five_times
        assert content(await deployment.chat()) == TEXT
        assert [s.request.epoch for s in router.submissions] == [0, 1, 2, 3, 4, 5]


async def test_a_router_that_dies_counts_once_whatever_it_worked_on(model_dir: Path) -> None:
    """Of a request whose choices go on one by one, too; nobody beside it is forgotten."""
    async with two_routers(model_dir) as (deployment, old, new):

        def spelt(request: TokenRequest) -> Reply:
            return bytes_reply(TEXT.encode(), interval_s=0.1)

        old.reply = new.reply = spelt
        many = asyncio.create_task(deployment.chat(n=4))
        beside = [asyncio.create_task(deployment.chat()) for _ in range(3)]
        for used, num_parts in ((old, 4), (new, 7), (old, 4 + 7)):
            await until_sent(used, num_parts)
            await asyncio.sleep(0.25)
            used.cut()
        choices = (await many).json()["choices"]
        assert [choice["message"]["content"] for choice in choices] == [TEXT] * 4
        assert [content(await one) for one in beside] == [TEXT] * 3


async def test_a_fault_of_ours_costs_one_stream_and_is_told(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_routers(model_dir) as (deployment, _old, new):

        def fail_once(link: object, frame: object) -> None:
            monkeypatch.undo()
            raise ZeroDivisionError

        with capture_logs() as logs:
            monkeypatch.setattr(deployment.gateway.serving.router, "take", fail_once)
            assert content(await deployment.chat()) == TEXT
        assert len(new.submissions) == 1
        (told,) = [line for line in logs if line["event"] == "router link failed"]
        assert isinstance(told["exc_info"], ZeroDivisionError)


async def test_a_request_that_is_given_up_takes_nobody_with_it(model_dir: Path) -> None:
    async with running(model_dir) as deployment:
        router = deployment.router
        router.reply = lambda request: bytes_reply(TEXT.encode(), interval_s=0.15)
        many = asyncio.create_task(deployment.chat(n=4))
        await until(lambda: len(router.submissions) == 1)
        for _ in range(3):
            await asyncio.sleep(0.25)
            router.cut()
            await until(lambda: router.num_streams == 1)
        await asyncio.sleep(0.25)
        beside = [asyncio.create_task(deployment.chat()) for _ in range(3)]
        await until(lambda: len([s for s in router.submissions if not s.request.epoch]) == 4)
        router.cut()
        assert (await many).status_code == 503
        assert [content(await one) for one in beside] == [TEXT] * 3


async def test_what_the_last_router_gives_back_waits_as_long_as_others_and_no_longer(
    model_dir: Path,
) -> None:
    """Also when nobody has known a router for longer than that, while it drained."""
    wait_s = 0.5
    async with running(model_dir, router_wait_s=wait_s) as deployment:
        router = deployment.router
        router.reply = lambda request: bytes_reply(TEXT.encode(), interval_s=0.5)
        held = asyncio.create_task(deployment.chat())
        await until(lambda: len(router.submissions) == 1)
        router.drain()
        await asyncio.sleep(2 * wait_s)
        assert (await deployment.chat()).status_code == 503, "the wait of new ones is over"
        assert not held.done()
        router.hand_over()
        given_back_s = asyncio.get_running_loop().time()
        answer = await held
        assert answer.status_code == 503 and answer.headers["retry-after"]
        assert asyncio.get_running_loop().time() - given_back_s >= 0.9 * wait_s


async def test_a_cancel_reaches_the_router_that_works_now(model_dir: Path) -> None:
    async with two_routers(model_dir) as (deployment, old, new):
        old.reply = new.reply = lambda request: Reply([[97]] * 500, interval_s=0.02)
        asked = asyncio.create_task(deployment.chat(max_tokens=200))
        await until(lambda: len(old.submissions) == 1)
        await old.stop()
        await until(lambda: len(new.submissions) == 1)
        asked.cancel()
        await until(new.submissions[0].cancelled.is_set)


# --- addresses --------------------------------------------------------------------------------


class Names:
    """A name service: `addresses` of one name, which tests change."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.num_asked = 0

    async def getaddrinfo(self, host: str, port: int, **kind: int) -> list[Any]:
        assert host == "routers.test"
        self.num_asked += 1
        if not self.addresses:
            raise socket.gaierror("no such name")
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))
            for address in self.addresses
        ]


@pytest.fixture
async def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    names = Names()
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", names.getaddrinfo)
    return names


async def test_a_name_is_looked_up_anew_and_leads_to_the_replacement(
    model_dir: Path, names: Names
) -> None:
    """A headless Service: the old address is gone from it before its router is."""
    old, new = FakeRouter([model_info(model_dir)]), FakeRouter([model_info(model_dir)])
    old.reply = new.reply = slowly
    await old.start(host="127.0.0.2")
    port = int(old.endpoint.rpartition(":")[2])
    await new.start(port, "127.0.0.3")
    names.addresses = ["127.0.0.2"]
    async with gateway(model_dir, f"routers.test:{port}") as server:
        await until(lambda: not server.serving.reasons())
        names.addresses = []  # a moment without any: the old one still serves
        old.drain()
        await asyncio.sleep(0.3)
        names.addresses = ["127.0.0.3"]
        await until(lambda: new.num_attached == 1)
        await until(lambda: not server.serving.reasons())
        assert names.num_asked < 20, "there is a pause between lookups"
    await old.stop()
    await new.stop()


async def test_dead_and_silent_addresses_cost_a_moment_each(model_dir: Path, names: Names) -> None:
    with socket.create_server(("127.0.0.4", 0), backlog=1) as silent:  # accepts, says nothing
        port = silent.getsockname()[1]
        router = FakeRouter([model_info(model_dir)])
        await router.start(port, "127.0.0.5")
        names.addresses = ["127.0.0.4", "127.0.0.6", "127.0.0.5"]
        async with gateway(model_dir, f"127.0.0.7:{port}", f"routers.test:{port}") as server:
            assert await until(lambda: not server.serving.reasons()) < 2.5
        await router.stop()


async def test_ipv6_and_ipv4_of_one_name_are_both_tried(model_dir: Path) -> None:
    """`localhost` is ::1 first on most machines, and this router listens on IPv4 alone."""
    router = FakeRouter([model_info(model_dir)])
    await router.start()
    async with gateway(model_dir, router.endpoint.replace("127.0.0.1", "localhost")) as server:
        await until(lambda: not server.serving.reasons())
    await router.stop()


@asynccontextmanager
async def gateway(model_dir: Path, *routers: str) -> AsyncIterator[GatewayServer]:
    server = GatewayServer(gateway_config(model_dir, *routers))
    await server.start()
    try:
        yield server
    finally:
        await server.drain()
        await server.stop()


async def test_embeddings_are_made_by_another_router_when_theirs_dies(model_dir: Path) -> None:
    async with two_routers(model_dir) as (deployment, old, new):
        old.reply = lambda request: Reply([], delay_s=30)
        body = {"model": "mock", "input": ["one", "three"], "normalize": False}
        work = asyncio.create_task(deployment.http.post("/v1/embeddings", json=body))
        await until(lambda: len(old.submissions) == 2)
        old.cut()
        answer = await work
        assert answer.status_code == 200, answer.text
        found = [item["embedding"] for item in answer.json()["data"]]
        assert found == [embedding_of(one.request) for one in old.submissions]
        assert [one.request.epoch for one in new.submissions] == [1, 1]
