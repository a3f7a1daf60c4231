"""From an engine that prefills to one that decodes, the pages copied in between."""

import numpy as np

from paceline.core.keys import chain_keys
from paceline.engine.messages import (
    Adopt,
    HandoffReady,
    KeyRun,
    Pin,
    Pinned,
    PinnedPage,
    Pulled,
    Release,
    RequestSpec,
    Reserve,
    Reserved,
    Submit,
    Unpin,
)
from paceline.engine.pools import pool_memory
from paceline.kernels.pages import copy_pages
from tests.unit.engine.benches import ROOT, Bench


def pull(source: Bench, reader: Bench, spec: RequestSpec, slot: int) -> list[tuple[int, int]]:
    """Pins what the source has, copies it into the reserved pages; returns the pins."""
    (reserved,) = reader.of(Reserved, slot)
    keys = chain_keys(ROOT, spec.token_ids)
    runs = [KeyRun(i, list(keys[r.first_block :])) for i, r in enumerate(reserved.runs)]
    pinned = source.engine.pool_calls.answer(Pin(runs, slot))
    assert isinstance(pinned, Pinned)
    assert list(map(len, pinned.runs)) == [len(run.keys) for run in runs]
    for i, (granted, found) in enumerate(zip(reserved.runs, pinned.runs, strict=True)):
        copy(source, reader, found, granted.pages[: len(found)], None)
        tail = pinned.tails[i : i + 1]
        copy(source, reader, tail, granted.pages[len(found) :], pinned.num_tail_tokens)
        checksums = [page.checksums for page in found]
        reader.handle(Pulled(slot, i, granted.first_block, checksums))
    return [(p.page, p.generation) for p in pinned.pages]


def copy(
    source: Bench, reader: Bench, pages: list[PinnedPage], to: list[int], num_tokens: int | None
) -> None:
    assert len(pages) == len(to)
    for page, destination in zip(pages, to, strict=True):
        sums = copy_pages(
            pool_memory(reader.engine.runner.pools[0]),
            pool_memory(source.engine.runner.pools[0]),
            np.array([destination]),
            np.array([page.page]),
            reader.engine.runner.model.layout.page,
            num_tokens,
        )
        assert sums[0].tolist() == page.checksums


def hand_over(source: Bench, reader: Bench, spec: RequestSpec, slot: int = 1) -> None:
    source.handle(Submit(slot, spec, prefill_only=True)).run()
    reader.handle(Reserve(slot, spec)).run()
    pins = pull(source, reader, spec, slot)
    (ready,) = source.of(HandoffReady, slot)
    reader.handle(Adopt(slot, ready.first_tokens))
    source.engine.pool_calls.answer(Unpin(pins))
    source.handle(Release(slot)).run()
    reader.run()
