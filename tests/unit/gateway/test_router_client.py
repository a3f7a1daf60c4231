"""The stream to the router: attach, lose it, find it or another one again."""

import asyncio
import time
from pathlib import Path

from paceline.gateway.main import GatewayServer
from paceline.v1.common_pb2 import TokenRequest
from tests.support.fake_router_service import FakeRouter, Reply, bytes_reply
from tests.support.gateway_client import sse_events
from tests.support.gateway_deployment import gateway_config, model_info, running
from tests.support.waits import until

TEXT = "takes a while"


def slowly(request: TokenRequest) -> Reply:
    return bytes_reply(TEXT.encode(), interval_s=0.06)


def text_of(stream: str) -> str:
    """Of a chat's chunks."""
    *chunks, done = sse_events(stream)
    assert done == "[DONE]"
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


async def test_requests_outlive_their_router_and_wait_for_the_next(model_dir: Path) -> None:
    async with running(model_dir) as deployment:
        router = deployment.router
        router.reply = slowly
        stream = asyncio.create_task(deployment.chat(stream=True))
        whole = asyncio.create_task(deployment.chat())
        await until(lambda: len(router.submissions) == 2)
        await asyncio.sleep(0.2)
        await router.stop()
        waiting = asyncio.create_task(deployment.chat())
        await until(lambda: bool(deployment.gateway.serving.reasons()))
        answer = await deployment.http.get("/readyz")
        assert (answer.status_code, answer.text) == (503, "no router is reachable\n")
        back = FakeRouter([model_info(model_dir)])
        back.reply = slowly
        await back.start(int(router.endpoint.rpartition(":")[2]))
        assert text_of((await stream).text) == TEXT
        for answer in (await whole, await waiting):
            assert answer.json()["choices"][0]["message"]["content"] == TEXT
        assert not deployment.gateway.serving.reasons()
        before = {s.request.request_id: s.request for s in router.submissions}
        moved = [s.request for s in back.submissions if s.request.request_id in before]
        assert [request.epoch for request in moved] == [1, 1]
        for request in moved:
            assert len(request.token_ids) > request.num_prompt_tokens, "they went on"
            assert 0 < request.budget_ms < before[request.request_id].budget_ms
            assert request.block_keys == before[request.request_id].block_keys
        await deployment.gateway.drain()
        await back.stop()


async def test_without_a_router_requests_end_when_the_wait_is_over(model_dir: Path) -> None:
    async with running(model_dir, router_wait_s=0.3) as deployment:
        router = deployment.router
        router.reply = slowly
        stream = asyncio.create_task(deployment.chat(stream=True))
        await until(lambda: len(router.submissions) == 1)
        await asyncio.sleep(0.05)
        await router.stop()
        waited = await deployment.chat()
        assert waited.status_code == 503 and waited.headers["retry-after"] == "1"
        assert sse_events((await stream).text)[-2]["error"]["code"] == "unavailable"
        started = time.monotonic()
        assert (await deployment.chat()).status_code == 503
        assert time.monotonic() - started < 0.2, "nobody waits for long when none has come"


async def test_the_next_router_serves_when_the_first_is_gone(model_dir: Path) -> None:
    routers = [FakeRouter([model_info(model_dir)]) for _ in range(2)]
    for router in routers:
        await router.start()
    config = gateway_config(model_dir, *(router.endpoint for router in routers))
    gateway = GatewayServer(config)
    await gateway.start()
    await until(lambda: not gateway.serving.reasons())
    await routers[0].stop()
    await until(lambda: routers[1].num_attached == 1)
    assert not gateway.serving.reasons(), "readiness does not blink"
    await gateway.drain()
    await gateway.stop()
    await routers[1].stop()


