"""Workers whose pool is too small for two prompts: the first one comes back from a tier."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from tests.support.fake_router import Attachment, make_request, run_split
from tests.support.mock_model import write_mock_model
from tests.support.object_store import BUCKET, CREDENTIALS, object_store
from tests.support.redis_server import redis_server
from tests.support.waits import wait_for
from tests.support.worker_pair import FAST, is_free
from tests.support.workers import WorkerProcess, start_worker

HOST = "- {kind: host, capacity_mib: 16, eviction: arc}\n"
LENGTH = 3000  # tokens; a pool of a MiB holds 4096
NUM_BLOCKS = LENGTH // 16
PAGE_BYTES = 4096
WINDOWED = {"num_hidden_layers": 4, "head_dim": 4, "layer_windows": [100, 0, 100, 0]}


def prompt(salt: int) -> list[int]:
    return [(i * 31 + salt * 17 + i // 7) % 251 for i in range(LENGTH)]


@contextmanager
def worker_of(
    role: str, folder: Path, tiers: str, model: dict[str, object] | None = None, **settings: object
) -> Iterator[WorkerProcess]:
    """One that is free of all that ran when it stops."""
    listed = folder / "tiers.yaml"
    listed.write_text(tiers)
    path = write_mock_model(folder / "model", **(model or {}))
    given = {**FAST, "pool_mib": 1, "tiers": listed, **settings}
    worker = start_worker(role, path, **given)
    try:
        worker.wait_until_ready()
        yield worker
        wait_for(lambda: is_free(worker))
    finally:
        status = worker.stop()
    assert status == 0


async def visit(worker: WorkerProcess, tokens: list[int]) -> tuple[list[int], int]:
    """Its output, and how many tokens of the prompt were cached."""
    async with Attachment(worker.endpoint) as router:
        request = make_request(router.info, tokens, max_tokens=6, ignore_eos=True)
        log = await router.run(request).until_ended()
    assert log.error is None
    return log.output(), log.emissions[0].num_cached_tokens


def await_stored(worker: WorkerProcess, num_pages: int, tier: str = "host") -> None:
    label = f'paceline_tier_stored_pages_total{{tier="{tier}"}}'
    wait_for(lambda: worker.metric(label) >= num_pages)


@pytest.mark.parametrize(
    ("model", "num_hits"),
    [({}, NUM_BLOCKS / 2), pytest.param(WINDOWED, NUM_BLOCKS / 4, marks=pytest.mark.slow)],
    ids=["full", "windows"],
)
async def test_the_second_visit_hits_the_host_tier(
    tmp_path: Path, model: dict[str, object], num_hits: float
) -> None:
    """The mock model hashes the KV that it reads: one wrong byte changes every later token."""
    with worker_of("decode", tmp_path, HOST, model) as worker:
        output, num_cached = await visit(worker, prompt(1))
        assert num_cached == 0
        await visit(worker, prompt(2))
        await_stored(worker, 2 * NUM_BLOCKS)
        assert await visit(worker, prompt(1)) == (output, NUM_BLOCKS * 16)
        assert worker.metric('paceline_tier_hits_total{tier="host"}') > num_hits
        assert worker.metric("paceline_tier_errors_total") == 0


@pytest.mark.slow
async def test_a_prefill_worker_hands_over_what_came_from_a_tier(tmp_path: Path) -> None:
    large = {"pool_mib": 8}
    with (
        worker_of("prefill", tmp_path, HOST) as source,
        worker_of("decode", tmp_path, HOST, **large) as reader,
    ):
        async with Attachment(source.endpoint) as prefill, Attachment(reader.endpoint) as decode:
            outputs = []
            for salt in (1, 2, 1):
                request = make_request(decode.info, prompt(salt), max_tokens=6, ignore_eos=True)
                split = await run_split(prefill, decode, request)
                assert split.decode.error is None
                outputs.append(split.output())
                await_stored(source, min(len(outputs), 2) * NUM_BLOCKS)
        assert outputs[0] == outputs[2] != outputs[1]
        assert source.metric('paceline_tier_hits_total{tier="host"}') > NUM_BLOCKS / 2


@pytest.mark.slow
async def test_the_index_names_the_tier(tmp_path: Path) -> None:
    with (
        redis_server() as server,
        worker_of("decode", tmp_path, HOST, redis_url=server.url) as worker,
        contextlib.closing(redis.Redis.from_url(server.url)) as store,
    ):
        await visit(worker, prompt(1))
        await_stored(worker, NUM_BLOCKS)

        def num_members(suffix: bytes) -> int:
            (name,) = store.keys("pl:1:keys:*") or [b"none"]
            return sum(member[16:] == suffix for member in store.smembers(name))

        wait_for(lambda: (num_members(b""), num_members(b"host")) == (NUM_BLOCKS, NUM_BLOCKS))
        tiers = {fields[b"t"] for _, fields in store.xrange("pl:1:events")}
        assert tiers == {b"device", b"host"}


@pytest.mark.slow
async def test_tiers_outlive_the_rank(tmp_path: Path) -> None:
    with (
        redis_server() as server,
        worker_of("decode", tmp_path, HOST, redis_url=server.url) as worker,
        contextlib.closing(redis.Redis.from_url(server.url)) as store,
    ):
        output, _ = await visit(worker, prompt(1))
        await_stored(worker, NUM_BLOCKS)
        (before,) = store.keys("pl:1:keys:*")
        os.kill(worker.rank_pids()[0], signal.SIGKILL)
        wait_for(lambda: bool(worker.not_ready()))
        worker.wait_until_ready()
        wait_for(lambda: store.keys("pl:1:keys:*") not in ([], [before]))
        (after,) = store.keys("pl:1:keys:*")
        assert {member[16:] for member in store.smembers(after)} == {b"host"}
        assert await visit(worker, prompt(1)) == (output, NUM_BLOCKS * 16)


@pytest.mark.slow
async def test_a_rank_with_pages_of_another_form_gets_tiers_anew(tmp_path: Path) -> None:
    with (
        redis_server() as server,
        worker_of("decode", tmp_path, HOST, redis_url=server.url) as worker,
        contextlib.closing(redis.Redis.from_url(server.url)) as store,
    ):
        await visit(worker, prompt(1))
        await_stored(worker, NUM_BLOCKS)
        write_mock_model(tmp_path / "model", num_hidden_layers=1)
        os.kill(worker.rank_pids()[0], signal.SIGKILL)
        wait_for(lambda: bool(worker.not_ready()))
        worker.wait_until_ready()
        assert worker.metric("paceline_tier_pages") == 0
        wait_for(lambda: store.keys("pl:1:keys:*") == [])  # the index is told that they are gone
        output, num_cached = await visit(worker, prompt(1))
        assert num_cached == 0
        await_stored(worker, NUM_BLOCKS)
        for salt in (2, 3):  # the pool holds twice as many pages as before
            await visit(worker, prompt(salt))
            await_stored(worker, salt * NUM_BLOCKS)
        again, num_cached = await visit(worker, prompt(1))
        assert again == output and num_cached == NUM_BLOCKS * 16
        assert worker.metric("paceline_tier_errors_total") == 0


def file_tier(folder: Path, capacity_mib: int = 16) -> str:
    return f"- {{kind: file, path: {folder}, capacity_mib: {capacity_mib}}}\n"


def spoil_pages(folder: Path) -> None:
    """One byte of each segment changes."""
    for path in folder.glob("0/*.kv"):
        with path.open("r+b") as file:
            file.seek(10_000)
            byte = file.read(1)[0]
            file.seek(10_000)
            file.write(bytes([byte ^ 1]))


@pytest.mark.slow
@pytest.mark.parametrize("is_spoiled", [False, True])
async def test_files_outlive_the_worker(tmp_path: Path, is_spoiled: bool) -> None:
    tiers = file_tier(tmp_path / "kv")
    with worker_of("decode", tmp_path, tiers) as worker:
        output, _ = await visit(worker, prompt(1))
        await_stored(worker, NUM_BLOCKS, "file")
    if is_spoiled:
        spoil_pages(tmp_path / "kv")
    with worker_of("decode", tmp_path, tiers) as worker:
        again, num_cached = await visit(worker, prompt(1))
        assert again == output
        mismatches = worker.metric('paceline_tier_errors_total{cause="mismatch"')
        assert (num_cached == NUM_BLOCKS * 16) is (mismatches == 0) is not is_spoiled
        assert worker.metric("paceline_tier_pages") == NUM_BLOCKS  # deleted, and stored anew


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """With room for the pages of two prompts."""
    disk = tmp_path / "disk"
    disk.mkdir()
    size = 2 * NUM_BLOCKS * PAGE_BYTES
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.slow
async def test_mooncake_2475_a_full_disk_costs_hits_and_no_request(
    tmp_path: Path, small_disk: Path
) -> None:
    """https://github.com/kvcache-ai/Mooncake/issues/2475, a whole worker: the disk is full from the
    third prompt on, though the capacity is not reached."""
    with worker_of("decode", tmp_path, file_tier(small_disk)) as worker:
        first = {salt: (await visit(worker, prompt(salt)))[0] for salt in range(6)}
        for salt in reversed(range(6)):
            assert (await visit(worker, prompt(salt)))[0] == first[salt]
        assert worker.metric("paceline_tier_pages") > 0
        lost = ("paceline_tier_evictions_total", "paceline_tier_dropped_pages_total")
        assert sum(map(worker.metric, lost)) > 0
        assert worker.metric('paceline_tier_errors_total{cause="mismatch"') == 0
        assert not worker.not_ready()


@pytest.mark.slow
async def test_pages_of_one_prompt_come_from_two_tiers(tmp_path: Path) -> None:
    tiers = "- {kind: host, capacity_mib: 1}\n" + file_tier(tmp_path / "kv")
    with worker_of("decode", tmp_path, tiers) as worker:
        outputs = [await visit(worker, prompt(salt)) for salt in (1, 2)]
        await_stored(worker, 2 * NUM_BLOCKS)
        again = [await visit(worker, prompt(salt)) for salt in (1, 2)]
        assert [output for output, _ in again] == [output for output, _ in outputs]
        assert [num_cached for _, num_cached in again] == [NUM_BLOCKS * 16] * 2
        for tier in ("host", "file"):
            assert worker.metric(f'paceline_tier_hits_total{{tier="{tier}"}}') > 0
        assert worker.metric("paceline_tier_errors_total") == 0


@pytest.mark.slow
async def test_objects_outlive_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with object_store(tmp_path) as store:
        tiers = (
            f"- {{kind: object, bucket: {BUCKET}, endpoint: '{store.endpoint}', capacity_mib: 16}}"
        )
        named = {"worker_id": "decode-0"}
        with worker_of("decode", tmp_path, tiers, **named) as worker:
            output, _ = await visit(worker, prompt(1))
            await_stored(worker, NUM_BLOCKS, "object")
        with worker_of("decode", tmp_path, tiers, **named) as worker:
            assert await visit(worker, prompt(1)) == (output, NUM_BLOCKS * 16)
            assert worker.metric("paceline_tier_errors_total") == 0
