"""A gateway on real ports before a scripted router, all on the test's event loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI

from paceline.core.config import made, settings_of
from paceline.core.serving_digest import serving_digest
from paceline.gateway.config import GatewayConfig
from paceline.gateway.main import GatewayServer
from paceline.v1.control_pb2 import ModelInfo
from tests.support.fake_router_service import HIDDEN_SIZE, SECRET, FakeRouter
from tests.support.waits import until

CONTEXT_LENGTH = 256


@dataclass
class Deployment:
    """What a test needs: the gateway, its router, clients."""

    gateway: GatewayServer
    router: FakeRouter
    http: httpx.AsyncClient
    openai: AsyncOpenAI
    model_dir: Path

    @property
    def port(self) -> int:
        return self.gateway.port

    async def chat(self, content: Any = "Hi", **fields: Any) -> httpx.Response:
        body = {"model": "mock", "messages": [{"role": "user", "content": content}], **fields}
        return await self.http.post("/v1/chat/completions", json=body)

    async def complete(self, prompt: Any = "Hi", **fields: Any) -> httpx.Response:
        body = {"model": "mock", "prompt": prompt, **fields}
        return await self.http.post("/v1/completions", json=body)


def model_info(model_dir: Path, **fields: Any) -> ModelInfo:
    described = {
        "name": "mock",
        "content_digest": "ab" * 32,
        "serving_digest": serving_digest(model_dir),
        "context_length": CONTEXT_LENGTH,
        "vocab_size": 260,
        "hidden_size": HIDDEN_SIZE,
        **fields,
    }
    return ModelInfo(**described)


@asynccontextmanager
async def running(model_dir: Path, *others: str, **settings: Any) -> AsyncIterator[Deployment]:
    """A gateway that is ready, until the block ends. `others`: further routers that it knows."""
    router = FakeRouter([model_info(model_dir)])
    await router.start()
    gateway = GatewayServer(gateway_config(model_dir, router.endpoint, *others, **settings))
    await gateway.start()
    await until(lambda: not gateway.serving.reasons())
    url = f"http://127.0.0.1:{gateway.port}"
    try:
        async with (
            httpx.AsyncClient(base_url=url, timeout=10) as http,
            AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as openai,
        ):
            yield Deployment(gateway, router, http, openai, model_dir)
    finally:  # also after a failure: uvloop does not close while connections are open
        async with asyncio.timeout(10):
            await gateway.drain()
            await gateway.stop()
            await router.stop()


def gateway_config(model_dir: Path, *routers: str, **settings: Any) -> GatewayConfig:
    """`settings` by the names that users give them."""
    assert settings.keys() <= {item.name for item in settings_of(GatewayConfig)}
    own = {"model": model_dir, "router": routers, "secret": SECRET}
    brief = {"port": 0, "grpc_port": 0, "drain_timeout_s": 1.0}
    return made(GatewayConfig, {**own, **brief, **settings})
