"""A client that leaves or lags frees everything upstream, and only its own request."""

import asyncio
import itertools
import json
from typing import Any

import pytest

from paceline.gateway.http_limits import PEER_CHECK_S
from tests.support.fake_router_service import Reply, Submission, bytes_reply
from tests.support.gateway_client import request_bytes
from tests.support.gateway_deployment import Deployment, running
from tests.support.waits import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

CANCEL_S = 0.25


def endless(steps: int = 2000, size: int = 1, interval_s: float = 0.005) -> Reply:
    return Reply([[97] * size] * steps, interval_s=interval_s, is_endless=True)


def chat_request(**fields: Any) -> bytes:
    messages = [{"role": "user", "content": "Hi"}]
    body = json.dumps({"model": "mock", "messages": messages, **fields}).encode()
    return request_bytes("/v1/chat/completions", body)


async def started(deployment: Deployment) -> Submission:
    await until(lambda: bool(deployment.router.submissions))
    return deployment.router.submissions[0]


@pytest.mark.parametrize("stream", [True, False])
async def test_atom_1562_a_gone_client_is_cancelled_upstream(
    deployment: Deployment, stream: bool
) -> None:
    """https://github.com/ROCm/ATOM/pull/1562"""
    deployment.router.reply = lambda request: endless()
    _, writer = await asyncio.open_connection("127.0.0.1", deployment.port)
    writer.write(chat_request(stream=stream, max_tokens=200))
    submission = await started(deployment)
    await asyncio.sleep(0.05)
    writer.close()
    async with asyncio.timeout(CANCEL_S):
        await submission.cancelled.wait()
    await until(lambda: deployment.gateway.serving.num_running == 0)
    text = (await deployment.http.get("/metrics")).text
    assert (
        'vllm:request_success_total{engine="0",finished_reason="cancelled",model_name="mock"}'
        in text
    )


async def test_a_request_that_waits_behind_does_not_hide_that_the_client_left(
    deployment: Deployment,
) -> None:
    """Pipelined: nothing is read any more while the first one runs."""
    deployment.router.reply = lambda request: Reply([[97]], delay_s=30)
    writers = []
    for stream, num_behind in itertools.product([True, False], [1, 3]):
        for cut in (0, 5):  # all of the last one is here, or not
            _, writer = await asyncio.open_connection("127.0.0.1", deployment.port)
            one = chat_request(stream=stream)
            writer.write(one)
            writers.append(writer)
            await until(lambda: len(deployment.router.submissions) == len(writers))
            behind = one * num_behind
            writer.write(behind[: len(behind) - cut])
    await asyncio.sleep(0.02)
    for index, writer in enumerate(writers):
        writer.close() if index % 3 else writer.transport.abort()
    async with asyncio.timeout(PEER_CHECK_S + CANCEL_S):
        for submission in deployment.router.submissions:
            await submission.cancelled.wait()
    await until(lambda: deployment.gateway.serving.num_running == 0)
    assert len(deployment.router.submissions) == len(writers)


async def test_a_client_that_stays_gets_the_answers_of_all_that_waits(
    deployment: Deployment,
) -> None:
    """Also when it takes longer than until somebody looks whether it is there."""
    replies = [Reply([[97]], delay_s=1.2 * PEER_CHECK_S), Reply([[98]])]
    deployment.router.reply = lambda request: replies.pop(0)
    reader, writer = await asyncio.open_connection("127.0.0.1", deployment.port)
    writer.write(chat_request() * 2)
    for content in (b"a", b"b"):
        await asyncio.wait_for(reader.readuntil(b'"content":"%b"' % content), 5)
    writer.close()


async def test_a_client_that_leaves_before_the_first_token(deployment: Deployment) -> None:
    deployment.router.reply = lambda request: Reply([[97]], delay_s=30)
    _, writer = await asyncio.open_connection("127.0.0.1", deployment.port)
    writer.write(chat_request(stream=True))
    submission = await started(deployment)
    writer.close()
    async with asyncio.timeout(CANCEL_S):
        await submission.cancelled.wait()


async def test_all_prompts_of_a_request_are_cancelled(deployment: Deployment) -> None:
    deployment.router.reply = lambda request: endless()
    _, writer = await asyncio.open_connection("127.0.0.1", deployment.port)
    body = json.dumps({"model": "mock", "prompt": ["a", "b", "c"], "n": 2}).encode()
    writer.write(request_bytes("/v1/completions", body))
    await until(lambda: len(deployment.router.submissions) == 3)
    writer.close()
    async with asyncio.timeout(CANCEL_S):
        for submission in deployment.router.submissions:
            await submission.cancelled.wait()


BULKY = {"logprobs": True, "top_logprobs": 20}  # some 150 kB a step of 100 tokens


async def test_a_client_that_does_not_read_is_cut_and_delays_nobody(deployment: Deployment) -> None:
    async with running(deployment.model_dir, max_pending_emissions=20) as tight:
        bulky = endless(steps=500, size=100, interval_s=0.01)
        quick = bytes_reply(b"quick", interval_s=0.01)
        tight.router.reply = lambda request: (
            bulky if request.sampling.HasField("num_logprobs") else quick
        )
        _, writer = await asyncio.open_connection("127.0.0.1", tight.port, limit=1024)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(chat_request(stream=True, **BULKY))
        submission = await started(tight)
        while not submission.cancelled.is_set():
            answer = (await tight.chat()).json()
            assert answer["choices"][0]["message"]["content"] == "quick"
        await until(lambda: tight.gateway.serving.num_running == 0)
        writer.close()


async def test_a_pause_within_the_bound_loses_nothing(deployment: Deployment) -> None:
    deployment.router.reply = lambda request: Reply([[97] * 100] * 60)
    reader, writer = await asyncio.open_connection("127.0.0.1", deployment.port, limit=1024)
    writer.write(chat_request(stream=True, **BULKY))
    await started(deployment)
    await asyncio.sleep(0.3)
    pieces = [b""]
    while b"[DONE]" not in pieces[-1][-50:]:
        pieces.append(await asyncio.wait_for(reader.read(1 << 20), 5))
    assert b"".join(pieces).count(b'"content":"' + b"a" * 100 + b'"') == 60
    writer.close()


async def test_a_client_that_leaves_while_its_answer_waits_is_no_failure_of_ours(
    deployment: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    """An answer in one piece waits for earlier ones that the client does not read."""
    body = json.dumps({"prompt": "x" * 300_000}).encode()
    serving = deployment.gateway.serving
    disconnects = serving.metrics.disconnects._value
    before = disconnects.get()
    _, writer = await asyncio.open_connection("127.0.0.1", deployment.port, limit=1024)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    with pytest.raises(TimeoutError):
        for _ in range(20):
            writer.write(request_bytes("/tokenize", body))
            await until(lambda: serving.num_running == 1)
            await until(lambda: serving.num_running == 0, 0.5)
    writer.transport.abort()
    await until(lambda: serving.num_running == 0)
    assert disconnects.get() == before + 1
    assert "ASGI" not in caplog.text and "CancelledError" not in caplog.text
