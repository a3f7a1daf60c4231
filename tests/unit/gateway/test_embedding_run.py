"""A long list of inputs is handed to the router a part at a time."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from paceline.core.errors import EngineFailure, RateLimited
from paceline.core.pooling import Pooling
from paceline.gateway.deadline import Deadline
from paceline.gateway.embedding_run import MAX_AT_ONCE, MAX_NAMED, EmbeddingRun
from paceline.gateway.jobs import EmbeddingJob, KvOwner, Prompt
from paceline.gateway.mailbox import Mailbox
from paceline.gateway.metrics import GatewayMetrics, now_s
from paceline.gateway.rate_limits import Meter, TenantLimits
from paceline.gateway.request_log import Origin, RequestRecord
from paceline.gateway.statistics import RequestTimes
from paceline.gateway.vectors import VectorForm
from paceline.v1.common_pb2 import Emission, TokenRequest
from paceline.v1.control_pb2 import ModelInfo

OWNER = KvOwner("t", None, bytes(32))
FORM = VectorForm(2, is_normalized=False)


class HeldRouter:
    """Keeps what it gets until the test answers."""

    is_attached = True

    def __init__(self) -> None:
        self.models: dict[str, ModelInfo] = {}
        self.requests: dict[int, TokenRequest] = {}  # by slot
        self.cancelled: list[int] = []
        self.mailbox: Mailbox | None = None

    def start(self) -> None: ...
    async def stop(self) -> None: ...
    def forget(self, slot: int) -> None: ...

    def submit(self, request: TokenRequest, mailbox: Mailbox) -> int:
        self.mailbox = mailbox
        slot = len(self.requests)
        self.requests[slot] = request
        return slot

    def cancel(self, slot: int, choices: Sequence[int] = ()) -> None:
        self.cancelled.append(slot)

    def answer(self, slot: int, packed: bytes | None = None) -> None:
        vector = np.float32([*self.requests[slot].token_ids, 0.5])
        assert self.mailbox is not None
        emission = Emission(slot=slot, embedding=vector.tobytes() if packed is None else packed)
        self.mailbox.deliver(emission)


def run_on(router: HeldRouter, limits: TenantLimits | None = None) -> EmbeddingRun:
    return EmbeddingRun(
        router,
        GatewayMetrics().for_model("mock"),
        Meter(limits or TenantLimits(), now_s()),
        Mailbox(2 * MAX_AT_ONCE, 1 << 20, lambda: None),
        Deadline(60.0),
        RequestRecord(Origin("embeddings"), "mock", "t", RequestTimes(0.0)),
    )


def jobs_of(num_inputs: int) -> list[EmbeddingJob]:
    model = ModelInfo(name="mock")
    prompts = [Prompt([i], bytes(32), b"") for i in range(num_inputs)]
    return [EmbeddingJob(model, OWNER, prompt, Pooling.LAST) for prompt in prompts]


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_one_more_is_sent_for_each_that_comes_back_in_any_order() -> None:
    router, jobs = HeldRouter(), jobs_of(MAX_AT_ONCE + 3)
    run = run_on(router)
    work = asyncio.create_task(run.vectors(jobs, FORM))
    await turns()
    assert len(router.requests) == MAX_AT_ONCE
    for num_back, slot in enumerate((5, 60, 3), 1):
        router.answer(slot)
        await turns()
        assert len(router.requests) == MAX_AT_ONCE + num_back
    for slot in sorted(set(router.requests) - {5, 60, 3}, reverse=True):
        router.answer(slot)
    vectors = await work
    run.close()
    assert [vector.tolist() for vector in vectors] == [[i, 0.5] for i in range(len(jobs))]
    assert not router.cancelled and run.done
    assert len(run.record.request_ids) == MAX_NAMED


async def test_what_is_left_is_cancelled() -> None:
    router = HeldRouter()
    run = run_on(router)
    work = asyncio.create_task(run.vectors(jobs_of(100), FORM))
    await turns()
    router.answer(7)
    await turns()
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    run.close()
    assert set(router.cancelled) == set(range(65)) - {7}
    assert not run.done


@pytest.mark.parametrize("packed", [b"", b"1234", b"123456789"])
async def test_an_embedding_of_another_size_is_a_fault_of_ours(packed: bytes) -> None:
    router = HeldRouter()
    run = run_on(router)
    work = asyncio.create_task(run.vectors(jobs_of(2), FORM))
    await turns()
    router.answer(0, packed)
    with pytest.raises(EngineFailure):
        await work
    run.close()
    assert router.cancelled == [1]


async def test_tokens_of_a_tenant_are_counted_before_anything_is_sent() -> None:
    router = HeldRouter()
    run = run_on(router, TenantLimits(tokens_per_minute=2))
    with pytest.raises(RateLimited):
        for _ in range(2):
            work = asyncio.create_task(run.vectors(jobs_of(2), FORM))
            await turns()
            for slot in router.requests:
                router.answer(slot)
            await work
    run.close()
    assert len(router.requests) == 2
