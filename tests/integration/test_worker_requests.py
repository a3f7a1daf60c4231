"""Requests on real workers through WorkerService.Attach: whole, split, cancelled, refused."""

import asyncio
import random
import time
from collections.abc import Iterator

import grpc
import numpy as np
import pytest

from paceline.core.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    KvUnavailable,
    ModelNotFound,
    Unavailable,
)
from paceline.core.keys import chain_keys
from paceline.core.pooling import Pooling
from paceline.rpc.channel import connect
from paceline.v1 import common_pb2, kv_pb2, kv_pb2_grpc, worker_pb2
from tests.support.fake_router import (
    Attachment,
    begin_split,
    make_embedding,
    make_request,
    make_ticket,
    run_split,
    token,
)
from tests.support.waits import wait_for
from tests.support.worker_pair import Workers, is_free, workers
from tests.support.workers import flip_a_byte

TRANSPORTS = ("shm", "tcp")
STEP_S = 0.004


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """Named after how decode reads: by shm or by tcp."""
    decodes: dict[str, dict[str, object]] = {name: {"transports": name} for name in TRANSPORTS}
    folder = tmp_path_factory.mktemp("workers")
    yield from workers(folder, decodes, max_position_embeddings=2048, step_s=STEP_S)


def prompt(length: int, seed: int) -> list[int]:
    return [random.Random(seed).randrange(256) for _ in range(length)]


@pytest.mark.parametrize("end", ["", "let go", "time", "stream"])
async def test_a_prompt_is_kept_until_its_router_lets_it_go(deployment: Workers, end: str) -> None:
    """Beside more tokens than the pool holds, which is what its end lets in."""
    tokens, num_pool = prompt(200, 7000 + len(end)), 16 * 1024
    keep_ms = 100 if end == "time" else 20_000
    async with deployment.attached("shm") as pair, Attachment(pair.prefill.endpoint) as other:
        request = make_request(other.info, tokens, max_tokens=2)
        ticket = make_ticket(request, other.info, pair.decode.info)
        kept = other.prefill(request, ticket, keep_ms=keep_ms)
        await kept.until_emitted(1)
        other.cancel(kept)
        await kept.until_ended()
        if end == "let go":
            other.send(let_go=worker_pb2.LetGo(slot=other.slot_of(kept)))
        elif end == "time":
            await asyncio.sleep(0.3)
        elif end == "stream":
            await other.__aexit__()
        for i in range(1 + num_pool // 1000):
            filler = make_request(pair.decode.info, prompt(1000, 5000 + i), max_tokens=1)
            await pair.prefill.run(filler).until_ended()
        again = make_request(pair.decode.info, tokens, max_tokens=1)
        log = await pair.prefill.run(again).until_ended()
    assert log.emissions[0].num_cached_tokens == (0 if end else 192)


async def test_a_whole_request_emits_every_position_once(deployment: Workers) -> None:
    async with deployment.attached("shm") as pair:
        request = make_request(pair.decode.info, prompt(50, 1), max_tokens=12, ignore_eos=True)
        log = await pair.decode.run(request).until_ended()
    assert len(log.output()) == 12
    assert log.finishes == {0: common_pb2.FINISH_REASON_LENGTH}
    assert log.emissions[0].position == 0
    assert log.emissions[0].emitted_unix_us > (time.time() - 30) * 1e6


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 48, 333])
async def test_a_split_request_equals_a_whole_one(
    deployment: Workers, transport: str, length: int
) -> None:
    """The mock model hashes the KV that it reads: one wrong byte changes every later token."""
    async with deployment.attached(transport) as pair:
        tokens = prompt(length, 100 + length + 1000 * TRANSPORTS.index(transport))
        request = make_request(pair.decode.info, tokens, max_tokens=9, ignore_eos=True)
        split = await run_split(pair.prefill, pair.decode, request)
        whole = await pair.prefill.run(request).until_ended()
    assert split.decode.error is None
    assert split.output() == whole.output()
    assert len(split.output()) == 9
    assert split.decode.emissions[0].position == 1


async def test_bytes_travel_by_the_transport_that_was_asked_for(deployment: Workers) -> None:
    for transport in TRANSPORTS:
        label = f'paceline_transfer_bytes_total{{transport="{transport}"}}'
        worker = deployment.by_name[transport]
        before = worker.metric(label)
        async with deployment.attached(transport) as pair:
            request = make_request(pair.decode.info, prompt(64, 9), max_tokens=3)
            await run_split(pair.prefill, pair.decode, request)
        assert worker.metric(label) >= before + 4 * pair.decode.info.page_bytes


