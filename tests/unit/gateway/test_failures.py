"""What callers see when the other side fails: status before the first byte, a frame after it."""

import asyncio
import time

import pytest

from paceline.v1 import common_pb2
from paceline.v1.common_pb2 import Error
from tests.support.fake_router_service import Reply, bytes_reply
from tests.support.gateway_client import request_bytes, sse_events
from tests.support.gateway_deployment import Deployment, running
from tests.support.waits import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

ERRORS = [
    ("OVERLOADED", 429, "rate_limit_error", "overloaded", "7"),
    ("UNAVAILABLE", 503, "service_unavailable_error", "unavailable", "7"),
    ("KV_UNAVAILABLE", 503, "service_unavailable_error", "kv_unavailable", "7"),
    ("DEADLINE_EXCEEDED", 504, "timeout_error", "deadline_exceeded", None),
    ("INTERNAL", 500, "server_error", "internal", None),
    ("INVALID_REQUEST", 400, "invalid_request_error", "invalid_request", None),
    ("CONTEXT_LENGTH_EXCEEDED", 400, "invalid_request_error", "context_length_exceeded", None),
    ("REQUEST_QUARANTINED", 422, "invalid_request_error", "request_quarantined", None),
    ("MODEL_NOT_FOUND", 404, "invalid_request_error", "model_not_found", None),
]


def failing(code: str, steps: bytes = b"") -> Reply:
    number = getattr(common_pb2, f"ERROR_CODE_{code}")
    error = Error(code=number, message="as told", field="f", retry_after_ms=7000)
    return bytes_reply(steps, error=error)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("code", "status", "kind", "name", "retry"), ERRORS)
async def test_an_error_before_the_first_token_has_its_own_status(
    deployment: Deployment,
    code: str,
    status: int,
    kind: str,
    name: str,
    retry: str | None,
    stream: bool,
) -> None:
    deployment.router.reply = lambda request: failing(code)
    response = await deployment.chat(stream=stream)
    assert response.status_code == status
    error = {"message": "as told", "type": kind, "param": "f", "code": name}
    assert response.json() == {"error": error}
    assert response.headers.get("retry-after") == retry


async def test_litellm_39748_an_error_in_mid_stream_is_a_frame(deployment: Deployment) -> None:
    """https://github.com/BerriAI/litellm/pull/39748"""
    deployment.router.reply = lambda request: failing("UNAVAILABLE", b"ten tokens")
    *chunks, error, done = sse_events((await deployment.chat(stream=True)).text)
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
    assert text == "ten tokens" and done == "[DONE]"
    assert error["error"]["code"] == "unavailable"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)


async def test_a_gap_in_positions_is_never_hidden(deployment: Deployment) -> None:
    class Gap(Reply):
        pass

    deployment.router.reply = lambda request: Gap([[97], [98]], interval_s=0.02)
    task = asyncio.create_task(deployment.chat(stream=True))
    await until(lambda: bool(deployment.router.submissions))
    client = deployment.gateway.serving.router
    slot = deployment.router.submissions[0].slot
    client._submissions[slot].deliver(common_pb2.Emission(slot=slot, position=5, token_ids=[1]))
    response = await task
    assert "tokens were lost" in response.text and 'finish_reason":"' not in response.text


async def test_the_deadline_is_kept(deployment: Deployment) -> None:
    async with running(deployment.model_dir, request_timeout_s=0.2) as brief:
        brief.router.reply = lambda request: Reply([[97]], delay_s=30)
        response = await brief.chat()
        assert response.status_code == 504
        assert "within 0.2 s" in response.json()["error"]["message"]
        submission = brief.router.submissions[0]
        assert 150 < submission.request.budget_ms <= 200
        await until(submission.cancelled.is_set)


async def test_the_time_limit_begins_before_the_body_has_come(deployment: Deployment) -> None:
    async with running(deployment.model_dir, request_timeout_s=0.6) as brief:
        brief.router.reply = lambda request: Reply([[97]], delay_s=30)
        request = request_bytes("/v1/completions", b'{"model": "mock", "prompt": "Hi"}')
        reader, writer = await asyncio.open_connection("127.0.0.1", brief.port)
        started = time.monotonic()
        writer.write(request[:-1])
        await asyncio.sleep(0.4)
        writer.write(request[-1:])
        assert (await reader.readline()).startswith(b"HTTP/1.1 504 ")
        assert 0.6 <= time.monotonic() - started < 0.9
        assert 0 < brief.router.submissions[0].request.budget_ms <= 200
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", brief.port)
        writer.write(request[:-1])  # and that is all: no longer is waited for it
        assert (await asyncio.wait_for(reader.readline(), 1)).startswith(b"HTTP/1.1 408 ")
        writer.close()


async def test_too_many_requests_at_once_get_429(deployment: Deployment) -> None:
    async with running(deployment.model_dir, max_concurrent_requests=1) as small:
        small.router.reply = lambda request: bytes_reply(b"slowly", interval_s=0.05)
        first = asyncio.create_task(small.chat())
        await until(lambda: bool(small.router.submissions))
        second = await small.chat()
        assert second.status_code == 429 and second.headers["retry-after"] == "1"
        assert (await first).status_code == 200
        assert (await small.chat()).status_code == 200


async def test_an_unexpected_failure_shows_no_internals(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> list[int]:
        raise RuntimeError("/secret/path")

    monkeypatch.setattr(deployment.gateway.serving.text, "encode", broken)
    response = await deployment.chat()
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "internal error"
