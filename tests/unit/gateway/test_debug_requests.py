"""/debug/requests: what operators see of requests, and nobody else."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from paceline.core.errors import ConfigError
from paceline.core.keys import tenant_digest
from paceline.gateway.embedding_run import EmbeddingRun
from paceline.gateway.generation import Generation
from paceline.gateway.request_log import MAX_ENDED
from paceline.rpc.channel import connect
from paceline.rpc.status import error_of
from paceline.v1 import common_pb2
from paceline.v1.common_pb2 import PromptTimes, TokenRequest
from paceline.v1.generate_pb2 import EmbedInput, EmbedRequest, GenerateRequest
from paceline.v1.generate_pb2_grpc import GenerateServiceStub
from tests.support.fake_router_service import SECRET, Reply, bytes_reply
from tests.support.gateway_deployment import Deployment, gateway_config, running
from tests.support.waits import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "a prompt that nobody else may see"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(model_dir: Path) -> AsyncIterator[Deployment]:
    async with running(model_dir, operator_address="127.0.0.1:0") as deployment:
        yield deployment


async def page(deployment: Deployment) -> dict[str, Any]:
    url = f"http://127.0.0.1:{deployment.gateway.operator_port}/debug/requests"
    async with httpx.AsyncClient() as client:
        answer = await client.get(url)
    assert answer.headers["content-type"] == "application/json"
    assert PROMPT not in answer.text and "hello" not in answer.text.lower()
    found: dict[str, Any] = answer.json()
    return found


async def test_an_ended_request_has_its_stages_workers_and_ids(deployment: Deployment) -> None:
    deployment.router.reply = lambda request: Reply(
        [[97]] * 3,
        num_cached_tokens=16,
        prompt_times=PromptTimes(queue_us=2000, prefill_us=30_000),
        pull_us=7000,
        placement=common_pb2.Placement(prefill_worker="P", decode_worker="D"),
    )
    assert (await deployment.complete(PROMPT)).status_code == 200
    found = await page(deployment)
    ended = found["ended"][0]
    assert ended["request_ids"] == [deployment.router.submissions[0].request.request_id]
    assert ended["tenant"] == tenant_digest(SECRET.encode(), "default")
    assert (ended["operation"], ended["model"]) == ("text_completion", "mock")
    assert ended["outcome"] == "completed"
    assert ended["attempts"] == [{"attempt": 0, "prefill": "P", "decode": "D"}]
    assert (ended["prompt_tokens"], ended["cached_tokens"], ended["output_tokens"]) == (33, 16, 3)
    stages = ended["stages_ms"]
    assert (stages["queue"], stages["prefill"], stages["pull"]) == (2, 30, 7)
    assert 0 < ended["ttft_ms"] <= ended["total_ms"]
    assert found["num_running"] == 0 and found["running"] == []


async def test_a_running_request_is_seen_until_its_client_leaves(deployment: Deployment) -> None:
    deployment.router.reply = lambda request: Reply([[97]], is_endless=True)
    async with deployment.http.stream(
        "POST", "/v1/chat/completions", json={"messages": [{"role": "user", "content": PROMPT}],
                                              "model": "mock", "stream": True}
    ) as answer:  # fmt: skip
        await anext(answer.aiter_lines())
        (shown,) = (await page(deployment))["running"]
        assert (shown["operation"], shown["outcome"]) == ("chat", "running")
        assert shown["output_tokens"] == 1
    await until(lambda: deployment.gateway.serving.num_running == 0)
    assert (await page(deployment))["ended"][0]["outcome"] == "cancelled"


async def test_a_failure_has_its_code(deployment: Deployment) -> None:
    error = common_pb2.Error(code=common_pb2.ERROR_CODE_UNAVAILABLE, message="no")
    deployment.router.reply = lambda request: Reply([[97]], error=error)
    assert (await deployment.complete(PROMPT)).status_code == 503
    assert (await page(deployment))["ended"][0]["outcome"] == "unavailable"


async def test_attempts_are_all_shown(deployment: Deployment) -> None:
    def moved(request: TokenRequest) -> Reply:
        places = [common_pb2.Placement(attempt=i, decode_worker=f"D{i}") for i in range(2)]
        return Reply([[97]] * 3, placement=places[0], later_placement=places[1])

    deployment.router.reply = moved
    await deployment.complete(PROMPT)
    attempts = (await page(deployment))["ended"][0]["attempts"]
    assert [(a["attempt"], a["decode"]) for a in attempts] == [(0, "D0"), (1, "D1")]


async def test_a_log_line_for_each_where_that_is_wanted(model_dir: Path) -> None:
    async with running(model_dir, log_requests=True) as deployment:
        with capture_logs() as lines:
            await deployment.complete(PROMPT)
            await until(lambda: any(line["event"] == "request ended" for line in lines))
    (line,) = (line for line in lines if line["event"] == "request ended")
    assert line["request_ids"] == [deployment.router.submissions[0].request.request_id]
    assert line["tenant"] == tenant_digest(SECRET.encode(), "default")
    assert line["outcome"] == "completed" and "prefill" in line["stages_ms"]
    assert PROMPT not in json.dumps(lines)


@pytest.mark.parametrize("way", ["completion", "embedding", "Generate", "Embed"])
async def test_a_bug_of_ours_is_told_once_with_the_requests_id(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(Generation, "_take", broken)
    monkeypatch.setattr(EmbeddingRun, "_take", broken)
    with capture_logs() as lines:
        assert await asked(deployment, way) == "internal error"
    (line,) = (line for line in lines if line["log_level"] == "error")
    sent = [submission.request.request_id for submission in deployment.router.submissions]
    assert (line["event"], line["request_ids"]) == ("request failed", sent)
    assert line["tenant"] == tenant_digest(SECRET.encode(), "default")
    ended = (await page(deployment))["ended"][0]
    assert (ended["outcome"], ended["request_ids"]) == ("internal", sent)


def broken(run: object, *arguments: object) -> None:
    raise ZeroDivisionError


async def asked(deployment: Deployment, way: str) -> str:
    """The message of the internal error that PROMPT ends with."""
    if way in ("completion", "embedding"):
        body = {"model": "mock", "prompt" if way == "completion" else "input": PROMPT}
        answer = await deployment.http.post(f"/v1/{way}s", json=body)
        assert answer.status_code == 500
        return str(answer.json()["error"]["message"])
    async with connect(f"127.0.0.1:{deployment.gateway.grpc_port}") as channel:
        stub: Any = GenerateServiceStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            if way == "Generate":
                await stub.Generate(GenerateRequest(text=PROMPT)).read()
            else:
                await stub.Embed(EmbedRequest(inputs=[EmbedInput(text=PROMPT)]))
    assert raised.value.code() is grpc.StatusCode.INTERNAL
    return error_of(raised.value).message


async def test_only_the_last_ones_are_kept(deployment: Deployment) -> None:
    deployment.router.reply = lambda request: bytes_reply(b"a")
    for _ in range(5):
        await asyncio.gather(*(deployment.complete("x") for _ in range(60)))
    assert len((await page(deployment))["ended"]) == MAX_ENDED


async def test_the_port_of_callers_has_no_such_page(deployment: Deployment) -> None:
    assert (await deployment.http.get("/debug/requests")).status_code == 404


async def test_it_is_nowhere_unless_asked_for(model_dir: Path) -> None:
    async with running(model_dir) as deployment:
        assert deployment.gateway.operator_port == 0


@pytest.mark.parametrize("address", ["9000", ":9000", "host:", "host:65536", "host:٣"])
async def test_a_wrong_address_is_refused(model_dir: Path, address: str) -> None:
    with pytest.raises(ConfigError, match="operator_address"):
        gateway_config(model_dir, "127.0.0.1:1", operator_address=address)