async def test_what_decode_has_cached_is_not_pulled_again(deployment: Workers) -> None:
    async with deployment.attached("shm") as pair:
        tokens = prompt(100, 3)
        first = make_request(pair.decode.info, tokens, max_tokens=4, ignore_eos=True)
        await run_split(pair.prefill, pair.decode, first)
        longer = make_request(pair.decode.info, tokens + [7] * 30, max_tokens=6, ignore_eos=True)
        split = await run_split(pair.prefill, pair.decode, longer)
        whole = await pair.prefill.run(longer).until_ended()
    assert split.decode.reserved is not None
    assert split.decode.reserved.num_cached_tokens == 96
    assert split.prefill.emissions[0].num_cached_tokens == 96
    assert split.output() == whole.output()


async def test_all_choices_start_from_one_prefill(deployment: Workers) -> None:
    async with deployment.attached("tcp") as pair:
        sampling = {"n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 8, "ignore_eos": True}
        request = make_request(pair.decode.info, prompt(70, 4), **sampling)
        split = await run_split(pair.prefill, pair.decode, request)
        whole = await pair.prefill.run(request).until_ended()
    outputs = [split.output(choice) for choice in range(3)]
    assert outputs == [whole.output(choice) for choice in range(3)]
    assert len({tuple(output) for output in outputs}) == 3


async def test_a_stop_on_the_first_token_ends_both_sides(deployment: Workers) -> None:
    async with deployment.attached("shm") as pair:
        tokens = prompt(40, 6)
        probe = await pair.prefill.run(make_request(pair.prefill.info, tokens)).until_ended()
        stops = (probe.output()[0],)
        request = make_request(pair.decode.info, tokens, max_tokens=9, stop_token_ids=stops)
        split = await run_split(pair.prefill, pair.decode, request)
    assert split.output() == list(stops)
    assert split.prefill.finishes == {0: common_pb2.FINISH_REASON_STOP}
    assert split.decode.error is None


async def test_a_continued_request_forces_what_was_emitted(deployment: Workers) -> None:
    """After a re-plan: prompt and token log go in, the next position comes out."""
    async with deployment.attached("shm") as pair:
        tokens = prompt(60, 8)
        request = make_request(pair.decode.info, tokens, max_tokens=12, ignore_eos=True)
        whole = (await pair.prefill.run(request).until_ended()).output()
        again = make_request(
            pair.decode.info,
            tokens + whole[:5],
            num_prompt_tokens=60,
            max_tokens=12,
            ignore_eos=True,
        )
        split = await run_split(pair.prefill, pair.decode, again)
    assert split.prefill.emissions[0].position == 5
    assert split.output() == whole[5:]


async def test_cancel_at_any_moment_leaves_nothing(deployment: Workers) -> None:
    """R013, R031: whoever cancels, whenever, on either side, all pages come back.

    https://github.com/llm-d/llm-d/pull/1138, https://github.com/ROCm/ATOM/pull/1562
    """
    moments = random.Random(11)
    async with deployment.attached("tcp") as pair:
        for round_ in range(12):
            request = make_request(
                pair.decode.info, prompt(300, 50 + round_), max_tokens=500, ignore_eos=True
            )
            split = await begin_split(pair.prefill, pair.decode, request)
            await asyncio.sleep(moments.random() * 0.05)
            started = time.monotonic()
            pair.prefill.cancel(split.prefill)
            pair.decode.cancel(split.decode)
            await asyncio.gather(split.prefill.until_ended(5), split.decode.until_ended(5))
            assert time.monotonic() - started < 0.25 + 0.5  # 250 ms; the rest is a busy machine


async def test_prefill_lets_go_when_decode_never_comes(deployment: Workers) -> None:
    """R005: a hop that refuses before it adopts must not strand prefill's pages.

    https://github.com/vllm-project/vllm/pull/41269
    """
    async with deployment.attached("shm") as pair:
        request = make_request(pair.decode.info, prompt(90, 12), max_tokens=5, ignore_eos=True)
        log = await pair.decode.reserve(request, hold_ms=100).until_ended()
        assert isinstance(log.error, KvUnavailable)
        ticket = make_ticket(request, pair.prefill.info, pair.decode.info)
        held = await pair.prefill.prefill(request, ticket).until_emitted(1)
        assert not held.ended
        revoke = worker_pb2.Revoke(request_id=request.request_id, attempt=ticket.attempt)
        pair.prefill.send(revoke=revoke)
        await held.until_ended(1)
        await asyncio.to_thread(wait_for, lambda: is_free(deployment.by_name["prefill"]), 1)
        again = make_request(pair.decode.info, prompt(90, 13), max_tokens=5, ignore_eos=True)
        ticket = make_ticket(again, pair.prefill.info, pair.decode.info, lifetime_s=0.3)
        held = await pair.prefill.prefill(again, ticket).until_ended(3)
    assert isinstance(held.error, KvUnavailable)  # nobody followed: the ticket ran out


async def test_vllm_41269_two_hundred_refusals_in_a_row_strand_no_page(
    deployment: Workers,
) -> None:
    """https://github.com/vllm-project/vllm/pull/41269: decode refuses each before it is queued."""
    prefill = deployment.by_name["prefill"]
    async with deployment.attached("shm") as pair:
        for i in range(200):
            request = make_request(pair.decode.info, prompt(90, 1000 + i), max_tokens=5)
            ticket = make_ticket(request, pair.prefill.info, pair.decode.info)
            held = await pair.prefill.prefill(request, ticket).until_emitted(1)
            pair.prefill.send(
                revoke=worker_pb2.Revoke(request_id=request.request_id, attempt=ticket.attempt)
            )
            await held.until_ended(1)
        assert await asyncio.to_thread(wait_for, lambda: is_free(prefill), 1) < 1


async def test_a_router_that_leaves_frees_its_requests(deployment: Workers) -> None:
    worker = deployment.by_name["shm"]
    async with Attachment(worker.endpoint) as router:
        logs = [
            router.run(make_request(router.info, prompt(40, 20 + i), max_tokens=1500))
            for i in range(8)
        ]
        await asyncio.gather(*(log.until_emitted(1) for log in logs))
    assert await asyncio.to_thread(wait_for, lambda: is_free(worker), 3) < 2


async def test_a_silent_router_loses_its_stream(deployment: Workers) -> None:
    worker = deployment.by_name["shm"]
    async with Attachment(worker.endpoint, beats=False) as router:
        log = router.run(make_request(router.info, prompt(40, 30), max_tokens=2000))
        await log.until_emitted(1)
        async with asyncio.timeout(4):
            await router.closed.wait()
        await asyncio.to_thread(wait_for, lambda: is_free(worker), 3)


async def test_time_that_is_over_ends_a_request(deployment: Workers) -> None:
    async with deployment.attached("shm") as pair:
        request = make_request(
            pair.decode.info, prompt(40, 31), max_tokens=1500, ignore_eos=True, budget_ms=150
        )
        log = await pair.decode.run(request).until_ended(3)
    assert isinstance(log.error, DeadlineExceeded)
    assert log.output()


async def test_one_choice_can_be_cancelled(deployment: Workers) -> None:
    async with deployment.attached("shm") as pair:
        sampling = {"n": 2, "temperature": 1.0, "max_tokens": 60, "ignore_eos": True}
        log = pair.decode.run(make_request(pair.decode.info, prompt(30, 32), **sampling))
        await log.until_emitted(4)
        pair.decode.cancel(log, [1])
        await log.until_ended()
    assert len(log.output(0)) == 60
    assert len(log.output(1)) < 60


async def test_choices_cancelled_one_by_one_end_a_pull(deployment: Workers) -> None:
    """The last of them ends the slot like a cancel of all: not before the copy has ended."""
    async with deployment.attached("tcp") as pair:
        request = make_request(pair.decode.info, prompt(1500, 37), n=2, temperature=1.0)
        split = await begin_split(pair.prefill, pair.decode, request)
        for choice in (0, 1, 1):
            pair.decode.cancel(split.decode, [choice])
            pair.prefill.cancel(split.prefill, [choice])
        await split.decode.until_ended(2)
        await split.prefill.until_ended(2)
        assert split.decode.error is None
        assert not split.decode.emissions


async def test_a_choice_cancelled_before_the_record_leaves_the_other(deployment: Workers) -> None:
    async with deployment.attached("shm") as pair:
        sampling = {"n": 2, "temperature": 1.0, "seed": 3, "max_tokens": 6, "ignore_eos": True}
        request = make_request(pair.decode.info, prompt(900, 38), **sampling)
        split = await begin_split(pair.prefill, pair.decode, request)
        pair.decode.cancel(split.decode, [0])
        pair.prefill.cancel(split.prefill, [0])
        await asyncio.gather(split.prefill.until_ended(), split.decode.until_ended())
        whole = await pair.prefill.run(request).until_ended()
    assert split.decode.error is None
    assert split.output(1) == whole.output(1)
    assert 0 not in split.decode.tokens


async def test_refused_requests_name_their_field_and_disturb_nothing(deployment: Workers) -> None:
    async with deployment.attached("shm") as pair:
        info, decode = pair.decode.info, pair.decode
        good = decode.run(make_request(info, prompt(30, 33), max_tokens=30, ignore_eos=True))
        cases: list[tuple[common_pb2.TokenRequest, type[Exception], str]] = []
        outside = make_request(info, [1, 2, info.vocab_size])
        cases.append((outside, InvalidRequest, "token_ids"))
        cases.append((make_request(info, []), InvalidRequest, "token_ids"))
        long = make_request(info, [1] * info.context_length)
        cases.append((long, ContextLengthExceeded, "token_ids"))
        nan = make_request(info, [1, 2])
        nan.sampling.temperature = float("nan")
        cases.append((nan, InvalidRequest, "temperature"))
        keyless = make_request(info, [1, 2])
        keyless.root_key = b"short"
        cases.append((keyless, InvalidRequest, "root_key"))
        other = make_request(info, [1, 2])
        other.model = "another"
        cases.append((other, ModelNotFound, ""))
        twice = make_request(info, [1, 2], n=2, choices=[1, 1])
        cases.append((twice, InvalidRequest, "choices"))
        for request, kind, field in cases:
            log = await decode.run(request).until_ended(5)
            assert isinstance(log.error, kind), (field, log.error)
            assert (log.error.field or "") == field  # type: ignore[attr-defined]
        await good.until_ended()
    assert len(good.output()) == 30


@pytest.mark.parametrize("pooling", Pooling)
async def test_an_embedding_is_one_emission_of_a_prefill_worker(
    deployment: Workers, pooling: Pooling
) -> None:
    """Of as many tokens as the context holds, beside a stream that goes on. The mock model's mean
    takes long."""
    async with deployment.attached("shm") as pair:
        info = pair.prefill.info
        num_tokens = info.context_length if pooling is Pooling.LAST else 208
        asked = make_request(info, prompt(30, 35), max_tokens=40, ignore_eos=True)
        embedded = make_embedding(info, prompt(num_tokens, 36), pooling)
        stream, log = pair.prefill.run(asked), pair.prefill.run(embedded)
        await asyncio.gather(stream.until_ended(), log.until_ended())
        again = await pair.prefill.run(embedded).until_ended()
        left = pair.prefill.run(make_embedding(info, prompt(num_tokens, 37), pooling))
        pair.prefill.cancel(left)
        await left.until_ended()
    assert len(stream.output()) == 40
    (first,), (second,) = log.emissions, again.emissions
    assert first.finish == common_pb2.FINISH_REASON_STOP and not first.token_ids
    vectors = [np.frombuffer(one.embedding, "<f4") for one in (first, second)]
    assert vectors[0].shape == (info.hidden_size,)
    np.testing.assert_allclose(*vectors, rtol=1e-5)  # chunks may have been cut elsewhere
    hits = num_tokens - 16 if pooling is Pooling.LAST else 0
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, hits)
    assert not left.emissions


