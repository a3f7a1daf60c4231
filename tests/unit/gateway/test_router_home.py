"""Back to a router that has returned, and to a new one by lot; no stream is cut for it."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from paceline.gateway import router_home
from paceline.gateway.router_addresses import Address
from paceline.gateway.router_home import RETURN_S, STEADY_S, RouterHome
from paceline.gateway.router_search import RouterSearch
from tests.support.fake_router_service import FakeRouter, bytes_reply
from tests.support.gateway_deployment import model_info, running
from tests.support.waits import until

TEXT = "takes a while"
A, B, C, D = (Address(f"{name}:1", f"ipv4:10.0.0.{i}:1") for i, name in enumerate("abcd"))


async def _start(router: FakeRouter, endpoint: str = "") -> None:
    router.is_draining = False
    router.reply = lambda request: bytes_reply(TEXT.encode(), interval_s=0.05)
    await router.start(int(endpoint.rpartition(":")[2] or 0))


@pytest.mark.parametrize("is_spread", [False, True], ids=["in order", "by lot"])
@pytest.mark.parametrize("drains", [False, True], ids=["dies", "drains"])
async def test_requests_go_back_to_a_router_that_has_returned_and_streams_end_where_they_are(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, is_spread: bool, drains: bool
) -> None:
    monkeypatch.setattr(router_home, "RETURN_S", (0.1, 1.0))
    second = FakeRouter([model_info(model_dir)])
    await _start(second)
    async with running(model_dir, second.endpoint, spread_routers=is_spread) as deployment:
        home, other = deployment.router, second
        if second.num_attached:
            home, other = second, deployment.router
        other.reply = lambda request: bytes_reply(TEXT.encode(), interval_s=0.1)
        if drains:
            home.drain()
        else:
            await home.stop()
        await until(lambda: other.num_attached == 1, 20)
        running_one = asyncio.create_task(deployment.chat())
        await until(lambda: len(other.submissions) == 1, 20)
        if drains:
            await home.stop()
        await _start(home, home.endpoint)
        await until(lambda: home.num_streams == 1, 20)
        await until(lambda: deployment.gateway.serving.reasons() == [])
        num_before = len(home.submissions)
        assert (await deployment.chat()).status_code == 200
        assert len(home.submissions) == num_before + 1
        answer = await running_one
        assert answer.json()["choices"][0]["message"]["content"] == TEXT
        assert len(other.submissions) == 1
        await until(lambda: other.num_streams == 0, 20)
        metrics = (await deployment.http.get("/metrics")).text
        assert 'requests_moved_total{reason="lost"} 0.0' in metrics
    await second.stop()


async def test_a_home_that_does_not_answer_disturbs_nobody(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_home, "RETURN_S", (0.05, 1.0))
    backup = FakeRouter([model_info(model_dir)])
    await _start(backup)
    async with running(model_dir, backup.endpoint) as deployment:
        await deployment.router.stop()
        await until(lambda: backup.num_attached == 1, 20)
        tried, addresses = 0, RouterSearch.addresses

        async def counted(search: RouterSearch) -> list[Address]:
            nonlocal tried
            tried += 1
            return await addresses(search)

        monkeypatch.setattr(RouterSearch, "addresses", counted)
        await until(lambda: tried > 2, 20)
        answers = await asyncio.gather(*(deployment.chat() for _ in range(3)))
        assert [answer.status_code for answer in answers] == [200] * 3
        assert backup.num_attached == 1
    await backup.stop()


def test_names_in_an_order_lead_to_the_first() -> None:
    home = RouterHome(is_ordered=True)
    home.address = B
    assert home.of([A, B, C], B) == A
    assert home.of([A, B, C, D], B) == A, "a new one is no better"
    assert home.of([B, C], B) == B, "its name is known no more"
    assert home.of([], B) == B


def test_a_new_router_gets_its_share_and_no_other_is_left() -> None:
    taken = Counter[Address]()
    for number in range(3000):
        home = RouterHome(is_ordered=False)
        current = home.address = (A, B)[number % 2]
        for _ in range(3):
            assert home.of([A, B], current) == current
        chosen = home.of([A, B, C], current)
        for _ in range(3):
            assert home.of([A, B, C], current) == chosen, "one lot for each that is new"
        taken[chosen] += 1
    assert set(taken) == {A, B, C} and all(800 < num < 1200 for num in taken.values())


def test_a_router_that_comes_and_goes_is_gone_back_to_later_each_time() -> None:
    home = RouterHome(is_ordered=True)
    pauses = []
    for _ in range(12):
        home.note_left(1.0)
        pauses.append(home._pause_s)
    assert pauses[:3] == [30.0, 60.0, 120.0] and pauses[-1] == RETURN_S[1]
    home.note_left(STEADY_S)
    assert home._pause_s == RETURN_S[0]
