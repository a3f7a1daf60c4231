"""Sums on the device have the bits of the definition."""

import numpy as np
import pytest
import torch

from paceline.core.kv_layout import PageGroup
from paceline.kernels.checksum import sum_pages_reference

gpu = pytest.importorskip("paceline.kernels.gpu.checksum")


@pytest.mark.parametrize("num_tokens", [None, 1, 5])
@pytest.mark.parametrize(
    "group",
    [
        PageGroup("full", 5, 3, 8),
        PageGroup("full", 2, 1, 64, "bfloat16"),
        PageGroup("full", 9, 5, 12, "bfloat16"),
    ],
)
def test_equals_the_definition(
    device: torch.device, group: PageGroup, num_tokens: int | None
) -> None:
    raw = torch.randint(-(2**62), 2**62, (7, group.page_bytes // 8))
    raw[0] = -1
    pool = raw.view(getattr(torch, group.dtype)).view(7, *group.shape)
    pages = [6, 0, 3, 3]
    expected = sum_pages_reference(
        memoryview(raw.numpy()).cast("B"), np.array(pages), group, num_tokens
    )
    found = gpu.sum_pages(pool.to(device), torch.tensor(pages, device=device), group, num_tokens)
    assert np.array_equal(found.cpu().numpy().view(np.uint64), expected)


def test_pages_of_a_pool_with_gaps(device: torch.device) -> None:
    group = PageGroup("full", 2, 2, 8)
    wide = torch.randn(5, 2 * group.page_bytes // 4, device=device)
    pool = wide[:, : group.page_bytes // 4].unflatten(1, group.shape)
    pages = torch.tensor([4, 1], device=device)
    found = gpu.sum_pages(pool, pages, group)
    assert torch.equal(found, gpu.sum_pages(pool.contiguous(), pages, group))


def test_no_pages(device: torch.device) -> None:
    group = PageGroup("full", 2, 2, 8)
    pool = torch.zeros(3, *group.shape, device=device)
    pages = torch.empty(0, dtype=torch.int64, device=device)
    assert gpu.sum_pages(pool, pages, group).shape == (0, 2)
