"""Prompts whose leading blocks are filled from outside before they are computed."""

import functools
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from paceline.core.keys import chain_keys
from paceline.engine.messages import (
    Cancel,
    Committed,
    Emission,
    Failed,
    Fill,
    Filled,
    HandoffReady,
    KeyRun,
    Pin,
    Pinned,
    Pulled,
    Release,
    RequestSpec,
    Submit,
    TransferClosed,
    Unpin,
)
from paceline.engine.page_pool import PageState
from paceline.engine.pools import pool_memory
from paceline.kernels.pages import copy_pages
from tests.unit.engine.benches import ROOT, Bench, alone, bench, prompt, request
from tests.unit.engine.windows import WINDOWS, windowed_model

SALTS = (1, 2, 3)
LENGTHS = st.sampled_from([1, 16, 17, 33, 64, 90, 119, 120])


@dataclass
class Store:
    """Pages by (key, page group), copied out of another engine."""

    pages: dict[tuple[bytes, int], tuple[bytes, list[int]]] = field(default_factory=dict)

    def take(self, source: Bench, spec: RequestSpec) -> "Store":
        model = source.engine.runner.model
        memory, size = pool_memory(source.engine.runner.pools[0]), model.layout.page.page_bytes
        for key in chain_keys(ROOT, spec.token_ids):
            for group in range(len(model.layout.groups)):
                pinned = source.engine.pool_calls.answer(Pin([KeyRun(group, [key])]))
                assert isinstance(pinned, Pinned)
                for page in pinned.pages:
                    start = page.page * size
                    content = bytes(memory[start : start + size])
                    self.pages[key, group] = content, page.checksums
                    source.engine.pool_calls.answer(Unpin([(page.page, page.generation)]))
        return self

    def fill(
        self, reader: Bench, spec: RequestSpec, fill: Fill, *, is_copying: bool = False
    ) -> int:
        """Answers `fill` with what is here; returns the number of pages."""
        memory, page = (
            pool_memory(reader.engine.runner.pools[0]),
            reader.engine.runner.model.layout.page,
        )
        keys, count = chain_keys(ROOT, spec.token_ids), 0
        for group, run in enumerate(fill.runs):
            for block, destination in enumerate(run.pages, run.first_block):
                found = self.pages.get((keys[block], group))
                if found is not None:
                    source = memoryview(bytearray(found[0]))
                    ids = np.array([destination]), np.array([0])
                    assert copy_pages(memory, source, *ids, page)[0].tolist() == found[1]
                    reader.handle(Pulled(fill.slot, group, block, [found[1]]))
                    count += 1
        reader.handle(Filled(fill.slot, is_copying))
        return count


def store_of(spec: RequestSpec, model: Any = None) -> Store:
    source = bench(model, 200)
    return Store().take(source.handle(Submit(1, spec)).run(), spec)


def answer(
    reader: Bench,
    store: Store,
    specs: dict[int, RequestSpec],
    late: Set[int] = frozenset(),
) -> None:
    """Runs until every Fill is answered and nothing is left to do. Copies of `late` slots end when
    nothing else can be done."""
    answered: set[int] = set()
    copying: list[int] = []
    while True:
        reader.run()
        fills = [fill for fill in reader.of(Fill) if fill.slot not in answered]
        if not fills and not copying:
            return
        if not fills:
            reader.handle(TransferClosed(copying.pop()))
        for fill in fills:
            answered.add(fill.slot)
            is_late = fill.slot in late
            store.fill(reader, specs[fill.slot], fill, is_copying=is_late)
            if is_late:
                copying.append(fill.slot)


def test_a_filled_prompt_goes_on_behind_what_was_filled() -> None:
    spec = request(prompt(100), max_tokens=10)
    reader = bench()
    reader.handle(Submit(1, spec, num_offered_blocks=5)).run()
    (fill,) = reader.of(Fill, 1)
    assert fill.runs[0].first_block == 0 and len(fill.runs[0].pages) == 5
    assert len(reader.engine.state) == 0  # no row meanwhile
    assert store_of(spec).fill(reader, spec, fill) == 5
    step = reader.engine.launch()
    assert step is not None and step.plan.num_chunk_tokens == 20
    reader.finish_step(step)
    reader.run().assert_idle()
    assert reader.tokens(1) == alone(spec)[0]
    assert reader.of(Emission, 1)[0].num_cached_tokens == 80


