"""Both pools full at once: neither side waits for the other, and every request ends.

Prefill has room for one prompt, and holds it until decode has pulled it; decode has room for two
requests. So whenever a prompt is computed prefill is full, and most of the time decode is, too.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.deployment import NOTHING, mock_model, scrape, settle, total, workers_total
from benchmarks.loadgen import send_all
from paceline.cli.cluster import Cluster, ClusterSpec
from paceline.core import metrics as names
from tests.support.end_to_end import Alone, prompt, streaming

NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 24, 400, 40
PREFILL_PAGES, DECODE_PAGES = 32, 64  # of 16 tokens
MIB_OF_PAGES = 16

pytestmark = pytest.mark.slow


@pytest.fixture
def model() -> Iterator[Path]:
    with mock_model(step_s=0.005, token_s=0.0002, head_dim=64, num_hidden_layers=4) as folder:
        yield folder


@pytest.fixture
def tiny(model: Path) -> Iterator[Cluster]:
    worker = {"num_threads": 1, "transports": "shm"}
    settings = {
        "router": {"split_min_tokens": 0},
        "prefill": {**worker, "pool_mib": PREFILL_PAGES // MIB_OF_PAGES},
        "decode": {**worker, "pool_mib": DECODE_PAGES // MIB_OF_PAGES},
    }
    with Cluster(ClusterSpec(model, settings=settings)) as cluster:
        yield cluster


def test_more_requests_than_two_pools_hold_all_end(model: Path, tiny: Cluster) -> None:
    for role, num_pages in (("prefill", PREFILL_PAGES), ("decode", DECODE_PAGES)):
        assert workers_total(tiny, names.WORKER_PAGES, role) == num_pages
    prompts = [prompt(PROMPT_TOKENS, salt) for salt in range(NUM_REQUESTS)]
    fields = {"max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
    calls = [streaming(model, tokens, **fields) for tokens in prompts]
    answers = asyncio.run(send_all(tiny.base_url, calls, NUM_REQUESTS))
    for answer in answers:
        assert answer.is_complete, (answer.status, answer.error)
    router = scrape(tiny.urls["router"])
    assert total(router, names.ROUTER_PLANS, kind="split") >= NUM_REQUESTS
    assert total(router, names.ROUTER_BUSY) > 0, "decode was full"
    assert workers_total(tiny, names.VLLM_PREEMPTIONS) <= NUM_REQUESTS / 10
    alone = Alone(model)
    for number in range(0, NUM_REQUESTS, 6):
        expected = alone.answer(prompts[number], **fields)
        assert answers[number].token_ids() == expected[0]
    assert settle(tiny) == NOTHING
