"""Two engines joined by the `local` connector, in one process: the hand-off without a network."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.core.keys import chain_keys
from paceline.core.kv_layout import PAGE_TOKENS
from paceline.core.sampling import SamplingParams
from paceline.engine import messages
from paceline.engine.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.pools import view_pool
from paceline.kv_transfer.base import CellSums, Link, LocalPool, Piece, TransportSettings
from paceline.kv_transfer.local import make_reader, make_source
from paceline.models.loader import load_model
from tests.support.mock_model import write_mock_model

NUM_PAGES = 64


class Side:
    """An engine and its pool; `run` steps until nothing is left to do."""

    def __init__(self, folder: Path) -> None:
        model = load_model(folder).model
        group = model.layout.page
        memory = memoryview(bytearray(NUM_PAGES * group.page_bytes))
        self.pool = LocalPool(memory, group, NUM_PAGES)
        config = EngineConfig(max_batch_tokens=32, max_running=8)
        self.engine = Engine(model, config, (view_pool(memory, group),), memory)

    def run(self, *commands: messages.Command) -> list[messages.Event]:
        for command in commands:
            self.engine.handle(command)
        events: list[messages.Event] = []
        with torch.inference_mode():
            while (output := self.engine.step()) is not None:
                events += output.events
        return events

    def is_free(self) -> bool:
        books = self.engine.pool_calls.answer(messages.CheckIntegrity())
        assert isinstance(books, messages.Integrity)
        return not (books.problem or books.num_mapped or books.num_pinned or books.num_quarantined)


@pytest.fixture
def sides(tmp_path: Path) -> tuple[Side, Side]:
    torch.set_num_threads(1)
    folder = write_mock_model(tmp_path / "model")
    return Side(folder), Side(folder)


@pytest.fixture
def link(sides: tuple[Side, Side]) -> Iterator[Link]:
    prefill, decode = sides
    source = make_source(prefill.pool, TransportSettings("1"))
    source.start()
    yield make_reader(decode.pool, TransportSettings("2")).connect(source.address(), 1.0)
    source.close()


def tokens_of(events: list[messages.Event], choice: int) -> list[int]:
    emissions = [e for e in events if isinstance(e, messages.Emission) and e.choice == choice]
    return [token for emission in emissions for token in emission.token_ids]


def only(events: list[messages.Event], kind: type) -> messages.Event:
    (found,) = [event for event in events if isinstance(event, kind)]
    return found


def read(
    link: Link, pinned: list[messages.PinnedPage], to: list[int], tail: int | None
) -> CellSums:
    source_pages = np.array([page.page for page in pinned], np.int64)
    sums = link.read(Piece(source_pages, np.array(to, np.int64), tail), 1.0)
    assert sums.tolist() == [page.checksums for page in pinned]
    return sums


@pytest.mark.parametrize("length", [16, 41, 200])
def test_a_split_over_local_equals_one_engine(
    sides: tuple[Side, Side], link: Link, length: int
) -> None:
    prefill, decode = sides
    sampling = SamplingParams(max_tokens=7, n=2, seed=3, ignore_eos=True)
    tokens = [(7 * i + length) % 256 for i in range(length)]
    request = messages.RequestSpec("r", tokens, length, bytes(32), sampling, (0, 1))
    reserved = only(decode.run(messages.Reserve(1, request)), messages.Reserved)
    assert isinstance(reserved, messages.Reserved)
    first = prefill.run(messages.Submit(1, request, prefill_only=True))
    ready = only(first, messages.HandoffReady)
    assert isinstance(ready, messages.HandoffReady)
    keys = [bytes(key) for key in chain_keys(request.root_key, tokens)]
    runs = [messages.KeyRun(0, keys)]
    pinned = prefill.engine.pool_calls.answer(messages.Pin(runs, tail_slot=1))
    assert isinstance(pinned, messages.Pinned)
    (granted,) = reserved.runs
    sums = read(link, pinned.runs[0], granted.pages[: len(keys)], None)
    if length % PAGE_TOKENS:
        read(link, pinned.tails, granted.pages[len(keys) :], pinned.num_tail_tokens)
    pulled = messages.Pulled(1, 0, 0, sums.tolist())
    rest = decode.run(pulled, messages.Adopt(1, ready.first_tokens))
    pins = [(page.page, page.generation) for page in pinned.pages]
    prefill.engine.pool_calls.answer(messages.Unpin(pins))
    prefill.run(messages.Release(1))
    whole = prefill.run(messages.Submit(2, request))
    for choice in (0, 1):
        assert tokens_of(first, choice) + tokens_of(rest, choice) == tokens_of(whole, choice)
    assert prefill.is_free() and decode.is_free()
