"""One prefill and two decode workers for the tests of a module: by shm and by tcp."""

import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.fake_router import Attachment
from tests.support.mock_model import write_mock_model
from tests.support.waits import wait_for
from tests.support.workers import WorkerProcess, start_worker

BUSY_STATES = ("mapped", "pinned", "quarantined")  # of pages that are neither free nor cached
FAST: dict[str, object] = {"silence_s": 1.5, "beat_s": 0.2, "stall_s": 1.5, "drain_timeout_s": 3}


@dataclass(frozen=True, slots=True)
class Pair:
    prefill: Attachment
    decode: Attachment


@dataclass(frozen=True, slots=True)
class Workers:
    """Processes by name: "prefill", and decode workers by what they are called in `start`."""

    by_name: dict[str, WorkerProcess]

    @asynccontextmanager
    async def attached(self, decode: str) -> AsyncIterator[Pair]:
        """Both streams; afterwards every worker must be free of all that ran."""
        prefill, reader = self.by_name["prefill"], self.by_name[decode]
        async with Attachment(prefill.endpoint) as source, Attachment(reader.endpoint) as sink:
            yield Pair(source, sink)
        for worker in (prefill, reader):
            wait_for(lambda worker=worker: is_free(worker), 5)  # type: ignore[misc]


def is_free(worker: WorkerProcess) -> bool:
    """Nothing is held, and the books of the pool balance."""
    slots = worker.metric("paceline_worker_slots") + worker.metric("paceline_leases_active")
    pages = [worker.metric(f'paceline_worker_pages{{state="{state}"}}') for state in BUSY_STATES]
    balanced = worker.metric("paceline_worker_page_books_balanced")
    return slots == 0 and not any(pages) and balanced == 1


def workers(
    folder: Path,
    decodes: dict[str, dict[str, object]],
    prefill: dict[str, object] | None = None,
    **model: object,
) -> Iterator[Workers]:
    """On a mock model with the fields `model`."""
    yield from workers_on(write_mock_model(folder / "model", **model), decodes, prefill)


def workers_on(
    path: Path, decodes: dict[str, dict[str, object]], prefill: dict[str, object] | None = None
) -> Iterator[Workers]:
    """Starts them all at once; stops them at the end, and each must exit with 0."""
    started = {"prefill": start_worker("prefill", path, **{**FAST, **(prefill or {})})}
    for name, settings in decodes.items():
        started[name] = start_worker("decode", path, **{**FAST, **settings})
    try:
        for worker in started.values():
            worker.wait_until_ready()
        yield Workers(started)
    finally:
        for worker in started.values():
            worker.process.terminate()
        statuses = [worker.stop() for worker in started.values()]
    assert not any(statuses), statuses


def prompt(length: int, seed: int) -> list[int]:
    return [random.Random(seed).randrange(256) for _ in range(length)]
