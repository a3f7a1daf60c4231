"""A router with an engine of no cost behind it: each step brings one token of every request.

One frame a step, as a router sends them; steps come by a clock, or as fast as the gateway takes
frames. Only the gateway's work is left to be measured.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from paceline.rpc.channel import make_server
from paceline.v1 import common_pb2
from paceline.v1.common_pb2 import Emission
from paceline.v1.control_pb2 import GatewayFrame, ModelInfo, RouterFrame
from paceline.v1.control_pb2_grpc import RouterServiceServicer, add_RouterServiceServicer_to_server

BEAT_S = 0.5


class MockRouter(RouterServiceServicer):
    """`step_s`: time between steps; 0: none. It may change while requests run."""

    def __init__(self, model: ModelInfo, token_ids: Sequence[int], step_s: float) -> None:
        self.step_s = step_s
        self._model = model
        self._token_ids = token_ids
        self._live: dict[int, tuple[int, int]] = {}  # slot → (next position, max_tokens)
        self._has_work = asyncio.Event()

    async def start(self, secret: str) -> str:
        """Returns its endpoint."""
        self._server = make_server(secret.encode())
        add_RouterServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return f"127.0.0.1:{port}"

    async def stop(self) -> None:
        await self._server.stop(None)

    async def Attach(self, request_iterator: AsyncIterator[GatewayFrame], context: Any) -> None:
        reader = asyncio.create_task(self._read(request_iterator))
        try:
            await context.write(RouterFrame(models=[self._model], models_changed=True))
            for step in itertools.count():
                await self._until_work()
                due_s = time.perf_counter() + self.step_s
                await context.write(self._step(step))
                await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        finally:
            reader.cancel()

    async def _until_work(self) -> None:
        try:
            async with asyncio.timeout(BEAT_S):
                await self._has_work.wait()
        except TimeoutError:
            return  # an empty frame is a beat

    async def _read(self, frames: AsyncIterator[GatewayFrame]) -> None:
        async for frame in frames:
            if frame.HasField("submit"):
                max_tokens = frame.submit.request.sampling.max_tokens
                self._live[frame.submit.slot] = (0, max_tokens)
                self._has_work.set()
            else:
                self._live.pop(frame.cancel.slot, None)

    def _step(self, step: int) -> RouterFrame:
        now_us = time.time_ns() // 1000
        emissions = []
        for slot, (position, max_tokens) in list(self._live.items()):
            is_last = position + 1 == max_tokens
            token_id = self._token_ids[(step + slot) % len(self._token_ids)]
            emission = Emission(
                slot=slot, position=position, token_ids=[token_id], emitted_unix_us=now_us
            )
            if is_last:
                emission.finish = common_pb2.FINISH_REASON_LENGTH
                del self._live[slot]
            else:
                self._live[slot] = (position + 1, max_tokens)
            emissions.append(emission)
        if not self._live:
            self._has_work.clear()
        return RouterFrame(emissions=emissions)
