"""Prefill and decode workers on one device, and on two: KV goes by cuda_ipc, from rank to rank."""

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.fake_router import make_request, run_split
from tests.support.tiny_families import write_tiny_family
from tests.support.waits import wait_for
from tests.support.worker_pair import Workers, is_free, workers, workers_on
from tests.support.workers import WorkerProcess

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ON_DEVICE: dict[str, object] = {"device": "cuda", "dtype": "float32", "pool_mib": 64}
PULLED = 'paceline_transfer_bytes_total{transport="cuda_ipc"}'


TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.fixture(scope="module", params=["cuda:0", pytest.param("cuda:1", marks=TWO)])
def deployment(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Workers]:
    """Prefill on the first device, decode on that of the parameter."""
    folder = tmp_path_factory.mktemp("workers")
    decode = {**ON_DEVICE, "device": request.param}
    yield from workers(folder, {"decode": decode}, ON_DEVICE, max_position_embeddings=2048)


@pytest.fixture
def windowed(tmp_path: Path) -> Iterator[Workers]:
    write_tiny_family("gemma3", tmp_path)
    yield from workers_on(tmp_path, {"decode": ON_DEVICE}, ON_DEVICE)


def prompt(length: int, vocab_size: int = 256) -> list[int]:
    return [random.Random(length).randrange(2, vocab_size) for _ in range(length)]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 48, 333, 1500])
async def test_a_split_request_equals_a_whole_one(deployment: Workers, length: int) -> None:
    """The mock model hashes the KV that it reads: one wrong byte changes every later token."""
    before = deployment.by_name["decode"].metric(PULLED)
    async with deployment.attached("decode") as pair:
        request = make_request(pair.decode.info, prompt(length), max_tokens=9, ignore_eos=True)
        split = await run_split(pair.prefill, pair.decode, request)
        whole = await pair.prefill.run(request).until_ended()
        page_bytes = pair.decode.info.page_bytes
    assert split.decode.error is None
    assert split.output() == whole.output()
    assert len(split.output()) == 9
    pulled = deployment.by_name["decode"].metric(PULLED) - before
    assert pulled == page_bytes * length / 16


async def test_a_family_with_windows(windowed: Workers) -> None:
    async with windowed.attached("decode") as pair:
        request = make_request(pair.decode.info, prompt(77, 60), max_tokens=9, ignore_eos=True)
        split = await run_split(pair.prefill, pair.decode, request)
        whole = await pair.prefill.run(request).until_ended()
    assert split.decode.error is None
    assert split.output() == whole.output()


async def test_a_killed_source_leaves_the_reader_whole(deployment: Workers) -> None:
    """kill -9 of the prefill rank: its successor gets its memory, and splits go on."""
    prefill, decode = deployment.by_name["prefill"], deployment.by_name["decode"]
    (old,) = prefill.rank_pids()
    (reader,) = decode.rank_pids()
    os.kill(old, signal.SIGKILL)
    started = time.monotonic()
    wait_for(lambda: not prefill.not_ready() and rank_of(prefill) != old, 60)
    print(f"ready again after {time.monotonic() - started:.1f} s")
    assert rank_of(decode) == reader
    async with deployment.attached("decode") as pair:
        request = make_request(pair.decode.info, prompt(100), max_tokens=5, ignore_eos=True)
        split = await run_split(pair.prefill, pair.decode, request)
        whole = await pair.prefill.run(request).until_ended()
    assert split.decode.error is None
    assert split.output() == whole.output()
    assert is_free(decode)


def rank_of(worker: WorkerProcess) -> int:
    return next(iter(worker.rank_pids()), 0)
