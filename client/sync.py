"""The client for threads."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
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


class Client:
    """`target`: host:port of a gateway's gRPC port. Threads may share one; use it as a context
    manager, or close it. `credentials`: of TLS, where a proxy offers that.

    Every call raises PacelineError (paceline.core.errors): what the gateway refused, with the field
    at fault, or Unavailable when it does not answer. Nothing is tried again."""

    def __init__(
        self,
        target: str,
        *,
        model: str = "",
        api_key: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """`model`: "" is the only one that is served. `timeout_s`: of each call."""
        self._model = model
        self._metadata = metadata_of(api_key)
        self._timeout_s = timeout_s
        if credentials is None:
            self._channel = grpc.insecure_channel(target, options=OPTIONS)
        else:
            self._channel = grpc.secure_channel(target, credentials, options=OPTIONS)
        self._stub: Any = GenerateServiceStub(self._channel)  # type: ignore[no-untyped-call]

    def generate(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Result:
        """The whole answer."""
        collector = Collector()
        for response in self._responses(request_of(prompt, self._model, options)):
            collector.add(response)
        return collector.finished()

    def stream(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Iterator[Part]:
        """Parts as they come. Closing the iterator ends the generation at the gateway."""
        request = request_of(prompt, self._model, options)
        with closing(self._responses(request)) as responses:
            yield from map(part_of, responses)

    def embed(
        self, inputs: Sequence[str | Sequence[int]], **options: Unpack[EmbedOptions]
    ) -> Embeddings:
        """A vector for each text or list of token ids, in order."""
        request = embed_request_of(inputs, self._model, options)
        call = {"timeout": self._timeout_s, "metadata": self._metadata}
        try:
            return embeddings_of(self._stub.Embed(request, **call))
        except grpc.RpcError as failure:
            raise error_of(failure) from None

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _responses(self, request: GenerateRequest) -> Generator[GenerateResponse, None, None]:
        call = self._stub.Generate(request, timeout=self._timeout_s, metadata=self._metadata)
        try:
            yield from call
        except grpc.RpcError as failure:
            raise error_of(failure) from None
        finally:
            call.cancel()
