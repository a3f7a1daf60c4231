"""Workers that meet: links made and measured before a request, and canaries that differ."""

import asyncio
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from paceline.core.errors import IncompatiblePeer
from paceline.models.manifest import weights_digest
from tests.support.fake_router import Attachment, begin_split, make_request, run_split
from tests.support.mock_model import byte_tokenizer, write_mock_model
from tests.support.redis_server import redis_server
from tests.support.tiny_models import write_tiny_llama
from tests.support.waits import wait_for
from tests.support.worker_pair import FAST
from tests.support.workers import WorkerProcess, flip_a_byte, probe, start_worker


def readiness(worker: WorkerProcess) -> str:
    """What /readyz says."""
    return probe(worker.probe_port, "/readyz", 0)


def ended(*workers: WorkerProcess) -> None:
    for worker in workers:
        worker.process.terminate()
    statuses = [worker.stop() for worker in workers]
    assert not any(statuses), statuses


async def test_registered_workers_have_measured_links_before_a_request(tmp_path: Path) -> None:
    """The reader's floor is far above any link: it stays ready, and says so."""
    model = write_mock_model(tmp_path / "model")
    with redis_server() as redis:
        given = {**FAST, "redis_url": redis.url}
        prefill = start_worker("prefill", model, worker_id="p", **given)
        decode = start_worker(
            "decode", model, worker_id="d", transports="tcp", link_floor_mb_s=1e7, **given
        )
        try:
            for worker in (prefill, decode):
                worker.wait_until_ready()
            tested = 'paceline_link_self_test_bytes_per_second{source="p",transport="tcp"}'
            wait_for(lambda: decode.metric(tested) > 0, 10)
            assert decode.metric("paceline_link_self_test_seconds") > 0
            wait_for(lambda: "ok\nlink from p by tcp: " in readiness(decode), 2)
            assert "MB/s, below 1e+07" in readiness(decode)
            assert decode.metric("paceline_links_degraded") == 1
            assert decode.metric("paceline_transfer_pieces_total") == 0, "no request was needed"
            speed_of_pulls = "paceline_transfer_link_bytes_per_second"
            assert not any(line.startswith(speed_of_pulls) for line in decode.metrics())
            wait_for(lambda: prefill.metric("paceline_link_self_test_bytes_per_second") > 0, 10)
            assert readiness(prefill) == "ok\n"
            async with Attachment(prefill.endpoint) as source, Attachment(decode.endpoint) as sink:
                request = make_request(sink.info, list(range(70)), max_tokens=4, ignore_eos=True)
                assert len((await run_split(source, sink, request)).output()) == 4
                wait_for(lambda: decode.metric(speed_of_pulls) > 0, 10)
        finally:
            ended(prefill, decode)


@pytest.fixture
def models_of_one_digest(tmp_path: Path) -> tuple[Path, Path]:
    """The second one's weights have changed behind its manifest."""
    first = write_tiny_llama(tmp_path / "first", vocab_size=64)
    byte_tokenizer(260).save(str(first / "tokenizer.json"))
    digest = weights_digest(first)
    second = tmp_path / "second"
    shutil.copytree(first, second)
    for path in second.glob("*.safetensors"):
        status = path.stat()
        weights = load_file(path)
        save_file({name: value * 1.3 for name, value in weights.items()}, path)
        assert path.stat().st_size == status.st_size
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert weights_digest(second) == digest
    return first, second


@pytest.fixture
def pair(models_of_one_digest: tuple[Path, Path]) -> Iterator[tuple[WorkerProcess, WorkerProcess]]:
    first, second = models_of_one_digest
    started = (start_worker("prefill", first, **FAST), start_worker("decode", second, **FAST))
    try:
        for worker in started:
            worker.wait_until_ready()
        yield started
    finally:
        ended(*started)


async def test_a_canary_that_differs_keeps_a_pair_apart(
    pair: tuple[WorkerProcess, WorkerProcess],
) -> None:
    """No page of a request is read, now or later; each worker serves what is computed on it."""
    prefill, decode = pair
    async with Attachment(prefill.endpoint) as source, Attachment(decode.endpoint) as sink:
        assert source.info.content_digest == sink.info.content_digest
        for attempt in range(2):
            tokens = [token % 60 + 2 for token in range(50 + attempt)]
            request = make_request(sink.info, tokens, max_tokens=4, ignore_eos=True)
            split = await begin_split(source, sink, request)
            await split.decode.until_ended(10)
            assert isinstance(split.decode.error, IncompatiblePeer)
            assert split.decode.error.field == "canary"
            source.cancel(split.prefill)
            await split.prefill.until_ended(10)
            whole = await sink.run(request).until_ended()
            assert len(whole.output()) == 4
    await asyncio.to_thread(wait_for, lambda: decode.metric("paceline_peers_apart") == 1, 3)
    assert "ok\nkept apart from prefill-" in readiness(decode)
    assert "canary: its KV differs from ours by" in readiness(decode)
    assert decode.metric("paceline_transfer_bytes_total") == 0


@pytest.mark.slow
async def test_sglang_23020_kv_that_drifts_raises_an_alarm(tmp_path: Path) -> None:
    """https://github.com/sgl-project/sglang/issues/23020: a byte of the reader's memory changes, no
    page arrives wrong. Here within 30 beats of 0.2 s, by default of a second."""
    model = write_mock_model(tmp_path / "model")
    prefill = start_worker("prefill", model, worker_id="p", **FAST)
    decode = start_worker("decode", model, **FAST)
    try:
        for worker in (prefill, decode):
            worker.wait_until_ready()
        async with Attachment(prefill.endpoint) as source, Attachment(decode.endpoint) as sink:
            request = make_request(sink.info, list(range(70)), max_tokens=4, ignore_eos=True)
            assert len((await run_split(source, sink, request)).output()) == 4
            assert decode.metric("paceline_peers_apart") == 0
            pulled = decode.metric("paceline_transfer_bytes_total")
            canary = sink.info.num_pages * sink.info.page_bytes  # it follows the pages of requests
            flip_a_byte(decode.rank_pids()[0], canary + 3)
            await asyncio.to_thread(
                wait_for, lambda: decode.metric("paceline_peers_apart") == 1, 12
            )
            assert "kept apart from p: canary" in readiness(decode)
            again = make_request(sink.info, list(range(80)), max_tokens=4, ignore_eos=True)
            split = await begin_split(source, sink, again)
            await split.decode.until_ended(10)
            assert isinstance(split.decode.error, IncompatiblePeer)
            assert decode.metric("paceline_transfer_bytes_total") == pulled, "canaries do not count"
            source.cancel(split.prefill)
            await split.prefill.until_ended(10)
    finally:
        ended(prefill, decode)