async def test_gateways_share_the_routers_when_they_are_told_to(model_dir: Path) -> None:
    routers = [FakeRouter([model_info(model_dir)]) for _ in range(2)]
    for router in routers:
        await router.start()
    endpoints = [router.endpoint for router in routers]
    gateways: list[GatewayServer] = []
    while not all(router.num_attached for router in routers):
        assert len(gateways) < 30  # by lot: 1 in 10^9
        gateways.append(GatewayServer(gateway_config(model_dir, *endpoints, spread_routers=True)))
        await gateways[-1].start()
        await until(lambda: not gateways[-1].serving.reasons())
    await asyncio.gather(*(gateway.drain() for gateway in gateways))
    await asyncio.gather(*(gateway.stop() for gateway in gateways))
    for router in routers:
        await router.stop()


async def test_a_router_that_hangs_is_left_though_its_stream_stands(model_dir: Path) -> None:
    async with running(model_dir, router_silence_s=1.1) as deployment:
        router = deployment.router
        router.reply = lambda request: Reply([[97]] * 1000, interval_s=0.01, is_endless=True)
        stream = asyncio.create_task(deployment.chat(stream=True))
        await until(lambda: len(router.submissions) == 1)
        await asyncio.sleep(1.2)
        assert not stream.done(), "beats and tokens keep it"
        router.is_silent = True
        await until(lambda: router.num_attached > 1)
        router.is_silent = False
        await until(lambda: len(router.submissions) == 2)
        assert router.submissions[1].request.epoch == 1
        stream.cancel()


async def test_a_failure_of_ours_costs_the_stream_and_not_the_search_for_routers(
    model_dir: Path,
) -> None:
    async with running(model_dir) as deployment:
        broken = iter([ValueError("a bug"), ValueError("another")])

        def change() -> None:
            if (bug := next(broken, None)) is not None:
                raise bug

        deployment.gateway.serving.on_change = change
        deployment.router.set_models([])
        await until(lambda: next(broken, None) is None)
        await until(lambda: deployment.gateway.serving.router.is_attached)
        deployment.router.set_models([model_info(model_dir)])
        await until(lambda: not deployment.gateway.serving.reasons())


async def test_another_secret_opens_no_router(model_dir: Path) -> None:
    async with running(model_dir) as deployment:
        config = gateway_config(
            model_dir, deployment.router.endpoint, secret="another secret of 16 bytes"
        )
        stranger = GatewayServer(config)
        await stranger.start()
        await asyncio.sleep(0.3)
        assert stranger.serving.reasons() == ["no router is reachable"]
        await stranger.drain()
        await stranger.stop()


async def test_another_tokenizer_at_the_workers_means_not_ready(model_dir: Path) -> None:
    async with running(model_dir) as deployment:
        deployment.router.set_models([model_info(model_dir, serving_digest="00" * 32)])
        await until(lambda: bool(deployment.gateway.serving.reasons()))
        answer = await deployment.http.get("/readyz")
        assert answer.status_code == 503 and "differs" in answer.text and "mock" in answer.text
        assert (await deployment.chat()).status_code == 503
        assert (await deployment.http.get("/v1/models")).json()["data"] == []
        deployment.router.set_models([model_info(model_dir), model_info(model_dir, name="other")])
        await until(lambda: not deployment.gateway.serving.reasons())
        listed = (await deployment.http.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["mock", "other"]


async def test_no_model_yet_is_503_and_an_unknown_one_404(model_dir: Path) -> None:
    async with running(model_dir) as deployment:
        assert (await deployment.chat(model="none")).status_code == 404
        deployment.router.set_models([])
        await until(lambda: bool(deployment.gateway.serving.reasons()))
        assert (await deployment.chat()).status_code == 503


async def test_a_model_whose_workers_were_just_lost_takes_requests_but_is_not_listed(
    model_dir: Path,
) -> None:
    async with running(model_dir) as deployment:
        deployment.router.set_models([model_info(model_dir, unavailable=True)])
        await until(lambda: bool(deployment.gateway.serving.reasons()))
        answer = await deployment.http.get("/readyz")
        assert (answer.status_code, answer.text) == (503, "no decode worker is connected\n")
        assert (await deployment.http.get("/v1/models")).json()["data"] == []
        one = await deployment.http.get("/v1/models/mock")
        assert (one.status_code, one.json()["error"]["code"]) == (503, "unavailable")
        assert (await deployment.chat()).status_code == 200, "the router says how long it waits"
