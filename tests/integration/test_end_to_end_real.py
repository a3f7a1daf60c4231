"""The real model, SmolLM2-135M-Instruct, through the whole path."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import AsyncOpenAI, OpenAI
from tokenizers import Tokenizer
from torch.nn.functional import normalize
from transformers import AutoModel

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


TEXTS = [
    "The capital of France is Paris.",
    "Paris is the capital city of France.",
    "A recipe for bread asks for flour, water, salt and yeast. " * 20,
]


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, torch.Tensor]:
    """By pooling: of transformers, not normalised."""
    theirs = AutoModel.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    states = []
    with torch.inference_mode():
        for text in TEXTS:
            ids = torch.tensor([tokenizer.encode(text).ids])
            states.append(theirs(ids, use_cache=False).last_hidden_state[0])
    return {
        "last": torch.stack([state[-1] for state in states]),
        "mean": torch.stack([state.mean(dim=0) for state in states]),
    }


@pytest.mark.parametrize("pooling", ["last", "mean"])
async def test_embeddings_are_those_of_transformers(
    client: OpenAI, cluster: Cluster, model: Path, expected: dict[str, torch.Tensor], pooling: Any
) -> None:
    """By the openai clients, beside a stream; and by ours."""
    wanted = normalize(expected[pooling])
    asked: Any = {"model": model.name, "input": TEXTS, "extra_body": {"pooling": pooling}}
    stream = client.chat.completions.create(
        model=model.name, messages=QUESTION, temperature=0, max_tokens=32, stream=True
    )
    made = [client.embeddings.create(**asked)]
    async with AsyncOpenAI(base_url=f"{cluster.base_url}/v1", api_key="none") as aio:
        made.append(await aio.embeddings.create(**asked, encoding_format="float"))
        made.append(await aio.embeddings.create(**asked, dimensions=64))
    vectors = [torch.tensor([item.embedding for item in one.data]) for one in made]
    for found in vectors[:2]:
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
    torch.testing.assert_close(vectors[2], normalize(wanted[:, :64]), rtol=0, atol=1e-4)
    parts = [choice.delta.content or "" for chunk in stream for choice in chunk.choices]
    assert "".join(parts) == "The capital of France is Paris."
    with Client(cluster.grpc_endpoint) as ours:
        raw = torch.tensor(ours.embed(TEXTS, pooling=pooling, normalize=False).vectors)
    assert (raw - expected[pooling]).abs().max() < 1e-4 * expected[pooling].abs().max()
    near, far = wanted[0] @ wanted[1], wanted[0] @ wanted[2]
    assert near > far, "what means the same is nearer"


def test_greedy_output_is_that_of_transformers() -> None:
    figures = greedy_exact.measure(Options(quick=True, peer=False))
    differing = {key: value for key, value in figures.items() if key.startswith("differing")}
    assert len(differing) == 4
    assert not any(differing.values()), differing
    assert figures["preemptions_preempted"] > 0
    assert figures["prefix_hit_tokens_prefix"] > 0
    assert all(value > 0 for key, value in figures.items() if key.startswith("pulled"))
