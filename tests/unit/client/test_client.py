"""The client library against a gateway on real ports: both clients, the same answers."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import uvloop

from paceline.client import AsyncClient, Client, Embeddings, EmbedOptions, Options, Part, Result
from paceline.client.options import request_of
from paceline.core.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidApiKey,
    InvalidRequest,
    ModelNotFound,
    PacelineError,
    Unavailable,
)
from paceline.core.finish import FinishReason
from paceline.v1 import common_pb2
from paceline.v1.common_pb2 import Error
from paceline.v1.generate_pb2 import EmbedRequest, GenerateRequest
from tests.support.fake_router_service import STOP, Reply, bytes_reply, embedding_of
from tests.support.gateway_deployment import Deployment, running
from tests.support.key_file import entry, write
from tests.support.mock_model import write_mock_model
from tests.support.waits import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def deployment(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Deployment]:
    async with running(write_mock_model(tmp_path_factory.mktemp("model"))) as deployment:
        yield deployment


def target(deployment: Deployment) -> str:
    return f"127.0.0.1:{deployment.gateway.grpc_port}"


class Asked:
    """Both clients in one form; the sync one in a thread, as its gateway runs on this loop."""

    def __init__(self, is_async: bool, target: str, **settings: Any) -> None:
        self._is_async = is_async
        self._target = target
        self._settings = settings

    async def generate(self, prompt: Any = "Hi", **options: Any) -> Result:
        if self._is_async:
            async with AsyncClient(self._target, **self._settings) as client:
                return await client.generate(prompt, **options)

        def ask() -> Result:
            with Client(self._target, **self._settings) as client:
                return client.generate(prompt, **options)

        return await asyncio.to_thread(ask)

    async def embed(self, inputs: Any, **options: Any) -> Embeddings:
        if self._is_async:
            async with AsyncClient(self._target, **self._settings) as client:
                return await client.embed(inputs, **options)

        def ask() -> Embeddings:
            with Client(self._target, **self._settings) as client:
                return client.embed(inputs, **options)

        return await asyncio.to_thread(ask)

    async def first_parts(self, count: int, **options: Any) -> list[Part]:
        """And then the iterator is closed."""
        if self._is_async:
            async with (
                AsyncClient(self._target, **self._settings) as client,
                aclosing(client.stream("Hi", **options)) as parts,
            ):
                return [await anext(parts) for _ in range(count)]

        def ask() -> list[Part]:
            with Client(self._target, **self._settings) as client:
                stream = client.stream("Hi", **options)
                taken = [next(stream) for _ in range(count)]
                stream.close()  # type: ignore[attr-defined]
                return taken

        return await asyncio.to_thread(ask)


@pytest.fixture(params=["sync", "async"])
def asked(request: pytest.FixtureRequest, deployment: Deployment) -> Asked:
    deployment.router.submissions.clear()
    deployment.router.reply = lambda request: bytes_reply(b"Hello")
    return Asked(request.param == "async", target(deployment))


async def test_a_whole_answer(asked: Asked, deployment: Deployment) -> None:
    reply = Reply([*([byte] for byte in "é!".encode()), [256]], finish=STOP, num_cached_tokens=3)
    deployment.router.reply = lambda request: reply
    found = await asked.generate("Hi", n=2, logprobs=1, statistics=True)
    assert found.text == "é!" and len(found.choices) == 2
    choice = found.choices[1]
    assert (choice.token_ids, choice.finish) == ([0xC3, 0xA9, 33, 256], FinishReason.STOP)
    assert [position.chosen.token_id for position in choice.logprobs] == choice.token_ids
    assert (found.num_prompt_tokens, found.num_cached_tokens) == (2, 3)
    assert found.statistics is not None and found.statistics.num_hit_tokens == 3


async def test_every_option_arrives(asked: Asked, deployment: Deployment) -> None:
    options: Options = {
        "max_tokens": 7,
        "stop": "x",
        "stop_token_ids": [5],
        "logit_bias": {3: 1.5},
        "bad_words": ["ab"],
        "bad_token_ids": [[9, 8]],
        "logits_processors": ["plain", ("other", '{"a": 1}')],
        "seed": 2**64 - 1,
        "priority": -3,
        "ttft_ms": 2000,
        "itl_ms": 12.5,
        "prompt_logprobs": 2,
    }
    await asked.generate([1, 2, 3], **options)
    request = deployment.router.submissions[0].request
    sampling = request.sampling
    assert list(request.token_ids) == [1, 2, 3] and request.priority == -3
    assert 0 < request.ttft_ms < 2000 and request.itl_ms == 12.5
    assert (sampling.max_tokens, sampling.seed) == (7, 2**64 - 1)
    assert dict(sampling.logit_bias) == {3: 1.5} and sampling.num_prompt_logprobs == 2
    assert [list(word.ids) for word in sampling.bad_words] == [[97, 98], [9, 8]]
    assert [call.name for call in sampling.logits_processors] == ["plain", "other"]


async def test_parts_come_as_they_are_made_and_leaving_ends_the_request(
    asked: Asked, deployment: Deployment
) -> None:
    deployment.router.reply = lambda request: Reply([[97]] * 500, interval_s=0.01, is_endless=True)
    parts = await asked.first_parts(3)
    assert [part.text for part in parts] == ["a"] * 3
    await until(lambda: deployment.router.submissions[0].cancelled.is_set(), 1)


@pytest.mark.parametrize(
    ("prompt", "options", "kind", "field"),
    [
        ("", {}, InvalidRequest, "prompt"),
        ("x" * 300, {}, ContextLengthExceeded, "prompt"),
        ("Hi", {"temperature": 101.0}, InvalidRequest, "temperature"),
        ("Hi", {"top_k": -1}, InvalidRequest, "top_k"),
        ("Hi", {"seed": -1}, InvalidRequest, "seed"),
        ("Hi", {"max_tokens": "7"}, InvalidRequest, "max_tokens"),
        ("Hi", {"maxtokens": 7}, InvalidRequest, "maxtokens"),
        ([-1], {}, InvalidRequest, "prompt"),
        ([1.5], {}, InvalidRequest, "prompt"),
        ("\ud83d", {}, InvalidRequest, "prompt"),
    ],
)
async def test_errors_are_those_of_the_gateway(
    asked: Asked, prompt: Any, options: Any, kind: type[PacelineError], field: str
) -> None:
    with pytest.raises(kind) as caught:
        await asked.generate(prompt, **options)
    assert type(caught.value) is kind and caught.value.field == field


async def test_errors_of_the_service(asked: Asked, deployment: Deployment) -> None:
    unavailable = Error(code=common_pb2.ERROR_CODE_UNAVAILABLE, message="gone", retry_after_ms=2500)
    deployment.router.reply = lambda request: bytes_reply(b"ab", error=unavailable)
    with pytest.raises(Unavailable, match="gone") as caught:
        await asked.generate()
    assert caught.value.retry_after_s == 2.5
    asked._settings = {"model": "none"}
    with pytest.raises(ModelNotFound):
        await asked.generate()
    deployment.router.reply = lambda request: Reply([[97]], delay_s=30)
    asked._settings = {"timeout_s": 0.1}
    with pytest.raises(DeadlineExceeded):
        await asked.generate()
    with pytest.raises(Unavailable):
        await Asked(asked._is_async, "127.0.0.1:1").generate()


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_key_is_sent(deployment: Deployment, tmp_path: Path, is_async: bool) -> None:
    keys = write(tmp_path / "keys.toml", entry("acme", ["sk-acme"]))
    async with running(deployment.model_dir, api_keys=keys) as own:
        assert (await Asked(is_async, target(own), api_key="sk-acme").generate()).text == "Hello"
        assert own.router.submissions[0].request.tenant == "acme"
        for settings in ({}, {"api_key": "sk-other"}):
            with pytest.raises(InvalidApiKey):
                await Asked(is_async, target(own), **settings).generate()


EMBED_OPTIONS: EmbedOptions = {
    "pooling": "mean",
    "normalize": False,
    "dimensions": 3,
    "priority": -2,
    "cache_salt": "s",
}


async def test_inputs_become_vectors(asked: Asked, deployment: Deployment) -> None:
    made = await asked.embed(["Hi", [97, 98, 99]], **EMBED_OPTIONS)
    requests = [submission.request for submission in deployment.router.submissions]
    assert made.vectors == [embedding_of(request)[:3] for request in requests]
    assert (made.num_prompt_tokens, made.num_cached_tokens) == (5, 0)
    for request in requests:
        assert request.pooling == common_pb2.POOLING_MEAN
        assert (request.priority, request.cache_salt) == (-2, "s")
    assert set(EMBED_OPTIONS) | {"model", "inputs"} == set(EmbedRequest.DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize(
    ("inputs", "options", "field"),
    [
        ("Hi", {}, "inputs"),
        ([b"Hi"], {}, "inputs"),
        ([], {}, "inputs"),
        ([""], {}, "input"),
        (["Hi"], {"dimensions": 99}, "dimensions"),
        (["Hi"], {"dimensions": -1}, "dimensions"),
        (["Hi"], {"pooling": "max"}, "pooling"),
        (["Hi"], {"size": 3}, "size"),
    ],
)
async def test_wrong_inputs_and_options_are_named(
    asked: Asked, inputs: Any, options: Any, field: str
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        await asked.embed(inputs, **options)
    assert raised.value.field == field


async def test_it_knows_every_field_of_the_message() -> None:
    own = {"logprobs": "num_logprobs", "prompt_logprobs": "num_prompt_logprobs"}
    fields = {own.get(name, name) for name in Options.__annotations__}
    assert fields == set(GenerateRequest.DESCRIPTOR.fields_by_name) - {"model", "text", "tokens"}
    assert request_of("x", "", {}) == GenerateRequest(text="x")


@pytest.mark.parametrize("prompt", [b"text", bytearray(b"text"), 7, None, ["a", "b"], [1.5]])
async def test_a_prompt_is_a_text_or_token_ids(prompt: object) -> None:
    with pytest.raises(InvalidRequest, match="prompt"):
        request_of(prompt, "", {})  # type: ignore[arg-type]


async def test_it_loads_nothing_of_a_server() -> None:
    code = "import sys, paceline.client; print(*sorted(sys.modules))"
    command = [sys.executable, "-P", "-c", code]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, check=True)
    modules = done.stdout.decode().split()
    assert "paceline.v1.generate_pb2" in modules
    heavy = ("torch", "numpy", "starlette", "paceline.rpc", "paceline.gateway")
    assert not [name for name in modules if name in heavy]
