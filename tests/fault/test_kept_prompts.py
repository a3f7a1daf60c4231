"""A decode worker dies long after its prompt was computed: the next one pulls it from the prefill
worker, though that has turned its pool over many times."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.answer import Answer
from benchmarks.deployment import NOTHING, deployment, mock_model, settle, workers_total
from benchmarks.kill_worker import kill_tree
from benchmarks.loadgen import send, send_all
from paceline.cli.cluster import Cluster
from paceline.core import metrics as names
from tests.support.end_to_end import Alone, prompt, streaming
from tests.support.soak_faults import recover
from tests.support.waits import wait_beside

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NUM_PROMPT = 1600
MAX_TOKENS = 400
NUM_OTHERS = 28
OTHERS_TOKENS = 600
POOL_TOKENS = 4096  # of 256 bytes each


@pytest.fixture(scope="module")
def model() -> Iterator[Path]:
    with mock_model(step_s=0.1) as folder:
        yield folder


@pytest.fixture
def cluster(model: Path) -> Iterator[Cluster]:
    worker = {"num_threads": 1, "pool_mib": POOL_TOKENS * 256 >> 20}
    with deployment(model, decode=2, router={"split_min_tokens": 0}, worker=worker) as running:
        yield running


def computed(cluster: Cluster) -> float:
    source = "local_compute"
    return workers_total(cluster, names.VLLM_PROMPT_TOKENS_BY_SOURCE, source=source)


def busy(cluster: Cluster) -> list[str]:
    """Decode workers with requests, as they last said."""
    decodes = [name for name in cluster.urls if name.startswith("decode")]
    return [name for name in decodes if workers_total(cluster, names.WORKER_SLOTS, name)]


def test_a_live_prompt_outlasts_what_the_prefill_worker_computes_meanwhile(
    cluster: Cluster, model: Path
) -> None:
    sampling = {"max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    call = streaming(model, prompt(NUM_PROMPT), **sampling)
    others = [
        streaming(model, prompt(OTHERS_TOKENS, salt=i), max_tokens=2)
        for i in range(1, NUM_OTHERS + 1)
    ]
    assert NUM_OTHERS * OTHERS_TOKENS > 4 * POOL_TOKENS

    async def run() -> tuple[Answer, float]:
        answer = asyncio.create_task(send(cluster.base_url, call))
        await wait_beside(lambda: workers_total(cluster, names.WORKER_GENERATED, "decode") > 3, 60)
        assert all(a.is_complete for a in await send_all(cluster.base_url, others, 4))
        await wait_beside(lambda: len(busy(cluster)) == 1, 30)
        assert not answer.done()
        before = computed(cluster)
        pid = cluster.processes[busy(cluster)[0]].pid
        assert pid is not None
        await asyncio.to_thread(kill_tree, pid)
        found = await answer
        return found, computed(cluster) - before

    answer, again = asyncio.run(run())
    assert [answer.token_ids()] == Alone(model).answer(prompt(NUM_PROMPT), **sampling)
    assert again <= MAX_TOKENS + 32, "of the output so far, and a last block"
    recover(cluster)
    assert settle(cluster) == NOTHING
