"""Pairs that cannot hand KV over, seen by a client: recomputed, at once."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.deployment import NOTHING, mock_model, settle, workers_total
from benchmarks.loadgen import send
from paceline.cli.cluster import Cluster, ClusterSpec
from paceline.core import metrics as names
from tests.support.end_to_end import Alone, prompt, streaming

SOON_S = 2.0


@pytest.fixture(scope="module")
def model() -> Iterator[Path]:
    with mock_model() as folder:
        yield folder


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[Cluster]:
    """Every prompt is prefilled apart, and no transfer succeeds: the two have no transport in
    common."""
    worker = {"num_threads": 1, "pool_mib": 16}
    spec = ClusterSpec(
        model,
        settings={
            "router": {"split_min_tokens": 0},
            "prefill": {**worker, "transports": "tcp"},
            "decode": {**worker, "transports": "shm"},
        },
    )
    with Cluster(spec) as started:
        yield started


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
def test_llm_d_2433_a_transfer_that_always_fails_is_no_hang(
    cluster: Cluster, model: Path, stream: bool
) -> None:
    """https://github.com/llm-d/llm-d/issues/2433: only a sidecar saw the error, the client hung."""
    alone = Alone(model)
    for salt in range(3):
        token_ids = prompt(100, salt=salt + 10 * stream)
        (expected,) = alone.answer(token_ids, max_tokens=12, temperature=0)
        call = streaming(model, token_ids, max_tokens=12, temperature=0)
        started = time.monotonic()
        if stream:
            answer = asyncio.run(send(cluster.base_url, call))
            assert answer.is_complete, answer.error
            assert answer.token_ids() == expected
        else:
            body = {k: v for k, v in call.body.items() if not k.startswith("stream")}
            found = httpx.post(f"{cluster.base_url}/v1/completions", json=body, timeout=20)
            assert found.status_code == 200
            assert found.json()["usage"]["completion_tokens"] == 12
        assert time.monotonic() - started < SOON_S
    assert workers_total(cluster, names.TRANSFER_FAILURES, "decode") > 0
    assert workers_total(cluster, names.TRANSFER_BYTES, "decode") == 0
    assert settle(cluster) == NOTHING
