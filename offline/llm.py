"""`LLM`: lists of prompts in, results out, as the servers would answer them.

    caller's thread          event loop, in a thread            engine, in another
    generate, chat  ──────►  checks, tokens ──► LocalRouter ──► batches of all prompts
                    ◄──────  results ◄── text, stop strings ◄── tokens

Everything but the way between gateway and engine is what a deployment runs.
"""

import asyncio
import os
import secrets
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import msgspec

from paceline.client.embedding import (
    Embeddings,
    EmbedOptions,
    embed_request_of,
    embeddings_of,
)
from paceline.client.options import Options, request_of
from paceline.client.result import Collector, Result
from paceline.core.errors import InvalidRequest, Unavailable
from paceline.engine.engine import Engine
from paceline.gateway.config import GatewayConfig
from paceline.gateway.deadline import Deadline
from paceline.gateway.embed_call import embed
from paceline.gateway.generate_call import responses
from paceline.gateway.messages import chat_of
from paceline.gateway.openai_types import ChatMessage, TokenizeRequest
from paceline.gateway.serving import Serving
from paceline.kv_transfer.pool_memory import new_pool_file
from paceline.models.loader import LoadedModel
from paceline.offline.local_router import LocalRouter
from paceline.v1.control_pb2 import ModelInfo
from paceline.v1.generate_pb2 import EmbedRequest, EmbedResponse, GenerateRequest
from paceline.worker.config import ComputeSettings, StepSettings, WorkerConfig
from paceline.worker.rank_main import make_engine
from paceline.worker.rank_process import rank_config

MAX_AT_ONCE = 256  # requests at the engine; the others wait here
_UNLIMITED_S = 1e8  # a list has no deadline
_IN_PROCESS = ("", "", "")  # nobody is spoken to

R = TypeVar("R")
T = TypeVar("T")
Message = Mapping[str, Any]  # role, content


