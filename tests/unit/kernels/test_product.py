"""Products over packed weights against float64, at every level of instructions."""

import os
import threading
import time

import pytest
import torch

from paceline.kernels import native
from paceline.kernels.product import PackedMatrix, TorchMatrix, hold

assert native.module is not None
LEVELS = range(native.module.BEST_LEVEL + 1)
SHAPES = [
    (1, 576, 96),
    (1, 7, 1),
    (2, 33, 31),
    (3, 16, 33),
    (4, 40, 64),
    (5, 1, 130),
    (14, 64, 32),
    (15, 64, 70),
    (64, 100, 40),
    (300, 576, 130),  # more than stays near: the other order of loops
]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize(("rows", "depth", "columns"), SHAPES)
def test_equals_the_product(
    rows: int, depth: int, columns: int, num_threads: int, level: int
) -> None:
    x, weight, bias = random(rows, depth), random(depth, columns), random(columns)
    matrix = PackedMatrix(weight, level)
    product = x.double() @ weight.double()
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        found = matrix.multiply(x, None)
        with_bias = matrix.multiply(x, bias)
        out = random(rows, columns)
        added = out.clone()
        matrix.add_product(added, x, bias)
    finally:
        torch.set_num_threads(before)
    for result, expected in [
        (found, product),
        (with_bias, product + bias),
        (added, out + product + bias),
    ]:
        torch.testing.assert_close(result, expected.float(), rtol=1e-4, atol=1e-4)


def test_every_tile_height_gives_the_same_rows() -> None:
    """A row's result does not depend on its neighbours: what greedy decoding relies on."""
    weight, x = random(64, 70), random(40, 64)
    matrix = PackedMatrix(weight)
    whole = matrix.multiply(x, None)
    for rows in range(1, 40):
        assert torch.equal(matrix.multiply(x[:rows], None), whole[:rows])


@pytest.mark.parametrize("make", [PackedMatrix, TorchMatrix])
def test_columns_are_those_of_the_weight(make: type[PackedMatrix] | type[TorchMatrix]) -> None:
    weight, ids = random(16, 70), torch.tensor([0, 69, 31, 32, 64, 69])
    columns = make(weight).columns(ids)
    assert torch.equal(columns, weight.t()[ids])
    assert columns.is_contiguous()


def test_no_rows_and_gaps_between_rows() -> None:
    matrix, x = PackedMatrix(random(16, 40)), random(6, 32)
    assert matrix.multiply(x[:0, :16], None).shape == (0, 40)
    expected = matrix.multiply(x[::2, :16].clone(), None)
    assert torch.equal(matrix.multiply(x[::2, :16], None), expected)


def test_callers_at_the_same_time_do_not_mix() -> None:
    weights = [random(64, 64 + i) for i in range(4)]
    xs = [random(8, 64) + i for i in range(4)]
    wrong: list[int] = []

    def call(i: int) -> None:
        matrix, expected = PackedMatrix(weights[i]), xs[i] @ weights[i]
        for _ in range(50):
            if not torch.allclose(matrix.multiply(xs[i], None), expected, atol=1e-3):
                wrong.append(i)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_refuses_sizes_that_do_not_agree() -> None:
    matrix = PackedMatrix(random(16, 40))
    with pytest.raises(ValueError, match="product of 2 rows, depth 16, 40 columns"):
        matrix.multiply(random(2, 15), None)
    with pytest.raises(ValueError, match="must agree"):
        matrix.add_product(random(2, 39), random(2, 16), None)


def test_packs_what_compiled_code_takes() -> None:
    assert isinstance(hold(random(8, 8)), PackedMatrix)
    assert isinstance(hold(random(8, 8).bfloat16()), TorchMatrix)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core only")
def test_a_thread_that_slept_wakes_on_another_core_than_its_caller() -> None:
    """Else it may wait there for its turn, however idle the other cores are."""
    cores, before = os.sched_getaffinity(0), torch.get_num_threads()
    matrix, x = hold(torch.randn(256, 4096)), torch.randn(2, 256)
    torch.set_num_threads(2)
    try:
        matrix.multiply(x, None)  # the thread exists then
        time.sleep(0.05)  # and sleeps
        matrix.multiply(x, None)
        allowed = [os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")]
        assert len(cores) - 1 in map(len, allowed)
    finally:
        torch.set_num_threads(before)
