"""Products of few rows against float64: odd sizes, NaN in all memory around."""

import pytest
import torch
from torch.nn import functional as F

from paceline.kernels import backend
from paceline.kernels.gate import GELU_TANH, SILU, Activation, gelu_tanh

gpu = pytest.importorskip("paceline.kernels.gpu.skinny_product")
pytestmark = [
    pytest.mark.gpu,  # the interpreter knows no wgmma
    pytest.mark.skipif(not backend.is_hopper(torch.device("cuda")), reason="needs a Hopper device"),
]
SHAPES = [  # rows, outputs, depth
    (1, 40, 8),
    (3, 200, 64),
    (17, 96, 584),
    (40, 136, 1032),
    (100, 640, 2048),
    (128, 96, 264),
    (64, 1000, 4096),
    (2, 72, 14336),
]
TILES = [(64, 64, 1, 3, 4, 168), (64, 128, 3, 3, 4, 168), (128, 64, 2, 4, 8, 168)]


def random(device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    around = torch.full((shape[0] + 2, shape[1]), float("nan"), dtype=dtype, device=device)
    around[1:-1] = torch.randn(shape, device=device)
    return around[1:-1]


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_rows", "num_outputs", "depth"), SHAPES)
def test_parts_add_up_to_the_product(
    device: torch.device, num_rows: int, num_outputs: int, depth: int, dtype: torch.dtype
) -> None:
    x = random(device, num_rows, depth, dtype=dtype)
    weight = random(device, depth, num_outputs, dtype=dtype)
    expected = x.double() @ weight.double()
    for tiles in [None, *(gpu.Tiling(*tile) for tile in TILES)]:
        if tiles is not None and tiles.splits > 1 and depth < 512:
            continue
        parts = gpu.parts(x, weight, tiles)
        assert parts.shape[1:] == (num_rows, num_outputs)
        assert error(parts.double().sum(0), expected) < 1e-4


@pytest.mark.parametrize(("code", "act"), [(SILU, F.silu), (GELU_TANH, gelu_tanh)])
@pytest.mark.parametrize(("num_rows", "inner", "depth"), SHAPES)
def test_gated(
    device: torch.device, num_rows: int, inner: int, depth: int, code: int, act: Activation
) -> None:
    x, weight = random(device, num_rows, depth), random(device, depth, 2 * inner) / depth**0.5
    both = (x.double() @ weight.double()).to(x.dtype)
    gate, up = both.double().chunk(2, dim=1)
    found = gpu.gated(x, weight, code)
    assert found.dtype == x.dtype
    assert error(found, act(gate) * up) < 1e-2


@pytest.mark.parametrize(("num_rows", "num_outputs", "depth"), SHAPES)
def test_rounded(device: torch.device, num_rows: int, num_outputs: int, depth: int) -> None:
    x, weight = random(device, num_rows, depth), random(device, depth, num_outputs)
    found = gpu.rounded(x, weight)
    assert torch.equal(found, found.to(x.dtype).float())
    assert error(found, x.double() @ weight.double()) < 1e-2


def test_the_same_each_time(device: torch.device) -> None:
    x, weight = random(device, 33, 4096), random(device, 4096, 6144)
    first = gpu.parts(x, weight)
    assert all(torch.equal(gpu.parts(x, weight), first) for _ in range(20))
