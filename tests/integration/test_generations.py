"""An upgrade to another content digest under load, by the steps of docs/operations.md.

Workers of two generations serve side by side, then the old ones go. Nobody fails, and each answer
is wholly of one generation: tokens of the mock model are a hash of the KV that it reads.
"""

import asyncio
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from benchmarks.answer import Answer
from benchmarks.deployment import mock_model, scrape, total
from benchmarks.loadgen import Call, send
from paceline.cli.cluster import Cluster, ClusterSpec
from paceline.core import metrics as names
from tests.support.waits import until

STEP_S = 0.02
PER_SECOND = 5
OUTPUT_TOKENS = 60
NUM_PROMPTS = 4
OLD, NEXT = ("prefill-0", "decode-0"), ("prefill-1", "decode-1", "decode-2")
START_S = 60.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Of the old generation; workers that are added are of the next one."""
    with (
        mock_model(step_s=STEP_S) as old,
        mock_model(step_s=STEP_S, num_hidden_layers=3) as following,
    ):
        worker = {"num_threads": 1, "pool_mib": 32, "transports": "tcp"}
        upgraded = {"model": following, "model_name": old.name}
        settings = {
            "router": {"split_min_tokens": 0},
            "prefill": worker,
            "decode": worker,
            **dict.fromkeys(NEXT, upgraded),
        }
        with Cluster(ClusterSpec(old, settings=settings, restart=False)) as made:
            yield made


@dataclass
class Load:
    """Streams at a steady rate until it is stopped, with what came of each."""

    cluster: Cluster
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    sent: list[tuple[int, asyncio.Task[Answer]]] = field(default_factory=list)

    def call(self, salt: int) -> Call:
        prompt = [300 + (salt * 7919 + i * i * 31) % 3000 for i in range(80)]
        fields = {"max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
        body = {"model": self.cluster.spec.model.name, "prompt": prompt, "stream": True, **fields}
        return Call(body, headers={"x-paceline-timing": "1"}, timeout_s=60)

    async def learn(self) -> list[list[int]]:
        """The answers, one a prompt, of the generation that is listed now."""
        calls = [send(self.cluster.base_url, self.call(i)) for i in range(NUM_PROMPTS)]
        answers = await asyncio.gather(*calls)
        assert all(answer.is_complete for answer in answers)
        return [answer.token_ids() for answer in answers]

    async def run(self) -> None:
        while not self.stopping.is_set():
            i = len(self.sent) % NUM_PROMPTS
            self.sent.append((i, asyncio.create_task(send(self.cluster.base_url, self.call(i)))))
            await asyncio.sleep(1 / PER_SECOND)


def revisions(cluster: Cluster) -> dict[tuple[str, str], float]:
    """Connected workers by (content digest, role)."""
    found = scrape(cluster.urls["router"]).get(names.ROUTER_REVISION_WORKERS, [])
    return {(labels["revision"], labels["role"]): value for labels, value in found}


def held(cluster: Cluster) -> float:
    """Requests on the old workers."""
    return sum(total(scrape(cluster.urls[name]), names.WORKER_SLOTS) for name in OLD)


def test_two_generations_serve_side_by_side_and_no_request_suffers(cluster: Cluster) -> None:
    asyncio.run(upgrade(cluster))


async def upgrade(cluster: Cluster) -> None:
    load = Load(cluster)
    old = await load.learn()
    running = asyncio.create_task(load.run())
    await asyncio.sleep(1)

    for name in NEXT:
        role = "prefill" if name.startswith("prefill") else "decode"
        await asyncio.to_thread(cluster.add_worker, role)
    await until(lambda: sorted(revisions(cluster).values()) == [1, 1, 1, 2], START_S)
    assert len({revision for revision, _ in revisions(cluster)}) == 2
    await until(lambda: held(cluster) == 0, START_S)  # all new ones go to the majority

    for name in OLD:
        cluster.kill(name, signal.SIGTERM)
    await asyncio.sleep(2)
    load.stopping.set()
    await running
    following = await load.learn()

    assert all(a != b for a, b in zip(old, following, strict=True))
    seen = []
    for i, task in load.sent:
        answer = await task
        assert answer.is_complete, (answer.status, answer.error)
        assert answer.token_ids() in (old[i], following[i])
        seen.append(answer.token_ids() == following[i])
    assert seen.index(True) > 0 and seen[-1]
    assert {role for _, role in revisions(cluster)} == {"prefill", "decode"}
    assert [cluster.processes[name].process.wait() for name in OLD] == [0, 0]
