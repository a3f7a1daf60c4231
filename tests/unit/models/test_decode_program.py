"""Decode steps as lists of compiled calls give the numbers of the ordinary path, bit by bit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.models.decoder import Decoder
from paceline.models.loader import load_model
from tests.support.batches import Sequence, make_batch, new_pool, run
from tests.support.tiny_families import write_tiny_family
from tests.support.tiny_models import write_tiny_gpt2, write_tiny_llama

COMPILED = ("mistral", "phi3", "qwen2", "smollm3")
OTHERS = ("gemma2", "mixtral", "olmo2", "qwen3")


def steps(model: Decoder, batch: int, num_steps: int = 40) -> list[torch.Tensor]:
    """Logits of sequences of different lengths that decode together, over several pages each."""
    pool = new_pool(model, 100)
    sequences = [Sequence(list(range(8 * i, 8 * i + 8))) for i in range(batch)]
    for i, sequence in enumerate(sequences):
        run(model, pool, [(sequence, list(range(1, 4 + 5 * i)))])
    return [
        run(model, pool, [(sequence, [(7 * t + i) % 40]) for i, sequence in enumerate(sequences)])
        for t in range(num_steps)
    ]


def load(folder: Path, quantization: str = "auto") -> Decoder:
    model = load_model(folder, quantization=quantization).model
    assert isinstance(model, Decoder)
    return model


def assert_same_without(model: Decoder) -> None:
    assert model._programs is not None
    found = [steps(model, batch) for batch in (1, 3, 1)]
    model._programs = None
    for batch, logits in zip((1, 3), found, strict=False):
        assert all(map(torch.equal, logits, steps(model, batch)))
    assert all(map(torch.equal, found[0], found[2]))


@pytest.mark.parametrize("quantization", ["auto", "int8", "int4"])
def test_llama_gives_the_same_bits(tmp_path: Path, quantization: str) -> None:
    assert_same_without(load(write_tiny_llama(tmp_path), quantization))


@pytest.mark.parametrize("family", COMPILED)
def test_families_of_the_common_shape_give_the_same_bits(tmp_path: Path, family: str) -> None:
    """Windows, rotation of parts and of some layers only, biases."""
    assert_same_without(load(write_tiny_family(family, tmp_path)))


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_go_the_ordinary_way(tmp_path: Path, family: str) -> None:
    assert load(write_tiny_family(family, tmp_path))._programs is None


def test_so_does_gpt_2(tmp_path: Path) -> None:
    assert load(write_tiny_gpt2(tmp_path))._programs is None


def test_another_pool_and_other_threads_are_noticed(tmp_path: Path) -> None:
    model = load(write_tiny_llama(tmp_path))
    first = steps(model, 2)
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        assert all(map(torch.equal, first, steps(model, 2)))
    finally:
        torch.set_num_threads(before)


def test_a_step_without_logits_writes_its_kv(tmp_path: Path) -> None:
    model = load(write_tiny_llama(tmp_path))
    found = []
    for wants_logits in (True, False):
        pool, sequence = new_pool(model, 8), Sequence([3, 4, 5])
        run(model, pool, [(sequence, [1, 2, 3])])
        batch = make_batch(model, [(sequence, [4])])
        if not wants_logits:
            batch = replace(batch, logits_rows=batch.logits_rows[:0])
        with torch.inference_mode():
            logits = model.forward(batch, (pool,))
        assert logits.shape == (int(wants_logits), model.vocab_size)
        sequence.num_computed += 1
        found.append(run(model, pool, [(sequence, [5])]))
    assert torch.equal(*found)
