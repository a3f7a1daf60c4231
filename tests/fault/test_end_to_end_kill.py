"""Processes die or freeze while streams run; clients see every token once, and the right one."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from benchmarks.answer import Answer
from benchmarks.deployment import deployment, mock_model, scrape, total
from benchmarks.kill_worker import kill_tree, pause_s
from benchmarks.loadgen import Call, send_all
from paceline.cli.cluster import Cluster
from paceline.core import metrics as names
from tests.support.end_to_end import Alone, prompt, streaming
from tests.support.waits import wait_for

pytestmark = pytest.mark.slow

NUM_STREAMS = 12
NUM_PROMPT = 120
LONG_PROMPT = 1500  # 0.2 s of prefill each
MAX_TOKENS = 60
STEP_S = 0.02
SAMPLING = {"max_tokens": MAX_TOKENS, "ignore_eos": True}
MAX_PAUSE_S = 3.0
LONGEST_FIRST_TOKEN_S = 12.0  # twice `stall_s` and two beats at worst; 2.6 s are usual

Disturb = Callable[[Cluster], None]


@pytest.fixture(scope="module")
def model() -> Iterator[Path]:
    with mock_model(step_s=STEP_S, token_s=0.0001) as folder:
        yield folder


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    return undisturbed(NUM_PROMPT)


def undisturbed(num_prompt: int) -> list[list[int]]:
    """Tokens of each stream when nothing happens, from an engine that does not sleep."""
    with mock_model() as quick:
        alone = Alone(quick)
        return [
            alone.answer(prompt(num_prompt, salt=i), temperature=i % 2, seed=i, **SAMPLING)[0]
            for i in range(NUM_STREAMS)
        ]


@pytest.fixture(scope="module")
def running(model: Path) -> Iterator[Cluster]:
    worker = {"num_threads": 1, "pool_mib": 16}
    with deployment(model, prefill=2, decode=2, worker=worker) as cluster:
        yield cluster


@pytest.fixture
def cluster(running: Cluster) -> Cluster:
    """All workers up, also those that the test before has killed."""
    running.wait_ready()
    running.wait_connected(4)
    return running


def calls(model: Path, num_prompt: int = NUM_PROMPT) -> list[Call]:
    return [
        streaming(model, prompt(num_prompt, salt=i), temperature=i % 2, seed=i, **SAMPLING)
        for i in range(NUM_STREAMS)
    ]


def disturbed(
    cluster: Cluster,
    model: Path,
    after_s: float,
    disturb: Disturb,
    num_prompt: int = NUM_PROMPT,
) -> list[Answer]:
    """Answers of streams in the middle of which `disturb` was called."""

    async def run() -> list[Answer]:
        sent = calls(model, num_prompt)
        sending = asyncio.create_task(send_all(cluster.base_url, sent, NUM_STREAMS))
        await asyncio.sleep(after_s)
        assert not sending.done()
        await asyncio.to_thread(disturb, cluster)
        return await sending

    return asyncio.run(run())


def check(answers: list[Answer], expected: list[list[int]]) -> None:
    assert [answer.error for answer in answers] == [""] * NUM_STREAMS
    assert [answer.token_ids() for answer in answers] == expected
    assert max(map(pause_s, answers)) <= MAX_PAUSE_S


def pid_of(cluster: Cluster, name: str) -> int:
    pid = cluster.processes[name].pid
    assert pid is not None
    return pid


@contextmanager
def rank_to_stop(cluster: Cluster, name: str) -> Iterator[Disturb]:
    """What freezes the rank of a worker; it wakes up at the end, if it is still there."""
    (rank,) = psutil.Process(pid_of(cluster, name)).children()
    try:
        yield lambda _: rank.suspend()
    finally:
        with suppress(psutil.NoSuchProcess):
            rank.resume()


def num_replans(cluster: Cluster) -> float:
    return total(scrape(cluster.urls["router"]), names.ROUTER_REPLANS)


@pytest.mark.parametrize(("name", "after_s"), [("prefill-0", 0.05), ("decode-0", 0.6)])
def test_a_worker_is_killed(
    cluster: Cluster, model: Path, expected: list[list[int]], name: str, after_s: float
) -> None:
    before = num_replans(cluster)
    answers = disturbed(cluster, model, after_s, lambda c: kill_tree(pid_of(c, name)))
    check(answers, expected)
    assert num_replans(cluster) > before  # else nobody was served by it


def test_embeddings_are_made_elsewhere_when_their_worker_is_killed(
    cluster: Cluster, model: Path
) -> None:
    before = num_replans(cluster)
    inputs = [prompt(LONG_PROMPT, salt=100 + i) for i in range(40)]
    body = {"model": model.name, "input": inputs, "normalize": False, "pooling": "last"}
    with ThreadPoolExecutor(1) as threads:
        url = f"{cluster.base_url}/v1/embeddings"
        asked = threads.submit(httpx.post, url, json=body, timeout=60)
        wait_for(lambda: total(scrape(cluster.urls["prefill-1"]), names.WORKER_SLOTS), 30)
        kill_tree(pid_of(cluster, "prefill-1"))
        answer = asked.result()
    assert answer.status_code == 200, answer.text
    with mock_model() as quick:
        alone = Alone(quick)
        expected = [alone.embedding(token_ids, "last").tolist() for token_ids in inputs]
    assert [item["embedding"] for item in answer.json()["data"]] == expected
    assert num_replans(cluster) > before


def test_the_rank_of_a_decode_worker_is_killed(
    cluster: Cluster, model: Path, expected: list[list[int]]
) -> None:
    front = psutil.Process(pid_of(cluster, "decode-1"))
    before = num_replans(cluster)

    def kill_rank(_: Cluster) -> None:
        (rank,) = front.children()
        os.kill(rank.pid, signal.SIGKILL)

    check(disturbed(cluster, model, 0.6, kill_rank), expected)
    assert front.is_running()
    assert num_replans(cluster) > before


def test_the_rank_of_a_decode_worker_is_stopped(
    cluster: Cluster, model: Path, expected: list[list[int]]
) -> None:
    """Its front beats on, so only the missing steps tell: streams move before it wakes up."""
    before = num_replans(cluster)
    with rank_to_stop(cluster, "decode-1") as stop:
        answers = disturbed(cluster, model, 0.6, stop)
    check(answers, expected)
    assert num_replans(cluster) > before


def test_the_rank_of_a_prefill_worker_is_stopped_in_the_middle_of_a_prompt(
    cluster: Cluster, model: Path
) -> None:
    """More prompts wait there, and its last word may be that all of them do."""
    before = num_replans(cluster)
    with rank_to_stop(cluster, "prefill-0") as stop:
        answers = disturbed(cluster, model, 0.4, stop, LONG_PROMPT)
    assert [answer.error for answer in answers] == [""] * NUM_STREAMS
    assert [answer.token_ids() for answer in answers] == undisturbed(LONG_PROMPT)
    assert max(map(pause_s, answers)) <= LONGEST_FIRST_TOKEN_S
    assert num_replans(cluster) > before


def test_redis_freezes(cluster: Cluster, model: Path, expected: list[list[int]]) -> None:
    """Streams go on, and requests that come while it is frozen are served."""
    try:
        answers = disturbed(cluster, model, 0.4, lambda c: c.kill("redis", signal.SIGSTOP))
        check(answers, expected)
        check(asyncio.run(send_all(cluster.base_url, calls(model), NUM_STREAMS)), expected)
    finally:
        cluster.kill("redis", signal.SIGCONT)
