"""The client for asyncio."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from paceline.client.channel import DEFAULT_TIMEOUT_S, OPTIONS, error_of, metadata_of
from paceline.client.embedding import (
    Embeddings,
    EmbedOptions,
    embed_request_of,
    embeddings_of,
)
from paceline.client.options import Options, request_of
from paceline.client.result import Collector, Part, Result, part_of
from paceline.v1.generate_pb2 import GenerateRequest, GenerateResponse
from paceline.v1.generate_pb2_grpc import GenerateServiceStub


class AsyncClient:
    """As `Client`, of one event loop."""

    def __init__(
        self,
        target: str,
        *,
        model: str = "",
        api_key: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._model = model
        self._metadata = metadata_of(api_key)
        self._timeout_s = timeout_s
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(target, options=OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(target, credentials, options=OPTIONS)
        self._stub: Any = GenerateServiceStub(self._channel)  # type: ignore[no-untyped-call]

    async def generate(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Result:
        """The whole answer."""
        collector = Collector()
        async with aclosing(self._responses(request_of(prompt, self._model, options))) as responses:
            async for response in responses:
                collector.add(response)
        return collector.finished()

    async def stream(
        self, prompt: str | Sequence[int], **options: Unpack[Options]
    ) -> AsyncGenerator[Part, None]:
        """Parts as they come. Closing the iterator (contextlib.aclosing) ends the generation at the
        gateway."""
        async with aclosing(self._responses(request_of(prompt, self._model, options))) as responses:
            async for response in responses:
                yield part_of(response)

    async def embed(
        self, inputs: Sequence[str | Sequence[int]], **options: Unpack[EmbedOptions]
    ) -> Embeddings:
        """A vector for each text or list of token ids, in order."""
        request = embed_request_of(inputs, self._model, options)
        call = self._stub.Embed(request, timeout=self._timeout_s, metadata=self._metadata)
        try:
            return embeddings_of(await call)
        except grpc.aio.AioRpcError as failure:
            raise error_of(failure) from None
        finally:
            call.cancel()

    async def close(self) -> None:
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _responses(self, request: GenerateRequest) -> AsyncGenerator[GenerateResponse, None]:
        call = self._stub.Generate(request, timeout=self._timeout_s, metadata=self._metadata)
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as failure:
            raise error_of(failure) from None
        finally:
            call.cancel()
