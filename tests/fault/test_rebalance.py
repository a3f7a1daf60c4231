"""`paceline rebalance` while the load shifts: workers follow it, once each way; nothing fails."""

import asyncio
from collections.abc import Awaitable, Iterator
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from benchmarks.deployment import (
    NOTHING,
    deployment,
    mock_model,
    rebalancing,
    scrape,
    settle,
    total,
)
from benchmarks.loadgen import Call, send
from paceline.cli.cluster import Cluster
from paceline.core import metrics as names
from tests.support.waits import until, wait_beside
from tests.support.workers import probe

WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
SETTINGS = {"prefill_s": 1.5, "decode_share": 0.8, "hold_s": 3, "cool_down_s": 8, "interval_s": 0.5}
SHIFT_S = 120.0
STAYS_S = 20.0  # two times the pause after a change

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def model() -> Iterator[Path]:
    with mock_model(step_s=0.01, token_s=0.004) as folder:
        yield folder


def changes(cluster: Cluster) -> dict[str, float]:
    """Of all workers by the new role."""
    scraped = [scrape(cluster.urls[name]) for name in WORKERS]
    counted = names.WORKER_ROLE_CHANGES
    return {
        role: sum(total(one, counted, role=role, reason="rebalance") for one in scraped)
        for role in ("prefill", "decode")
    }


def call_of(model: Path, seed: int, num_prompt: int, max_tokens: int, salt: str) -> Call:
    """The same answer whatever the salt, by which nothing of it is cached."""
    prompt = [300 + (seed * 7 + i) % 3000 for i in range(num_prompt)]
    body = {"model": model.name, "prompt": prompt, "max_tokens": max_tokens, "cache_salt": salt}
    return Call({**body, "temperature": 0, "ignore_eos": True}, timeout_s=120)


class Traffic:
    """`num_at_once` requests, again and again; each must come out as it did for the first time."""

    def __init__(
        self, cluster: Cluster, model: Path, num_at_once: int, num_prompt: int, max_tokens: int
    ) -> None:
        self._cluster = cluster
        self._call = partial(call_of, model, num_prompt=num_prompt, max_tokens=max_tokens)
        self._num_at_once = num_at_once
        self._stops = False
        self.num_answers = 0

    async def _keep_asking(self, seed: int) -> None:
        expected = ""
        for number in count():
            if self._stops:
                return
            answer = await send(self._cluster.base_url, self._call(seed, salt=f"{number}"))
            assert answer.is_complete, answer.error
            expected = expected or answer.text()
            assert answer.text() == expected
            self.num_answers += 1

    async def during(self, work: Awaitable[None]) -> None:
        asking = [
            asyncio.ensure_future(self._keep_asking(seed)) for seed in range(self._num_at_once)
        ]
        try:
            await work
        finally:
            self._stops = True
        await asyncio.gather(*asking)
        assert self.num_answers >= self._num_at_once


async def wait_for_one(cluster: Cluster, role: str, expected: dict[str, float]) -> None:
    """To take this role, and then for nobody else, while the load stays as it is."""

    def is_there() -> bool:
        return changes(cluster)[role] >= 1

    await wait_beside(is_there, SHIFT_S)
    await asyncio.sleep(STAYS_S)
    assert changes(cluster) == expected


def test_workers_follow_the_load_and_do_not_flap(model: Path) -> None:
    with deployment(model, prefill=2, decode=2, worker={"pool_mib": 2}) as cluster:
        asyncio.run(shift(cluster, model))
        assert settle(cluster, 30) == NOTHING


async def shift(cluster: Cluster, model: Path) -> None:
    with rebalancing(cluster, **SETTINGS) as port:
        await until(lambda: not probe(port, "/readyz", 200), 60)
        long_prompts = Traffic(cluster, model, 6, num_prompt=400, max_tokens=2)
        there = {"prefill": 1.0, "decode": 0.0}
        await long_prompts.during(wait_for_one(cluster, "prefill", there))
        long_outputs = Traffic(cluster, model, 28, num_prompt=64, max_tokens=200)
        back = {"prefill": 1.0, "decode": 1.0}
        await long_outputs.during(wait_for_one(cluster, "decode", back))
        await asyncio.sleep(STAYS_S)
        assert changes(cluster) == back, "without load nobody moves"
