"""The public gRPC API: the same text, the same refusals, statuses with details."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from paceline.rpc.channel import connect
from paceline.v1 import common_pb2
from paceline.v1.common_pb2 import TokenIds
from paceline.v1.generate_pb2 import GenerateRequest, GenerateResponse
from paceline.v1.generate_pb2_grpc import GenerateServiceStub
from tests.support.fake_router_service import STOP, Reply, bytes_reply
from tests.support.gateway_deployment import CONTEXT_LENGTH, Deployment, running
from tests.support.waits import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

INVALID, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def channel(shared: Deployment) -> AsyncIterator[grpc.aio.Channel]:
    async with connect(f"127.0.0.1:{shared.gateway.grpc_port}") as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.aio.Channel, deployment: Deployment) -> Any:
    return GenerateServiceStub(channel)  # type: ignore[no-untyped-call]


async def responses(stub: Any, **fields: Any) -> list[GenerateResponse]:
    request = GenerateRequest(**{"model": "mock", "text": "Hi", **fields})
    return [response async for response in stub.Generate(request, timeout=5)]


async def test_text_in_text_out(stub: Any, deployment: Deployment) -> None:
    reply = Reply([*([byte] for byte in "é!".encode()), [256]], finish=STOP, num_cached_tokens=3)
    deployment.router.reply = lambda request: reply
    found = await responses(stub, num_logprobs=1)
    assert "".join(response.text for response in found) == "é!"
    assert [list(response.token_ids) for response in found] == [[0xC3], [0xA9], [33], [256]]
    assert found[-1].finish == STOP and found[0].num_cached_tokens == 3
    assert found[0].num_prompt_tokens == 2 and found[0].logprobs[0].chosen.token_id == 0xC3


async def test_token_ids_and_choices(stub: Any, deployment: Deployment) -> None:
    found = await responses(stub, model="", tokens=TokenIds(ids=[1, 2]), n=2, stop=["llo"])
    texts = ["".join(r.text for r in found if r.choice == choice) for choice in (0, 1)]
    assert texts == ["He", "He"]
    assert list(deployment.router.submissions[0].request.token_ids) == [1, 2]
    assert deployment.router.submissions[0].request.sampling.max_tokens == 16


@pytest.mark.parametrize(
    ("fields", "status", "field"),
    [
        ({"text": ""}, INVALID, "prompt"),
        ({"tokens": TokenIds()}, INVALID, "prompt"),
        ({"tokens": TokenIds(ids=[260])}, INVALID, "prompt"),
        ({"text": "<|end|>"}, INVALID, "prompt"),
        ({"text": "x" * CONTEXT_LENGTH}, INVALID, "prompt"),
        ({"max_tokens": CONTEXT_LENGTH - 1}, INVALID, "max_tokens"),
        ({"max_tokens": 0}, INVALID, "max_tokens"),
        ({"temperature": float("nan")}, INVALID, "temperature"),
        ({"top_p": float("inf")}, INVALID, "top_p"),
        ({"n": 1000}, INVALID, "n"),
        ({"stop": ["s"] * 100}, INVALID, "stop"),
        ({"stop": [""]}, INVALID, "stop"),
        ({"stop": ["a", ""]}, INVALID, "stop"),
        ({"num_logprobs": 21}, INVALID, "num_logprobs"),
        ({"num_prompt_logprobs": 21}, INVALID, "num_prompt_logprobs"),
        ({"min_p": float("nan")}, INVALID, "min_p"),
        ({"typical_p": 0.0}, INVALID, "typical_p"),
        ({"repetition_penalty": 0.0}, INVALID, "repetition_penalty"),
        ({"presence_penalty": 2.5}, INVALID, "presence_penalty"),
        ({"frequency_penalty": float("inf")}, INVALID, "frequency_penalty"),
        ({"logit_bias": {260: 1.0}}, INVALID, "logit_bias"),
        ({"bad_words": [""]}, INVALID, "bad_words"),
        ({"bad_token_ids": [TokenIds()]}, INVALID, "bad_words"),
        ({"bad_token_ids": [TokenIds(ids=[260])]}, INVALID, "bad_words"),
        ({"logits_processors": [{"name": ""}]}, INVALID, "logits_processors"),
        ({"model": "none"}, NOT_FOUND, "model"),
    ],
)
async def test_vllm_7632_bad_requests_are_refused_as_over_http(
    stub: Any, deployment: Deployment, fields: dict[str, Any], status: grpc.StatusCode, field: str
) -> None:
    """https://github.com/vllm-project/vllm/issues/7632"""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await responses(stub, **fields)
    assert caught.value.code() is status
    details = trailer(caught.value)
    assert details.field == field and details.message == caught.value.details()
    assert not deployment.router.submissions


