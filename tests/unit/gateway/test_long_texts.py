"""Texts that are long, too long or many: refused early, and never in the way of short ones."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from paceline.gateway import prompts
from paceline.gateway.lanes import SHORT_CHARS
from paceline.gateway.tokenizer import TextModel
from paceline.rpc.channel import connect
from paceline.v1.common_pb2 import TokenIds
from paceline.v1.generate_pb2 import GenerateRequest
from paceline.v1.generate_pb2_grpc import GenerateServiceStub
from tests.support.gateway_deployment import CONTEXT_LENGTH, Deployment, model_info, running
from tests.support.waits import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = "x" * (SHORT_CHARS + 1)
MUCH_TOO_LONG = "y" * 900_000


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def wide(shared: Deployment) -> AsyncIterator[Deployment]:
    """A context that holds LONG."""
    async with running(shared.model_dir, request_timeout_s=2.0) as deployment:
        model = model_info(shared.model_dir, context_length=2 * len(LONG))
        deployment.router.set_models([model])
        text_model = deployment.gateway.serving
        await until(lambda: text_model.models()[0].context_length == model.context_length)
        yield deployment


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts that were tokenised."""
    texts: list[str] = []
    encode = TextModel.encode

    def recording(self: TextModel, text: str, *args: Any, **options: Any) -> list[int]:
        texts.append(text)
        return encode(self, text, *args, **options)

    monkeypatch.setattr(TextModel, "encode", recording)
    return texts


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of prompts that were hashed."""
    lengths: list[int] = []
    chain_keys = prompts.chain_keys

    def recording(parent: bytes, token_ids: list[int]) -> list[Any]:
        lengths.append(len(token_ids))
        return list(chain_keys(parent, token_ids))

    monkeypatch.setattr(prompts, "chain_keys", recording)
    return lengths


@pytest.mark.parametrize(
    ("ask", "field"),
    [
        (lambda d: d.complete(MUCH_TOO_LONG), "prompt"),
        (lambda d: d.complete(["a", "b", MUCH_TOO_LONG]), "prompt"),
        (lambda d: d.complete(MUCH_TOO_LONG, max_tokens=5), "prompt"),
        (lambda d: d.complete([[65] * 100, [66] * 20_000]), "prompt"),
        (lambda d: d.chat(MUCH_TOO_LONG), "messages"),
    ],
)
async def test_what_is_much_too_long_is_refused_before_it_is_tokenised(
    deployment: Deployment,
    encoded: list[str],
    hashed: list[int],
    ask: Callable[[Deployment], Any],
    field: str,
) -> None:
    response = await ask(deployment)
    error = response.json()["error"]
    assert response.status_code == 400 and error["code"] == "context_length_exceeded"
    assert error["param"] == field and f"{CONTEXT_LENGTH} tokens" in error["message"]
    assert encoded == [] and hashed == []


async def test_what_is_much_too_long_is_refused_over_grpc(
    deployment: Deployment, encoded: list[str], hashed: list[int]
) -> None:
    async with connect(f"127.0.0.1:{deployment.gateway.grpc_port}") as channel:
        stub: Any = GenerateServiceStub(channel)  # type: ignore[no-untyped-call]
        for prompt in ({"text": MUCH_TOO_LONG}, {"tokens": TokenIds(ids=[65] * 20_000)}):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Generate(GenerateRequest(model="mock", **prompt)).read()
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert encoded == [] and hashed == []


async def test_a_prompt_that_does_not_fit_is_not_hashed(
    deployment: Deployment, encoded: list[str], hashed: list[int]
) -> None:
    fits = "x" * (CONTEXT_LENGTH - 1)
    assert (await deployment.complete(fits + "x")).status_code == 400
    assert (await deployment.complete(fits, max_tokens=2)).json()["error"]["param"] == "max_tokens"
    assert (await deployment.complete([65] * CONTEXT_LENGTH)).status_code == 400
    assert (await deployment.chat(fits)).status_code == 400
    assert len(encoded) == 3 and hashed == []
    assert (await deployment.complete(fits)).status_code == 200
    assert hashed == [CONTEXT_LENGTH - 1]


async def test_least_tokens_that_fit_are_counted_exactly(wide: Deployment) -> None:
    room = 2 * len(LONG) - len(LONG)
    assert (await wide.complete(LONG, max_tokens=room)).status_code == 200
    error = (await wide.complete(LONG, max_tokens=room + 1)).json()["error"]
    assert error["param"] == "max_tokens" and f"at most {room} fit" in error["message"]


class HeldTokenizer:
    """Long texts wait in the tokenizer until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = threading.Event()
        self.num_inside = self.num_long = 0
        encode = TextModel.encode

        def held(model: TextModel, text: str, *args: Any, **options: Any) -> list[int]:
            if len(text) > SHORT_CHARS:
                self.num_long += 1
                self.num_inside += 1
                self.free.wait(10)
                self.num_inside -= 1
            return encode(model, text, *args, **options)

        monkeypatch.setattr(TextModel, "encode", held)


