"""The real model, SmolLM2-135M-Instruct, through the whole path."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from benchmarks import greedy_exact
from benchmarks.common import Options
from benchmarks.deployment import demo_model, deployment
from paceline.cli.cluster import Cluster
from paceline.client import Client
from paceline.offline import LLM

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def model() -> Path:
    return demo_model()


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[Cluster]:
    with deployment(model, router={"split_min_tokens": 0}) as running:
        yield running


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{cluster.base_url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_it_knows_the_capital_of_france(client: OpenAI, model: Path) -> None:
    answer = client.chat.completions.create(
        model=model.name, messages=QUESTION, temperature=0, max_tokens=32
    )
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage and answer.usage.completion_tokens == 8


def test_an_engine_in_the_own_process_knows_it_too(cluster: Cluster, model: Path) -> None:
    poem = [{"role": "user", "content": "Write a short poem about the sea."}]
    with LLM(model) as llm:
        answers = llm.chat([QUESTION, poem] * 4, temperature=0, max_tokens=32)
        ours = llm.generate(["The sea is"], temperature=0, max_tokens=32)
    with Client(cluster.grpc_endpoint) as client:
        served = client.generate("The sea is", temperature=0, max_tokens=32)
    assert [a.text for a in answers[::2]] == ["The capital of France is Paris."] * 4
    assert len({a.text for a in answers[1::2]}) == 1
    assert ours[0].choices == served.choices


def test_a_stream_of_the_openai_client_says_the_same(client: OpenAI, model: Path) -> None:
    stream = client.chat.completions.create(
        model=model.name,
        messages=QUESTION,
        temperature=0,
        max_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    parts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(parts) == "The capital of France is Paris."
    assert len([part for part in parts if part]) == 7
    assert chunks[-1].usage and chunks[-1].usage.completion_tokens == 8


def test_logprobs_of_the_openai_client_are_those_of_its_choice(client: OpenAI, model: Path) -> None:
    answer = client.chat.completions.create(
        model=model.name,
        messages=QUESTION,
        temperature=0,
        max_tokens=6,
        logprobs=True,
        top_logprobs=3,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs and logprobs.content
    for entry in logprobs.content:
        assert entry.top_logprobs[0].token == entry.token
        assert entry.top_logprobs[0].logprob == entry.logprob <= 0


def test_greedy_output_is_that_of_transformers() -> None:
    figures = greedy_exact.measure(Options(quick=True, peer=False))
    differing = {key: value for key, value in figures.items() if key.startswith("differing")}
    assert len(differing) == 4
    assert not any(differing.values()), differing
    assert figures["preemptions_preempted"] > 0
    assert figures["prefix_hit_tokens_prefix"] > 0
    assert all(value > 0 for key, value in figures.items() if key.startswith("pulled"))
