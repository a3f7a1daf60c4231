"""Tokens drawn from logits: the distribution, the filters, and what they may depend on."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from paceline.engine.noise import mix, noise_keys
from paceline.engine.sampler import SampleBatch, Sampled, collect, sample
from paceline.kernels import native
from paceline.kernels.gumbel_max import gumbel
from tests.unit.engine.sample_batches import VOCAB, batch, logits_of


def draw(logits: torch.Tensor, samples: SampleBatch) -> Sampled:
    before = logits.clone()
    result = collect(sample(logits, samples), samples)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    return result


def allowed_ids(row: torch.Tensor, temperature: float, top_k: int, top_p: float) -> set[int]:
    """The filters by their definition: sort, keep top_k, then the shortest prefix over top_p."""
    probs = torch.softmax(row.double() / temperature, dim=0)
    order = probs.argsort(descending=True, stable=True)[: top_k or None]
    kept = probs[order] / probs[order].sum()
    before = kept.cumsum(0) - kept
    return set(order[before < top_p].tolist())


def test_greedy_takes_the_best() -> None:
    logits = logits_of(9)
    result = draw(logits, batch(9, temperature=0.0, top_k=3, top_p=0.5))
    assert result.token_ids == logits.argmax(dim=1).tolist()


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.5])
def test_draws_follow_the_softmax(temperature: float) -> None:
    """Chi-square at p = 0.001 over 8 tokens: 7 degrees of freedom."""
    row = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0])
    num = 20_000
    counts = np.zeros(8)
    samples = batch(num, rows=np.zeros(num, np.int64), temperature=temperature)
    np.add.at(counts, draw(row[None], samples).token_ids, 1)
    expected = torch.softmax(row / temperature, dim=0).numpy() * num
    assert ((counts - expected) ** 2 / expected).sum() < 24.32


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({"min_p": 0.2}, [0, 1, 2, 3]),
        ({"top_k": 5}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.75}, [0, 1, 2]),
        ({"typical_p": 0.55}, [1, 2, 0]),
        ({"min_p": 0.1, "top_k": 6, "top_p": 0.9, "typical_p": 0.6}, [0, 1]),
    ],
)
def test_what_is_left_keeps_its_proportions(filters: dict[str, float], kept: list[int]) -> None:
    """Chi-square at p = 0.001."""
    row = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0])
    num = 20_000
    samples = batch(num, rows=np.zeros(num, np.int64), **filters)
    counts = np.bincount(draw(row[None], samples).token_ids, minlength=8)
    expected = torch.softmax(row[kept], dim=0).numpy() * num
    assert counts[kept].sum() == num
    limits = {2: 10.83, 3: 13.82, 4: 16.27, 5: 18.47}
    assert ((counts[kept] - expected) ** 2 / expected).sum() < limits[len(kept)]


@pytest.mark.parametrize("varying", ["seed", "choice", "position"])
def test_draws_of_neighbours_are_independent(varying: str) -> None:
    num = 20_000
    arrays = {"seed": 3, varying: np.arange(num)}
    tokens = np.array(
        draw(torch.zeros(1, 4), batch(num, rows=np.zeros(num, int), **arrays)).token_ids
    )
    pairs = np.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16)
    assert ((pairs - num / 16) ** 2 / (num / 16)).sum() < 37.7  # 15 degrees, p = 0.001


@pytest.mark.parametrize("top_k", [0, 1, 2, 50, VOCAB - 1, VOCAB + 9])
@pytest.mark.parametrize("top_p", [1.0, 0.999, 0.9, 0.3, 1e-9])
@pytest.mark.parametrize("spread", [0.1, 4.0])
def test_filters_keep_what_they_say(top_k: int, top_p: float, spread: float) -> None:
    """A flat row (0.1) makes top_p reach beyond the candidates that are sorted first."""
    num = 300
    logits = logits_of(1, spread)
    samples = batch(num, rows=np.zeros(num, np.int64), temperature=0.8, top_k=top_k, top_p=top_p)
    drawn = set(draw(logits, samples).token_ids)
    allowed = allowed_ids(logits[0], 0.8, top_k, top_p)
    assert drawn <= allowed
    if len(allowed) <= 3:
        assert drawn == allowed


def test_ties_at_the_border_survive_together() -> None:
    logits = torch.zeros(1, 6)
    logits[0, 4] = -50.0
    samples = batch(400, rows=np.zeros(400, np.int64), top_k=2)
    assert set(draw(logits, samples).token_ids) == {0, 1, 2, 3, 5}


def test_a_draw_depends_on_nothing_but_its_own_row() -> None:
    num = 12
    kinds: dict[str, Any] = {
        "temperature": np.array([0.0, 0.5, 1.0, 1.5] * 3, np.float32),
        "top_k": np.array([0, 0, 5, 100] * 3),
        "top_p": np.array([1.0, 0.9, 1.0, 0.95] * 3, np.float32),
        "seed": np.arange(num) + np.iinfo(np.int64).min,
        "position": np.arange(num) * 3,
        "choice": np.arange(num) % 5,
    }
    logits = logits_of(num)
    together = draw(logits, batch(num, **kinds)).token_ids
    for i in range(num):
        one = {name: array[i : i + 1] for name, array in kinds.items()}
        assert draw(logits[i : i + 1], batch(1, **one)).token_ids == [together[i]]
    order = np.random.default_rng(0).permutation(num)
    mixed = {name: array[order] for name, array in kinds.items()}
    shuffled = draw(logits[torch.from_numpy(order)], batch(num, **mixed)).token_ids
    assert shuffled == [together[i] for i in order]


def test_without_compiled_code_the_tokens_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device, or in a source tree without a compiler."""
    num = 200
    kinds: dict[str, Any] = {
        "temperature": np.array([0.0, 0.7, 1.0, 1.5, 9.0] * 40, np.float32),
        "min_p": np.array([0.0, 0.0, 0.1, 0.01] * 50, np.float32),
        "top_k": np.array([0, 7, 0, 300, 0, 0, 0, 50] * 25),
        "top_p": np.array([1.0, 1.0, 0.9, 1.0, 0.5] * 40, np.float32),
        "typical_p": np.array([1.0, 1.0, 1.0, 0.8] * 50, np.float32),
        "num_logprobs": np.arange(num) % 6 - 1,
    }
    logits = logits_of(num)
    compiled = draw(logits, batch(num, **kinds))
    monkeypatch.setattr(native, "module", None)
    plain = draw(logits, batch(num, **kinds))
    assert plain.token_ids == compiled.token_ids
    for score, wanted in zip(plain.logprobs, compiled.logprobs, strict=True):
        assert (score and score.rank) == (wanted and wanted.rank)
        if score is not None and wanted is not None:
            assert [i for i, _ in score.top] == [i for i, _ in wanted.top]