async def test_no_worker_takes_an_embedding_over(deployment: Workers) -> None:
    async with deployment.attached("shm") as pair:
        request = make_embedding(pair.decode.info, prompt(30, 38), Pooling.LAST)
        ticket = make_ticket(request, pair.prefill.info, pair.decode.info)
        for log in (pair.decode.reserve(request), pair.prefill.prefill(request, ticket)):
            await log.until_ended(5)
            assert isinstance(log.error, InvalidRequest) and log.error.field == "pooling"


async def test_a_ticket_that_is_not_ours_is_refused(deployment: Workers) -> None:
    async with deployment.attached("shm") as pair:
        request = make_request(pair.decode.info, prompt(30, 34))
        forged = make_ticket(request, pair.prefill.info, pair.decode.info)
        forged.expires_unix_ms += 1
        log = await pair.prefill.prefill(request, forged).until_ended(5)
        stale = make_ticket(request, pair.decode.info, pair.decode.info)
        old = await pair.prefill.prefill(request, stale).until_ended(5)
    assert isinstance(log.error, KvUnavailable) and log.error.field == "ticket.signature"
    assert isinstance(old.error, KvUnavailable)


async def test_wrong_bytes_at_the_source_are_found_and_dropped(deployment: Workers) -> None:
    """Verification on the reading side is the authority; the source hashes its page again."""
    source = deployment.by_name["prefill"]
    async with Attachment(deployment.by_name["shm"].endpoint) as other:
        request = make_request(other.info, prompt(80, 36), max_tokens=6, ignore_eos=True)
        expected = (await other.run(request).until_ended()).output()
    async with deployment.attached("tcp") as pair:
        first = make_request(pair.prefill.info, request.token_ids, max_tokens=1)
        await pair.prefill.run(first).until_ended()
        page = await page_of_block(pair.prefill, request, 2)
        flip_a_byte(source.pid, page * pair.prefill.info.page_bytes + 5)
        reported = source.metric("paceline_mismatches_reported_total")
        wrong = await begin_split(pair.prefill, pair.decode, request)
        await wrong.decode.until_ended()
        pair.prefill.cancel(wrong.prefill)
        assert isinstance(wrong.decode.error, KvUnavailable)
        assert not wrong.decode.emissions
        assert source.metric("paceline_mismatches_reported_total") > reported
        reader = deployment.by_name["tcp"]
        cause = 'paceline_mismatch_causes_total{cause="source"}'
        await asyncio.to_thread(wait_for, lambda: reader.metric(cause) == 1, 3)
        assert reader.metric("paceline_mismatch_causes_total") == 1
        assert reader.metric("paceline_peers_quarantined") == 0, "for one page nobody is"
        await wrong.prefill.until_ended()
        request.request_id += "-again"
        again = await run_split(pair.prefill, pair.decode, request)
    assert again.output() == expected


