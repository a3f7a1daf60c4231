"""Embeddings over HTTP and gRPC: forms of inputs and vectors, limits, and that all ends at once."""

import asyncio
import base64
import json
from typing import Any

import grpc
import numpy as np
import pytest
from prometheus_client import generate_latest

from paceline.rpc.channel import connect
from paceline.rpc.status import error_of
from paceline.v1 import common_pb2
from paceline.v1.common_pb2 import ERROR_CODE_UNAVAILABLE, Error, TokenIds
from paceline.v1.generate_pb2 import EmbedInput, EmbedRequest
from paceline.v1.generate_pb2_grpc import GenerateServiceStub
from tests.support.fake_router_service import HIDDEN_SIZE, Reply, embedding_of
from tests.support.gateway_client import request_bytes
from tests.support.gateway_deployment import CONTEXT_LENGTH, Deployment, running
from tests.support.waits import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def post(own: Deployment, given: Any = "Hi", **fields: Any) -> Any:
    body = {"model": "mock", "input": given, **fields}
    return await own.http.post("/v1/embeddings", json=body)


def raw(own: Deployment) -> list[list[float]]:
    """What the workers found, in the order of submission."""
    return [embedding_of(submission.request) for submission in own.router.submissions]


def last_outcome(own: Deployment) -> str:
    """As operators see it."""
    return str(json.loads(own.gateway.serving.requests_page())["ended"][0]["outcome"])


def unit(vector: list[float]) -> Any:
    return np.float32(np.asarray(vector) / np.linalg.norm(vector))


@pytest.mark.parametrize("encoding", ["float", "base64", "the client's own"])
async def test_the_official_client_embeds(deployment: Deployment, encoding: Any) -> None:
    options: Any = {} if encoding.startswith("the") else {"encoding_format": encoding}
    made = await deployment.openai.embeddings.create(
        model="mock", input=["Hi", "you"], user="me", **options
    )
    vectors: list[Any] = [item.embedding for item in made.data]
    if encoding == "base64":
        vectors = [np.frombuffer(base64.b64decode(vector), "<f4") for vector in vectors]
    for vector, expected in zip(vectors, raw(deployment), strict=True):
        np.testing.assert_allclose(vector, unit(expected), rtol=1e-6)
    assert [item.index for item in made.data] == [0, 1]
    assert (made.model, made.usage.prompt_tokens, made.usage.total_tokens) == ("mock", 5, 5)
    request = deployment.router.submissions[0].request
    assert request.pooling == common_pb2.POOLING_LAST and not request.choices
    assert list(request.token_ids) == [72, 105] and request.num_prompt_tokens == 2


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("ab", [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([97, 98], [[97, 98]]),
        ([[97, 98], [99]], [[97, 98], [99]]),
        ("x" * CONTEXT_LENGTH, [[120] * CONTEXT_LENGTH]),
    ],
)
async def test_each_form_of_an_input(
    deployment: Deployment, given: object, sent: list[list[int]]
) -> None:
    answer = await post(deployment, given, pooling="mean", normalize=False)
    assert [list(s.request.token_ids) for s in deployment.router.submissions] == sent
    assert {s.request.pooling for s in deployment.router.submissions} == {common_pb2.POOLING_MEAN}
    assert [item["embedding"] for item in answer.json()["data"]] == raw(deployment)


async def test_fewer_dimensions_are_cut_and_then_normalised(deployment: Deployment) -> None:
    for normalize, form in ((True, unit), (False, np.float32)):
        made = await post(deployment, "Hi", dimensions=2, normalize=normalize)
        (vector,) = [item["embedding"] for item in made.json()["data"]]
        np.testing.assert_allclose(vector, form(raw(deployment)[-1][:2]), rtol=1e-6)
        deployment.router.submissions.clear()


