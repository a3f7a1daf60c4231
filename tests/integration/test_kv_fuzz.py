"""Calls of KvTransferService with whatever fields, by a caller that knows the secret: refused or
answered, in bounded memory, and the worker goes on."""

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import psutil
import pytest

from paceline.core.keys import chain_keys
from paceline.rpc import tickets
from paceline.rpc.channel import connect
from paceline.v1 import common_pb2, kv_pb2, kv_pb2_grpc, worker_pb2
from tests.support.fake_router import Attachment, make_request, make_ticket, token
from tests.support.mock_model import write_mock_model
from tests.support.waits import wait_for
from tests.support.worker_pair import FAST, is_free
from tests.support.workers import SECRET, WorkerProcess, start_worker

NUM_CALLS = 400
MAX_GROWTH_BYTES = 48 << 20
CALL_S = 0.3  # some wait for what never comes
NUMBERS = (0, 1, 2, 15, 16, 1023, 1024, 1036, 2**31 - 1, 2**31, 2**32 - 1)
REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
}


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[WorkerProcess]:
    started = start_worker("prefill", write_mock_model(tmp_path / "model"), **FAST)
    try:
        started.wait_until_ready()
        yield started
    finally:
        status = started.stop()
    assert status == 0


class Fuzzer:
    def __init__(self, good: common_pb2.Ticket, keys: bytes, seed: int) -> None:
        self.good, self.keys = good, keys
        self.chance = random.Random(seed)

    def number(self) -> int:
        return self.chance.choice(NUMBERS)

    def text(self) -> str:
        return self.chance.choice(["", "reader", "\0", "é" * 999, str(self.chance.random())])

    def ticket(self) -> common_pb2.Ticket:
        """Good, or genuine with a field that is not, or forged."""
        made = common_pb2.Ticket()
        made.CopyFrom(self.good)
        kind = self.chance.randrange(4)
        if kind:
            name = self.chance.choice(["request_id", "tenant", "reader_worker", "source_worker"])
            setattr(made, name, self.text())
            made.attempt = self.number()
        return made if kind == 1 else tickets.sign(made, SECRET.encode())

    def run(self) -> kv_pb2.KeyRun:
        keys = self.chance.choice([self.keys, b"", self.chance.randbytes(31), bytes(32 * 2000)])
        return kv_pb2.KeyRun(group=self.number(), keys=keys)

    def describe(self, stub: kv_pb2_grpc.KvTransferServiceStub) -> object:
        parts = {self.text(): self.text() for _ in range(self.chance.randrange(50))}
        return stub.Describe(
            kv_pb2.DescribeRequest(content_digest=self.text(), content_parts=parts),
            metadata=token(),
            timeout=CALL_S,
        )

    def pin(self, stub: kv_pb2_grpc.KvTransferServiceStub) -> object:
        runs = [self.run() for _ in range(self.chance.choice([0, 1, 1, 2, 500]))]
        with_tail = self.chance.random() < 0.2
        request = kv_pb2.PinRequest(ticket=self.ticket(), runs=runs, with_tail=with_tail)
        return stub.Pin(request, metadata=token(), timeout=CALL_S)

    def unpin(self, stub: kv_pb2_grpc.KvTransferServiceStub) -> object:
        request = kv_pb2.UnpinRequest(
            ticket=self.ticket(), lease_id=self.text(), complete=self.chance.random() < 0.5
        )
        return stub.Unpin(request, metadata=token(), timeout=CALL_S)

    def report(self, stub: kv_pb2_grpc.KvTransferServiceStub) -> object:
        request = kv_pb2.ReportRequest(page=self.number(), generation=self.number() << 32)
        return stub.Report(request, metadata=token(), timeout=CALL_S)

    def progress(self, stub: kv_pb2_grpc.KvTransferServiceStub) -> object:
        firsts = [self.number() for _ in range(self.chance.randrange(4))]
        request = kv_pb2.ProgressRequest(ticket=self.ticket(), first_blocks=firsts)
        return stub.Progress(request, metadata=token(), timeout=CALL_S).read()

    def beats(self, stub: kv_pb2_grpc.KvTransferServiceStub) -> object:
        names = [self.text() for _ in range(self.chance.choice([0, 3, 5000]))]
        beat = kv_pb2.LeaseBeat(
            reader_worker=str(self.chance.random()), reader_incarnation=self.text(), lease_ids=names
        )
        return stub.KeepLeases(iter([beat] * 3), metadata=token(), timeout=CALL_S).read()

    def call(self) -> Callable[[kv_pb2_grpc.KvTransferServiceStub], object]:
        calls = [self.describe, self.pin, self.pin, self.unpin, self.report, self.beats]
        return self.chance.choice([*calls, self.progress] if self.chance.random() < 0.3 else calls)


async def refused_as(made: object) -> grpc.StatusCode | None:
    try:
        await made  # type: ignore[misc]
    except grpc.aio.AioRpcError as failure:
        return failure.code()
    return None


@pytest.mark.slow
async def test_calls_with_any_fields_leave_the_worker_as_it_was(worker: WorkerProcess) -> None:
    processes = [psutil.Process(pid) for pid in (worker.pid, *worker.rank_pids())]
    async with Attachment(worker.endpoint) as router:
        request = make_request(router.info, list(range(64)), max_tokens=1)
        before = (await router.run(request).until_ended()).output()
        reader = worker_pb2.WorkerInfo(worker_id="reader", incarnation="1")
        good = make_ticket(request, router.info, reader)
        keys = b"".join(chain_keys(request.root_key, request.token_ids))
        codes = set()
        memory = 0
        async with connect(worker.endpoint) as channel:
            stub = kv_pb2_grpc.KvTransferServiceStub(channel)  # type: ignore[no-untyped-call]
            for seed in range(NUM_CALLS):
                codes.add(await refused_as(Fuzzer(good, keys, seed).call()(stub)))
                if seed == NUM_CALLS // 4:
                    memory = sum(process.memory_info().rss for process in processes)
        assert codes <= {None, *REFUSALS}, codes
        assert None in codes and len(codes) > 2
        assert sum(p.memory_info().rss for p in processes) - memory < MAX_GROWTH_BYTES
        after = make_request(router.info, list(range(64)), max_tokens=1)
        assert (await router.run(after).until_ended()).output() == before
    assert worker.metric("paceline_worker_incarnations_total") == 1
    await asyncio.to_thread(wait_for, lambda: is_free(worker), 5)
