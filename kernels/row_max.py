"""The highest number of each row and its first place; NaN where a row has one, and its place."""

import torch

from paceline.kernels import backend, native


def row_max(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, size] → values [rows], places [rows] int64"""
    if native.takes(x) and x.numel():
        return row_max_cpu(x)
    if backend.takes_rows(x):
        from paceline.kernels.gpu import row_max as gpu

        return gpu.row_max(x)
    values, places = x.max(dim=1)
    return values, places


def row_max_cpu(x: torch.Tensor, level: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by compiled code. `level` of instructions: the best where it is not given."""
    assert native.module is not None
    values = x.new_empty(len(x))
    places = x.new_empty(len(x), dtype=torch.int64)
    native.module.row_max(
        x.contiguous().numpy(),
        values.numpy(),
        places.numpy(),
        x.shape[1],
        torch.get_num_threads(),
        native.module.BEST_LEVEL if level is None else level,
    )
    return values, places
