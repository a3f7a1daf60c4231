"""The whole path with real processes over transports whose libraries are extras.

The mock model's next token is a hash of all KV bytes before it: equal tokens mean equal KV.
"""

import asyncio

import pytest

from benchmarks.deployment import NOTHING, deployment, mock_model, settle, workers_total
from benchmarks.loadgen import send_all
from paceline.core import metrics as names
from tests.contract.transports import installed
from tests.support.end_to_end import Alone, prompt, streaming

LENGTHS = [1, 16, 17, 100, 333, 700]
TOKEN_BYTES = 2 * 2 * 2 * 8 * 4


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["ucx", "nixl"])
def test_split_requests_get_the_tokens_of_one_worker(transport: str) -> None:
    worker = {"transports": installed(transport), "num_threads": 1, "pool_mib": 16}
    prompts = [prompt(length, salt=length) for length in LENGTHS]
    with (
        mock_model(step_s=0.005) as model,
        deployment(model, router={"split_min_tokens": 0}, worker=worker) as cluster,
    ):
        calls = [streaming(model, p, max_tokens=24, temperature=0) for p in prompts]
        answers = asyncio.run(send_all(cluster.base_url, calls, len(calls)))
        alone = Alone(model)
        for token_ids, answer in zip(prompts, answers, strict=True):
            assert answer.is_complete, answer.error
            assert [answer.token_ids()] == alone.answer(token_ids, max_tokens=24, temperature=0)
        assert settle(cluster) == NOTHING
        pulled = workers_total(cluster, names.TRANSFER_BYTES, "decode", transport=transport)
        assert pulled == sum(LENGTHS) * TOKEN_BYTES
