"""Conversations over two prefill and two decode workers: what only decode has is pulled by prefill,
and every token is that of one engine alone."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from benchmarks.deployment import (
    NOTHING,
    demo_model,
    deployment,
    mock_model,
    settle,
    workers_total,
)
from benchmarks.loadgen import send
from paceline.cli.cluster import Cluster
from paceline.core import metrics as names
from tests.support.end_to_end import Alone, prompt, streaming

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_CONVERSATIONS = 3
START_TOKENS, SAID_TOKENS, ANSWER_TOKENS = 150, 40, 48
INDEX_S = 1.0  # until the index knows what a turn has left


@dataclass(slots=True)
class Talk:
    """One conversation, all of which is decoded greedily."""

    number: int
    text: list[int] = field(default_factory=list)
    num_turns: int = 0
    asked: list[list[int]] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)

    async def turn(self, base_url: str, model: Path) -> None:
        length = SAID_TOKENS if self.num_turns else START_TOKENS
        self.text = self.text + prompt(length, salt=100 * self.number + self.num_turns)
        self.num_turns += 1
        fields = {"max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
        answer = await send(base_url, streaming(model, self.text, **fields))
        assert answer.is_complete and answer.usage is not None, answer.error
        self.asked.append(self.text)
        self.answers.append(answer.token_ids())
        self.hits.append(answer.usage["prompt_tokens_details"]["cached_tokens"])
        self.text = self.text + answer.token_ids()

    def check(self, alone: Alone) -> None:
        for text, answer in zip(self.asked, self.answers, strict=True):
            sampling = {"max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
            assert [answer] == alone.answer(text, **sampling)


def talk_all(cluster: Cluster, model: Path, talks: list[Talk], num_turns: int) -> None:
    async def go_on() -> None:
        for _ in range(num_turns):
            await asyncio.gather(*(talk.turn(cluster.base_url, model) for talk in talks))
            await asyncio.sleep(INDEX_S)

    asyncio.run(go_on())


def pulled_tokens(cluster: Cluster) -> float:
    return workers_total(cluster, names.PREFIX_TOKENS, "prefill", result="pulled")


@pytest.fixture(scope="module")
def mock() -> Iterator[Path]:
    with mock_model(token_s=0.002) as folder:
        yield folder


@pytest.fixture(scope="module")
def alone(mock: Path) -> Alone:
    return Alone(mock)


def test_the_next_turn_reuses_what_decode_made(mock: Path, alone: Alone) -> None:
    worker = {"num_threads": 1, "pool_mib": 16}
    talks = [Talk(i) for i in range(NUM_CONVERSATIONS)]
    with deployment(mock, prefill=2, decode=2, worker=worker) as cluster:
        talk_all(cluster, mock, talks, num_turns=4)
        assert pulled_tokens(cluster) > 0
        assert settle(cluster) == NOTHING
    for talk in talks:
        talk.check(alone)
    best = max(hit for talk in talks for hit in talk.hits)
    num_known = START_TOKENS + 2 * SAID_TOKENS + 3 * ANSWER_TOKENS - 1
    assert best >= num_known // 16 * 16, "all that decode had, but for its last page"


def test_holders_that_die_cost_no_token(mock: Path, alone: Alone) -> None:
    """Both decode workers are killed between two turns, one of them while the turn runs."""
    worker = {"num_threads": 1, "pool_mib": 16}
    talks = [Talk(10 + i) for i in range(NUM_CONVERSATIONS)]
    with deployment(mock, prefill=2, decode=2, worker=worker) as cluster:
        talk_all(cluster, mock, talks, num_turns=2)
        cluster.kill("decode-0")
        talk_all(cluster, mock, talks, num_turns=1)
        cluster.wait_ready()
        cluster.kill("decode-1")
        talk_all(cluster, mock, talks, num_turns=1)
        assert settle(cluster) == NOTHING
    for talk in talks:
        talk.check(alone)


def test_the_demo_model_says_what_it_says_alone() -> None:
    model = demo_model()
    talks = [Talk(20 + i) for i in range(2)]
    with deployment(model, prefill=1, decode=2) as cluster:
        talk_all(cluster, model, talks, num_turns=3)
        assert pulled_tokens(cluster) > 0
        assert settle(cluster) == NOTHING
    alone = Alone(model)
    for talk in talks:
        talk.check(alone)
