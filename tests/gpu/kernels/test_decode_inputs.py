"""Inputs of a captured decode step against torch's path, beside what an earlier step has left."""

import pytest
import torch

from paceline.core.kv_layout import PAGE_TOKENS
from paceline.kernels.decode_inputs import DecodeInputs, DecodeRows, fill_inputs_torch

gpu = pytest.importorskip("paceline.kernels.gpu.decode_inputs")
SCRATCH = 999


def inputs(num_groups: int, num_rows: int, width: int, device: torch.device) -> DecodeInputs:
    def stale(*shape: int) -> torch.Tensor:
        return torch.full(shape, -7, dtype=torch.int64, device=device)

    return DecodeInputs(
        *(stale(num_rows) for _ in range(3)),
        stale(num_groups, num_rows),
        stale(num_groups, num_rows, width),
    )


@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize(("num", "num_rows", "width"), [(1, 1, 32), (3, 4, 512), (20, 136, 32)])
def test_equals_torch(
    device: torch.device, num_groups: int, num: int, num_rows: int, width: int
) -> None:
    contexts = torch.randint(1, 32 * PAGE_TOKENS + 1, (num,))
    contexts[0] = width * PAGE_TOKENS
    tables = torch.randint(0, SCRATCH, (max(num, 30), num_groups, max(width, 64)))
    tokens = torch.where(torch.rand(num) < 0.5, -1 - torch.randint(0, 9, (num,)), 5)
    decodes = DecodeRows(
        *(x.to(device) for x in (torch.randperm(len(tables))[:num], contexts, tokens)),
        drawn=torch.randint(10, 90, (9,)).to(device),
        tables=tables.to(device),
    )
    found, expected = (inputs(num_groups, num_rows, width, device) for _ in range(2))
    gpu.fill_inputs(found, decodes, SCRATCH)
    fill_inputs_torch(expected, decodes, SCRATCH)
    for name in ("token_ids", "positions", "context_lens", "slots"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    for row, context in enumerate(expected.context_lens.tolist()):
        used = slice(-(-context // PAGE_TOKENS))
        assert torch.equal(found.tables[:, row, used], expected.tables[:, row, used])
