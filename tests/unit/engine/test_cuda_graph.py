"""What a graph would replay equals an eager step; the capture itself is tested on a GPU."""

import torch

from paceline.engine.cuda_graph import fill, padded_batch, rungs
from paceline.engine.messages import Submit
from tests.unit.engine.benches import bench, prompt, request
from tests.unit.engine.test_scheduler import recorded


def test_rungs_end_with_the_largest() -> None:
    assert rungs(1, 2, 12) == [1, 2, 4, 8, 12]
    assert rungs(512, 4, 4096) == [512, 2048, 4096]
    assert rungs(512, 4, 100) == [100]


def test_a_padded_decode_batch_equals_an_eager_one() -> None:
    b, model = recorded()
    b.handle(*(Submit(slot, request(prompt(20 + slot, slot))) for slot in range(3))).run()
    batch = next(batch for batch in model.batches if not batch.prefills)
    pools, scratch = b.engine.runner.pools, 63
    static = padded_batch(4, 128, scratch, torch.device("cpu"))
    fill(static, model.batches[-1], scratch)  # what an earlier step left must not matter
    fill(static, batch, scratch)
    logits = model.model.forward(static, pools)
    assert torch.equal(logits[:3], model.model.forward(batch, pools))
    owned = torch.arange(64) != scratch
    before = pools[0][owned].clone()
    model.model.forward(static, pools)
    assert torch.equal(pools[0][owned], before), "padding writes to the scratch page alone"


def test_the_engine_uses_every_page_without_graphs() -> None:
    assert bench(num_pages=16).engine.pool.num_pages == 16
