"""Embeddings on a device, in chunks beside streams, equal those of the CPU."""

from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.core.pooling import Pooling
from paceline.engine.messages import Submit
from paceline.models.loader import load_model
from tests.gpu.test_engine_llama import HEADS, HIDDEN, INNER, engine, write_llama
from tests.unit.engine.benches import Bench, prompt, request

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SPECS = {
    10 * length + number: request(prompt(length, number), pooling=pooling)
    for length in (1, 33, 150)
    for number, pooling in enumerate(Pooling)
}


def vectors(b: Bench) -> list[np.ndarray]:
    """The second time with a prefix from the cache, where one is taken."""
    for shift in (0, 10_000):
        b.handle(Submit(shift + 1, request(prompt(40, 9), max_tokens=40, ignore_eos=True)))
        b.step()
        b.handle(*(Submit(shift + slot, spec) for slot, spec in SPECS.items())).run()
    b.assert_idle()
    assert len(b.tokens(1)) == len(b.tokens(10_001)) == 40
    return [b.vector(shift + slot) for shift in (0, 10_000) for slot in SPECS]


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_vectors_equal_those_of_the_cpu(tmp_path: Path, cuda_graphs: bool) -> None:
    write_llama(tmp_path, HIDDEN, HEADS, INNER)
    expected = vectors(engine(load_model(tmp_path).model, "cpu"))
    found = vectors(engine(load_model(tmp_path, device="cuda").model, "cuda", cuda_graphs))
    for ours, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=0, atol=2e-3)
