"""Silent streams stay open: comments between tokens, none before the first, none among tokens."""

import pytest

from tests.support.fake_router_service import bytes_reply
from tests.support.gateway_client import sse_events
from tests.support.gateway_deployment import Deployment, running

pytestmark = pytest.mark.asyncio(loop_scope="module")

COMMENT = ": keep-alive\n\n"


async def test_a_silence_has_comments_that_clients_skip(deployment: Deployment) -> None:
    async with running(deployment.model_dir, heartbeat_s=0.03) as own:
        own.router.reply = lambda request: bytes_reply(b"abc", interval_s=0.12, delay_s=0.1)
        text = (await own.chat(stream=True)).text
        assert text.startswith("data: ")  # nothing in the silence before the first token
        assert 2 <= text.count(COMMENT) <= 10
        events = sse_events(text.replace(COMMENT, ""))
        assert events[-1] == "[DONE]"
        stream = await own.openai.chat.completions.create(
            model="mock", messages=[{"role": "user", "content": "Hi"}], stream=True
        )
        parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(parts) == "abc"


async def test_tokens_that_come_need_none(deployment: Deployment) -> None:
    async with running(deployment.model_dir, heartbeat_s=0.15) as own:
        own.router.reply = lambda request: bytes_reply(b"abcdefghij" * 3, interval_s=0.01)
        assert COMMENT not in (await own.chat(stream=True)).text
