"""Workers and routers die while requests with every option of sampling run: what clients get is
what they get undisturbed, but for time."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.answer import Answer
from benchmarks.deployment import (
    NOTHING,
    demo_model,
    deployment,
    mock_model,
    scrape,
    settle,
    total,
    workers_total,
)
from benchmarks.kill_worker import kill_tree
from benchmarks.loadgen import TIMING, Call, send, send_all
from paceline.cli.cluster import Cluster
from paceline.core import metrics as names
from tests.support.end_to_end import prompt
from tests.support.options import MAX_TOKENS, difference, said, with_options
from tests.support.soak_faults import recover
from tests.support.waits import wait_beside

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROUTERS = ("router", "router-1")


@dataclass(frozen=True, slots=True)
class Served:
    """A deployment, and what it answers undisturbed to each request."""

    cluster: Cluster
    calls: dict[str, Call]
    undisturbed: dict[str, Any]

    @property
    def num_long(self) -> int:
        """Answers that nothing ends early."""
        return sum(told["usage"][1] >= MAX_TOKENS for told in self.undisturbed.values())

    def cold(self, run: str) -> list[Call]:
        """No KV of another run is hit."""
        calls = self.calls.values()
        return [Call({**call.body, "cache_salt": run}, headers=TIMING) for call in calls]


def serve(cluster: Cluster, model: Path, num_prompt: int, *, reads_text: bool) -> Served:
    body = {"model": model.name, "max_tokens": MAX_TOKENS, "ignore_eos": True, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    greedy = Call({**body, "prompt": prompt(num_prompt), "temperature": 0}, headers=TIMING)
    first = asyncio.run(send(cluster.base_url, greedy))
    options = with_options(first.token_ids(), first.text(), reads_text=reads_text)
    calls = {}
    for number, (name, fields) in enumerate(options.items()):
        asked: dict[str, Any] = {**body, "prompt": prompt(num_prompt), **fields}
        if not asked["stream"]:
            del asked["stream_options"]
        if number % 2 and asked["temperature"]:
            asked["prompt"] = prompt(num_prompt + number, salt=number)
        calls[name] = Call(asked, headers=TIMING)
    answers = asyncio.run(send_all(cluster.base_url, list(calls.values()), len(calls)))
    return Served(cluster, calls, dict(zip(calls, map(said, answers), strict=True)))


@pytest.fixture(scope="module", params=["mock", "real"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    settings: dict[str, Any] = {"routers": 2, "router": {"split_min_tokens": 0}}
    if request.param == "real":
        with deployment(demo_model(), **settings) as cluster:
            yield serve(cluster, demo_model(), 150, reads_text=True)
    else:
        worker = {"num_threads": 1, "pool_mib": 32}
        with (
            mock_model(step_s=0.04, token_s=0.0001) as model,
            deployment(model, worker=worker, **settings) as cluster,
        ):
            yield serve(cluster, model, 600, reads_text=False)


def pid_of(cluster: Cluster, name: str) -> int:
    pid = cluster.processes[name].pid
    assert pid is not None
    return pid


def in_flight(cluster: Cluster) -> float:
    return sum(total(scrape(cluster.urls[name]), names.ROUTER_IN_FLIGHT) for name in ROUTERS)


def in_use(cluster: Cluster) -> str:
    sent = {name: total(scrape(cluster.urls[name]), names.ROUTER_IN_FLIGHT) for name in ROUTERS}
    return max(sent, key=lambda name: sent[name])


def disturbed(
    served: Served, run: str, reached: Callable[[], object], victim: Callable[[], str]
) -> list[Answer]:
    """Answers while `victim` is killed as soon as `reached`."""
    cluster, calls = served.cluster, served.cold(run)

    async def ask() -> list[Answer]:
        sending = asyncio.create_task(send_all(cluster.base_url, calls, len(calls)))
        await wait_beside(reached, 60)
        assert not sending.done()
        await asyncio.to_thread(lambda: kill_tree(pid_of(cluster, victim())))
        return await sending

    answers = asyncio.run(ask())
    recover(cluster)
    return answers


def check(served: Served, answers: list[Answer]) -> None:
    found = {}
    for (name, expected), answer in zip(served.undisturbed.items(), answers, strict=True):
        found[name] = answer.error or difference(said(answer), expected)
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
    assert settle(served.cluster) == NOTHING


def generated(cluster: Cluster, role: str) -> float:
    return workers_total(cluster, names.WORKER_GENERATED, role)


def num_migrated(cluster: Cluster) -> float:
    return sum(total(scrape(cluster.urls[name]), names.ROUTER_REPLANS) for name in ROUTERS)


def test_the_options_do_what_they_should(served: Served) -> None:
    """Else nothing is compared below."""
    told = served.undisturbed
    assert len(told["choices"]["choices"]) == 3
    greedy = told["greedy"]["choices"][0]["token_ids"]
    for name in ("stop", "shown stop", "stop token"):
        assert told[name]["choices"][0]["finish"] == "stop"
        assert told[name]["usage"][1] < MAX_TOKENS
    assert told["least tokens"]["usage"][1] >= 40
    if "bad words" in told:
        assert told["bad words"]["choices"][0]["token_ids"] != greedy
    assert told["prompt"]["choices"][0]["prompt_logprobs"]
    assert len(told["echo"]["choices"][0]["token_logprobs"]) > MAX_TOKENS + 100


def test_the_decode_worker_is_killed_in_mid_stream(served: Served) -> None:
    cluster = served.cluster
    before, replans = generated(cluster, "decode"), num_migrated(cluster)
    num_streams = len(served.calls) + 3
    answers = disturbed(
        served,
        "decode",
        lambda: generated(cluster, "decode") - before > 12 * num_streams,
        lambda: "decode-0",
    )
    check(served, answers)
    assert num_migrated(cluster) - replans >= served.num_long


def test_the_prefill_worker_is_killed_among_prompts(served: Served) -> None:
    """It stands still until it has all of them, so that none is over when it dies."""
    cluster = served.cluster
    replans = num_migrated(cluster)
    os.kill(pid_of(cluster, "prefill-0"), signal.SIGSTOP)
    answers = disturbed(
        served,
        "prefill",
        lambda: in_flight(cluster) >= len(served.calls),
        lambda: "prefill-0",
    )
    check(served, answers)
    assert num_migrated(cluster) > replans


def test_the_router_is_killed_in_mid_stream(served: Served) -> None:
    cluster = served.cluster
    before = generated(cluster, "decode")
    moved = total(scrape(cluster.base_url), names.GATEWAY_MOVED)
    answers = disturbed(
        served,
        "router",
        lambda: generated(cluster, "decode") - before > 12 * len(served.calls),
        lambda: in_use(cluster),
    )
    check(served, answers)
    assert total(scrape(cluster.base_url), names.GATEWAY_MOVED) > moved