async def test_what_the_reader_lacks_is_pinned_with_the_record(deployment: Workers) -> None:
    """It is there with the last event of Progress; what is copied by it needs no Pin."""
    async with deployment.attached("shm") as pair:
        request = make_request(pair.decode.info, prompt(1000, 39), max_tokens=3, ignore_eos=True)
        ticket = make_ticket(request, pair.prefill.info, pair.decode.info)
        asked = kv_pb2.ProgressRequest(ticket=ticket, first_blocks=[50])
        async with connect(pair.prefill.endpoint) as channel:
            stub = kv_pb2_grpc.KvTransferServiceStub(channel)  # type: ignore[no-untyped-call]
            following = asyncio.create_task(all_of(stub.Progress(asked, metadata=token())))
            await asyncio.sleep(0.3)  # the reader waits for the hand-off
            pair.prefill.prefill(request, ticket)
            events = await following
            rest = events[-1].rest
            unpin = kv_pb2.UnpinRequest(ticket=ticket, lease_id=rest.lease_id, complete=True)
            await stub.Unpin(unpin, metadata=token())
    assert not any(event.rest.lease_id for event in events[:-1])
    assert [len(run.pages) for run in rest.runs] == [12]  # 62 full blocks
    assert (len(rest.tails), rest.num_tail_tokens) == (1, 8)


