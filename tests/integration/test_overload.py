"""More than a deployment can do, and work that nobody wants any more: the rest gets its turn."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.answer import Answer
from benchmarks.deployment import NOTHING, deployment, mock_model, settle, workers_total
from benchmarks.fault_matrix import at_rate
from benchmarks.loadgen import Call, send, send_all
from paceline.cli.cluster import Cluster
from paceline.core import metrics as names
from tests.support.end_to_end import prompt, streaming
from tests.support.waits import wait_beside

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

LONG_PROMPT = 100_000
TOKEN_S = 0.0002  # a tenth of a second for 512 tokens of a prompt

MAX_RUNNING = 4
LIMIT_S = 30.0  # of a request
OVERLOAD = 10
OVERLOAD_S = 60.0


@pytest.fixture
def one_pair() -> Iterator[tuple[Cluster, Path]]:
    worker = {"num_threads": 1, "pool_mib": 64, "max_batch_tokens": 512}
    with (
        mock_model(token_s=TOKEN_S, max_position_embeddings=131_072) as model,
        deployment(model, router={"split_min_tokens": 0}, worker=worker) as cluster,
    ):
        yield cluster, model


def num_computed(cluster: Cluster) -> float:
    source = "local_compute"
    return workers_total(cluster, names.VLLM_PROMPT_TOKENS_BY_SOURCE, "prefill", source=source)


def test_dynamo_13691_a_prompt_whose_client_has_left_is_computed_no_further(
    one_pair: tuple[Cluster, Path],
) -> None:
    """R029. https://github.com/ai-dynamo/dynamo/issues/13691: 100K tokens, the socket closed after
    a second, then at once 20 tokens; one prefill worker. The whole prompt would take 20 s."""
    cluster, model = one_pair
    body = {"model": model.name, "prompt": prompt(LONG_PROMPT), "max_tokens": 50, "stream": True}
    short = [streaming(model, prompt(20, salt=i), max_tokens=4, temperature=0) for i in range(4)]

    async def run() -> tuple[Answer, Answer]:
        idle = [await send(cluster.base_url, call) for call in short[:3]]
        begun = asyncio.create_task(send(cluster.base_url, Call(body, leave_after_s=1.0)))
        await wait_beside(lambda: begun.done(), 20)
        assert (await begun).has_left
        return min(idle, key=lambda answer: answer.ttft_s), await send(cluster.base_url, short[3])

    before = num_computed(cluster)
    idle, beside = asyncio.run(run())
    assert beside.is_complete, beside.error
    assert beside.ttft_s < 2 * idle.ttft_s + 2.0, "20 s if it waited for the prompt"
    assert settle(cluster) == NOTHING
    assert num_computed(cluster) - before < LONG_PROMPT / 4


@pytest.fixture
def small() -> Iterator[tuple[Cluster, Path]]:
    """About one answer a second."""
    worker = {"num_threads": 1, "pool_mib": 8, "max_running": MAX_RUNNING}
    settings = {"router": {"queue_limit": 8}, "gateway": {"request_timeout_s": LIMIT_S}}
    with (
        mock_model(step_s=0.2) as model,
        deployment(model, worker=worker, **settings) as cluster,
    ):
        yield cluster, model


def test_vllm_18826_ten_times_the_capacity_for_a_minute(small: tuple[Cluster, Path]) -> None:
    """R088. https://github.com/vllm-project/vllm/issues/18826: what is too much is refused at once
    with Retry-After, what is taken is served within its time, and all is well again after it."""
    cluster, model = small
    calls = [
        streaming(model, prompt(40, salt=i), max_tokens=15, ignore_eos=True) for i in range(2000)
    ]
    warm = calls[: 6 * MAX_RUNNING]
    began = time.monotonic()
    asyncio.run(send_all(cluster.base_url, warm, 2 * MAX_RUNNING))
    peak_per_s = len(warm) / (time.monotonic() - began)
    refusals = []

    async def ask_now_and_then() -> None:
        async with httpx.AsyncClient(timeout=LIMIT_S) as client:
            while True:
                await asyncio.sleep(0.5)
                body = {"model": model.name, "prompt": prompt(40), "max_tokens": 1}
                answer = await client.post(f"{cluster.base_url}/v1/completions", json=body)
                if answer.status_code == 429:
                    refusals.append(answer.headers["retry-after"])

    async def run() -> list[Answer]:
        asking = asyncio.create_task(ask_now_and_then())
        sent = calls[: round(OVERLOAD * peak_per_s * OVERLOAD_S)]
        answers = await at_rate(cluster.base_url, sent, OVERLOAD * peak_per_s)
        asking.cancel()
        return answers

    began = time.monotonic()
    answers = asyncio.run(run())
    took_s = time.monotonic() - began
    refused = [answer for answer in answers if answer.status in (429, 503)]
    taken = [answer for answer in answers if answer.status == 200]
    strange = Counter(answer.status for answer in answers if answer not in refused + taken)
    assert not strange
    assert len(refused) > len(answers) / 2
    assert refusals and all(1 <= int(after) <= 60 for after in refusals)
    complete = [answer for answer in taken if answer.is_complete]
    assert len(complete) >= 0.99 * len(taken)
    assert len(complete) / took_s >= 0.9 * peak_per_s
    began = time.monotonic()
    last = asyncio.run(send(cluster.base_url, calls[-1]))
    assert last.is_complete and time.monotonic() - began < 10
    assert settle(cluster) == NOTHING
