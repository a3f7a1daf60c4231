"""The fused write of K and V against norm, rotation and write, one after the other."""

import pytest
import torch

from paceline.core.kv_layout import PAGE_TOKENS, PageGroup
from paceline.kernels.kv_write import HeadScale
from paceline.kernels.rmsnorm import rms_norm_reference
from paceline.kernels.rope import rope_tables, rotate_reference

gpu = pytest.importorskip("paceline.kernels.gpu.kv_write")
LAYER, NUM_PAGES = 1, 5
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def expected_heads(
    qkv: torch.Tensor, rotated: int, positions: torch.Tensor, norm: HeadScale | None
) -> torch.Tensor:
    heads = qkv.float().clone()
    num_qk = heads.shape[1] - 2
    if norm is not None:
        for i in range(num_qk):
            heads[:, i] = rms_norm_reference(heads[:, i], norm.weight[i].float(), norm.epsilon)
    if rotated:
        part = heads[:, :num_qk, :rotated]
        part.copy_(rotate_reference(part, positions, frequencies(rotated, qkv.device), 1.5))
    return heads


def frequencies(rotated: int, device: torch.device) -> torch.Tensor:
    return 1 / 100 ** (torch.arange(0, rotated, 2, device=device) / rotated)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "dim", "rotated", "num_tokens"),
    [(6, 16, 16, 7), (2, 24, 8, 3), (3, 64, 64, 1), (2, 16, 0, 5), (2, 8, 8, 300)],
)
def test_equals_its_parts(
    device: torch.device,
    num_heads: int,
    dim: int,
    rotated: int,
    num_tokens: int,
    with_norm: bool,
    dtype: torch.dtype,
) -> None:
    num_pages = NUM_PAGES + num_tokens // PAGE_TOKENS
    group = PageGroup("full", 3, 2, dim)
    pool = torch.full((num_pages, *group.shape), float("nan"), dtype=dtype, device=device)
    row = torch.randn(num_tokens, num_heads + 5, dim).to(device, dtype)
    qkv = row[:, : num_heads + 4]  # other memory lies between the rows
    slots = torch.randperm(num_pages * PAGE_TOKENS)[:num_tokens].to(device)
    positions = torch.randint(0, 40, (num_tokens,), device=device)
    weight = torch.randn(num_heads + 2, dim).to(device, dtype)
    norm = HeadScale(weight, 1e-5) if with_norm else None
    tables = rope_tables(positions, frequencies(rotated, qkv.device), 1.5, torch.float32)
    query = gpu.write_kv(qkv, pool, LAYER, slots, tables if rotated else None, norm)
    expected = expected_heads(qkv, rotated, positions, norm)
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(query.float(), expected[:, :num_heads], **close)
    written = pool[slots // PAGE_TOKENS, LAYER, :, :, slots % PAGE_TOKENS]
    torch.testing.assert_close(written.flatten(1, 2).float(), expected[:, num_heads:], **close)
    assert pool.isfinite().sum() == written.numel(), "nothing else is written"
