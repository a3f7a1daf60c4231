"""Pages that travel slowly: an abort does not give them away while they may still be written."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.transfer_faults_seam import DataProxies
from tests.support.fake_router import Attachment, make_request, make_ticket
from tests.support.kv_proxy import KvProxy, Seam
from tests.support.mock_model import write_mock_model
from tests.support.waits import wait_beside
from tests.support.worker_pair import FAST, is_free, prompt
from tests.support.workers import WorkerProcess, start_worker, until_stopped

pytestmark = pytest.mark.slow
PAGE_BYTES = 128 << 10
NUM_PAGES = 30  # of a request
TRAVEL_S = 6.0


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[dict[str, WorkerProcess]]:
    """Decode's pool has 48 pages: another request needs those of the first."""
    model = write_mock_model(tmp_path / "model", num_hidden_layers=8, head_dim=64)
    settings = {**FAST, "transports": "tcp", "output_window_tokens": 32}
    started = {
        "prefill": start_worker("prefill", model, **settings, pool_mib=16),
        "decode": start_worker("decode", model, **settings, pool_mib=6),
    }
    with until_stopped(started):
        yield started


class Slowly(Seam):
    """Puts a proxy where the pages travel, which is throttled from the first pin on."""

    def __init__(self, data: DataProxies) -> None:
        self._data = data

    async def answered(self, method: str, answer: Any) -> None:
        if method == "Describe":
            self._data.put_into(answer)
        elif method == "Pin" or answer.rest.lease_id:
            self._data.over_tcp["tcp"].bytes_per_s = NUM_PAGES * PAGE_BYTES / TRAVEL_S


@pytest.mark.parametrize("then", ["the link goes on", "the link is cut"])
async def test_sglang_35049_pages_of_an_abort_are_not_given_away_before_the_fence(
    then: str, workers: dict[str, WorkerProcess]
) -> None:
    """https://github.com/sgl-project/sglang/pull/35049: 30 pages take 6 s; A is aborted after 2 s;
    B, which needs 32 pages, starts at once and must answer as on a quiet worker."""
    data = DataProxies()
    async with (
        Attachment(workers["prefill"].endpoint) as prefill,
        Attachment(workers["decode"].endpoint) as decode,
    ):
        proxy = KvProxy(prefill.endpoint, Slowly(data))
        await proxy.start()
        quiet = make_request(prefill.info, prompt(32 * 16 - 8, 2), max_tokens=8, ignore_eos=True)
        expected = (await prefill.run(quiet).until_ended()).output()
        request = make_request(decode.info, prompt(NUM_PAGES * 16, 1), max_tokens=8)
        aborted = await decode.reserve(request).until_answered()
        assert aborted.reserved is not None
        ticket = make_ticket(request, prefill.info, decode.info)
        decode.adopt(aborted, ticket, f"127.0.0.1:{proxy.port}")
        held = prefill.prefill(request, ticket)
        await asyncio.sleep(2)
        assert not aborted.ended
        if then == "the link is cut":
            data.over_tcp["tcp"].pause()
        decode.cancel(aborted)
        prefill.cancel(held)
        later = decode.run(
            make_request(decode.info, quiet.token_ids, max_tokens=8, ignore_eos=True)
        )
        await asyncio.sleep(0.6)  # more than B takes
        assert not later.tokens, "A's pages are B's already"
        await later.until_ended(10)
        assert later.output() == expected
        data.close()
        await proxy.close()
    await wait_beside(lambda: is_free(workers["decode"]) and is_free(workers["prefill"]), 8)