async def test_a_request_has_the_same_bound_as_over_http(stub: Any, deployment: Deployment) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await responses(
            stub, text="x" * (deployment.gateway.serving.config.clients.max_body_bytes + 1)
        )
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert not deployment.router.submissions


async def test_a_message_that_does_not_parse_is_refused(channel: grpc.aio.Channel) -> None:
    generate = channel.unary_stream("/paceline.v1.GenerateService/Generate")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(b"\xff\xff\xff junk").read()
    assert caught.value.code() is INVALID and trailer(caught.value).field == "request"


async def test_an_unexpected_failure_is_counted_and_shows_no_internals(
    stub: Any, deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> list[int]:
        raise RuntimeError("/secret/path")

    monkeypatch.setattr(deployment.gateway.serving.text, "encode", broken)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await responses(stub)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert caught.value.details() == trailer(caught.value).message == "internal error"
    metrics = (await deployment.http.get("/metrics")).text
    assert 'paceline_gateway_errors_total{code="internal"}' in metrics


async def test_an_error_in_mid_stream_is_a_status(stub: Any, deployment: Deployment) -> None:
    error = common_pb2.Error(code=common_pb2.ERROR_CODE_UNAVAILABLE, message="gone")
    deployment.router.reply = lambda request: bytes_reply(b"abc", error=error)
    texts = []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for response in stub.Generate(GenerateRequest(model="mock", text="Hi")):
            texts.append(response.text)
    assert "".join(texts) == "abc"
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert trailer(caught.value).code == common_pb2.ERROR_CODE_UNAVAILABLE


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_an_ended_call_is_cancelled_upstream(
    stub: Any, deployment: Deployment, how: str
) -> None:
    deployment.router.reply = lambda request: Reply([[97]] * 500, interval_s=0.01, is_endless=True)
    timeout_s = 0.3 if how == "deadline" else 30
    call = stub.Generate(GenerateRequest(model="mock", text="Hi"), timeout=timeout_s)
    await call.read()
    if how == "cancel":
        call.cancel()
    async with asyncio.timeout(timeout_s + 0.25 if how == "deadline" else 0.25):
        await deployment.router.submissions[0].cancelled.wait()
    await until(lambda: deployment.gateway.serving.num_running == 0)


async def test_health_follows_readiness(deployment: Deployment) -> None:
    async with (
        running(deployment.model_dir) as own,
        connect(f"127.0.0.1:{own.gateway.grpc_port}") as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)

        async def status() -> int:
            request = health_pb2.HealthCheckRequest(service="paceline.v1.GenerateService")
            return int((await stub.Check(request)).status)

        assert await status() == health_pb2.HealthCheckResponse.SERVING
        await own.router.stop()
        await until(lambda: bool(own.gateway.serving.reasons()))
        await asyncio.sleep(0.05)
        assert await status() == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_reflection_lists_the_service(channel: grpc.aio.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    listed = (await call.read()).list_services_response.service
    assert "paceline.v1.GenerateService" in {service.name for service in listed}
    await call.done_writing()


def trailer(error: grpc.aio.AioRpcError) -> common_pb2.Error:
    metadata: Any = error.trailing_metadata()  # iterable, whatever its stub says
    return common_pb2.Error.FromString(dict(metadata)["paceline-error-bin"])
