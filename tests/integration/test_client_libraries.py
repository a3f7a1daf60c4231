"""Clients that people use, unchanged, and a load generator, against a whole deployment.

The mock model's text is a function of the prompt, so whoever asks has to get the same.
"""

import asyncio
import csv
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI

from benchmarks.deployment import NOTHING, deployment, settle
from paceline.cli.cluster import Cluster
from tests.support.mock_model import write_mock_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # libraries of others, whose warnings are theirs
]

MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße!"}]
NUM_TOKENS = 24
LOCUSTFILE = Path(__file__).parents[1] / "support" / "locustfile.py"
OPTIONS: dict[str, Any] = {"temperature": 0, "max_tokens": NUM_TOKENS}
MODEL = "mock"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = write_mock_model(tmp_path_factory.mktemp("models") / MODEL)
    worker = {"num_threads": 1, "pool_mib": 16}
    with deployment(model, router={"split_min_tokens": 0}, worker=worker) as running:
        yield running
        assert settle(running) == NOTHING


@pytest.fixture(scope="module")
def url(cluster: Cluster) -> str:
    return f"{cluster.base_url}/v1"


@pytest.fixture
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=url, api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def said(url: str) -> str:
    """To MESSAGES."""
    with OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, **OPTIONS)
    assert answer.usage is not None and answer.usage.completion_tokens == NUM_TOKENS
    assert answer.choices[0].finish_reason == "length"
    text = answer.choices[0].message.content
    assert text
    return text


def test_openai_streams_what_it_says_at_once(client: OpenAI, said: str) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
        **OPTIONS,
    )
    chunks = list(stream)
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == said and len(texts) > 2
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == NUM_TOKENS


async def test_openai_says_the_same_to_many_at_once(url: str, said: str) -> None:
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        create = client.chat.completions.create

        async def streamed() -> str:
            stream = await create(model=MODEL, messages=MESSAGES, stream=True, **OPTIONS)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        async def whole() -> str | None:
            answer = await create(model=MODEL, messages=MESSAGES, **OPTIONS)
            return answer.choices[0].message.content

        found = await asyncio.gather(*(one() for one in (streamed, whole) for _ in range(8)))
    assert set(found) == {said}


def test_openai_raises_what_it_does_elsewhere(client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, top_p=2)
    assert refused.value.param == "top_p"
    with pytest.raises(NotFoundError) as unknown:
        client.chat.completions.create(model="nothing", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"


async def test_langchain(url: str, said: str) -> None:
    langchain: Any = pytest.importorskip("langchain_openai")
    chat = langchain.ChatOpenAI(
        model=MODEL, base_url=url, api_key="none", max_retries=0, stream_usage=True, **OPTIONS
    )
    asked = [("system", "Be brief."), ("human", "Grüße!")]
    answer = chat.invoke(asked)
    assert answer.content == said
    assert answer.usage_metadata["output_tokens"] == NUM_TOKENS
    assert answer.response_metadata["finish_reason"] == "length"
    chunks = list(chat.stream(asked))
    assert "".join(chunk.content for chunk in chunks) == said and len(chunks) > 2
    assert [c.usage_metadata["output_tokens"] for c in chunks if c.usage_metadata] == [NUM_TOKENS]
    assert (await chat.ainvoke(asked)).content == said
    assert "".join([chunk.content async for chunk in chat.astream(asked)]) == said
    assert [one.content for one in chat.batch([asked] * 8)] == [said] * 8
    embedder = langchain.OpenAIEmbeddings(
        model=MODEL, base_url=url, api_key="none", max_retries=0, check_embedding_ctx_length=False
    )
    first, second, third = embedder.embed_documents(["Red", "Red", "and"])
    assert first == second != third and embedder.embed_query("Red") == pytest.approx(first)


async def test_litellm(url: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks GitHub for prices
    litellm: Any = pytest.importorskip("litellm")
    target = {"model": f"openai/{MODEL}", "api_base": url, "api_key": "none", "max_retries": 0}
    answer = litellm.completion(messages=MESSAGES, **target, **OPTIONS)
    assert answer.choices[0].message.content == said
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == NUM_TOKENS
    chunks = list(litellm.completion(messages=MESSAGES, stream=True, **target, **OPTIONS))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == said
    assert (await litellm.acompletion(messages=MESSAGES, **target, **OPTIONS)).choices[
        0
    ].message.content == said
    stream = await litellm.acompletion(messages=MESSAGES, stream=True, **target, **OPTIONS)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == said
    text = litellm.text_completion(prompt="Grüße!", **target, **OPTIONS)
    assert text.choices[0].text
    made = litellm.embedding(input=["Red", "and"], **target)
    assert len(made.data) == 2 and made.usage.prompt_tokens == 6
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(messages=MESSAGES, top_p=2, **target)
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=MESSAGES, **{**target, "model": "openai/nothing"})


def test_locust_finds_no_failure(cluster: Cluster, tmp_path: Path) -> None:
    pytest.importorskip("gevent")
    command = [sys.executable, "-m", "locust", "--headless", "-f", str(LOCUSTFILE)]
    command += ["--host", cluster.base_url, "--users", "16", "--spawn-rate", "16"]
    command += ["--run-time", "6s", "--stop-timeout", "20", "--csv", str(tmp_path / "found")]
    done = subprocess.run(
        command, env={**os.environ, "MODEL": MODEL}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with (tmp_path / "found_stats.csv").open() as file:
        found = {line["Name"]: line for line in csv.DictReader(file)}
    for name in ("chat", "stream", "completion"):
        assert int(found[name]["Request Count"]) > 20
    assert found["Aggregated"]["Failure Count"] == "0", done.stdout