def test_what_is_here_is_not_filled() -> None:
    spec, store = request(prompt(100)), store_of(request(prompt(100)))
    reader = bench()
    reader.handle(Submit(1, request(prompt(40)))).run()
    reader.handle(Submit(2, spec, num_offered_blocks=6)).run()
    (fill,) = reader.of(Fill, 2)
    assert (fill.runs[0].first_block, len(fill.runs[0].pages)) == (2, 4)
    store.fill(reader, spec, fill)
    reader.run()
    reader.handle(Submit(3, spec, num_offered_blocks=6)).run().assert_idle()
    assert not reader.of(Fill, 3)
    assert reader.tokens(2) == reader.tokens(3) == alone(spec)[0]


def test_the_last_token_is_computed_even_if_all_is_offered() -> None:
    spec = request(prompt(64))
    reader = bench()
    reader.handle(Submit(1, spec, num_offered_blocks=99)).run()
    assert len(reader.of(Fill, 1)[0].runs[0].pages) == 3
    answer(reader, store_of(spec), {1: spec})
    assert reader.tokens(1) == alone(spec)[0]


def test_what_does_not_come_is_computed() -> None:
    spec, store = request(prompt(100)), store_of(request(prompt(100)))
    keys = chain_keys(ROOT, spec.token_ids)
    del store.pages[keys[3], 0]
    reader = bench()
    reader.handle(Submit(1, spec, num_offered_blocks=6))
    answer(reader, store, {1: spec})
    assert reader.tokens(1) == alone(spec)[0]
    assert reader.of(Emission, 1)[0].num_cached_tokens == 48  # by name, up to the one that lacks
    reader.assert_idle()


def test_others_run_while_one_is_filled() -> None:
    spec = request(prompt(100))
    reader = bench(max_running=1)
    reader.handle(Submit(1, spec, num_offered_blocks=6), Submit(2, request(prompt(30, 3)))).run()
    assert reader.of(Fill, 1) and reader.tokens(2) == alone(request(prompt(30, 3)))[0]
    answer(reader, store_of(spec), {1: spec})
    assert reader.tokens(1) == alone(spec)[0]


def test_prompts_that_are_filled_count_as_waiting() -> None:
    spec = request(prompt(100))
    reader = bench(max_waiting=2)
    for slot in (1, 2, 3):
        reader.handle(Submit(slot, spec, num_offered_blocks=5)).run()
    load = reader.engine.load()
    assert (load.num_running, load.num_waiting, load.num_waiting_tokens) == (0, 2, 2 * 20)
    assert load.num_deferred == 2
    assert [event.slot for event in reader.of(Failed)] == [3]
    reader.handle(Cancel(1), TransferClosed(1), Filled(2))
    load = reader.engine.load()
    assert (load.num_running, load.num_waiting, load.num_waiting_tokens) == (0, 1, 100)
    assert load.num_deferred == 0  # a row is all that it waits for
    reader.run().assert_idle()
    load = reader.engine.load()
    assert (load.num_running, load.num_waiting, load.num_waiting_tokens) == (0, 0, 0)


def test_a_cancelled_fill_gives_its_pages_back_when_the_copy_has_ended() -> None:
    reader = bench()
    reader.handle(Submit(1, request(prompt(100)), num_offered_blocks=6)).run()
    reader.handle(Cancel(1)).run()
    assert reader.engine.pool.counts[PageState.QUARANTINED] == 7
    reader.handle(Filled(1), TransferClosed(1)).run().assert_idle()
    assert reader.engine.pool.counts[PageState.FREE] == 64


def test_a_prompt_does_not_wait_for_a_copy_that_is_late_but_its_pages_do() -> None:
    spec = request(prompt(100), max_tokens=10)
    reader = bench()
    reader.handle(Submit(1, spec, num_offered_blocks=6)).run()
    reader.handle(Filled(1, is_copying=True)).run()
    assert reader.tokens(1) == alone(spec)[0]
    assert reader.engine.pool.counts[PageState.QUARANTINED] == 7
    assert not reader.engine.pool.check_integrity()
    reader.handle(TransferClosed(1)).run().assert_idle()
    assert reader.engine.pool.counts[PageState.QUARANTINED] == 0


