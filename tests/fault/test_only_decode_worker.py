"""The only decode worker is killed: requests wait until it is back, or end with an error."""

import asyncio
import json
import time
import urllib.error
import urllib.request

import grpc
import httpx
import pytest

from benchmarks.deployment import deployment, mock_model
from benchmarks.kill_worker import kill_tree
from benchmarks.loadgen import send_all
from paceline.core.errors import Unavailable
from paceline.rpc.status import error_of
from paceline.v1.common_pb2 import TokenIds
from paceline.v1.generate_pb2 import GenerateRequest
from paceline.v1.generate_pb2_grpc import GenerateServiceStub
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


@pytest.mark.timeout(120)
def test_litellm_39748_a_stream_that_no_worker_can_go_on_with_ends_with_an_error() -> None:
    """https://github.com/BerriAI/litellm/pull/39748: all decode workers are killed after 10 tokens
    and none comes back. One frame with an error, then [DONE]; over gRPC UNAVAILABLE, with details.
    """
    tokens = TokenIds(ids=prompt(100))
    request = GenerateRequest(tokens=tokens, max_tokens=2000, ignore_eos=True)
    waits = {"worker_wait_s": 0.5}
    worker = {"num_threads": 1, "pool_mib": 16}
    with (
        mock_model(step_s=0.02) as model,
        deployment(model, router=waits, worker=worker, restart=False) as cluster,
        grpc.insecure_channel(cluster.grpc_endpoint) as channel,
    ):
        url = f"{cluster.base_url}/v1/completions"
        body = {"model": model.name, "prompt": prompt(100, salt=1), "stream": True}
        body |= {"max_tokens": 2000, "ignore_eos": True}
        stub = GenerateServiceStub(channel)  # type: ignore[no-untyped-call]
        with httpx.stream("POST", url, json=body, timeout=30) as answer:
            frames = (line[6:] for line in answer.iter_lines() if line.startswith("data: "))
            parts = stub.Generate(request, timeout=30)
            before = [next(frames) for _ in range(10)]
            for _ in range(10):
                next(parts)
            kill_tree(cluster.processes["decode-0"].pid)
            with pytest.raises(grpc.RpcError) as caught:
                list(parts)
            *rest, error, done = frames
    assert done == "[DONE]" and json.loads(error)["error"]["code"] == "unavailable"
    choices = [json.loads(frame)["choices"][0] for frame in (*before, *rest)]
    assert {choice["finish_reason"] for choice in choices} == {None}
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert isinstance(error_of(caught.value), Unavailable)
