"""The only decode worker of the default deployment is killed: requests wait until it is back."""

import asyncio
import json
import time
import urllib.error
import urllib.request

import pytest

from benchmarks.deployment import deployment, mock_model
from benchmarks.kill_worker import kill_tree
from benchmarks.loadgen import send_all
from tests.support.end_to_end import Alone, prompt, streaming

pytestmark = pytest.mark.slow

NUM_STREAMS = 4
SHORT = {"max_tokens": 8, "ignore_eos": True, "temperature": 1, "seed": 5}
LONG = {**SHORT, "max_tokens": 100}  # 2 s
NONE = "no decode worker is connected"


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def wait_until_unready(url: str) -> None:
    deadline = time.monotonic() + 5
    while get(f"{url}/readyz")[0] == 200:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.timeout(180)
def test_streams_and_later_requests_wait_until_it_is_started_again() -> None:
    with mock_model() as quick:
        alone = Alone(quick)
        expected = [alone.answer(prompt(100, salt=i), **LONG)[0] for i in range(NUM_STREAMS)]
        late_expected = alone.answer(prompt(100, salt=9), **SHORT)[0]
    worker = {"num_threads": 1, "pool_mib": 16}
    with (
        mock_model(step_s=0.02, token_s=0.0001) as model,
        deployment(model, worker=worker) as cluster,
    ):
        url = cluster.base_url
        streams = [streaming(model, prompt(100, salt=i), **LONG) for i in range(NUM_STREAMS)]
        late = streaming(model, prompt(100, salt=9), **SHORT)

        async def run() -> None:
            sending = asyncio.create_task(send_all(url, streams, NUM_STREAMS))
            await asyncio.sleep(0.8)
            assert not sending.done()
            kill_tree(cluster.processes["decode-0"].pid)
            await asyncio.to_thread(wait_until_unready, url)
            sending_late = asyncio.create_task(send_all(url, [late], 1))
            for probed in (url, str(cluster.urls["router"])):
                assert await asyncio.to_thread(get, f"{probed}/readyz") == (503, f"{NONE}\n")
            listed = await asyncio.to_thread(get, f"{url}/v1/models")
            assert json.loads(listed[1])["data"] == []
            answers = await sending
            assert [answer.error for answer in answers] == [""] * NUM_STREAMS
            assert [answer.token_ids() for answer in answers] == expected
            assert max(answer.longest_gap_s for answer in answers) > 1  # they did wait
            (late_answer,) = await sending_late
            assert (late_answer.error, late_answer.token_ids()) == ("", late_expected)

        asyncio.run(run())
        assert get(f"{url}/readyz")[0] == 200
        assert [m["id"] for m in json.loads(get(f"{url}/v1/models")[1])["data"]] == [model.name]
        assert cluster.processes["decode-0"].num_starts == 2