def test_what_came_before_a_late_copy_is_used() -> None:
    spec = request(prompt(100), max_tokens=10)
    store, reader = store_of(spec), bench()
    reader.handle(Submit(1, spec, num_offered_blocks=6)).run()
    (fill,) = reader.of(Fill, 1)
    run = fill.runs[0]
    came = replace(fill, runs=[replace(run, pages=run.pages[:4])])
    store.fill(reader, spec, came, is_copying=True)
    reader.run()
    assert reader.tokens(1) == alone(spec)[0]
    assert reader.of(Emission, 1)[0].num_cached_tokens == 64
    assert reader.engine.pool.counts[PageState.QUARANTINED] == 3
    reader.handle(TransferClosed(1)).run().assert_idle()


def test_a_reader_can_pin_what_was_filled_at_once() -> None:
    spec = request(prompt(100))
    reader = bench()
    reader.handle(Submit(1, spec, prefill_only=True, num_offered_blocks=4))
    answer(reader, store_of(spec), {1: spec})
    assert [event.num_blocks for event in reader.of(Committed, 1)] == [4, 6]
    assert len(reader.of(HandoffReady, 1)) == 1
    reader.handle(Release(1)).run().assert_idle()


@pytest.mark.parametrize("kind", sorted(WINDOWS))
@pytest.mark.parametrize("lacks", [False, True])
def test_windows_are_filled_with_what_the_next_token_sees(kind: str, lacks: bool) -> None:
    model = windowed_model(kind)
    spec = request(prompt(150), max_tokens=12)
    store = store_of(spec, model)
    reader = bench(model, 16 * len(model.layout.groups))
    reader.handle(Submit(1, spec, num_offered_blocks=8)).run()
    (fill,) = reader.of(Fill, 1)
    for group, run in zip(model.layout.groups, fill.runs, strict=True):
        assert run.first_block == group.first_block(128)
        assert len(run.pages) == 8 - run.first_block
    if lacks:
        needed = max(group for group, run in enumerate(fill.runs) if run.pages)
        del store.pages[chain_keys(ROOT, spec.token_ids)[7], needed]
    answer(reader, store, {1: spec})
    assert reader.tokens(1) == alone(spec, model)[0]
    assert (reader.of(Emission, 1)[0].num_cached_tokens == 128) is not lacks
    reader.assert_idle()


@functools.cache
def pages_of_prompts(kind: str) -> Mapping[tuple[bytes, int], tuple[bytes, list[int]]]:
    """All that can be asked for in the mixes below."""
    model = windowed_model(kind) if kind else None
    pages = {}
    for salt in SALTS:
        pages |= store_of(request(prompt(120, salt)), model).pages
    return pages


@functools.cache
def expected(kind: str, salt: int, length: int) -> list[int]:
    model = windowed_model(kind) if kind else None
    return alone(request(prompt(length, salt), max_tokens=6), model)[0]


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(["", "mixed", "padded"]),
    num_pages=st.integers(10, 24),
    requests=st.lists(
        st.tuples(st.sampled_from(SALTS), LENGTHS, st.integers(0, 8), st.integers(1, 6)),
        max_size=6,
    ),
    lost=st.sets(st.integers(0, 200), max_size=20),
    late=st.sets(st.integers(0, 5)),
)
def test_any_mix_of_fills_emits_what_is_emitted_alone(
    kind: str,
    num_pages: int,
    requests: list[tuple[int, int, int, int]],
    lost: set[int],
    late: set[int],
) -> None:
    """In a pool so small that some wait, are preempted, and evict what was filled. Copies of the
    slots in `late` end after the rest of their request, as soon as nobody gets on without."""
    model = windowed_model(kind) if kind else None
    store = Store(dict(pages_of_prompts(kind)))
    for i, name in enumerate(list(store.pages)):
        if i in lost:
            del store.pages[name]
    groups = 1 if model is None else len(model.layout.groups)
    reader = bench(model, num_pages * groups, max_batch_tokens=48, max_running=3)
    specs = {}
    for slot, (salt, length, offered, max_tokens) in enumerate(requests):
        specs[slot] = request(prompt(length, salt), max_tokens=max_tokens)
        reader.handle(Submit(slot, specs[slot], num_offered_blocks=offered))
    answer(reader, store, specs, late)
    for slot, (salt, length, _, max_tokens) in enumerate(requests):
        assert reader.tokens(slot) == expected(kind, salt, length)[:max_tokens]
    reader.assert_idle()