class LLM:
    """`model`: a folder with config.json, weights and tokenizer.json. Loads it at once; use it as a
    context manager, or close it. Threads may share one.

    Raises ConfigError for a model or a setting that cannot work, naming it."""

    def __init__(
        self,
        model: str | Path,
        *,
        device: str = "cpu",
        dtype: str = "auto",
        quantization: str = "auto",
        pool_mib: int = 512,
        max_batch_tokens: int = 1024,
        max_running: int = 64,
        num_threads: int = 0,
    ) -> None:
        """The settings are those of a worker: `paceline decode --help` explains them. `num_threads`
        becomes that of torch in this process."""
        worker = WorkerConfig(
            model=str(model),
            secret=secrets.token_hex(32),
            compute=ComputeSettings(
                device=device,
                dtype=dtype,
                quantization=quantization,
                pool_mib=pool_mib,
                num_threads=num_threads,
            ),
            steps=StepSettings(max_batch_tokens=max_batch_tokens, max_running=max_running),
        )
        gateway = GatewayConfig(model=Path(model), secret=worker.secret)
        engine, loaded = _load(worker)
        self._loop = asyncio.new_event_loop()
        self._model = _described(worker.served_name, engine, loaded)
        self._serving = Serving(gateway, LocalRouter(engine, self._model, self._loop))
        self._tenant = self._serving.authentication.tenant_of(None)
        self._gate = asyncio.Semaphore(MAX_AT_ONCE)
        self._lock = threading.Lock()  # between the last call that is let in and close
        self._is_closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="llm", daemon=True)
        self._thread.start()
        self._serving.router.start()

    @property
    def context_length(self) -> int:
        """Tokens of a prompt and its output together."""
        return self._model.context_length

    def generate(
        self, prompts: Sequence[str | Sequence[int]], **options: Unpack[Options]
    ) -> list[Result]:
        """A result for each text or list of token ids, in order. `options` hold for all.

        Raises PacelineError, such as InvalidRequest, for the first prompt that cannot be answered;
        the others end, too."""
        _check_list("prompts", prompts)
        requests = [request_of(prompt, "", options) for prompt in prompts]
        return self._run(self._all(self._one, requests))

    def chat(
        self, conversations: Sequence[Sequence[Message]], **options: Unpack[Options]
    ) -> list[Result]:
        """The same for lists of messages, through the model's chat template. Without `max_tokens`
        an answer may fill the context."""
        _check_list("conversations", conversations)
        return self._run(self._chat(conversations, options))

    def embed(
        self, inputs: Sequence[str | Sequence[int]], **options: Unpack[EmbedOptions]
    ) -> Embeddings:
        """A vector for each text or list of token ids, in order. Raises as `generate` does."""
        _check_list("inputs", inputs)
        requests = [embed_request_of([one], "", options) for one in inputs]
        return self._run(self._embed(requests))

    def close(self) -> None:
        """Ends what runs, and both threads: who waits for an answer gets Unavailable. Weights and
        pages go with the last reference, when the collector has come by."""
        with self._lock:
            is_first, self._is_closed = not self._is_closed, True
        if is_first:
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        if is_first:
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """On the event loop; an interrupt here ends it there."""
        with self._lock:
            if self._is_closed:
                work.close()
                raise RuntimeError("this LLM is closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise Unavailable("this LLM was closed meanwhile") from None
        except BaseException:
            future.cancel()
            raise

    async def _chat(
        self, conversations: Sequence[Sequence[Message]], options: Options
    ) -> list[Result]:
        requests = []
        for index, messages in enumerate(conversations):
            ids = await self._ids_of(f"conversations[{index}]", messages)
            room = max(1, self.context_length - len(ids))
            requests.append(request_of(ids, "", {"max_tokens": room, **options}))
        return await self._all(self._one, requests)

    async def _embed(self, requests: Sequence[EmbedRequest]) -> Embeddings:
        return embeddings_of(_joined(await self._all(self._one_embedding, requests)))

    async def _ids_of(self, field: str, messages: Sequence[Message]) -> list[int]:
        try:
            checked = msgspec.convert(list(messages), list[ChatMessage])
        except (msgspec.ValidationError, TypeError) as error:
            raise InvalidRequest(field, "…", str(error)) from None
        has_developer = self._serving.text.has_developer_role
        chat = chat_of(checked, TokenizeRequest(), has_developer=has_developer)
        return await self._serving.prompts.ids_of_chat(chat)

    async def _all(
        self, answer: Callable[[R], Coroutine[Any, Any, T]], requests: Sequence[R]
    ) -> list[T]:
        tasks = [asyncio.create_task(answer(request)) for request in requests]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, request: GenerateRequest) -> Result:
        collector = Collector()
        async with self._gate:
            answer = responses(self._serving, request, self._tenant, Deadline(_UNLIMITED_S))
            async with aclosing(answer) as parts:
                async for part in parts:
                    collector.add(part)
        return collector.finished()

    async def _one_embedding(self, request: EmbedRequest) -> EmbedResponse:
        async with self._gate:
            return await embed(self._serving, request, self._tenant, Deadline(_UNLIMITED_S))

    async def _stop(self) -> None:
        running = asyncio.all_tasks() - {asyncio.current_task()}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        self._serving.prompts.close()
        await self._serving.router.stop()
        await self._loop.shutdown_default_executor()


def _load(worker: WorkerConfig) -> tuple[Engine, LoadedModel]:
    fd = new_pool_file()
    try:
        engine, loaded, _ = make_engine(rank_config(worker, fd, "", _IN_PROCESS))
    finally:
        os.close(fd)  # what is mapped stays
    return engine, loaded


def _described(name: str, engine: Engine, loaded: LoadedModel) -> ModelInfo:
    return ModelInfo(
        name=name,
        content_digest=loaded.content_digest,
        serving_digest=loaded.serving_digest,
        context_length=engine.max_length,
        vocab_size=loaded.model.vocab_size,
        hidden_size=loaded.model.hidden_size,
    )


def _joined(responses: Sequence[EmbedResponse]) -> EmbedResponse:
    """As if all had been asked for at once."""
    whole = EmbedResponse()
    for response in responses:
        whole.embeddings.extend(response.embeddings)
        whole.num_prompt_tokens += response.num_prompt_tokens
        whole.num_cached_tokens += response.num_cached_tokens
    return whole


def _check_list(field: str, value: object) -> None:
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    InvalidRequest.check(field, value, is_list, "must be a list")
