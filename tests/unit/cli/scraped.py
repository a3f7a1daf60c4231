"""Registries as processes of a deployment show them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry

from paceline.rpc.probes import ProbeServer


@asynccontextmanager
async def shown(*registries: CollectorRegistry) -> AsyncIterator[list[str]]:
    servers = [ProbeServer("127.0.0.1", 0, list, registry) for registry in registries]
    try:
        yield [f"http://127.0.0.1:{await server.start()}" for server in servers]
    finally:
        for server in servers:
            await server.stop()