async def all_of(
    call: "grpc.aio.UnaryStreamCall[kv_pb2.ProgressRequest, kv_pb2.ProgressEvent]",
) -> list[kv_pb2.ProgressEvent]:
    return [event async for event in call]


async def page_of_block(source: Attachment, request: common_pb2.TokenRequest, block: int) -> int:
    keys = chain_keys(request.root_key, request.token_ids)
    ticket = make_ticket(request, source.info, source.info)
    pin = kv_pb2.PinRequest(ticket=ticket, runs=[kv_pb2.KeyRun(keys=b"".join(keys))])
    async with connect(source.endpoint) as channel:
        stub = kv_pb2_grpc.KvTransferServiceStub(channel)  # type: ignore[no-untyped-call]
        pinned = await stub.Pin(pin, metadata=token())
        unpin = kv_pb2.UnpinRequest(ticket=ticket, lease_id=pinned.lease_id)
        await stub.Unpin(unpin, metadata=token())
    page: int = pinned.runs[0].pages[block].page
    return page


async def test_each_role_takes_its_own_commands(deployment: Workers) -> None:
    async with deployment.attached("shm") as pair:
        request = make_request(pair.decode.info, prompt(30, 35))
        ticket = make_ticket(request, pair.prefill.info, pair.decode.info)
        wrong = await pair.decode.prefill(request, ticket).until_ended(5)
        also = await pair.prefill.reserve(request).until_ended(5)
    assert isinstance(wrong.error, Unavailable)
    assert isinstance(also.error, Unavailable)
