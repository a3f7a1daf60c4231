"""Chat completions through the official client and over raw HTTP."""

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.support.fake_router_service import STOP, Reply, bytes_reply
from tests.support.gateway_client import sse_events
from tests.support.gateway_deployment import CONTEXT_LENGTH, Deployment, running
from tests.support.mock_model import write_mock_model
from tests.support.waits import until

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]
EOS = 256

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_an_answer_in_one_piece(deployment: Deployment) -> None:
    deployment.router.reply = lambda request: bytes_reply("Grüße 😀".encode(), num_cached_tokens=16)
    answer = await deployment.openai.chat.completions.create(model="mock", messages=HELLO)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", "Grüße 😀")
    assert choice.finish_reason == "length"
    assert answer.object == "chat.completion" and answer.model == "mock"
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    num_prompt = len("<|user|>Hi<|end|><|assistant|>") - len("<|user|><|end|><|assistant|>") + 3
    assert answer.usage.prompt_tokens == num_prompt
    assert answer.usage.completion_tokens == len("Grüße 😀".encode())
    assert answer.usage.prompt_tokens_details.cached_tokens == 16


async def test_a_stream_joins_to_the_same_text(deployment: Deployment) -> None:
    deployment.router.reply = lambda request: bytes_reply("Grüße 😀".encode())
    stream = await deployment.openai.chat.completions.create(
        model="mock",
        messages=HELLO,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == "Grüße 😀"
    assert all("\ufffd" not in text for text in texts)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None and chunks[-1].usage.total_tokens == 5 + 12
    assert len({chunk.id for chunk in chunks}) == 1


async def test_a_stream_is_exact_on_the_wire(deployment: Deployment) -> None:
    deployment.router.reply = lambda request: Reply([[72, 105]], finish=STOP)
    response = await deployment.chat(stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    role, content, end, done = sse_events(response.text)
    assert done == "[DONE]"
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert content["choices"] == [
        {"index": 0, "delta": {"content": "Hi"}, "logprobs": None, "finish_reason": None}
    ]
    assert end["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
    assert content["object"] == "chat.completion.chunk" and "usage" not in content


async def test_the_router_gets_the_rendered_prompt_and_its_keys(deployment: Deployment) -> None:
    await deployment.chat("x" * 40, seed=-1, top_k=5, priority=-2, temperature=0, top_p=0.5)
    request = deployment.router.submissions[0].request
    assert list(request.token_ids) == [258, *b"x" * 40, 256, 259]
    assert request.num_prompt_tokens == 43
    assert len(request.block_keys) == 2 * 32 and len(request.root_key) == 32
    assert request.sampling.seed == 2**64 - 1
    assert request.sampling.temperature == 0 and request.sampling.top_k == 5
    assert request.sampling.top_p == 0.5 and request.priority == -2
    assert request.sampling.max_tokens == CONTEXT_LENGTH - 43
    assert list(request.choices) == [0] and 0 < request.budget_ms <= 600_000


async def test_n_choices_have_their_own_text(deployment: Deployment) -> None:
    deployment.router.reply = lambda request: bytes_reply(b"abc")
    whole = (await deployment.chat(n=3)).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in whole["choices"]} == {"abc"}
    assert whole["usage"]["completion_tokens"] == 9
    events = sse_events((await deployment.chat(n=3, stream=True)).text)[:-1]
    for index in range(3):
        own = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        assert "".join(c["delta"].get("content", "") for c in own) == "abc"
        assert own[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_have_bytes_and_no_infinities(deployment: Deployment, stream: bool) -> None:
    """https://github.com/sgl-project/sglang/issues/5984: filtered tokens stay valid JSON."""
    data = "é!".encode()
    deployment.router.reply = lambda request: bytes_reply(data)
    response = await deployment.chat(logprobs=True, top_logprobs=3, stream=stream)
    if stream:
        choices = [e["choices"][0] for e in sse_events(response.text)[:-1]]
        entries = [x for c in choices if c["logprobs"] for x in c["logprobs"]["content"]]
    else:
        entries = response.json()["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in entries] == [[byte] for byte in data]
    assert entries[2] == {
        "token": "!",
        "logprob": -0.5,
        "bytes": [33],
        "top_logprobs": [
            {"token": "!", "logprob": -0.5, "bytes": [33]},
            {"token": '"', "logprob": -1.5, "bytes": [34]},
            {"token": "#", "logprob": -9999.0, "bytes": [35]},
        ],
    }
    assert orjson.loads(orjson.dumps(entries)) == entries


@pytest.mark.parametrize("stream", [False, True])
async def test_vllm_3574_a_stop_string_ends_the_choice_everywhere(
    deployment: Deployment, stream: bool
) -> None:
    """https://github.com/vllm-project/vllm/issues/3574"""
    steps = [b"AB", b"CDE", b"F", b"GHIJ", b"K"]
    reply = Reply(steps, interval_s=0.01, is_endless=True)
    deployment.router.reply = lambda request: reply
    response = await deployment.chat(stop=["DEFGHIJ"], stream=stream)
    if stream:
        events = sse_events(response.text)[:-1]
        text = "".join(e["choices"][0]["delta"].get("content", "") for e in events)
        reason = events[-1]["choices"][0]["finish_reason"]
    else:
        choice = response.json()["choices"][0]
        text, reason = choice["message"]["content"], choice["finish_reason"]
        assert response.json()["usage"]["completion_tokens"] == 10
    assert (text, reason) == ("ABC", "stop")
    async with asyncio.timeout(1):
        await deployment.router.submissions[0].cancelled.wait()


async def test_a_stop_string_of_one_choice_leaves_the_others(deployment: Deployment) -> None:
    deployment.router.reply = lambda request: bytes_reply(b"abcdef", interval_s=0.005)
    whole = (await deployment.chat(n=2, stop="cd")).json()
    assert [c["message"]["content"] for c in whole["choices"]] == ["ab", "ab"]
    submission = deployment.router.submissions[0]
    await until(lambda: submission.cancelled_choices == {0})
    assert {c["finish_reason"] for c in whole["choices"]} == {"stop"}


async def test_the_end_token_is_counted_and_not_shown(deployment: Deployment) -> None:
    deployment.router.reply = lambda request: Reply([[72], [105], [EOS]], finish=STOP)
    whole = (await deployment.chat(logprobs=True)).json()
    choice = whole["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Hi", "stop")
    assert whole["usage"]["completion_tokens"] == 3
    assert choice["logprobs"]["content"][-1]["token"] == "<|end|>"


async def test_min_tokens_come_before_any_stop_string(deployment: Deployment) -> None:
    deployment.router.reply = lambda request: bytes_reply(b"ababab")
    whole = (await deployment.chat(stop="b", min_tokens=3)).json()
    assert whole["choices"][0]["message"]["content"] == "aba"


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_vllm_40689_the_edge_of_the_context(deployment: Deployment, field: str) -> None:
    """https://github.com/vllm-project/vllm/issues/40689"""
    room = CONTEXT_LENGTH - 5
    for num_tokens, status in ((room - 1, 200), (room, 200), (room + 1, 400)):
        response = await deployment.chat("Hi", **{field: num_tokens})
        assert response.status_code == status
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded" and error["param"] == "max_tokens"
    assert str(CONTEXT_LENGTH) in error["message"] and f"at most {room}" in error["message"]
    too_long = await deployment.chat("x" * CONTEXT_LENGTH)
    assert too_long.status_code == 400 and too_long.json()["error"]["param"] == "messages"


async def test_vllm_10583_equal_request_ids_do_not_meet(deployment: Deployment) -> None:
    """https://github.com/vllm-project/vllm/issues/10583"""
    deployment.router.reply = lambda request: bytes_reply(
        bytes(request.token_ids[1:-2]), interval_s=0.005
    )
    body = [{"model": "mock", "messages": [{"role": "user", "content": t}]} for t in ("one", "two")]
    headers = {"x-request-id": "the-same"}
    answers = await asyncio.gather(
        *(deployment.http.post("/v1/chat/completions", json=b, headers=headers) for b in body)
    )
    texts = [answer.json()["choices"][0]["message"]["content"] for answer in answers]
    assert texts == ["one", "two"]
    assert {answer.headers["x-request-id"] for answer in answers} == {"the-same"}
    ids = {submission.request.request_id for submission in deployment.router.submissions}
    assert len(ids) == 2 and "the-same" not in ids


async def test_content_parts_are_joined(deployment: Deployment) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await deployment.chat(parts)
    assert list(deployment.router.submissions[0].request.token_ids) == [258, *b"a\nb", 256, 259]


async def test_harmless_and_neutral_fields_are_accepted(deployment: Deployment) -> None:
    fields: dict[str, Any] = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
    }
    fields |= {"logit_bias": {}, "presence_penalty": 0, "response_format": {"type": "text"}}
    fields |= {"tools": [], "temperature": None, "top_k": -1, "parallel_tool_calls": True}
    assert (await deployment.chat(**fields)).status_code == 200


async def test_a_chat_without_a_token_is_refused_by_the_name_of_its_field(tmp_path: Path) -> None:
    model = write_mock_model(tmp_path / "mock")
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    async with running(model) as deployment:
        refused = await deployment.chat("")
    assert refused.status_code == 400
    error = refused.json()["error"]
    told = "messages='0 tokens': the chat template makes nothing of them"
    assert (error["param"], error["message"]) == ("messages", told)