@pytest.mark.parametrize(
    ("fields", "field", "shown"),
    [
        ({"input": ""}, "input", "input=''"),
        ({"input": []}, "input", "input=[]"),
        ({"input": ["a", ""]}, "input", "input=''"),
        ({"input": ["a", [1]]}, "input", "not a mixture"),
        ({"input": [260]}, "input", "input=260"),
        ({"input": ["a"] * 2049}, "input", "2049 inputs"),
        ({"input": None}, "input", "Invalid type for 'input'"),
        ({"input": "x" * (CONTEXT_LENGTH + 1)}, "input", f"{CONTEXT_LENGTH + 1} tokens"),
        ({"input": [[97], [97] * (CONTEXT_LENGTH + 1)]}, "input", f"{CONTEXT_LENGTH} tokens"),
        ({"dimensions": 0}, "dimensions", "dimensions=0"),
        ({"dimensions": HIDDEN_SIZE + 1}, "dimensions", f"between 1 and the {HIDDEN_SIZE}"),
        ({"encoding_format": "hex"}, "encoding_format", "hex"),
        ({"pooling": "max"}, "pooling", "max"),
        ({"priority": 2**40}, "priority", str(2**40)),
        ({"cache_salt": ""}, "cache_salt", "cache_salt="),
        ({"truncate": True}, "truncate", "Unrecognized request argument supplied: truncate"),
        ({"model": "none"}, "model", "does not exist"),
    ],
)
async def test_refused(deployment: Deployment, fields: Any, field: str, shown: str) -> None:
    answer = await deployment.http.post(
        "/v1/embeddings", json={"model": "mock", "input": "Hi", **fields}
    )
    error = answer.json()["error"]
    assert answer.status_code == (404 if field == "model" else 400)
    assert error["param"] == field and shown in error["message"]
    assert not deployment.router.submissions


async def test_an_answer_has_so_many_numbers_and_no_more(model_dir: Any) -> None:
    async with running(model_dir, max_embedding_numbers=11) as own:
        assert (await post(own, ["a"] * 2)).status_code == 200
        error = (await post(own, ["a"] * 3)).json()["error"]
        assert error["param"] == "input" and "12 numbers" in error["message"]
        assert (await post(own, ["a"] * 3, dimensions=3)).status_code == 200


async def test_a_gone_client_is_cancelled_upstream(deployment: Deployment) -> None:
    deployment.router.reply = lambda request: Reply([], delay_s=30)
    body = json.dumps({"model": "mock", "input": ["a", "b"]}).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", deployment.port)
    writer.write(request_bytes("/v1/embeddings", body))
    await until(lambda: len(deployment.router.submissions) == 2)
    writer.close()
    async with asyncio.timeout(2):
        for submission in deployment.router.submissions:
            await submission.cancelled.wait()
    await until(lambda: deployment.gateway.serving.num_running == 0)
    assert last_outcome(deployment) == "cancelled"


async def test_one_that_fails_ends_the_others(deployment: Deployment) -> None:
    error = Error(code=ERROR_CODE_UNAVAILABLE, message="nobody can")

    def reply(request: Any) -> Reply:
        is_second = list(request.token_ids) == [98]
        return Reply([], error=error) if is_second else Reply([], delay_s=30)

    deployment.router.reply = reply
    answer = await post(deployment, ["a", "b", "c"])
    assert answer.status_code == 503 and answer.json()["error"]["message"] == "nobody can"
    first, _, third = deployment.router.submissions
    async with asyncio.timeout(2):
        await first.cancelled.wait()
        await third.cancelled.wait()
    assert last_outcome(deployment) == "unavailable"


async def test_the_deadline_is_kept(model_dir: Any) -> None:
    async with running(model_dir, request_timeout_s=0.5) as brief:
        brief.router.reply = lambda request: Reply([], delay_s=30)
        answer = await post(brief)
        assert answer.status_code == 504 and "within 0.5 s" in answer.json()["error"]["message"]
        await until(lambda: all(one.cancelled.is_set() for one in brief.router.submissions))
        assert last_outcome(brief) == "deadline_exceeded"


async def test_a_drain_whose_time_is_over_ends_them(deployment: Deployment) -> None:
    deployment.router.reply = lambda request: Reply([], delay_s=30)
    work = asyncio.create_task(post(deployment))
    await until(lambda: bool(deployment.router.submissions))
    deployment.gateway.serving.end_running()
    answer = await work
    assert answer.status_code == 503 and "shutting down" in answer.json()["error"]["message"]


