"""Workers that die, stall, freeze and drain, as real processes."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.core.errors import KvUnavailable, Unavailable
from paceline.core.pooling import Pooling
from tests.support.fake_router import (
    Attachment,
    begin_split,
    make_embedding,
    make_request,
    run_split,
)
from tests.support.mock_model import write_mock_model
from tests.support.waits import wait_beside
from tests.support.worker_pair import FAST, is_free, prompt
from tests.support.workers import WorkerProcess, start_worker, until_stopped

TOKEN_S = 0.001
FEW_PINS = 0.008  # 8 pages
# A chunk of a prompt takes 0.13 s; the pool has 1024 pages of 128 KiB.
SETTINGS = {**FAST, "max_batch_tokens": 128, "pool_mib": 128}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults") / "model"
    sizes = {"max_position_embeddings": 2048, "step_s": 0.002, "token_s": TOKEN_S}
    sizes |= {"num_hidden_layers": 8, "head_dim": 64}  # so large that pulls need not wait
    return write_mock_model(folder, **sizes)


@pytest.fixture(scope="module")
def workers(model: Path) -> Iterator[dict[str, WorkerProcess]]:
    """Two prefill workers, one of which is there to be killed, and two of decode."""
    started = {
        "prefill": start_worker("prefill", model, **SETTINGS),
        "victim": start_worker("prefill", model, **{**SETTINGS, "max_pinned_share": FEW_PINS}),
        "decode": start_worker("decode", model, **{**SETTINGS, "max_running": 4}),
        "leaver": start_worker("decode", model, **{**SETTINGS, "drain_timeout_s": 10}),
    }
    with until_stopped(started):
        yield started


async def test_a_killed_rank_is_noticed_and_replaced(workers: dict[str, WorkerProcess]) -> None:
    """R016, R082: unready at once, a new incarnation soon, peers shake hands anew.

    https://github.com/smg-project/smg/issues/2382
    https://github.com/vllm-project/vllm/issues/39863
    """
    prefill, decode = workers["prefill"], workers["decode"]
    async with Attachment(decode.endpoint) as reader:
        async with Attachment(prefill.endpoint) as source:
            request = make_request(reader.info, prompt(50, 1), max_tokens=5, ignore_eos=True)
            assert len((await run_split(source, reader, request)).output()) == 5
            old = source.info.incarnation
            running = source.run(make_request(source.info, prompt(40, 2), max_tokens=1500))
            await running.until_emitted(1)
            os.kill(prefill.rank_pids()[0], signal.SIGKILL)
            assert await wait_beside(prefill.not_ready, 1.0) < 1.0
            async with asyncio.timeout(2):
                await source.closed.wait()
        await asyncio.to_thread(prefill.wait_until_ready)
        async with Attachment(prefill.endpoint) as source:
            assert source.info.incarnation != old
            request = make_request(reader.info, prompt(70, 3), max_tokens=5, ignore_eos=True)
            split = await run_split(source, reader, request)
            whole = await reader.run(request).until_ended()
            assert split.output() == whole.output()
    await wait_beside(lambda: is_free(prefill) and is_free(decode), 5)
    assert num_pools_mapped_writable(prefill.pid) == 1, "the pool of the dead one is freed"


def num_pools_mapped_writable(pid: int) -> int:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return sum(" rw-s " in line and "memfd:paceline-kv" in line for line in lines)


async def test_a_stalled_rank_is_noticed_and_replaced(workers: dict[str, WorkerProcess]) -> None:
    """R082: with stall_s = 1.5 instead of 4. https://github.com/vllm-project/vllm/issues/39863"""
    prefill = workers["prefill"]
    stopped = prefill.rank_pids()[0]
    os.kill(stopped, signal.SIGSTOP)
    assert await wait_beside(prefill.not_ready, 4) < 2.5
    await wait_beside(lambda: prefill.rank_pids() and prefill.rank_pids() != [stopped], 6)
    await asyncio.to_thread(prefill.wait_until_ready)


async def test_pins_that_are_taken_delay_a_pull_and_fail_nothing(
    workers: dict[str, WorkerProcess],
) -> None:
    victim, decode = workers["victim"], workers["decode"]
    failures = decode.metric("paceline_transfer_failures_total")
    async with Attachment(victim.endpoint) as source, Attachment(decode.endpoint) as reader:
        request = make_request(reader.info, prompt(411, 10), max_tokens=5, ignore_eos=True)
        split = await run_split(source, reader, request)
        whole = await reader.run(request).until_ended()
    assert split.decode.error is None
    assert split.output() == whole.output()
    assert decode.metric("paceline_transfer_failures_total") == failures


