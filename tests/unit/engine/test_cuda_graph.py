"""What a graph would replay equals an eager step; the capture itself is tested on a GPU."""

import numpy as np
import torch

from paceline.engine.cuda_graph import decode_batch, padded_inputs, rungs
from paceline.engine.messages import Submit
from paceline.kernels.decode_inputs import DecodeInputs, DecodeRows, fill_inputs
from paceline.models.base import ForwardBatch
from tests.unit.engine.benches import bench, mock_model, prompt, request
from tests.unit.engine.recorder import recorded

SCRATCH = 63


def fill(inputs: DecodeInputs, batch: ForwardBatch) -> None:
    """As if the first token had been drawn by the step before, and not been read yet."""
    tokens = batch.token_ids.clone()
    tokens[0] = ~2
    drawn = batch.token_ids[[1, 1, 0]]
    rows = torch.arange(len(tokens)).flip(0)
    tables = torch.stack(batch.block_tables, 1).flip(0)
    fill_inputs(inputs, DecodeRows(rows, batch.context_lens, tokens, drawn, tables), SCRATCH)


def test_rungs_end_with_the_largest() -> None:
    assert rungs(1, 2, 12) == [1, 2, 4, 8, 12]
    assert rungs(512, 4, 4096) == [512, 2048, 4096]
    assert rungs(512, 4, 100) == [100]


def test_a_padded_decode_batch_equals_an_eager_one() -> None:
    b, model = recorded()
    b.handle(*(Submit(slot, request(prompt(20 + slot, slot))) for slot in range(3))).run()
    batch = next(batch for batch in model.batches if not batch.prefills)
    pools = b.engine.runner.pools
    inputs = padded_inputs(4, 128, 1, SCRATCH, torch.device("cpu"))
    fill(inputs, model.batches[-1])  # what an earlier step left must not matter
    fill(inputs, batch)
    static = decode_batch(inputs, 128)
    logits = model.model.forward(static, pools)
    assert torch.equal(logits[:3], model.model.forward(batch, pools))
    owned = torch.arange(64) != SCRATCH
    before = pools[0][owned].clone()
    model.model.forward(static, pools)
    assert torch.equal(pools[0][owned], before), "padding writes to the scratch page alone"


def test_block_tables_of_a_device_follow_by_their_changes() -> None:
    """As sequences of several page groups come, grow, slide and go, in rows that move."""
    b = bench(mock_model(num_hidden_layers=3, layer_windows=[0, 20, 33]), 160, max_running=4)
    state = b.engine.state
    mirror = np.full_like(state.block_tables, -1)
    num_changes = []
    for slot in range(7):
        spec = request(prompt(20 + 9 * slot, slot), max_tokens=6 + 5 * slot)
        b.handle(Submit(slot, spec))
    while b.step() is not None:
        places, pages = state.take_changes()
        mirror.reshape(-1)[places] = pages
        num_changes.append(len(places))
        for sequence in state.sequences:
            for group, table in enumerate(sequence.tables):
                held = mirror[sequence.row, group, table.first : len(table.pages)]
                assert held.tolist() == table.held
    assert num_changes.count(0) > len(num_changes) // 4, "most steps change little"
    assert max(num_changes) < mirror[0].size


def test_the_engine_uses_every_page_without_graphs() -> None:
    assert bench(num_pages=16).engine.pool.num_pages == 16
