"""A worker that is stopped: what it cannot end goes on elsewhere, and finds its KV here."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.core.errors import ErrorCode
from paceline.core.keys import chain_keys
from paceline.core.kv_layout import PAGE_TOKENS
from paceline.rpc.channel import connect
from paceline.v1 import kv_pb2, kv_pb2_grpc
from tests.support.fake_router import Attachment, make_hint, make_request, make_ticket, token
from tests.support.mock_model import write_mock_model
from tests.support.waits import until
from tests.support.worker_pair import FAST
from tests.support.workers import WorkerProcess, start_worker, until_stopped

PROMPT = list(range(12 * PAGE_TOKENS))
SETTINGS = {**FAST, "drain_timeout_s": 8, "silence_s": 6, "stall_s": 4}


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[dict[str, WorkerProcess]]:
    """Steps take a while, so that streams last; computing takes longer than any pull."""
    model = write_mock_model(tmp_path / "model", step_s=0.02, token_s=0.005)
    started = {name: start_worker("decode", model, worker_id=name, **SETTINGS) for name in "ab"}
    with until_stopped(started):
        yield started


async def test_what_it_gives_up_is_pulled_from_it_by_who_goes_on(
    workers: dict[str, WorkerProcess],
) -> None:
    leaving, other = workers["a"], workers["b"]
    async with Attachment(leaving.endpoint) as source, Attachment(other.endpoint) as reader:
        await reader.run(make_request(reader.info, [1] * 40, max_tokens=1)).until_ended()  # a pace
        request = make_request(source.info, PROMPT, max_tokens=4000, ignore_eos=True)
        stream = await source.run(request).until_emitted(2)
        leaving.process.send_signal(signal.SIGTERM)
        await until(lambda: source.load.draining)
        refused = await source.run(make_request(source.info, [1] * 20, max_tokens=2)).until_ended()
        assert refused.error is not None and refused.error.code is ErrorCode.UNAVAILABLE
        await stream.until_ended()
        assert stream.error is not None and stream.error.message == "the worker leaves"
        again = make_request(reader.info, PROMPT, max_tokens=4)
        hints = [make_hint(again, source, reader)]
        for _ in range(3):  # a link is made for the next one
            log = await reader.run(again, hints).until_ended()
            again = make_request(reader.info, PROMPT, max_tokens=4)
            if pulled(other):
                break
        assert log.output() == stream.output()[:4]
        assert pulled(other) >= len(PROMPT) - PAGE_TOKENS
    assert await asyncio.to_thread(leaving.stop) == 0


async def test_it_waits_for_a_reader_that_holds_a_lease(workers: dict[str, WorkerProcess]) -> None:
    leaving = workers["a"]
    async with Attachment(leaving.endpoint) as router:
        request = make_request(router.info, PROMPT, max_tokens=1)
        await router.run(request).until_ended()
        ticket = make_ticket(request, router.info, router.info)
        keys = b"".join(chain_keys(request.root_key, request.token_ids))
        async with connect(leaving.endpoint) as channel:
            stub = kv_pb2_grpc.KvTransferServiceStub(channel)  # type: ignore[no-untyped-call]
            pin = kv_pb2.PinRequest(ticket=ticket, runs=[kv_pb2.KeyRun(keys=keys)])
            pinned = await stub.Pin(pin, metadata=token())
            leaving.process.send_signal(signal.SIGTERM)
            await until(lambda: router.load.draining)
            await asyncio.sleep(1)
            assert leaving.process.poll() is None, "somebody reads from it"
            unpin = kv_pb2.UnpinRequest(ticket=ticket, lease_id=pinned.lease_id)
            await stub.Unpin(unpin, metadata=token())
    assert await asyncio.to_thread(leaving.stop) == 0


def pulled(worker: WorkerProcess) -> float:
    return worker.metric('paceline_prefix_tokens_total{result="pulled"}')
