"""Sources that die, refuse or fall silent while decode waits for them."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.core.errors import InvalidRequest, KvUnavailable
from paceline.rpc.channel import connect
from paceline.v1 import common_pb2, kv_pb2, kv_pb2_grpc, worker_pb2
from tests.support import mute_sources
from tests.support.fake_router import Attachment, SlotLog, make_request, make_ticket, token
from tests.support.kv_proxy import KvProxy, Seam
from tests.support.mock_model import write_mock_model
from tests.support.tcp_proxy import TcpProxy
from tests.support.waits import wait_beside
from tests.support.worker_pair import FAST, is_free, prompt
from tests.support.workers import WorkerProcess, start_worker, until_stopped

pytestmark = pytest.mark.slow
NUM_KILLED = 40
SIZES = {"num_hidden_layers": 4, "head_dim": 32}  # pages of 32 KiB: 2 MiB are 64
CONTEXT = 1024


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, WorkerProcess]]:
    folder = tmp_path_factory.mktemp("lost") / "model"
    sizes = {**SIZES, "max_position_embeddings": CONTEXT, "token_s": 0.002}
    model = write_mock_model(folder, **sizes)
    common = {**FAST, "transports": "tcp", "pool_mib": 2}
    started = {role: start_worker(role, model, **common) for role in ("prefill", "decode")}
    with until_stopped(started):
        yield started


@contextmanager
def mute(number: int, pid: int, described: bytes) -> Iterator["subprocess.Popen[str]"]:
    root = Path(mute_sources.__file__).parents[2]
    path = os.pathsep.join([str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, mute_sources.__file__, str(number), str(pid), described.hex()]
    with subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin
        try:
            yield process
        finally:
            process.stdin.close()


async def description_of(worker: Attachment) -> bytes:
    async with connect(worker.endpoint) as channel:
        stub = kv_pb2_grpc.KvTransferServiceStub(channel)  # type: ignore[no-untyped-call]
        asked = kv_pb2.DescribeRequest(
            content_digest=worker.info.content_digest, layout_digest=worker.info.layout_digest
        )
        described: kv_pb2.DescribeResponse = await stub.Describe(asked, metadata=token())
        return described.SerializeToString()


async def reserved(decode: Attachment, request: common_pb2.TokenRequest) -> SlotLog:
    log = await decode.reserve(request).until_answered()
    assert log.reserved is not None, (log.error, log.busy)
    return log


async def test_vllm_46283_prefills_killed_after_they_took_the_job_cost_decode_no_block(
    workers: dict[str, WorkerProcess],
) -> None:
    """https://github.com/vllm-project/vllm/issues/46283: 64 blocks, 40 times a request of 300
    tokens whose prefill is killed when it has the job, then cancelled; one more is served."""
    async with Attachment(workers["decode"].endpoint) as decode:
        assert decode.info.num_pages == 64
        pid = workers["decode"].pid
        with mute(NUM_KILLED, pid, await description_of(decode)) as sources:
            assert sources.stdout
            for i in range(NUM_KILLED):
                line = json.loads(await asyncio.to_thread(sources.stdout.readline))
                while "pid" not in line:  # a later one is up first
                    line = json.loads(await asyncio.to_thread(sources.stdout.readline))
                request = make_request(decode.info, prompt(300, 1000 + i), max_tokens=20)
                log = await reserved(decode, request)
                source = worker_pb2.WorkerInfo(
                    worker_id=f"mute-{line['number']}",
                    incarnation=line["incarnation"],
                    content_digest=decode.info.content_digest,
                )
                ticket = make_ticket(request, source, decode.info)
                decode.adopt(log, ticket, f"127.0.0.1:{line['port']}")
                await asyncio.sleep(0.05)
                os.kill(line["pid"], signal.SIGKILL)
                decode.cancel(log)
                await log.until_ended(3)
                assert not log.tokens
        await wait_beside(lambda: is_free(workers["decode"]), 2 * FAST["silence_s"])  # type: ignore[operator]
        async with Attachment(workers["prefill"].endpoint) as prefill:
            request = make_request(decode.info, prompt(300, 1), max_tokens=20, ignore_eos=True)
            log = await reserved(decode, request)
            ticket = make_ticket(request, prefill.info, decode.info)
            decode.adopt(log, ticket, prefill.endpoint)
            first = prefill.prefill(request, ticket)
            await asyncio.gather(first.until_ended(), log.until_ended())
            assert len(first.output() + log.output()) == 20


async def test_sglang_30233_a_prompt_too_long_for_prefill_frees_its_reservation(
    workers: dict[str, WorkerProcess],
) -> None:
    """https://github.com/sgl-project/sglang/issues/30233: one token more than the context, straight
    to prefill, with pages of decode reserved: refused, nothing emitted, free within a second."""
    async with (
        Attachment(workers["prefill"].endpoint) as prefill,
        Attachment(workers["decode"].endpoint) as decode,
    ):
        fits = make_request(decode.info, prompt(700, 2), max_tokens=4)
        log = await reserved(decode, fits)
        too_long = make_request(decode.info, prompt(CONTEXT + 1, 2), max_tokens=4)
        too_long.request_id = fits.request_id
        ticket = make_ticket(fits, prefill.info, decode.info)
        decode.adopt(log, ticket, prefill.endpoint)
        refused = await prefill.prefill(too_long, ticket).until_ended(2)
        began = time.monotonic()
        assert isinstance(refused.error, InvalidRequest)
        await log.until_ended(1)  # before any word of a router
        assert isinstance(log.error, KvUnavailable)
        assert not refused.tokens and not log.tokens
    await wait_beside(lambda: is_free(workers["decode"]), 1 - (time.monotonic() - began))


@pytest.mark.parametrize("how", ["fails", "closes", "says nothing"])
async def test_aibrix_2289_decode_does_not_wait_for_a_prefill_that_has_failed(
    how: str, workers: dict[str, WorkerProcess]
) -> None:
    """https://github.com/vllm-project/aibrix/issues/2289: decode waits, prefill answers an error,
    closes, or never answers; the reservation is let go and the request is served elsewhere."""
    await asyncio.to_thread(workers["prefill"].renew)  # so that decode meets the proxy
    async with (
        Attachment(workers["prefill"].endpoint) as prefill,
        Attachment(workers["decode"].endpoint) as decode,
    ):
        proxy = KvProxy(prefill.endpoint, Seam())
        await proxy.start()
        calls = TcpProxy(("127.0.0.1", proxy.port))
        request = make_request(decode.info, prompt(600, len(how)), max_tokens=4)
        log = await reserved(decode, request)
        ticket = make_ticket(request, prefill.info, decode.info)
        decode.adopt(log, ticket, f"127.0.0.1:{calls.port}")
        job = prefill.prefill(request, ticket)  # 1.2 s
        await asyncio.sleep(0.4)
        assert not (log.ended or job.ended)
        began = time.monotonic()
        if how == "fails":
            prefill.cancel(job)
        elif how == "closes":
            calls.reset()
        else:
            calls.pause()
            decode.cancel(log)  # a router that waits no longer
        await log.until_ended(3)
        assert time.monotonic() - began < 1
        assert not log.tokens
        assert how == "says nothing" or isinstance(log.error, KvUnavailable)
        prefill.cancel(job)
        calls.close()
        await proxy.close()
        whole = await decode.run(make_request(decode.info, request.token_ids)).until_ended()
        assert whole.error is None and whole.tokens
    await wait_beside(lambda: is_free(workers["decode"]) and is_free(workers["prefill"]), 5)


async def test_a_link_that_is_closed_ends_whoever_follows_its_source(
    workers: dict[str, WorkerProcess],
) -> None:
    """One hand-off waits for a prompt that is computed when another's ticket names an incarnation
    that is no more: the link to the source is made anew, and the first must not wait for ever."""
    async with (
        Attachment(workers["prefill"].endpoint) as prefill,
        Attachment(workers["decode"].endpoint) as decode,
    ):
        request = make_request(decode.info, prompt(800, 3), max_tokens=4)
        log = await reserved(decode, request)
        ticket = make_ticket(request, prefill.info, decode.info)
        decode.adopt(log, ticket, prefill.endpoint)
        job = prefill.prefill(request, ticket)  # 1.6 s
        await asyncio.sleep(0.4)
        stale = make_request(decode.info, prompt(40, 4), max_tokens=4)
        other = await reserved(decode, stale)
        gone = worker_pb2.WorkerInfo()
        gone.CopyFrom(prefill.info)
        gone.incarnation = "gone"
        decode.adopt(other, make_ticket(stale, gone, decode.info), prefill.endpoint)
        await other.until_ended(3)
        await log.until_ended(3)
        assert isinstance(log.error, KvUnavailable) and isinstance(other.error, KvUnavailable)
        prefill.cancel(job)
    await wait_beside(lambda: is_free(workers["decode"]) and is_free(workers["prefill"]), 5)