async def test_a_source_killed_during_a_pull_costs_one_request(
    workers: dict[str, WorkerProcess],
) -> None:
    victim, decode = workers["victim"], workers["decode"]
    rank = victim.rank_pids()[0]
    before = decode.metric("paceline_transfer_pieces_total")
    async with Attachment(decode.endpoint) as reader:
        other = reader.run(make_request(reader.info, prompt(30, 5), max_tokens=300))
        async with Attachment(victim.endpoint) as source:
            request = make_request(reader.info, prompt(1500, 4), max_tokens=5, ignore_eos=True)
            split = await begin_split(source, reader, request)
            await wait_beside(lambda: decode.metric("paceline_transfer_pieces_total") > before, 5)
            os.kill(victim.pid, signal.SIGKILL)
            started = time.monotonic()
            await split.decode.until_ended(6)
            assert time.monotonic() - started < 2
        assert isinstance(split.decode.error, KvUnavailable)
        assert await wait_beside(lambda: not is_running(rank), 2) < 2  # it died with its front
        whole = await reader.run(request).until_ended()
        assert len(whole.output()) == 5
        assert whole.emissions[0].num_cached_tokens > 0  # what was pulled stays
        await other.until_ended()
        assert other.error is None
    await wait_beside(lambda: is_free(decode), 5)


async def test_a_reader_that_wakes_after_its_lease_never_emits_wrong_tokens(
    workers: dict[str, WorkerProcess],
) -> None:
    """R004: frozen in the middle of a pull, while the source's pages get another content.

    https://github.com/aws-samples/aws-do-eks/pull/84
    """
    prefill, decode = workers["prefill"], workers["decode"]
    async with Attachment(prefill.endpoint) as source:
        async with Attachment(decode.endpoint) as reader:
            request = make_request(reader.info, prompt(700, 6), max_tokens=20, ignore_eos=True)
            split = await begin_split(source, reader, request)
            await asyncio.sleep(0.3)
            os.kill(decode.pid, signal.SIGSTOP)
            frozen = time.monotonic()
            await split.prefill.until_ended(6)  # let go: its reader is silent
            assert time.monotonic() - frozen > 1.0
            fillers = [
                source.run(make_request(source.info, prompt(900, 60 + i), max_tokens=1))
                for i in range(3)
            ]
            await asyncio.gather(*(filler.until_ended() for filler in fillers))
            os.kill(decode.pid, signal.SIGCONT)
            async with asyncio.timeout(8):
                await reader.closed.wait()  # our beats went unread: it drops the work
        whole = await source.run(request).until_ended()
        expected = dict(enumerate(whole.output()))
        emitted = split.decode.tokens.get(0, {}).items()
        assert all(expected[position] == token for position, token in emitted)
        await wait_beside(lambda: not decode.not_ready(), 5)
        async with Attachment(decode.endpoint) as reader:
            again = await run_split(source, reader, make_request(reader.info, prompt(99, 7)))
            assert again.decode.error is None
    await wait_beside(lambda: is_free(prefill) and is_free(decode), 5)


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_vllm_53095_leases_outlast_a_queue_at_decode(tmp_path: Path) -> None:
    """R003: 128 requests of 512 tokens at once, of which decode runs 8, the others wait for more
    than 10 s; readers that are alive lose no lease of 2 s.

    https://github.com/vllm-project/vllm/issues/53095
    """
    model = write_mock_model(tmp_path / "model", step_s=0.012)
    settings = {**FAST, "silence_s": 2, "pool_mib": 48}
    started = {
        "prefill": start_worker("prefill", model, **settings),
        "decode": start_worker("decode", model, **{**settings, "max_running": 8}),
    }
    with until_stopped(started) as workers:
        prefill, decode = workers["prefill"], workers["decode"]
        async with Attachment(prefill.endpoint) as source, Attachment(decode.endpoint) as reader:
            requests = [
                make_request(
                    reader.info, prompt(512, i), max_tokens=64, ignore_eos=True, budget_ms=120_000
                )
                for i in range(128)
            ]
            began = time.monotonic()
            splits = await asyncio.gather(*(run_split(source, reader, r) for r in requests))
            assert time.monotonic() - began > 10
            assert [len(split.output()) for split in splits] == [64] * 128
            whole = await source.run(requests[-1]).until_ended()
            assert splits[-1].output() == whole.output()
        assert prefill.metric("paceline_leases_expired_total") == 0
        await wait_beside(lambda: is_free(prefill) and is_free(decode), 5)


async def test_a_drain_finishes_what_runs_and_refuses_what_comes(
    workers: dict[str, WorkerProcess],
) -> None:
    leaver = workers["leaver"]
    async with Attachment(leaver.endpoint) as router:
        request = make_request(router.info, prompt(30, 8), max_tokens=200, ignore_eos=True)
        log = await router.run(request).until_emitted(1)
        embedded = make_embedding(router.info, prompt(300, 8), Pooling.LAST)
        embedding = router.run(embedded)
        await asyncio.sleep(0.1)
        assert not embedding.ended
        leaver.process.send_signal(signal.SIGTERM)
        assert await wait_beside(leaver.not_ready, 1) < 1
        late = await router.run(make_request(router.info, prompt(30, 9))).until_ended(2)
        assert isinstance(late.error, Unavailable)
        busy = await router.reserve(make_request(router.info, prompt(30, 9))).until_ended(2)
        assert busy.busy is not None
        assert router.load.draining
        await asyncio.gather(log.until_ended(), embedding.until_ended())
        assert len(log.output()) == 200
        assert embedding.error is None and embedding.emissions[0].embedding
    assert await asyncio.to_thread(leaver.process.wait, 5) == 0


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
