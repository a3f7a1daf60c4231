"""Mixes of requests on models with windows, drawn by hypothesis, and what plays them."""

import bisect

import hypothesis.strategies as st

from paceline.engine.allowances import Allowances
from paceline.engine.config import EngineConfig
from paceline.engine.messages import (
    Cancel,
    KeyRun,
    Pin,
    Pinned,
    Reserve,
    Submit,
    TransferClosed,
    Unpin,
)
from tests.unit.engine.benches import Bench, prompt, request
from tests.unit.engine.windows import windowed_model

STEPS = 50
requests = st.fixed_dictionaries(
    {
        "num_tokens": st.integers(1, 110),
        "salt": st.integers(0, 1),
        "max_tokens": st.integers(1, 40),
        "n": st.sampled_from([1, 1, 2, 3]),
        "priority": st.integers(0, 2),
        "arrival": st.integers(0, 5),
        "cancel": st.one_of(st.none(), st.integers(1, 30)),
        "is_reserved": st.sampled_from([False, False, False, True]),  # and never adopted
    }
)
Mix = list[dict[str, int]]
# (step, group): a reader pins all that is named there and in use, for some steps
pins = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 2)), max_size=12)
PIN_STEPS = 40
engines = st.fixed_dictionaries(
    {
        "max_batch_tokens": st.integers(5, 60),
        "max_running": st.integers(1, 4),
        "output_window_tokens": st.sampled_from([0, 0, 256]),
        "prefix_cache": st.booleans(),
        "overlap": st.booleans(),
    }
)


class Play:
    def __init__(self, b: Bench, mix: Mix, pins: list[tuple[int, int]]) -> None:
        self.b, self.mix, self.pins = b, mix, pins
        self.held: dict[int, list[tuple[int, int]]] = {}  # to be unpinned, by step

    def run(self) -> None:
        for step in range(STEPS):
            for slot, one in enumerate(self.mix):
                self.command(step, slot, one)
            self.pin(step)
            self.b.step()
            assert self.b.engine.pool.check_integrity() == ""
            assert self.b.engine.cache.check_integrity() == ""
        for slot, one in enumerate(self.mix):
            if one["is_reserved"]:
                self.b.handle(Cancel(slot), TransferClosed(slot))
        for pages in self.held.values():
            self.b.engine.pool_calls.answer(Unpin(pages))
        self.b.run()

    def command(self, step: int, slot: int, one: dict[str, int]) -> None:
        if step == one["arrival"]:
            tokens = prompt(one["num_tokens"], one["salt"])
            limits = {"max_tokens": one["max_tokens"], "priority": one["priority"]}
            spec = request(tokens, n=one["n"], **limits)
            self.b.handle(Reserve(slot, spec) if one["is_reserved"] else Submit(slot, spec))
        if one["cancel"] is not None and step == one["arrival"] + one["cancel"]:
            self.b.handle(Cancel(slot))

    def pin(self, step: int) -> None:
        calls = self.b.engine.pool_calls
        calls.answer(Unpin(self.held.pop(step, [])))
        for at, group in self.pins:
            if at == step:
                pinned = calls.answer(Pin([KeyRun(group, self.keys_in_use(group))]))
                assert isinstance(pinned, Pinned)
                pages = [(page.page, page.generation) for page in pinned.pages]
                self.held.setdefault(step + PIN_STEPS, []).extend(pages)

    def keys_in_use(self, group: int) -> list[bytes]:
        records = [r for r in self.b.engine.pool.pages if r.group == group and r.refs]
        return [record.key for record in records if record.key is not None]


def smallest_pool(kind: str, config: dict[str, int]) -> int:
    """That holds the longest request."""
    model, settings = windowed_model(kind), EngineConfig(**config)

    def longest(num_pages: int) -> int:
        return Allowances(model.layout, num_pages, model.context_length, settings).max_length

    return bisect.bisect_left(range(200), 150, key=longest)
