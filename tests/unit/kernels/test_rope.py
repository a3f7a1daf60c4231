"""Rotary embedding against its definition."""

import pytest
import torch

from paceline.kernels import native
from paceline.kernels.rope import rope_tables, rotate_, rotate_cpu_, rotate_reference

assert native.module is not None


@pytest.mark.parametrize("level", range(native.module.BEST_LEVEL + 1))
@pytest.mark.parametrize(("rows", "dim"), [(1, 2), (7, 12), (3, 64), (200, 80)])
def test_compiled_code_equals_torch(
    rows: int, dim: int, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = torch.randn(rows, 5, dim + 4, generator=torch.Generator().manual_seed(dim))
    cos, sin = rope_tables(
        torch.arange(rows) * 3, 1 / 100.0 ** (torch.arange(dim // 2) / dim), 1.25, torch.float32
    )
    other = packed.clone()
    rotate_cpu_(packed[:, 1:4, :dim], cos, sin, level)  # rotates a part of each head
    monkeypatch.setattr(native, "module", None)
    rotate_(other[:, 1:4, :dim], cos, sin)
    torch.testing.assert_close(packed, other, rtol=1e-5, atol=1e-5)
    assert torch.equal(packed[:, :, dim:], other[:, :, dim:])
    assert torch.equal(packed[:, ::4], other[:, ::4])


def test_rotates_a_view_in_place_and_nothing_else() -> None:
    generator = torch.Generator().manual_seed(1)
    packed = torch.randn(7, 5, 12, generator=generator)
    before = packed.clone()
    positions = torch.tensor([0, 1, 2, 9, 1000, 4, 4])
    inv_freq = 1 / 100.0 ** (torch.arange(6) / 6)
    cos, sin = rope_tables(positions, inv_freq, 1.25, torch.float32)
    rotate_(packed[:, 1:4], cos, sin)
    expected = rotate_reference(before[:, 1:4], positions, inv_freq, 1.25)
    torch.testing.assert_close(packed[:, 1:4], expected, rtol=0, atol=3e-4)
    torch.testing.assert_close(packed[:4, 1:4], expected[:4], rtol=1e-5, atol=1e-5)
    assert torch.equal(packed[:, 0], before[:, 0])
    assert torch.equal(packed[:, 4], before[:, 4])
