"""Routing to experts against its definition, token by token."""

import pytest
import torch

from paceline.kernels.product import hold
from paceline.models.config import ExpertsConfig
from paceline.models.layers import ACTIVATIONS, Linear
from paceline.models.mlp import Experts, GatedMLP

HIDDEN, INNER, NUM_EXPERTS = 12, 10, 5


def experts(num_chosen: int, normalized: bool) -> tuple[Experts, torch.Tensor]:
    """With the router's weight; expert 4 is chosen by no token."""
    generator = torch.Generator().manual_seed(3)

    def linear(num_in: int, num_out: int) -> Linear:
        return Linear(hold(torch.randn(num_in, num_out, generator=generator) / num_in**0.5))

    parts = [
        GatedMLP(linear(HIDDEN, 2 * INNER), linear(INNER, HIDDEN), ACTIVATIONS["silu"])
        for _ in range(NUM_EXPERTS)
    ]
    router = torch.randn(HIDDEN, NUM_EXPERTS, generator=generator)
    router[0] = torch.tensor([0.0, 0.0, 0.0, 0.0, -100.0])
    config = ExpertsConfig(NUM_EXPERTS, num_chosen, INNER, normalized, (True,))
    return Experts(Linear(hold(router.clone())), parts, config), router


def tokens(num: int) -> torch.Tensor:
    x = torch.randn(num, HIDDEN, generator=torch.Generator().manual_seed(num))
    x[:, 0] = 1.0
    return x


@pytest.mark.parametrize("num_tokens", [1, 2, 33])
@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("num_chosen", [1, 2, 4])
def test_experts_equal_the_definition(num_tokens: int, normalized: bool, num_chosen: int) -> None:
    layer, router = experts(num_chosen, normalized)
    x = tokens(num_tokens)
    expected = torch.zeros_like(x)
    for i, row in enumerate(x):
        shares = torch.softmax(row @ router, dim=0)
        best = sorted(range(NUM_EXPERTS), key=lambda e: -shares[e])[:num_chosen]
        total = sum(shares[e] for e in best) if normalized else 1.0
        for e in best:
            expected[i] += layer.experts[e](row[None])[0] * shares[e] / total
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-5)
    residual = torch.ones_like(x)
    found = layer.add_to(residual, x)
    torch.testing.assert_close(found, expected + 1, rtol=0, atol=1e-5)
    assert found is residual


@pytest.mark.parametrize("normalized", [True, False])
def test_a_captured_step_gives_the_same_without_counting(normalized: bool) -> None:
    layer, _ = experts(2, normalized)
    x = tokens(9)
    captured = torch.zeros_like(x)
    layer._add_all(captured, x, *layer.route(x))
    torch.testing.assert_close(captured, layer(x), rtol=0, atol=1e-5)
