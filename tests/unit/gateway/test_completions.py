"""Completions: all forms of a prompt, logprobs of the old API, streams."""

import pytest

from tests.support.fake_router_service import bytes_reply
from tests.support.gateway_client import sse_events
from tests.support.gateway_deployment import CONTEXT_LENGTH, Deployment

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_the_official_client_completes(deployment: Deployment) -> None:
    answer = await deployment.openai.completions.create(model="mock", prompt="Hi", max_tokens=5)
    assert answer.choices[0].text == "Hello" and answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.total_tokens == 7
    request = deployment.router.submissions[0].request
    assert list(request.token_ids) == [72, 105] and request.sampling.max_tokens == 5


@pytest.mark.parametrize(
    ("prompt", "sent"),
    [
        ("ab", [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([97, 98], [[97, 98]]),
        ([[97, 98], [99]], [[97, 98], [99]]),
    ],
)
async def test_each_form_of_a_prompt(
    deployment: Deployment, prompt: object, sent: list[list[int]]
) -> None:
    deployment.router.reply = lambda request: bytes_reply(bytes(request.token_ids) + b"!")
    whole = (await deployment.complete(prompt, n=2)).json()
    assert [list(s.request.token_ids) for s in deployment.router.submissions] == sent
    texts = [bytes(ids).decode() + "!" for ids in sent for _ in range(2)]
    assert [choice["text"] for choice in whole["choices"]] == texts
    assert [choice["index"] for choice in whole["choices"]] == list(range(2 * len(sent)))
    assert whole["usage"]["prompt_tokens"] == sum(map(len, sent))


async def test_max_tokens_is_16_unless_the_context_ends(deployment: Deployment) -> None:
    await deployment.complete("ab")
    await deployment.complete("x" * (CONTEXT_LENGTH - 4))
    limits = [s.request.sampling.max_tokens for s in deployment.router.submissions]
    assert limits == [16, 4]


async def test_logprobs_are_parallel_lists(deployment: Deployment) -> None:
    deployment.router.reply = lambda request: bytes_reply("aé".encode())
    logprobs = (await deployment.complete(logprobs=2)).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["token_logprobs"] == [-0.5, -0.5, -0.5]
    assert logprobs["top_logprobs"][0] == {"a": -0.5, "b": -9999.0}
    assert logprobs["text_offset"] == [0, 1, 1]


async def test_a_stream_of_two_prompts_with_usage(deployment: Deployment) -> None:
    deployment.router.reply = lambda request: bytes_reply(bytes(request.token_ids))
    options = {"include_usage": True}
    response = await deployment.complete(["one", "two"], stream=True, stream_options=options)
    *events, usage, done = sse_events(response.text)
    assert done == "[DONE]"
    for index, text in enumerate(("one", "two")):
        own = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in own) == text
        assert [choice["finish_reason"] for choice in own] == [None, None, "length"]
    assert all(event["usage"] is None for event in events)
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 6


async def test_timing_is_shown_when_asked_for(deployment: Deployment) -> None:
    body = {"model": "mock", "prompt": "Hi", "stream": True}
    headers = {"x-paceline-timing": "1"}
    response = await deployment.http.post("/v1/completions", json=body, headers=headers)
    events = sse_events(response.text)[:-1]
    assert all(event["paceline"]["emitted_unix_us"] > 10**15 for event in events)
    assert "paceline" not in (await deployment.complete(stream=True)).text


async def test_the_model_list_and_one_model(deployment: Deployment) -> None:
    listed = await deployment.openai.models.list()
    assert [model.id for model in listed.data] == ["mock"]
    assert (await deployment.openai.models.retrieve("mock")).owned_by == "paceline"
    assert (await deployment.http.get("/v1/models/none")).status_code == 404
