"""The only prefill worker is away for long: decode serves alone, and shares again when it is up."""

import asyncio
import time

import pytest

from benchmarks.answer import Answer
from benchmarks.deployment import deployment, mock_model, scrape, total
from benchmarks.kill_worker import kill_tree
from benchmarks.loadgen import send
from paceline.cli.cluster import Cluster
from paceline.core import metrics as names
from tests.support.end_to_end import prompt, streaming

pytestmark = pytest.mark.slow
RATE = 20.0
BEFORE_S, AWAY_S, AFTER_S = 3.0, 30.0, 10.0
FULL_RATE_AFTER_S = 5.0
NUM_PROMPT = 200


def num_splits(cluster: Cluster) -> float:
    return total(scrape(cluster.urls["router"]), names.ROUTER_PLANS, kind="split")


@pytest.mark.timeout(240)
def test_sglang_16903_decode_outlives_its_only_prefill_and_takes_it_back() -> None:
    """https://github.com/sgl-project/sglang/issues/16903: killed for 30 s during 20 requests a
    second; decode's process stays, streams go on, new ones are computed there, and 5 s after its
    return all is as before."""
    worker = {"num_threads": 1, "pool_mib": 16}
    with (
        mock_model(step_s=0.005, token_s=0.00005) as model,
        deployment(model, worker=worker, restart=False) as cluster,
    ):
        decode_pid = cluster.processes["decode-0"].pid
        answers: list[asyncio.Task[Answer]] = []

        async def load(seconds: float) -> None:
            ends = time.monotonic() + seconds
            while time.monotonic() < ends:
                call = streaming(model, prompt(NUM_PROMPT, len(answers)), max_tokens=12)
                answers.append(asyncio.create_task(send(cluster.base_url, call)))
                await asyncio.sleep(1 / RATE)

        async def run() -> list[Answer]:
            await load(BEFORE_S)
            assert num_splits(cluster) > BEFORE_S * RATE / 2
            kill_tree(cluster.processes["prefill-0"].pid)
            await load(AWAY_S)
            cluster.processes["prefill-0"].start()
            await asyncio.gather(
                load(FULL_RATE_AFTER_S), asyncio.to_thread(cluster.wait_ready, ["prefill-0"])
            )
            await load(FULL_RATE_AFTER_S)  # of its return at the latest
            before, first = num_splits(cluster), len(answers)
            await load(AFTER_S)
            assert num_splits(cluster) - before > (len(answers) - first) / 2
            return list(await asyncio.gather(*answers))

        done = asyncio.run(run())
        assert [answer.error for answer in done if answer.error] == []
        assert all(answer.is_complete for answer in done)
        assert cluster.processes["decode-0"].pid == decode_pid
        assert cluster.processes["decode-0"].num_starts == 1
        assert max(answer.ttft_s for answer in done[-round(AFTER_S * RATE / 2) :]) < 2
