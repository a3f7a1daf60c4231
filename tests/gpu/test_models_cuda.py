"""Models on a device against the same models on the CPU, and a decode step in a CUDA graph."""

from pathlib import Path

import pytest
import torch

from paceline.models.loader import load_model
from tests.support.batches import Sequence, make_batch, new_pool, run
from tests.support.computing import WAYS, logits
from tests.support.tiny_families import TINY_WRITERS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOKENS = [(5 * i * i + i) % 64 for i in range(80)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", TINY_WRITERS)
def test_logits_equal_those_of_the_cpu(tmp_path: Path, family: str, way: str) -> None:
    folder = TINY_WRITERS[family](tmp_path)
    expected = logits(load_model(folder).model, TOKENS, way)
    found = logits(load_model(folder, device="cuda").model, TOKENS, way, "cuda")
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=4e-3)


@pytest.mark.parametrize("family", TINY_WRITERS)
def test_a_captured_decode_step_equals_an_eager_one(tmp_path: Path, family: str) -> None:
    model = load_model(TINY_WRITERS[family](tmp_path), device="cuda").model
    pool = new_pool(model, 12, "cuda")
    sequences = [Sequence([3, 1, 4]), Sequence([5, 9, 2])]
    run(model, pool, [(sequences[0], TOKENS[:20]), (sequences[1], TOKENS[20:60])])
    work = [(sequence, [7]) for sequence in sequences]
    batch = make_batch(model, work, device="cuda")
    expected = run(model, pool, work)
    with torch.inference_mode():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = model.forward(batch, (pool,))
        captured.zero_()
        graph.replay()
    torch.testing.assert_close(captured, expected, rtol=0, atol=1e-5)
