"""Where the time of a request went, for callers who ask."""

import re
from typing import Any

import pytest

from paceline.rpc.channel import connect
from paceline.v1.common_pb2 import PromptTimes, TokenRequest
from paceline.v1.generate_pb2 import GenerateRequest
from paceline.v1.generate_pb2_grpc import GenerateServiceStub
from tests.support.fake_router_service import Reply
from tests.support.gateway_client import sse_events
from tests.support.gateway_deployment import Deployment

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASKING = {"x-paceline-statistics": "1"}


def timed(request: TokenRequest) -> Reply:
    """Told by router and workers: 2 ms of queue, 30 of prefill, 7 of pulls. 4 steps of 20 ms."""
    return Reply(
        [[97]] * 4,
        interval_s=0.02,
        num_cached_tokens=16,
        prompt_times=PromptTimes(queue_us=2000, prefill_us=30_000),
        pull_us=7000,
    )


def check(found: dict[str, float]) -> None:
    assert (found["queue_ms"], found["prefill_ms"], found["pull_ms"]) == (2, 30, 7)
    assert found["hit_tokens"] == 16
    assert 30 <= found["decode_ms"] < 5000
    assert 0 < found["prepare_ms"] < 5000
    assert found["total_ms"] > found["prepare_ms"] + found["decode_ms"]


def timings(header: str) -> dict[str, float]:
    assert 'hit;desc="16 tokens"' in header
    return {name: float(value) for name, value in re.findall(r"(\w+);dur=([\d.]+)", header)}


@pytest.mark.parametrize("path", ["chat", "complete"])
async def test_they_are_a_field_and_a_header(deployment: Deployment, path: str) -> None:
    deployment.router.reply = timed
    deployment.http.headers.update(ASKING)
    try:
        whole = await getattr(deployment, path)()
        stream = await getattr(deployment, path)(stream=True)
        options = {"include_usage": True}
        both = await getattr(deployment, path)(stream=True, stream_options=options)
    finally:
        del deployment.http.headers["x-paceline-statistics"]
    check(whole.json()["paceline"]["statistics"])
    head = timings(whole.headers["server-timing"])
    assert {f"{name}_ms" for name in head} | {"hit_tokens"} == set(
        whole.json()["paceline"]["statistics"]
    )
    assert head["decode"] == pytest.approx(whole.json()["paceline"]["statistics"]["decode_ms"])
    *_, last, done = sse_events(stream.text)
    assert done == "[DONE]" and last["choices"] == [] and "usage" not in last
    check(last["paceline"]["statistics"])
    first = timings(stream.headers["server-timing"])
    assert (first["queue"], first["prefill"], first["decode"]) == (2, 30, 0)
    *_, last, done = sse_events(both.text)
    assert last["usage"]["completion_tokens"] == 4
    check(last["paceline"]["statistics"])


async def test_nobody_gets_them_unasked(deployment: Deployment) -> None:
    deployment.router.reply = timed
    for fields in ({}, {"stream": True}):
        answer = await deployment.chat(**fields)
        assert "server-timing" not in answer.headers and "paceline" not in answer.text


async def test_grpc_has_them_in_the_last_response(deployment: Deployment) -> None:
    deployment.router.reply = timed

    async def ask(**fields: Any) -> list[Any]:
        async with connect(f"127.0.0.1:{deployment.gateway.grpc_port}") as channel:
            stub = GenerateServiceStub(channel)  # type: ignore[no-untyped-call]
            request = GenerateRequest(text="Hi", **fields)
            return [response async for response in stub.Generate(request, timeout=5)]

    *others, last = await ask(statistics=True, n=2)
    assert not any(response.HasField("statistics") for response in others)
    found = last.statistics
    assert (found.queue_us, found.prefill_us, found.pull_us) == (2000, 30_000, 7000)
    assert found.num_hit_tokens == 16 and found.decode_us >= 30_000
    assert not any(response.HasField("statistics") for response in await ask())
