"""Tables of rotations in one launch against torch's operations."""

import pytest
import torch

gpu = pytest.importorskip("paceline.kernels.gpu.rope")


@pytest.mark.parametrize("half", [1, 4, 24, 64])
def test_equals_torch(device: torch.device, half: int) -> None:
    positions = torch.tensor([0, 1, 5, 1000, 70001, 131071]).to(device)
    inv_freq = 1 / 500000 ** (torch.arange(half) / half).to(device)
    cos, sin = gpu.rope_tables(positions, inv_freq, 1.25)
    angles = positions[:, None].float() * inv_freq
    expected = (angles.cos() * 1.25).repeat(1, 2)[:, None]
    torch.testing.assert_close(cos, expected, rtol=0, atol=2e-6)
    expected = torch.cat((-angles.sin(), angles.sin()), dim=1)[:, None] * 1.25
    torch.testing.assert_close(sin, expected, rtol=0, atol=2e-6)
