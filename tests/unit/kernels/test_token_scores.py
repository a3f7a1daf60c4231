"""Log-probabilities, ranks and best tokens against float64, at every level of instructions."""

import pytest
import torch

from paceline.kernels import native
from paceline.kernels.token_scores import (
    TokenScores,
    token_scores,
    token_scores_cpu,
    token_scores_torch,
)

assert native.module is not None
LEVELS = range(native.module.BEST_LEVEL + 1)


def logits_of(num_rows: int, size: int, spread: float) -> torch.Tensor:
    x = torch.randn(num_rows, size, generator=torch.Generator().manual_seed(size)) * spread
    x[0, 1::3] = -torch.inf
    return x


def all_scores(x: torch.Tensor, ids: torch.Tensor, num_top: int) -> list[TokenScores]:
    found = [token_scores_cpu(x, ids, num_top, level) for level in LEVELS]
    return [*found, token_scores_torch(x, ids, num_top), token_scores(x, ids, num_top)]


@pytest.mark.parametrize("num_top", [0, 1, 20, 128])
@pytest.mark.parametrize("spread", [0.01, 3.0, 40.0])
@pytest.mark.parametrize("size", [1, 7, 300, 1025, 30_011])
def test_equal_their_definition(size: int, spread: float, num_top: int) -> None:
    x = logits_of(4, size, spread)
    ids = torch.tensor([0, size - 1, size // 2, int(x[3].argmax())])
    expected = x.double().log_softmax(dim=1)
    best = expected.topk(min(num_top, size), dim=1).values
    for scores in all_scores(x, ids, num_top):
        chosen = expected.gather(1, ids[:, None])[:, 0]
        torch.testing.assert_close(scores.logprobs.double(), chosen, rtol=1e-6, atol=2e-6)
        assert torch.equal(scores.ranks, (x >= x.gather(1, ids[:, None])).sum(dim=1))
        assert scores.ranks[3] == 1
        torch.testing.assert_close(scores.top_logprobs.double(), best, rtol=1e-6, atol=2e-6)
        assert torch.equal(x.gather(1, scores.top_ids), x.topk(min(num_top, size), dim=1).values)
        assert all(len(set(ids)) == len(ids) for ids in scores.top_ids.tolist())


@pytest.mark.parametrize("level", LEVELS)
def test_a_vocabulary_of_more_parts_than_are_kept(level: int) -> None:
    x = logits_of(2, 300_000, 3.0)
    scores = token_scores_cpu(x, torch.tensor([7, 299_999]), 20, level)
    assert torch.equal(x.gather(1, scores.top_ids), x.topk(20, dim=1).values)


@pytest.mark.parametrize("level", LEVELS)
def test_of_equal_numbers_the_first_are_best(level: int) -> None:
    x = torch.zeros(2, 5000)
    x[1, [4000, 17, 3000]] = 1.0
    scores = token_scores_cpu(x, torch.tensor([9, 9]), 5, level)
    assert scores.top_ids.tolist() == [[0, 1, 2, 3, 4], [17, 3000, 4000, 0, 1]]
    assert scores.ranks.tolist() == [5000, 5000]


@pytest.mark.parametrize("size", [1, 30, 5000])
def test_the_best_do_not_depend_on_how_many_are_asked_for(size: int) -> None:
    """Of logits with few different values; the neighbours of a request may ask for more."""
    x = torch.randint(-2, 3, (6, size), generator=torch.Generator().manual_seed(size)).float()
    x[0, ::2] = -torch.inf
    x[1] = 0
    x[2, size // 2] = 9
    ids = torch.zeros(6, dtype=torch.int64)
    order = x.argsort(dim=1, descending=True, stable=True)
    for num_top in range(min(size, 20) + 1):
        for scores in all_scores(x, ids, num_top):
            assert torch.equal(scores.top_ids, order[:, :num_top])
            assert scores.top_logprobs.shape == (6, num_top)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_unusable_rows_spoil_no_others(value: float, level: int) -> None:
    x = logits_of(3, 2000, 3.0)
    ids = torch.tensor([0, 5, 6])
    expected = token_scores_cpu(x, ids, 4, level)
    x[1] = value
    scores = token_scores_cpu(x, ids, 4, level)
    assert scores.logprobs[1].isnan()
    for name in ("logprobs", "ranks", "top_ids", "top_logprobs"):
        assert torch.equal(getattr(scores, name)[[0, 2]], getattr(expected, name)[[0, 2]])
    assert bool(((scores.top_ids >= 0) & (scores.top_ids < 2000)).all())


def test_ids_and_sizes_are_checked() -> None:
    x = logits_of(2, 100, 1.0)
    with pytest.raises(IndexError, match=r"ids\[1\]=100: a row has 100 numbers"):
        token_scores_cpu(x, torch.tensor([0, 100]), 1)
    with pytest.raises(ValueError, match="num_top=129: at most 128"):
        token_scores_cpu(logits_of(2, 200, 1.0), torch.tensor([0, 1]), 129)
    with pytest.raises(ValueError, match="2 rows, 8 a row are needed"):
        token_scores_cpu(x, torch.tensor([0]), 1)
