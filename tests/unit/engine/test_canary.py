"""The canary tells KV that is ours from KV that is not."""

import math
from pathlib import Path

import pytest
import torch

from paceline.engine.canary import Canary, num_canary_pages
from paceline.engine.pools import allocate_pools
from paceline.models.base import Model
from paceline.models.loader import load_model
from tests.support.tiny_families import TINY_WRITERS
from tests.support.tiny_models import write_tiny_llama
from tests.unit.engine.benches import mock_model

NUM_OTHERS = 5


def computed(model: Model) -> Canary:
    num_pages = NUM_OTHERS + num_canary_pages(model.layout)
    canary = Canary(model.layout, allocate_pools(model.layout, num_pages, "cpu"))
    canary.compute(model)
    return canary


def arrive(at: Canary, source: Canary) -> None:
    for to, pool in zip(at.pools, source.pools, strict=True):
        to[list(at.arrival_pages)] = pool[list(source.own_pages)]


def models(folder: Path) -> dict[str, Model]:
    return {
        "mock": mock_model(),
        "windows": mock_model(num_hidden_layers=3, layer_windows=[0, 20, 20]),
        "ranks": mock_model(num_key_value_heads=2, num_ranks=4),
        "llama": load_model(write_tiny_llama(folder / "llama")).model,
        "gemma3": load_model(TINY_WRITERS["gemma3"](folder / "gemma3")).model,
        "bfloat16": load_model(write_tiny_llama(folder / "bf16"), dtype="bfloat16").model,
    }


@pytest.mark.parametrize("name", ["mock", "windows", "ranks", "llama", "gemma3", "bfloat16"])
def test_the_same_model_is_near_and_every_layer_counts(tmp_path: Path, name: str) -> None:
    model = models(tmp_path)[name]
    canary = computed(model)
    assert not any(pool[:NUM_OTHERS].any() for pool in canary.pools), "those of requests stay"
    arrive(canary, computed(model))
    assert canary.distance() == 0
    for group in range(len(model.layout.groups)):
        for index in range(len(model.layout.layers_of(group))):
            for plane in range(2):
                arrive(canary, canary)
                canary.pools[-1][canary.arrival_pages[2 * group + 1], index, plane] *= -1
                assert canary.distance() > canary.tolerance


def test_rounding_is_near_and_other_weights_are_not(tmp_path: Path) -> None:
    ours = computed(load_model(write_tiny_llama(tmp_path / "a")).model)
    arrive(ours, ours)
    (pool,) = ours.pools
    arrived = pool[list(ours.arrival_pages)]
    pool[list(ours.arrival_pages)] = arrived * (1 + 1e-6 * torch.randn_like(arrived))
    assert 0 < ours.distance() < ours.tolerance
    other = computed(load_model(write_tiny_llama(tmp_path / "c", rms_norm_eps=0.1)).model)
    arrive(ours, other)
    assert ours.distance() > ours.tolerance


def test_a_nan_is_far() -> None:
    canary = computed(mock_model())
    arrive(canary, canary)
    canary.pools[0][canary.arrival_pages[0], 0, 0, 0, 0, 0] = math.nan
    assert not canary.distance() <= canary.tolerance


def test_its_time_says_how_fast_prompts_are(tmp_path: Path) -> None:
    model = mock_model(token_s=0.002)
    canary = computed(model)
    before = [pool.clone() for pool in canary.pools]
    assert canary.token_seconds(model) == pytest.approx(0.002, rel=0.5)
    assert all(map(torch.equal, before, canary.pools)), "what peers compare stays the same"
