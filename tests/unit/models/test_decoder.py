"""What every family owes the engine."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paceline.models.loader import load_model
from tests.support.batches import Sequence, kv_of, make_batch, new_pool, run
from tests.support.mock_model import write_mock_model
from tests.support.tiny_families import TINY_WRITERS

WRITERS: dict[str, Callable[[Path], Path]] = {"mock": write_mock_model} | TINY_WRITERS
NO_ROWS = torch.empty(0, dtype=torch.int64)


@pytest.mark.parametrize("family", WRITERS)
def test_a_step_that_wants_no_logits_still_writes_all_kv(tmp_path: Path, family: str) -> None:
    model = load_model(WRITERS[family](tmp_path)).model
    chunk, rest = list(range(20)), [5, 6, 7]
    usual, silent = new_pool(model, 4), new_pool(model, 4)
    sequence = Sequence([2, 1])
    run(model, usual, [(sequence, chunk)])
    batch = make_batch(model, [(Sequence([2, 1]), chunk)])
    with torch.inference_mode():
        found = model.forward(dataclasses.replace(batch, logits_rows=NO_ROWS), (silent,))
    assert found.shape == (0, model.vocab_size)
    assert torch.equal(usual.view(torch.int32), silent.view(torch.int32))
    assert torch.isfinite(run(model, silent, [(sequence, rest)])).all()


@pytest.mark.parametrize("family", WRITERS)
def test_pages_of_nobody_are_never_written(tmp_path: Path, family: str) -> None:
    model = load_model(WRITERS[family](tmp_path)).model
    pool = new_pool(model, 6)
    run(model, pool, [(Sequence([3]), [1]), (Sequence([1, 4]), list(range(17)))])
    pages = kv_of(model, pool)
    assert pages[[0, 2, 5]].isnan().all()
    assert pages[3, :, :, :, 1:].isnan().all()
    assert not pages[3, :, :, :, 0].isnan().any()


@pytest.mark.parametrize("family", WRITERS)
def test_generation_config_names_the_end(tmp_path: Path, family: str) -> None:
    folder = WRITERS[family](tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    assert load_model(folder).model.eos_token_ids == (2, 3)
