"""The engine over every family: split, chunked and preempted give the tokens of a quiet run.

Prompts and outputs pass the windows of the families that have one.
"""

from functools import cache
from pathlib import Path

import pytest

from paceline.engine.messages import Submit
from paceline.models.base import Model
from paceline.models.loader import load_model
from tests.support.families import FAMILIES
from tests.support.tiny_families import write_tiny_family
from tests.unit.engine.benches import alone, bench, prompt, request
from tests.unit.engine.hand_overs import hand_over

SPECS = [
    request(prompt(num, num), max_tokens=24, ignore_eos=True, **sampling)
    for num, sampling in ((1, {}), (33, {}), (70, {}), (50, {"temperature": 1.0, "seed": 5}))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@cache
def tiny(folder: Path, family: str) -> tuple[Model, list[list[int]]]:
    """A model, and the tokens of each request where nothing else runs."""
    model = load_model(write_tiny_family(family, folder / family)).model
    return model, [alone(spec, model)[0] for spec in SPECS]


@pytest.mark.parametrize("family", FAMILIES)
def test_split_equals_whole(folder: Path, family: str) -> None:
    model, expected = tiny(folder, family)
    num_pages = 64 * len(model.layout.groups)
    source = bench(model, num_pages, max_batch_tokens=24)
    reader = bench(model, num_pages)
    for slot, spec in enumerate(SPECS):
        hand_over(source, reader, spec, slot)
        assert source.tokens(slot) + reader.tokens(slot) == expected[slot]
    source.assert_idle()
    reader.assert_idle()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_crowd_gets_what_each_gets_alone(folder: Path, family: str) -> None:
    """In chunks, batches and preempted, for which a window's promise leaves no cause."""
    model, expected = tiny(folder, family)
    assert len({tuple(tokens) for tokens in expected}) == len(SPECS)
    groups = model.layout.groups
    num_pages = 10 if len(groups) == 1 else 14
    b = bench(model, num_pages, max_batch_tokens=19, output_window_tokens=0)
    b.handle(*(Submit(slot, spec) for slot, spec in enumerate(SPECS * 2))).run()
    assert [b.tokens(slot) for slot in range(2 * len(SPECS))] == expected * 2
    can_preempt = any(not group.window for group in groups)
    assert (b.engine.scheduler.num_preemptions > 0) is can_preempt
    b.assert_idle()