def test_several_draws_come_from_one_row() -> None:
    logits = logits_of(2)
    rows = np.array([0, 0, 0, 1])
    choices = np.array([0, 1, 2, 0])
    result = draw(logits, batch(4, rows=rows, choice=choices, seed=1)).token_ids
    for row, choice, token in zip(rows, choices, result, strict=True):
        alone = batch(1, choice=int(choice), seed=1)
        assert draw(logits[row : row + 1], alone).token_ids == [token]


def test_logprobs_are_of_the_unmodified_logits() -> None:
    logits = logits_of(3)
    samples = batch(3, temperature=0.3, top_k=2, num_logprobs=np.array([-1, 0, 4]))
    result = draw(logits, samples)
    expected = torch.log_softmax(logits.double(), dim=1)
    assert result.logprobs[0] is None
    assert result.logprobs[1] is not None and result.logprobs[1].top == []
    last = result.logprobs[2]
    assert last is not None and last.token_id == result.token_ids[2]
    assert last.logprob == pytest.approx(expected[2, last.token_id].item(), abs=1e-4)
    ids = expected[2].argsort(descending=True)[:4].tolist()
    assert [i for i, _ in last.top] == ids
    assert [v for _, v in last.top] == pytest.approx(expected[2, ids].tolist(), abs=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sglang_5984_only_finite_logprobs_and_nan_spoils_one_row(temperature: float) -> None:
    """https://github.com/sgl-project/sglang/issues/5984"""
    logits = torch.full((4, 50), float("-inf"))
    logits[0, 7] = 1.0
    logits[1, :] = 0.0
    logits[1, 3] = float("nan")
    logits[3, 5] = float("inf")
    result = draw(logits, batch(4, temperature=temperature, num_logprobs=5, top_k=3))
    assert [math.isfinite(best) for best in result.best] == [True, False, False, False]
    assert result.token_ids[0] == 7
    assert result.logprobs[0] is not None and result.logprobs[0].top == [(7, 0.0)]


@pytest.mark.parametrize("name", ["temperature", "top_p", "typical_p", "min_p"])
def test_the_smallest_numbers_that_a_request_may_send(name: str) -> None:
    """They are 0 in float32, which is what is computed with."""
    logits = logits_of(3, vocab=500)
    result = draw(logits, batch(3, **{name: np.full(3, 1e-46, np.float32)}))
    assert all(math.isfinite(best) for best in result.best)
    if name in ("temperature", "top_p"):
        assert result.token_ids == logits.argmax(dim=1).tolist()


def test_tiny_temperatures_are_greedy() -> None:
    logits = logits_of(4)
    result = draw(logits, batch(4, temperature=1e-40))
    assert result.token_ids == logits.argmax(dim=1).tolist()


def test_noise_is_pinned_and_gumbel() -> None:
    """Golden: a worker of another version must draw the same tokens."""
    keys = noise_keys(torch.tensor([1, -1]), torch.tensor([0, 2]), torch.tensor([0, 9]))
    values = gumbel(keys[:, None].expand(2, 2), torch.tensor([[0, 5], [0, 5]]))
    assert mix(torch.tensor([0])).tolist() == [-2152535657050944081]  # splitmix64's first output
    expected = [-0.862832, 0.066696, 0.318756, -0.047562]
    assert values.flatten().tolist() == pytest.approx(expected, rel=1e-5)
    many = gumbel(keys[:1].expand(100_000), torch.arange(100_000))
    assert torch.isfinite(many).all()
    assert many.mean().item() == pytest.approx(0.5772, abs=0.02)
    assert many.std().item() == pytest.approx(math.pi / math.sqrt(6), abs=0.02)
