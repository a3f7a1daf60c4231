"""Pages that the kernel copies, and their sums, have the bits of the definition."""

import numpy as np
import pytest
import torch

from paceline.core.kv_layout import PageGroup
from paceline.kernels.checksum import sum_pages_reference
from paceline.kernels.pages import copy_pages_torch

gpu = pytest.importorskip("paceline.kernels.gpu.pages")

GROUPS = [
    PageGroup("full", 5, 3, 8),
    PageGroup("full", 2, 1, 64, "bfloat16"),
    PageGroup("full", 9, 5, 12, "bfloat16"),
    PageGroup("full", 5, 4, 128, "bfloat16"),
]


def random_words(group: PageGroup, num_pages: int) -> torch.Tensor:
    return torch.randint(-(2**62), 2**62, (num_pages, group.page_bytes // 8))


@pytest.mark.parametrize("max_programs", [None, 4])
@pytest.mark.parametrize("num_tokens", [None, 1, 5])
@pytest.mark.parametrize("group", GROUPS)
def test_equals_the_definition(
    device: torch.device, group: PageGroup, num_tokens: int | None, max_programs: int | None
) -> None:
    source, expected = random_words(group, 7), torch.full((5, group.page_bytes // 8), -1)
    found = expected.to(device)
    ids = torch.tensor([4, 0, 1, 6, 6, 2])
    sums = torch.full((3, group.num_heads), -1)
    found_sums = sums.to(device)
    copy_pages_torch(expected, source, ids, sums, group, num_tokens)
    moved, on_device = source.to(device), ids.to(device)
    gpu.copy_pages(found, moved, on_device, found_sums, group, num_tokens, max_programs)
    assert torch.equal(found.cpu(), expected)
    assert torch.equal(found_sums.cpu(), sums)


@pytest.mark.parametrize("num_tokens", [None, 5])
def test_the_definition_sums_what_arrives(num_tokens: int | None) -> None:
    group = GROUPS[0]
    source, to = random_words(group, 4), torch.full((4, group.page_bytes // 8), -1)
    sums = torch.empty((2, group.num_heads), dtype=torch.int64)
    copy_pages_torch(to, source, torch.tensor([3, 1, 0, 2]), sums, group, num_tokens)
    memory = memoryview(to.numpy()).cast("B")
    expected = sum_pages_reference(memory, np.array([3, 1]), group, num_tokens)
    assert np.array_equal(sums.numpy().view(np.uint64), expected)
    assert (to[[0, 2]] == -1).all()
    if num_tokens is None:
        assert torch.equal(to[[3, 1]], source[[0, 2]])


def test_no_pages(device: torch.device) -> None:
    words = random_words(GROUPS[0], 2).to(device)
    ids = torch.empty(0, dtype=torch.int64, device=device)
    sums = torch.empty((0, GROUPS[0].num_heads), dtype=torch.int64, device=device)
    gpu.copy_pages(words, words, ids, sums, GROUPS[0])