async def test_they_are_counted_and_shown_to_operators(deployment: Deployment) -> None:
    deployment.router.reply = lambda request: Reply([], num_cached_tokens=1)
    before = generate_latest(deployment.gateway.serving.metrics.registry).decode()
    made = (await post(deployment, ["ab", "c"])).json()
    assert made["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    after = (await deployment.http.get("/metrics")).text
    for name, added in (
        ("paceline_embeddings_total", 2),
        ("vllm:prompt_tokens_total", 3),
        ("vllm:e2e_request_latency_seconds_count", 1),
    ):
        assert value(after, name) == value(before, name) + added
    page = json.loads(deployment.gateway.serving.requests_page())
    shown = page["ended"][0]
    assert (shown["operation"], shown["outcome"]) == ("embeddings", "completed")
    assert (shown["prompt_tokens"], shown["cached_tokens"], shown["choices"]) == (3, 2, 2)


async def test_their_stages_are_counted_as_operators_see_them(deployment: Deployment) -> None:
    """Nothing is decoded, so there is no such stage, however far vectors lie apart."""
    deployment.router.reply = lambda request: Reply([], delay_s=0.05 * len(request.token_ids))
    before = generate_latest(deployment.gateway.serving.metrics.registry).decode()
    assert (await post(deployment, ["ab", "c"])).status_code == 200
    after = (await deployment.http.get("/metrics")).text
    shown = json.loads(deployment.gateway.serving.requests_page())["ended"][0]["stages_ms"]
    assert set(shown) == {"prepare", "queue", "prefill"}
    for stage in ("prepare", "queue", "prefill", "pull", "second_token", "decode"):
        labels = f'{{model_name="mock",stage="{stage}"}}'
        count, total = (
            value(after, f"{name}{labels}") - value(before, f"{name}{labels}")
            for name in (
                "paceline_request_stage_seconds_count",
                "paceline_request_stage_seconds_sum",
            )
        )
        assert count == (stage in shown), stage
        assert 1000 * total == pytest.approx(shown.get(stage, 0.0), abs=0.01), stage
    computed = "vllm:request_prefill_kv_computed_tokens_sum"
    assert value(after, computed) == value(before, computed) + 3
    for name in ("vllm:request_decode_time_seconds", "vllm:request_generation_tokens"):
        assert value(after, f"{name}_count") == value(before, f"{name}_count"), name


def value(text: str, name: str) -> float:
    start = name if name.endswith("}") else name + "{"
    found = [line for line in text.splitlines() if line.startswith(start)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


async def test_grpc_answers_the_same(deployment: Deployment) -> None:
    inputs = [EmbedInput(text="Hi"), EmbedInput(tokens=TokenIds(ids=[97, 98]))]
    async with connect(f"127.0.0.1:{deployment.gateway.grpc_port}") as channel:
        stub: Any = GenerateServiceStub(channel)  # type: ignore[no-untyped-call]
        answer = await stub.Embed(EmbedRequest(inputs=inputs, pooling=common_pb2.POOLING_MEAN))
        for made, expected in zip(answer.embeddings, raw(deployment), strict=True):
            np.testing.assert_allclose(list(made.values), unit(expected), rtol=1e-6)
        assert answer.num_prompt_tokens == 4
        refused: list[tuple[dict[str, Any], str]] = [
            ({"inputs": []}, "inputs"),
            ({"inputs": [EmbedInput()]}, "input"),
            ({"dimensions": 9}, "dimensions"),
            ({"pooling": 7}, "pooling"),
        ]
        for fields, field in refused:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.Embed(EmbedRequest(**{"inputs": inputs, **fields}))
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert error_of(raised.value).field == field
        deployment.router.reply = lambda request: Reply([], delay_s=30)
        deployment.router.submissions.clear()
        call = stub.Embed(EmbedRequest(inputs=inputs))
        await until(lambda: len(deployment.router.submissions) == 2)
        call.cancel()
        async with asyncio.timeout(2):
            for submission in deployment.router.submissions:
                await submission.cancelled.wait()
