"""Holders of a prefix that die, hang, restart and evict between a hint and its pull.

Tokens are those of an engine alone: the mock model hashes the KV that it reads.
"""

import asyncio
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from paceline.v1 import kv_pb2
from paceline.worker.prefix_offers import AVOID_S
from tests.support.end_to_end import Alone
from tests.support.fake_router import Attachment, Hints, make_hint, make_request, run_split
from tests.support.kv_proxy import KvProxy, Lost, Seam
from tests.support.mock_model import write_mock_model
from tests.support.waits import wait_for
from tests.support.worker_pair import FAST, is_free
from tests.support.workers import WorkerProcess, start_worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

TOKEN_S = 0.002  # of a prompt
LENGTH = 160
COMPUTE_S = TOKEN_S * LENGTH

Edit = Callable[[kv_pb2.PinResponse], None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mock_model(tmp_path_factory.mktemp("pulls") / "model", token_s=TOKEN_S)


@pytest.fixture(scope="module")
def alone(model: Path) -> Alone:
    return Alone(write_mock_model(model.parent / "fast"))


@contextmanager
def pair(model: Path, **decode: object) -> Iterator[tuple[WorkerProcess, WorkerProcess]]:
    """A prefill worker that reads, and a decode worker that holds."""
    reader = start_worker("prefill", model, **FAST)
    holder = start_worker("decode", model, **{**FAST, **decode})
    try:
        for worker in (reader, holder):
            worker.wait_until_ready()
        yield reader, holder
    finally:
        holder.stop()
        assert reader.stop() == 0


def text(length: int = LENGTH) -> list[int]:
    chance = Random(secrets.randbits(64))
    return [chance.randrange(256) for _ in range(length)]


async def ask(
    worker: Attachment, tokens: list[int], holder: Attachment | None = None, endpoint: str = ""
) -> tuple[list[int], int, float]:
    """Its output, what of the prompt was not computed, and how long it took. With a hint that
    `holder` has all of it, at another `endpoint` if need be."""
    request = make_request(worker.info, tokens, max_tokens=6, ignore_eos=True)
    hints: Hints = [] if holder is None else [make_hint(request, holder, worker)]
    for hint in hints:
        hint.source_endpoint = endpoint or hint.source_endpoint
    started = time.monotonic()
    log = await worker.run(request, hints).until_ended()
    took_s = time.monotonic() - started
    assert log.error is None
    return log.output(), log.emissions[0].num_cached_tokens, took_s


def result(worker: WorkerProcess, name: str) -> float:
    return worker.metric(f'paceline_prefix_tokens_total{{result="{name}"}}')


async def free(*workers: WorkerProcess) -> None:
    """Within the 8 s that a dead link may keep pages."""
    for worker in workers:
        await asyncio.to_thread(wait_for, lambda worker=worker: is_free(worker), 8)


async def test_a_holder_that_is_stopped_costs_what_computing_takes(
    model: Path, alone: Alone
) -> None:
    with pair(model) as (reader, holder):
        async with Attachment(reader.endpoint) as sink, Attachment(holder.endpoint) as source:
            await ask(sink, text())  # by now it knows how fast it computes
            linked, stopped = text(), text()
            for tokens in (linked, stopped):
                await ask(source, tokens)
            assert (await ask(sink, linked, source))[1] > 0
            os.kill(holder.pid, signal.SIGSTOP)
            output, num_cached, took_s = await ask(sink, stopped, source)
            os.kill(holder.pid, signal.SIGCONT)
            assert [output] == alone.answer(stopped, max_tokens=6, temperature=0, ignore_eos=True)
            assert num_cached == 0 and result(reader, "late") == LENGTH - 16
            assert took_s < 2 * COMPUTE_S + 1
        await free(reader, holder)


async def test_a_holder_that_is_killed_costs_a_miss(model: Path, alone: Alone) -> None:
    with pair(model) as (reader, holder):
        async with Attachment(reader.endpoint) as sink, Attachment(holder.endpoint) as source:
            await ask(sink, text())
            prompts = [text() for _ in range(4)]
            for tokens in prompts:
                await ask(source, tokens)
            assert (await ask(sink, prompts[0], source))[1] > 0
            asking = [asyncio.create_task(ask(sink, p, source)) for p in prompts[1:]]
            await asyncio.sleep(0.003)
            os.kill(holder.pid, signal.SIGKILL)
            for tokens, task in zip(prompts[1:], asking, strict=True):
                output, _, took_s = await task
                expected = alone.answer(tokens, max_tokens=6, temperature=0, ignore_eos=True)
                assert [output] == expected
                assert took_s < 2 * 3 * COMPUTE_S + 1  # one after the other
        await free(reader)


async def test_what_was_evicted_between_hint_and_pin_is_computed(model: Path, alone: Alone) -> None:
    with pair(model, pool_mib=1) as (reader, holder):
        async with Attachment(reader.endpoint) as sink, Attachment(holder.endpoint) as source:
            await ask(sink, text())
            held, evicted = text(), text()
            await ask(source, evicted)
            for _ in range(3):  # the pool has 256 pages of 16 tokens
                await ask(source, text(1500))
            await ask(source, held)
            for tokens, expected in ((held, LENGTH - 16), (evicted, 0)):
                output, num_cached, _ = await ask(sink, tokens, source)
                assert num_cached == expected
                assert [output] == alone.answer(
                    tokens, max_tokens=6, temperature=0, ignore_eos=True
                )
            assert result(reader, "missing") == LENGTH - 16
        await free(reader, holder)


async def test_smg_2382_a_rank_that_restarts_voids_its_hints(model: Path, alone: Alone) -> None:
    """https://github.com/smg-project/smg/issues/2382: readers keep the state of a source that has
    restarted at the same address. Here the next pulls from it succeed without a restart of ours."""
    with pair(model) as (reader, holder):
        async with Attachment(reader.endpoint) as sink:
            await ask(sink, text())
            tokens = text()
            async with Attachment(holder.endpoint) as source:
                await ask(source, tokens)
                old = source.info.incarnation
                assert (await ask(sink, tokens, source))[1] > 0
                os.kill(holder.rank_pids()[0], signal.SIGKILL)
                stale = text()
                output, num_cached, _ = await ask(sink, stale, source)
                assert num_cached == 0
                expected = alone.answer(stale, max_tokens=6, temperature=0, ignore_eos=True)
                assert [output] == expected
            await asyncio.to_thread(wait_for, lambda: bool(holder.not_ready()))
            await asyncio.to_thread(holder.wait_until_ready)
            async with Attachment(holder.endpoint) as source:
                assert source.info.incarnation != old
                for _ in range(20):
                    tokens = text()
                    await ask(source, tokens)
                    output, num_cached, _ = await ask(sink, tokens, source)
                    assert num_cached == LENGTH - 16
        await free(reader, holder)


async def test_lmcache_1133_processes_of_other_hash_seeds_find_each_others_blocks(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """https://github.com/LMCache/LMCache/pull/1133: names depended on PYTHONHASHSEED; decode hit
    nothing and what was delivered stayed for ever. Of 200 requests all that one side has is
    found by the other, in both directions, and nothing is held afterwards."""
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    prefill = start_worker("prefill", model, **FAST)
    monkeypatch.setenv("PYTHONHASHSEED", "2")
    decode = start_worker("decode", model, **FAST)
    try:
        for worker in (prefill, decode):
            worker.wait_until_ready()
        async with Attachment(prefill.endpoint) as source, Attachment(decode.endpoint) as reader:
            await ask(source, text())
            for _ in range(200):
                tokens = text(90)
                request = make_request(reader.info, tokens, max_tokens=40, ignore_eos=True)
                split = await run_split(source, reader, request)
                assert split.decode.error is None
                said = tokens + split.output()
                again = make_request(reader.info, said, max_tokens=2)
                whole = await reader.run(again).until_ended()
                assert whole.emissions[0].num_cached_tokens == 128  # of 130
                assert (await ask(source, said, reader))[1] == 128
        await free(prefill, decode)
    finally:
        statuses = [worker.stop() for worker in (prefill, decode)]
    assert statuses == [0, 0]


class Fault(Seam):
    """What goes wrong between a reader and its source, once; `method` and `side` say where."""

    def __init__(self, method: str, side: str, result: str, edit: Edit | None = None) -> None:
        self.step = method, side
        self.result = result  # of the pull
        self.edit = edit  # of the message; None: it is lost
        self.is_over = False

    async def asked(self, method: str, request: Any) -> None:
        await self._pass(method, "asked", request)

    async def answered(self, method: str, answer: Any) -> None:
        await self._pass(method, "answered", answer)

    async def _pass(self, method: str, side: str, message: Any) -> None:
        if self.is_over or (method, side) != self.step:
            return
        self.is_over = True
        if self.edit is None:
            raise Lost
        self.edit(message)


def promise_other_bytes(pinned: kv_pb2.PinResponse) -> None:
    pinned.runs[0].pages[2].checksums[0] += 1


def promise_more(pinned: kv_pb2.PinResponse) -> None:
    pinned.runs[0].pages.add().CopyFrom(pinned.runs[0].pages[0])


def promise_pages_that_do_not_exist(pinned: kv_pb2.PinResponse) -> None:
    pinned.runs[0].pages[1].page = 1 << 30


FAULTS = [
    Fault("Unpin", "asked", "pulled"),
    Fault("Unpin", "answered", "pulled"),
    Fault("Pin", "answered", "missing", promise_more),
    Fault("Pin", "answered", "missing", lambda pinned: pinned.ClearField("runs")),
    Fault("Pin", "asked", "failed"),
    Fault("Pin", "answered", "failed"),
    Fault("Pin", "answered", "failed", promise_other_bytes),
    Fault("Pin", "answered", "missing", promise_pages_that_do_not_exist),
]


async def test_any_step_of_a_pull_may_fail(model: Path, alone: Alone) -> None:
    """One thing goes wrong in each pull: tokens are right, and pages are free on both sides."""
    with pair(model) as (reader, holder):
        proxy = KvProxy(holder.endpoint, Seam())
        await proxy.start()
        endpoint = f"127.0.0.1:{proxy.port}"
        async with Attachment(reader.endpoint) as sink, Attachment(holder.endpoint) as source:
            await ask(sink, text())
            for fault in FAULTS:
                tokens = text()
                await ask(source, tokens)
                before = result(reader, fault.result)
                proxy.seam = fault
                output, num_cached, _ = await ask(sink, tokens, source, endpoint)
                expected = alone.answer(tokens, max_tokens=6, temperature=0, ignore_eos=True)
                assert [output] == expected, fault.step
                assert fault.is_over and result(reader, fault.result) - before == LENGTH - 16
                assert num_cached == (LENGTH - 16 if fault.result == "pulled" else 0)
                await free(reader, holder)
                if fault.result == "failed":
                    await asyncio.sleep(AVOID_S)
        await proxy.close()