@pytest.fixture
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldTokenizer]:
    held = HeldTokenizer(monkeypatch)
    yield held
    held.free.set()


async def test_short_texts_do_not_wait_for_long_ones(
    wide: Deployment, tokenizer: HeldTokenizer
) -> None:
    asks = [ask(LONG) for ask in [wide.complete, wide.chat] * 6]
    long = [asyncio.create_task(ask) for ask in asks]
    await until(lambda: wide.gateway.serving.num_running == len(long))
    await until(lambda: tokenizer.num_inside > 0)
    started = time.monotonic()
    for _ in range(5):
        assert (await wide.complete("short")).status_code == 200
        assert (await wide.chat("short")).status_code == 200
        assert (await wide.complete(MUCH_TOO_LONG)).status_code == 400
    assert time.monotonic() - started < 1
    assert tokenizer.num_inside <= 4  # at once
    tokenizer.free.set()
    assert {response.status_code for response in await asyncio.gather(*long)} == {200}


async def test_a_text_whose_client_left_is_not_tokenised(
    wide: Deployment, tokenizer: HeldTokenizer
) -> None:
    tasks = [asyncio.create_task(wide.complete(LONG)) for _ in range(10)]
    await until(lambda: wide.gateway.serving.num_running == len(tasks))
    await until(lambda: tokenizer.num_inside > 0)
    num_left = wide.gateway.serving.metrics.disconnects._value.get()
    for task in tasks:
        task.cancel()
    await until(lambda: wide.gateway.serving.num_running == 0, 1)
    assert wide.gateway.serving.metrics.disconnects._value.get() == num_left + len(tasks)
    tokenizer.free.set()
    assert (await wide.complete(LONG)).status_code == 200
    assert tokenizer.num_long <= 4 + 1


async def test_the_time_limit_counts_from_the_arrival(
    wide: Deployment, tokenizer: HeldTokenizer
) -> None:
    """Of the waiting for the tokenizer, too; a client's own over gRPC."""
    async with connect(f"127.0.0.1:{wide.gateway.grpc_port}") as channel:
        stub: Any = GenerateServiceStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Generate(GenerateRequest(model="mock", text=LONG), timeout=0.3)
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await call.read()
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    response = await wide.complete(LONG)
    assert response.status_code == 504 and "within 2 s" in response.json()["error"]["message"]
    await until(lambda: wide.gateway.serving.num_running == 0, 1)


async def test_a_long_text_is_decoded_without_the_interpreters_lock(shared: Deployment) -> None:
    """Else the event loop would stand still all the while. The best of five, on a busy machine."""
    text, ids = shared.gateway.serving.text, [65] * 300_000

    def share_of_longest_wait() -> float:
        thread = threading.Thread(target=text.decode, args=(ids,))
        began = last = time.perf_counter()
        longest = 0.0
        thread.start()
        while thread.is_alive():
            time.sleep(0)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        return longest / (last - began)

    assert min(share_of_longest_wait() for _ in range(5)) < 0.5
