"""Streams over HTTP, a token an event: each delta whole, and as early as its tokens allow."""

import asyncio
from collections.abc import AsyncIterator

import orjson
import pytest

from tests.support.fake_router_service import bytes_reply
from tests.support.gateway_deployment import Deployment

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def deltas(deployment: Deployment, **fields: object) -> AsyncIterator[str]:
    """That carry text."""
    body = {"model": "mock", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    async with deployment.http.stream("POST", "/v1/chat/completions", json=body | fields) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                choice = orjson.loads(line.removeprefix("data: "))["choices"][0]
                if text := choice["delta"].get("content"):
                    yield text


async def test_vllm_mlx_109_characters_of_several_tokens_arrive_whole(
    deployment: Deployment,
) -> None:
    """https://github.com/waybarrios/vllm-mlx/pull/109"""
    text = "ď😀한"
    deployment.router.reply = lambda request: bytes_reply(text.encode())
    found = [delta async for delta in deltas(deployment)]
    assert "".join(found) == text
    assert all("\ufffd" not in delta for delta in found)
    assert (await deployment.chat()).json()["choices"][0]["message"]["content"] == text


async def test_vllm_13087_a_stop_string_holds_no_text_back_that_is_none_of_it(
    deployment: Deployment,
) -> None:
    """https://github.com/vllm-project/vllm/issues/13087: nothing follows a first token, yet its
    text is there."""
    stop = ["ZZZZZZZZZZ"]
    deployment.router.reply = lambda request: bytes_reply(b"t", is_endless=True)
    async with asyncio.timeout(10):
        assert await anext(deltas(deployment, stop=stop)) == "t"
    text = "twenty tokens, no Q."
    deployment.router.reply = lambda request: bytes_reply(text.encode())
    assert "".join([delta async for delta in deltas(deployment, stop=stop)]) == text
