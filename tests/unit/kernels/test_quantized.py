"""Quantised products against their definition, at every level of instructions."""

import pytest
import torch

from paceline.kernels import native
from paceline.kernels.product import Matrix
from paceline.kernels.quantized import (
    GROUP,
    PackedQuantizedMatrix,
    Quantized,
    ReorderedMatrix,
    TorchQuantizedMatrix,
    hold_quantized,
    round_rows,
)

assert native.module is not None
LEVELS = range(native.module.BEST_LEVEL + 1)
SHAPES = [
    (1, 576, 96),
    (1, 7, 1),
    (2, 33, 31),
    (3, 64, 33),
    (4, 40, 64),
    (5, 1, 130),
    (8, 64, 32),
    (9, 95, 70),
    (33, 100, 40),
    (700, 1056, 40),  # more than stays near: the other order of loops
]
CPU = torch.device("cpu")


def generator(*seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(hash(seed) % 2**31)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(*shape))


def rows_among_nan(num_rows: int, depth: int) -> torch.Tensor:
    """What lies before and after them in memory must not be read."""
    memory = torch.full((num_rows + 128, depth), torch.nan)
    memory[64:-64] = random(num_rows, depth)
    return memory[64:-64]


def any_weight(bits: int, depth: int, columns: int, has_zeros: bool) -> Quantized:
    """Any numbers in any place, beyond the depth too."""
    chance = generator(bits, depth, columns)
    num_groups = -(-depth // GROUP)
    numbers = torch.randint(0, 1 << bits, (num_groups * GROUP, columns), generator=chance)
    scales = torch.rand(num_groups, columns, generator=chance) / (1 << bits)
    zeros = torch.rand(num_groups, columns, generator=chance) * (1 << bits)
    kept = zeros.half() if has_zeros else None
    return Quantized(bits, depth, numbers.byte(), scales.half(), kept)


def definition(x: torch.Tensor, quantized: Quantized) -> torch.Tensor:
    """Number by number, in float64."""
    zero = float(1 << (quantized.bits - 1))
    out = torch.zeros(len(x), quantized.num_columns, dtype=torch.float64)
    for k in range(quantized.depth):
        g = k // GROUP
        group = x[:, g * GROUP : (g + 1) * GROUP]
        step = group.abs().amax(dim=1) / group.new_tensor(127)
        integer = (x[:, k] * (group.new_tensor(127) / group.abs().amax(dim=1))).round()
        offset = zero if quantized.zeros is None else quantized.zeros[g].double()
        weight = quantized.scales[g].double() * (quantized.numbers[k].double() - offset)
        out += (step * integer).double()[:, None] * weight
    return out


@pytest.mark.parametrize("has_zeros", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("rows", "depth", "columns"), SHAPES)
def test_equals_the_definition(
    rows: int, depth: int, columns: int, bits: int, has_zeros: bool
) -> None:
    x, bias = rows_among_nan(rows, depth), random(columns)
    quantized = any_weight(bits, depth, columns, has_zeros)
    product = definition(x, quantized)
    out = random(rows, columns)
    for matrix in (
        *(PackedQuantizedMatrix(quantized, level) for level in LEVELS),
        TorchQuantizedMatrix(quantized, torch.float32, CPU),
    ):
        added = out.clone()
        matrix.add_product(added, x, bias)
        for result, expected in [
            (matrix.multiply(x, None), product),
            (matrix.multiply(x, bias), product + bias),
            (added, out + product + bias),
        ]:
            torch.testing.assert_close(result, expected.float(), rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("level", LEVELS)
def test_the_largest_numbers_do_not_overflow(level: int) -> None:
    for bits in (4, 8):
        quantized = any_weight(bits, 64, 32, False)
        quantized.numbers.fill_((1 << bits) - 1)
        for sign in (1.0, -1.0):
            x = torch.full((1, 64), sign)
            found = PackedQuantizedMatrix(quantized, level).multiply(x, None)
            torch.testing.assert_close(found.double(), definition(x, quantized), rtol=1e-6, atol=0)


@pytest.mark.parametrize("bits", [4, 8])
def test_every_tile_height_gives_the_same_rows(bits: int) -> None:
    """A row's result does not depend on its neighbours: what greedy decoding relies on."""
    x = random(1400, 160)
    matrix = PackedQuantizedMatrix(any_weight(bits, 160, 70, True))
    whole = matrix.multiply(x, None)
    for rows in (*range(1, 40), 1399):
        assert torch.equal(matrix.multiply(x[:rows], None), whole[:rows])


@pytest.mark.parametrize("has_zeros", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_columns_are_those_of_the_weight(bits: int, has_zeros: bool) -> None:
    quantized = any_weight(bits, 50, 70, has_zeros)
    ids = torch.tensor([0, 69, 31, 32, 64, 69])
    expected = quantized.dequantized().t()[ids]
    matrices: list[Matrix] = [
        PackedQuantizedMatrix(quantized),
        TorchQuantizedMatrix(quantized, torch.float32, CPU),
    ]
    for matrix in matrices:
        columns = matrix.columns(ids)
        assert torch.equal(columns, expected)
        assert columns.is_contiguous()


@pytest.mark.parametrize("level", LEVELS)
def test_rows_that_are_tiny_or_not_finite(level: int) -> None:
    quantized = any_weight(8, 70, 40, True)
    x = random(5, 70)
    x[0] = 0
    x[1] = 1e-32
    x[2, 69] = torch.inf
    x[3, 5] = torch.nan
    for matrix in (
        PackedQuantizedMatrix(quantized, level),
        TorchQuantizedMatrix(quantized, torch.float32, CPU),
    ):
        found = matrix.multiply(x, None)
        assert torch.equal(found[:2], torch.zeros(2, 40))
        assert found[2:4].isnan().all()
        assert found[4].isfinite().all()


def test_rounded_rows_are_near() -> None:
    x = random(20, 75) * torch.logspace(-6, 6, 20)[:, None]
    groups = torch.nn.functional.pad(x, (0, 21)).view(20, 3, 32)
    half_step = (groups.abs().amax(dim=2, keepdim=True) / 127 / 2).expand_as(groups)
    error = (round_rows(x) - x).abs()
    assert (error <= half_step.flatten(1)[:, :75] * 1.001).all()


def test_another_order_of_rows() -> None:
    quantized, order = any_weight(4, 64, 40, True), torch.randperm(64, generator=generator(1))
    plain = PackedQuantizedMatrix(quantized)
    matrix, x, ids = ReorderedMatrix(plain, order), random(3, 64), torch.tensor([3, 39])
    assert torch.equal(matrix.multiply(x, None), plain.multiply(x[:, order], None))
    out = random(3, 40)
    expected = out.clone()
    matrix.add_product(out, x, None)
    plain.add_product(expected, x[:, order], None)
    assert torch.equal(out, expected)
    assert torch.equal(matrix.columns(ids)[:, order], plain.columns(ids))


def test_no_rows_and_gaps_between_rows() -> None:
    matrix, x = PackedQuantizedMatrix(any_weight(4, 16, 40, True)), random(6, 32)
    assert matrix.multiply(x[:0, :16], None).shape == (0, 40)
    expected = matrix.multiply(x[::2, :16].clone(), None)
    assert torch.equal(matrix.multiply(x[::2, :16], None), expected)


def test_refuses_sizes_that_do_not_agree() -> None:
    matrix = PackedQuantizedMatrix(any_weight(4, 16, 40, True))
    with pytest.raises(ValueError, match="product of 2 rows, depth 16, 40 columns of 4 bits"):
        matrix.multiply(random(2, 15), None)
    with pytest.raises(ValueError, match="must agree"):
        matrix.add_product(random(2, 39), random(2, 16), None)


def test_packs_what_compiled_code_takes() -> None:
    quantized = any_weight(4, 64, 64, True)
    packed = hold_quantized(quantized, torch.float32, CPU)
    assert isinstance(packed, PackedQuantizedMatrix)
    assert packed.num_bytes == 64 * 64 // 2 + 2 * 64 * 4  # numbers; a scale and a zero a group
    other = hold_quantized(quantized, torch.bfloat16, CPU)
    assert isinstance(other, TorchQuantizedMatrix)
    assert other.multiply(random(2, 64).bfloat16(), None).dtype == torch.bfloat16
