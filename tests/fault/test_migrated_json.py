"""Logits processors of the operator when workers die: what they did goes on elsewhere, and who
kills does so twice."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.answer import Answer
from benchmarks.deployment import deployment, scrape, total, workers_total
from benchmarks.kill_worker import kill_tree
from benchmarks.loadgen import TIMING, Call, send
from paceline.cli.cluster import Cluster
from paceline.core import metrics as names
from tests.support.mock_model import write_mock_model
from tests.support.processors import write_package
from tests.support.soak_faults import recover
from tests.support.waits import wait_beside

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[Cluster]:
    model = write_mock_model(folder / "mock", step_s=0.1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", write_package(folder))
        worker = {"num_threads": 1, "pool_mib": 4}
        router = {"split_min_tokens": 0}
        with deployment(model, router=router, worker=worker) as running:
            yield running


@pytest.mark.parametrize("num_tokens", [5, 10, 20])
def test_dynamo_7930_json_that_is_continued_elsewhere_is_the_undisturbed_one(
    cluster: Cluster, num_tokens: int
) -> None:
    """R037. https://github.com/ai-dynamo/dynamo/pull/7930: {a: int, b: [int]}, greedy, the decode
    worker killed after 5, 10 and 20 tokens. There are no schemas yet: a logits processor of an
    installed package is the matcher, whose state is the output so far."""
    body: dict[str, Any] = {"model": "mock", "prompt": list(range(65, 105)), "temperature": 0}
    body |= {"max_tokens": 60, "stream": True, "logits_processors": ["json"]}
    call = Call(body, headers=TIMING, timeout_s=120)
    undisturbed = asyncio.run(send(cluster.base_url, call))
    told = json.loads(undisturbed.text())
    assert set(told) == {"a", "b"} and len(told["b"]) == 6 and undisturbed.finish() == "stop"
    router = cluster.urls["router"]
    before = workers_total(cluster, names.WORKER_GENERATED, "decode")
    replans = total(scrape(router), names.ROUTER_REPLANS)

    def has_so_many() -> bool:
        return workers_total(cluster, names.WORKER_GENERATED, "decode") - before >= num_tokens - 1

    async def disturbed() -> str:
        answer = asyncio.create_task(send(cluster.base_url, call))
        await wait_beside(has_so_many, 30)
        assert not answer.done()
        pid = cluster.processes["decode-0"].pid
        assert pid is not None
        await asyncio.to_thread(kill_tree, pid)
        found = await answer
        assert found.is_complete, found.error
        return found.text()

    assert asyncio.run(disturbed()) == undisturbed.text()
    assert total(scrape(router), names.ROUTER_REPLANS) > replans
    recover(cluster)


@pytest.mark.parametrize("num_tokens", [0, 20])
def test_a_request_that_kills_ranks_is_refused_after_the_second(
    cluster: Cluster, num_tokens: int
) -> None:
    """At its first token on the prefill worker, then whole on decode; or in mid-stream. Another one
    beside it loses nothing."""
    deadly = {"name": "deadly", "arguments": {"at": num_tokens}}
    body: dict[str, Any] = {"model": "mock", "temperature": 0, "ignore_eos": True, "stream": True}
    poison = {**body, "prompt": [70] * (40 + num_tokens), "max_tokens": 60}
    poison["logits_processors"] = [deadly]
    other = Call({**body, "prompt": [71] * 50, "max_tokens": 100}, headers=TIMING, timeout_s=120)
    expected = asyncio.run(send(cluster.base_url, other))

    async def both() -> tuple[Answer, Answer]:
        beside = asyncio.create_task(send(cluster.base_url, other))
        killer = await send(cluster.base_url, Call(poison, headers=TIMING, timeout_s=120))
        return await beside, killer

    beside, killer = asyncio.run(both())
    assert "workers died" in killer.error
    assert killer.status == (200 if num_tokens else 422)
    assert beside.token_ids() == expected.token_ids()
    recover(cluster)
    lost = total(scrape(cluster.urls["router"]), names.ROUTER_WORKER_LOST)
    again = asyncio.run(send(cluster.base_url, Call(poison)))
    assert again.status == 422 and "workers died" in again.error
    assert total(scrape(cluster.urls["router"]), names.ROUTER_WORKER_LOST) == lost
